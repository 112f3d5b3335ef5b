"""Finds tokens, keys and passwords in text, by their known forms, and replaces them in messages.

A form has anchors, one of which is in every text that has the form. They are looked up first, because that is fast:
texts of megabytes are searched in a fraction of a second. Forms are told by their prefix or by the word before them.
`find_secret` with `strict` also finds secrets without either, by how random they look; that suits names and settings,
and not vocabularies or prose about code.
"""

import base64
import binascii
import contextlib
import functools
import itertools
import netrc
import os
import re
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import NamedTuple

START, WORD = r"(?<![A-Za-z0-9])", r"[A-Za-z0-9_-]"


class Secret(NamedTuple):
    """A secret in a text: what it is, and its place."""

    what: str
    match: re.Match[str]


def _form(
    what: str, anchors: str, pattern: str, flags: int = 0
) -> tuple[str, list[str], re.Pattern[str]]:
    """(what the secret is, its anchors: lower case if the pattern ignores case, its pattern)."""
    return what, anchors.split(), re.compile(pattern, flags)


FORMS = (
    _form("a Hugging Face token", "hf_ api_org_", rf"{START}(?:hf|api_org)_[A-Za-z0-9]{{20,}}"),
    _form("a Weights & Biases key", "wandb_v", rf"{START}wandb_v\d_\w{{20,}}"),
    _form("a Weights & Biases key", "local-", rf"{START}local-[0-9a-f]{{40}}\b"),
    _form("a GitHub token", "ghp_ gho_ ghu_ ghs_ ghr_", rf"{START}gh[pousr]_[A-Za-z0-9]{{20,}}"),
    _form("a GitHub token", "github_pat_", rf"{START}github_pat_\w{{20,}}"),
    _form("a GitLab token", "gl", rf"{START}gl(?:pat|dt|rt|ptt|ft|cbt|imt|soat|agent|oas)-{WORD}{{20,}}"),
    _form("an API key", "sk-", rf"{START}sk-(?=[\w-]*\d){WORD}{{20,}}"),
    _form("an API key", "gsk_ xai- nvapi- pplx- fw_ r8_ key- lin_api_",
          rf"{START}(?:gsk_|xai-|nvapi-|pplx-|fw_|r8_|key-|lin_api_)(?=[A-Za-z]*\d)[A-Za-z0-9]{{20,}}"),
    _form("a cloud token", "dapi dop_v1_ doo_v1_ dor_v1_ dckr_pat_ shp",
          rf"{START}(?:dapi[0-9a-f]{{32}}|do[opr]_v1_[0-9a-f]{{40,}}|dckr_pat_{WORD}{{20,}}"
          r"|shp(?:at|ca|pa|ss)_[0-9a-fA-F]{32})"),
    _form("a service token", "hvs. hvb. glsa_ glc_ sntry ntn_ PMAK- tskey-",
          rf"{START}(?:hv[sb]\.|gls?[ac]_|sntry[a-z]_|ntn_|PMAK-|tskey-)(?=[\w-]*\d)[\w.=+/-]{{20,}}"),
    _form("an AWS access key", "AKIA ASIA ABIA ACCA", rf"{START}A(?:KI|SI|BI|CC)A[A-Z0-9]{{16}}\b"),
    _form("an AWS secret key", "aws secret access",
          r"(?:aws|secret|access).{0,30}?[\s\"'=:]([A-Za-z0-9/+]{40})(?![A-Za-z0-9/+=])", re.I),
    _form("a Google key", "AIza ya29. GOCSPX-", rf"{START}(?:AIza|ya29\.|GOCSPX-){WORD}{{20,}}"),
    _form("a Google service account", "service_account",
          r"[\"']type[\"']\s*:\s*[\"']service_account[\"'][^}]*"),
    _form("an Azure key", "sig= accountkey= sharedaccesskey=",
          r"(?:[?&]sig|AccountKey|SharedAccessKey)=[\w%+/-]{20,}=*", re.I),
    _form("a Slack token", "xox xapp-", rf"{START}(?:xox[a-z]|xapp)-{WORD}{{10,}}"),
    _form("a webhook", "hooks.slack.com/ /api/webhooks/",
          r"hooks\.slack\.com/\w+/[\w/]{20,}|/api/webhooks/\d+/[\w-]{20,}"),
    _form("a PyPI token", "pypi-", rf"{START}pypi-(?=[a-zA-Z]*[A-Z0-9]){WORD}{{16,}}"),
    _form("an npm token", "npm_", rf"{START}npm_[A-Za-z0-9]{{20,}}"),
    _form("a Stripe key", "k_live_ k_test_ whsec_",
          rf"{START}(?:[spr]k_(?:live|test)|whsec)_[A-Za-z0-9]{{10,}}"),
    _form("a SendGrid key", "SG.", rf"{START}SG\.{WORD}{{16,}}\.{WORD}{{16,}}"),
    _form("a Twilio key", "SK AC", rf"{START}(?:SK|AC)[0-9a-f]{{32}}\b"),
    _form("a Mailchimp key", "-us", rf"{START}[0-9a-f]{{32}}-us\d{{1,2}}\b"),
    _form("a Telegram token", ":A", rf"{START}\d{{8,10}}:A{WORD}{{34}}(?!{WORD})"),
    _form("a Discord token", ".", rf"{START}[MNO]{WORD}{{23,27}}\.{WORD}{{6}}\.{WORD}{{27,}}"),
    _form("a JSON web token", "eyJ", rf"{START}eyJ{WORD}{{8,}}\.{WORD}{{8,}}\.{WORD}*"),
    _form("an age key", "AGE-SECRET-KEY-", r"AGE-SECRET-KEY-1[0-9A-Z]{20,}"),
    _form("a private key", "-----BEGIN PuTTY-User-Key",
          r"-----BEGIN [A-Z0-9 ]*PRIVATE KEY(?:-----[\s\w+/=\\-]*)?|PuTTY-User-Key-File-\d:"),
    _form("a bearer token", "bearer basic",
          rf"{START}(?:bearer|authorization[\"']?\s*[:=]\s*[\"']?basic)\s+(?=[\w.~+/-]*\d)[\w.~+/-]{{16,}}=*", re.I),
    _form("a URL with a password", "://",
          r"[A-Za-z][\w+.-]{0,15}://[^\s/:@\"'<>(){}\[\]$]*:(?!(?i:pass(?:word)?|thing)@)"
          r"[^\s/:@\"'<>(){}\[\]$]{3,}@[\w.\[-]+"),
    _form("a key", "password secret key token",
          r"(?:password|secret|api[_-]?key|access[_-]?key|token)[\"']?\s*[:=]\s*[\"']?(?=[A-Za-z+/]*\d)"
          r"(?=[\d+/]*[A-Za-z])[A-Za-z0-9+/]{16,}", re.I),
)  # fmt: skip

PASSWORD = re.compile(
    r"(?<![A-Za-z])(?:pass(?:word|wd|phrase)|pwd|secret|credentials?|api[_-]?key|access[_-]?key"
    r"|secret[_-]?key|private[_-]?key|auth[_-]?key|account[_-]?key|(?:api|auth|access|hf|hub|bearer|refresh)[_-]?token)"
    r"(?:[_-][A-Za-z0-9]+)*[\"']?\s*[:=]\s*[\"']?(?!null\b|none\b|true\b|false\b|\d+\b)[^\s\"',}\]]{4,}",
    re.I,
)
TOKEN = re.compile(
    r"(?<![\w-])token[\"']?\s*[:=]\s*[\"']?(?=[\w.+/=-]*\d)(?=[\w.+/=-]*[A-Za-z])[\w.+/=-]{8,}",
    re.I,
)
"""A name that says that a secret follows, and something after it."""
HEX = re.compile(r"(?<![A-Za-z0-9])(?:[0-9a-f]{32,}|[0-9A-F]{32,})(?![A-Za-z0-9])")
LONG = re.compile(r"[A-Za-z0-9+/_-]{32,}={0,2}")
BASE64 = re.compile(r"[A-Za-z0-9+/_-]{24,4096}={0,2}")
SECRET_NAMES = re.compile(r"TOKEN|API_?KEY|ACCESS_?KEY|SECRET|PASSW|CREDENTIAL", re.I)


def find_secret(text: str, strict: bool = False, known: Collection[str] = ()) -> Secret | None:
    """The first secret that is found in the text, None without one.

    Found are the forms, also in base64, and values of this process's environment that hold secrets. `strict` adds what
    follows a name such as `password:`, and long words that look random; those in `known`, such as checksums, may stay.
    """
    return next(_secrets(text, strict, known), None)


def redact(text: str) -> str:
    """`text` with *** for every secret that `find_secret` finds in it, and for passwords with a digit: for messages."""
    found = [secret.match for secret in _secrets(text, False, ())]
    for pattern in (PASSWORD, TOKEN):
        found += [m for m in pattern.finditer(text) if any(map(str.isdigit, m[0]))]
    hidden = {place for match in found for place in range(*match.span())}
    parts = itertools.groupby(enumerate(text), lambda pair: pair[0] in hidden)
    return "".join("***" if secret else "".join(x for _, x in part) for secret, part in parts)


def environment_secrets() -> set[str]:
    """Tokens, keys and passwords in this process's environment, and those that the logins of W&B and the Hub saved."""
    found = {value for name, value in os.environ.items() if SECRET_NAMES.search(name)}
    home = os.environ.get("HF_HOME", "~/.cache/huggingface")
    token_file = os.environ.get("HF_TOKEN_PATH", f"{home}/token")
    found |= _saved_secrets(os.environ.get("NETRC", "~/.netrc"), token_file)
    # A text cannot be searched for a shorter value, and a path is none.
    return {value for value in found if len(value) >= 8 and value[0] != "/"}


@functools.cache
def _saved_secrets(netrc_file: str, token_file: str) -> set[str]:
    found = set()
    with contextlib.suppress(OSError, netrc.NetrcParseError):
        hosts = netrc.netrc(Path(netrc_file).expanduser()).hosts
        found |= {password or "" for _, _, password in hosts.values()}
    with contextlib.suppress(OSError, UnicodeDecodeError):
        found.add(Path(token_file).expanduser().read_text().strip())
    return found


def looks_random(word: str) -> bool:
    """Whether a word of 32 and more characters changes between capitals, small letters and digits as keys do.

    Names of models are as long, but have more separators or longer pieces between two changes.
    """
    pieces = re.findall(r"[A-Z]?[a-z]+|[A-Z]+|\d+", word)
    separators = len(re.findall(r"[/_-]", word))
    changes = re.search(r"\d", word) and re.search(r"[A-Za-z]", word)
    return bool(changes) and separators <= len(word) / 8 and len(word) < 3 * len(pieces) + 1


def _secrets(text: str, strict: bool, known: Collection[str]) -> Iterator[Secret]:
    for value in environment_secrets():
        for match in re.finditer(re.escape(value), text):
            yield Secret("a secret of this environment", match)
    yield from _forms(text)
    for match in BASE64.finditer(text):
        if next(_forms(_decoded(match[0])), None) is not None:
            yield Secret("a secret in base64", match)
    if strict:
        for pattern in (PASSWORD, TOKEN):
            yield from (Secret("a password or key", match) for match in pattern.finditer(text))
        keys = [match for match in HEX.finditer(text) if match[0] not in known]
        words = (match for match in LONG.finditer(text) if HEX.search(match[0]) is None)
        keys += [match for match in words if looks_random(match[0])]
        yield from (Secret("a key", match) for match in keys)


def _forms(text: str) -> Iterator[Secret]:
    lower = text.lower()
    for what, anchors, pattern in FORMS:
        where = lower if pattern.flags & re.I else text
        if any(anchor in where for anchor in anchors):
            yield from (Secret(what, match) for match in pattern.finditer(text))


def _decoded(word: str) -> str:
    """The ASCII text that a word stands for in base64; "" if it stands for something else."""
    plain = word.rstrip("=").replace("-", "+").replace("_", "/")
    try:
        data = base64.b64decode(plain + "=" * (-len(plain) % 4))
        return data.decode("ascii")
    except (binascii.Error, UnicodeDecodeError, ValueError):
        return ""
