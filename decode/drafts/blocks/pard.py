"""PARD: a small language model that drafts K tokens in one pass (An et al., arXiv 2504.18583).

It reads the tokens committed since its last pass and K - 1 mask tokens. The logits after the last committed token are
those of the first drafted token, the logits after mask j those of token j + 1. It knows nothing of a target but the
tokenizer, so one draft serves every target that shares it.
"""

from pathlib import Path
from typing import Any

import torch

from decode.common.errors import UserError
from decode.common.files import read_json_object
from decode.drafts import causal
from decode.drafts.base import DraftContext, Proposal
from decode.drafts.blocks.levels import level_step
from decode.drafts.causal import CausalDraft
from decode.drafts.drafting import draft_tokens
from decode.model.loading import Target, load_config
from decode.model.runner import ModelRunner
from decode.verification.tree import TreeShape, max_depth

MASK_FIELD = "pard_token"
"""The field of config.json that holds the id of the mask token; vLLM reads it too."""


class PardDraft(CausalDraft):
    """A CausalDraft whose KV cache holds committed tokens; the masks behind them are overwritten by the next pass."""

    def __init__(
        self, runner: ModelRunner, mask_token: int, name: str = "pard", shape: TreeShape = None
    ):
        super().__init__(runner, name, shape)
        self.mask_token = mask_token

    def begin_batch(self, request: DraftContext) -> None:
        super().begin_batch(request)
        self.depth = max_depth(self.shape, request.k)

    def propose(self, history: torch.Tensor, length: torch.Tensor, k: int) -> Proposal:
        """A round commits up to depth + 1 tokens: as many are read, of which some were read before.

        Masks of the pass before lie at slots that are read again or are not visible yet.
        """
        depth = max_depth(self.shape, k)
        logits = self._read_with_masks(history, length, depth)
        return draft_tokens(level_step(logits), logits[:, 0], length, k, self.plan, self.request)

    def on_replaced(self, k: int) -> None:
        """As many committed tokens as a round of masks has levels are read again anyway."""
        self.unread += max(0, k - self.depth)

    def _read_committed(self, history: torch.Tensor, length: torch.Tensor, k: int) -> torch.Tensor:
        return self._read_with_masks(history, length, 1)[:, 0]

    def _read_with_masks(
        self, history: torch.Tensor, length: torch.Tensor, depth: int
    ) -> torch.Tensor:
        """[B, depth, V]: the logits at each level."""
        count = self.unread + self.depth + 1
        self.unread = 0
        back = length[:, None] + torch.arange(-count, 0, device=length.device)
        masks = history.new_full((len(history), depth - 1), self.mask_token)
        tokens = torch.cat([history.gather(1, back.clamp_min(0)), masks], 1)
        return self.runner.step(tokens, length - count, last=depth)


def load(path: str, target: Target, device: str, dtype: str) -> PardDraft:
    """A language model from a folder or the Hub with `pard_token` in its config.json. UserError if it has none."""
    draft = causal.load(path, target, device, dtype)
    return PardDraft(draft.runner, mask_token_of(path, load_config(path, "draft")))


def mask_token_of(path: str, config: Any) -> int:
    """The id of the mask token in a draft's config. UserError unless it is a row of the draft's embedding."""
    found = config.to_dict().get(MASK_FIELD)
    size = config.get_text_config(decoder=True).vocab_size
    if not isinstance(found, int) or not 0 <= found < size:
        raise UserError(
            f"config.json of the PARD draft {path!r} has {MASK_FIELD} {found!r}, which is no token of its {size}: get "
            "the file again"
        )
    return found


def is_pard(folder: str) -> bool:
    """Whether the config.json in a folder is that of a PARD draft."""
    return MASK_FIELD in read_json_object(Path(folder) / "config.json", "the config of a draft")
