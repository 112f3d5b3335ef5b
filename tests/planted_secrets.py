"""Made-up secrets of every form that publishing must stop, written so that no scanner takes this file for a leak."""

import base64
import json
import random
import string

LETTERS, DIGITS = string.ascii_letters, string.digits
ALNUM, HEX = LETTERS + DIGITS, "0123456789abcdef"


def _secrets() -> dict[str, str]:
    rng = random.Random(20)

    def of(count: int, letters: str = ALNUM) -> str:
        return "".join(rng.choices(letters, k=count))

    def part(content: dict[str, str]) -> str:
        return base64.urlsafe_b64encode(json.dumps(content).encode()).decode().rstrip("=")

    upper = string.ascii_uppercase + DIGITS
    hugging_face = "hf" + "_" + of(34)
    return {
        "Hugging Face": hugging_face,
        "Hugging Face, organisation": "api_org" + "_" + of(34),
        "W&B, 40 digits": of(40, HEX),
        "W&B, 86 characters": of(86),
        "W&B, v1": "wandb" + f"_v1_{of(27)}_{of(49)}",
        "AWS key id": "AKIA" + of(16, upper),
        "AWS session key id": "ASIA" + of(16, upper),
        "AWS secret key": of(40, ALNUM + "+/"),
        "AWS secret key by name": "aws_secret_access_key" + f" = {of(40, ALNUM + '+/')}",
        "GitLab": "glpat" + "-" + of(20),
        "Slack bot": "xoxb" + f"-{of(12, DIGITS)}-{of(12, DIGITS)}-{of(24)}",
        "Slack user": "xoxp" + f"-{of(12, DIGITS)}-{of(12, DIGITS)}-{of(32, HEX)}",
        "Slack hook": "https://hooks.slack.com" + f"/services/T{of(8)}/B{of(8)}/{of(24)}",
        "Google": "AIza" + of(35),
        "Google service account": json.dumps({"type": "service_account", "project_id": of(12)}),
        "PyPI": "pypi" + "-AgEIcHlwaS5vcmc" + of(60),
        "npm": "npm" + "_" + of(36),
        "JWT": f"{part({'alg': 'HS256'})}.{part({'sub': of(10)})}.{of(43)}",
        "bearer": f"Bearer {of(32)}",
        "Replicate": "r8" + "_" + of(37),
        "Stripe": "sk" + "_live_" + of(24),
        "Stripe, restricted": "rk" + "_live_" + of(24),
        "OpenAI": "sk" + "-" + of(48),
        "OpenAI, project": "sk" + "-proj-" + of(48),
        "Anthropic": "sk" + "-ant-api03-" + of(93),
        "GitHub": "ghp" + "_" + of(36),
        "GitHub, OAuth": "gho" + "_" + of(36),
        "GitHub, server": "ghs" + "_" + of(36),
        "GitHub, fine-grained": "github_pat" + f"_{of(22)}_{of(59)}",
        "PEM": "-----BEGIN RSA" + f" PRIVATE KEY-----\n{of(60)}\n-----END RSA PRIVATE KEY-----",
        "OpenSSH": "-----BEGIN OPENSSH" + f" PRIVATE KEY-----\n{of(60)}",
        "URL": f"https://alice:{of(12)}@git.example.org/x.git",
        "password": f"password: {of(10)}",
        "api_key": f"api_key={of(24)}",
        "token": f"token={of(24)}",
        "Azure": "AccountName=x;AccountKey" + f"={of(86)}==",
        "Azure SAS": f"https://x.blob.core.windows.net/c?sv=1&sig={of(43)}%3D",
        "SendGrid": "SG" + f".{of(22)}.{of(43)}",
        "Twilio": "SK" + of(32, HEX),
        "Telegram": f"{of(10, DIGITS)}:AA{of(33)}",
        "Discord": f"M{of(25)}.{of(6)}.{of(38)}",
        "Databricks": "dapi" + of(32, HEX),
        "DigitalOcean": "dop" + "_v1_" + of(64, HEX),
        "Vault": "hvs" + "." + of(90),
        "Groq": "gsk" + "_" + of(52),
        "Mailchimp": of(32, HEX) + "-us12",
        "32 digits": of(32, HEX),
        "base64": base64.b64encode(hugging_face.encode()).decode(),
    }


SECRETS = _secrets()
UNMARKED = (
    "W&B, 40 digits", "W&B, 86 characters", "AWS secret key", "32 digits", "password",
)  # fmt: skip
"""Those that are told from other text only by how random they are, or only by a word before them."""
MARKED = {name: secret for name, secret in SECRETS.items() if name not in UNMARKED}


def secret_part(secret: str) -> str:
    """The part of a planted text that must not be seen: its longest word."""
    words = "".join(c if c in ALNUM else " " for c in secret).split()
    return max(words, key=len)[-20:]
