"""A small causal LM as draft: a chain or tree of its most probable or sampled tokens."""

import torch

from decode.common.errors import UserError
from decode.drafts.base import Draft, DraftContext, Proposal, check_tokenizer
from decode.drafts.drafting import build_tree_plan, decoder_step, draft_tokens
from decode.model.kv_cache import SlotMapping
from decode.model.loading import Target, load_model, load_tokenizer, tokenizer_fingerprint
from decode.model.runner import ModelRunner
from decode.verification.tree import TreeShape, max_depth


class CausalDraft(Draft):
    """Keeps its own K/V store, rolled back by length like the target's."""

    def __init__(self, decoder: ModelRunner, name: str = "causal", shape: TreeShape = None):
        self.decoder = decoder
        self.name = name
        self.shape = shape

    def begin_batch(self, request: DraftContext) -> None:
        self.request = request
        self.plan = build_tree_plan(self.shape, self.decoder.device)
        self.decoder.allocate(request.rows, request.size)

    def kv_slots(self) -> list[SlotMapping]:
        return [self.decoder.cache.slots]

    def prefill(
        self,
        row: torch.Tensor,
        prompts: torch.Tensor,
        length: torch.Tensor,
        features: torch.Tensor | None,
    ) -> None:
        self.decoder.prefill(prompts, length, row)

    def reserve(self, size: int) -> None:
        self.decoder.reserve(size)

    def propose(self, history: torch.Tensor, length: torch.Tensor, k: int) -> Proposal:
        """The first step reads all that the round before may have committed, so that no case needs another.

        Of a chain only the last drafted token was never fed to this model, besides the bonus. A tree's path lies
        scattered over its slots and is read again whole.
        """
        count = 2 if self.shape is None else max_depth(self.shape, k) + 1
        back = length[:, None] + torch.arange(-count, 0, device=length.device)
        last = history.gather(1, back.clamp_min(0))
        logits = self.decoder.step(last, length - count)[:, -1]
        return draft_tokens(decoder_step(self.decoder), logits, length, k, self.plan, self.request)


def load(path: str, target: Target, device: str, dtype: str) -> CausalDraft:
    """Any HF causal LM with the target's tokenizer and vocabulary size."""
    check_tokenizer(path, tokenizer_fingerprint(load_tokenizer(path)), target)
    decoder = ModelRunner(load_model(path, "draft", device, dtype))
    if decoder.vocab_size != target.decoder.vocab_size:
        raise UserError(
            f"draft {path!r} has {decoder.vocab_size} logits and target {target.name!r} "
            f"{target.decoder.vocab_size}: pad the smaller vocabulary so that both agree"
        )
    return CausalDraft(decoder)
