"""What a draft is to the engine, the draft directory on disk, and a plain dict from family to loader."""

import hashlib
import json
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from decode.common.errors import UserError
from decode.model.hidden_states import HiddenStateSpec
from decode.model.kv_cache import SlotMapping, TreeNodes
from decode.model.loading import Target
from decode.verification.sampling import Sampler, SamplingParams
from decode.verification.tree import TreeShape, max_slots


@dataclass(frozen=True)
class DraftContext:
    """What a draft learns before the first prompt of a batch."""

    rows: int
    size: int  # the longest that a row can become, drafts included
    k: int
    sampling: SamplingParams
    choose: Sampler


@dataclass(frozen=True)
class TokenTree:
    """The shape of a token tree. Node 0 is the last committed token, node i + 1 the i-th drafted one."""

    parents: torch.Tensor  # [N] or [B, N] each drafted node's parent, a lower number than its own
    nodes: TreeNodes  # all N + 1 of them, as the target will verify them
    levels: int  # length of the longest path that can be accepted


@dataclass(frozen=True)
class Proposal:
    """Drafted tokens; verify.NO_DRAFT marks places without one.

    Without `tree` they are a chain, and q [B, N, V] is the law that each token was drawn from. With a tree, q
    [B, N + 1, V] is the law that each node's children were drawn from without replacement. q None: the tokens were
    chosen, not drawn.
    """

    tokens: torch.Tensor  # [B, N]
    q: torch.Tensor | None
    tree: TokenTree | None = None


class Draft:
    """Anything that proposes tokens. History is the truth: what a draft remembers, it can rebuild from there.

    A family overrides `propose` and what else it needs.
    """

    name: str
    on_host: bool = False
    """It proposes from what `observe` tells it, so that the engine must read each round before the next."""
    taps: HiddenStateSpec | None = None
    """States of the target that it reads: `admit` and `absorb` bring them."""
    shape: TreeShape = None
    """How it lays out its proposals, where the family leaves a choice."""

    def max_slots(self, k: int) -> int:
        """Slots past a row's length that a round may write to, in the draft's KV cache or in the target's."""
        return max_slots(self.shape, k)

    def begin_batch(self, request: DraftContext) -> None:
        """Forget earlier batches."""

    def kv_slots(self) -> list[SlotMapping]:
        """What stands for its K/V buffers: other objects whenever these are new or longer."""
        return []

    def prefill(
        self,
        row: torch.Tensor,
        prompts: torch.Tensor,
        length: torch.Tensor,
        features: torch.Tensor | None,
    ) -> None:
        """Rows `row` [b] hold new prompts [b, W], right-padded, of `length` [b]; `features` [b, W, F] if it taps."""

    def reserve(self, size: int) -> None:
        """Rows may become `size` tokens long from now on."""

    def on_commit(self, row: int, tokens: list[int]) -> None:
        """These ids were committed to the row, as the host has read them: first its prompt and what follows."""

    def update_hidden_states(self, features: torch.Tensor, count: torch.Tensor) -> None:
        """A round has committed `count` [B] tokens; the first `count` of `features` [B, P, F] are the tapped states of
        the tokens before each of them (the root and the accepted drafts). 0 for rows that stay as they are.

        Only for a draft that taps. It runs on the device, in the midst of a round.
        """

    def propose(self, history: torch.Tensor, length: torch.Tensor, k: int) -> Proposal:
        """Up to k tokens, or k levels of a tree, after the first `length` [B] ids of history [B, S]."""
        raise NotImplementedError


METADATA_FILE = "draftsmith.json"


def read_metadata(path: str) -> dict[str, Any]:
    """draftsmith.json of a draft directory; {} for a model that was not made here."""
    file = Path(path) / METADATA_FILE
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


def check_target(path: str, target: Target) -> None:
    """UserError for heads that were trained on a target with another tokenizer; a warning if they do not say."""
    facts = read_metadata(path)
    if not facts:
        warnings.warn(
            f"draft {path!r} was not made here: it names no tokenizer to compare with that of {target.name!r}, only "
            "the sizes of the vocabularies are compared",
            stacklevel=2,
        )
        return
    if "tokenizer_hash" not in facts:
        raise UserError(
            f"{path}/{METADATA_FILE} names no tokenizer_hash: train the draft again or restore the file"
        )
    check_tokenizer(path, facts["tokenizer_hash"], target)


def check_tokenizer(path: str, draft_fingerprint: str, target: Target) -> None:
    """UserError naming both when draft and target would read different text from the same ids."""
    if draft_fingerprint != target.fingerprint:
        raise UserError(
            f"draft {path!r} (tokenizer {draft_fingerprint}) and target {target.name!r} (tokenizer "
            f"{target.fingerprint}) disagree on token ids: use a draft trained for this target's tokenizer"
        )
