"""The Draft protocol, the draft directory on disk, and a plain dict from family to loader."""

import hashlib
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch

from decode.sampling import Choose, Sampling
from decode.settings import UserError
from decode.target import Target


@dataclass(frozen=True)
class Request:
    """What a draft learns before the first round of a batch."""

    prompts: torch.Tensor  # [B, W] right-padded
    length: torch.Tensor  # [B]
    slots: int  # the longest a row can become, drafts included
    sampling: Sampling
    choose: Choose


@dataclass(frozen=True)
class Proposal:
    """A chain of drafted tokens; verify.NO_DRAFT marks places without one."""

    tokens: torch.Tensor  # [B, K]
    q: torch.Tensor | None  # [B, K, V] the law each token was drawn from; None: point masses


class Draft(Protocol):
    """Anything that proposes tokens. `history` [B, S] holds the committed ids, `length` [B] how many."""

    name: str

    def begin(self, request: Request) -> None:
        """Forget earlier batches and read the prompts."""

    def propose(self, history: torch.Tensor, length: torch.Tensor, k: int) -> Proposal:
        """Up to k tokens after the committed ones. History is the truth: nothing else need be observed."""


FACTS = "draftsmith.json"


def load_draft(
    path: str, target: Target, device: str | None = None, dtype: str = "float32"
) -> Draft:
    """The draft saved in `path` (folder or hub name); UserError if its tokenizer is not the target's."""
    from decode.drafts import causal  # families import this module

    families = {"causal": causal.load}
    family = read_facts(path).get("family", "causal")
    if family not in families:
        raise UserError(f"draft {path!r} is of family {family!r}; known: {', '.join(families)}")
    return families[family](path, target, device or str(target.decoder.device), dtype)


def read_facts(path: str) -> dict[str, Any]:
    """draftsmith.json of a draft directory; {} for a model that was not made here."""
    file = Path(path) / FACTS
    if not file.is_file():
        return {}
    try:
        return json.loads(file.read_text())
    except ValueError as error:
        raise UserError(f"{file} is not valid JSON: restore it or save the draft again") from error


def draft_sha256(path: str) -> str | None:
    """Checksum over model.safetensors + config.json; None for a draft that is not a local folder."""
    files = [Path(path) / "model.safetensors", Path(path) / "config.json"]
    if not all(file.is_file() for file in files):
        return None
    digest = hashlib.sha256()
    for file in files:
        digest.update(file.read_bytes())
    return digest.hexdigest()


def check_tokenizer(path: str, draft_fingerprint: str, target: Target) -> None:
    """UserError naming both when draft and target would read different text from the same ids."""
    if draft_fingerprint != target.fingerprint:
        raise UserError(
            f"draft {path!r} (tokenizer {draft_fingerprint}) and target {target.name!r} (tokenizer "
            f"{target.fingerprint}) disagree on token ids: use a draft trained for this target's tokenizer"
        )
