"""A small causal LM as draft: a chain or tree of its most probable or sampled tokens."""

import torch

from decode.cache import Slots
from decode.drafts.base import Draft, Proposal, Request, check_tokenizer
from decode.drafts.grow import grow, levels, prepare, reach, step_of
from decode.settings import UserError
from decode.target import Decoder, Target, fingerprint, load_model, load_tokenizer
from decode.tree import Shape


class CausalDraft(Draft):
    """Keeps its own K/V store, rolled back by length like the target's."""

    def __init__(self, decoder: Decoder, name: str = "causal", shape: Shape = None):
        self.decoder = decoder
        self.name = name
        self.shape = shape

    def reach(self, k: int) -> int:
        return reach(self.shape, k)

    def begin(self, request: Request) -> None:
        self.request = request
        self.plan = prepare(self.shape, self.decoder.device)
        self.decoder.allocate(request.rows, request.size)

    def stores(self) -> list[Slots]:
        return [self.decoder.cache.slots]

    def admit(
        self,
        row: torch.Tensor,
        prompts: torch.Tensor,
        length: torch.Tensor,
        features: torch.Tensor | None,
    ) -> None:
        self.decoder.prefill(prompts, length, row)

    def reserve(self, size: int) -> None:
        self.decoder.grow(size)

    def propose(self, history: torch.Tensor, length: torch.Tensor, k: int) -> Proposal:
        """The first step reads all that the round before may have committed, so that no case needs another.

        Of a chain only the last drafted token was never fed to this model, besides the bonus. A tree's path lies
        scattered over its slots and is read again whole.
        """
        count = 2 if self.shape is None else levels(self.shape, k) + 1
        back = length[:, None] + torch.arange(-count, 0, device=length.device)
        last = history.gather(1, back.clamp_min(0))
        logits = self.decoder.step(last, length - count)[:, -1]
        return grow(step_of(self.decoder), logits, length, k, self.plan, self.request)


def load(path: str, target: Target, device: str, dtype: str) -> CausalDraft:
    """Any HF causal LM with the target's tokenizer and vocabulary size."""
    check_tokenizer(path, fingerprint(load_tokenizer(path)), target)
    decoder = Decoder(load_model(path, "draft", device, dtype))
    if decoder.vocab_size != target.decoder.vocab_size:
        raise UserError(
            f"draft {path!r} has {decoder.vocab_size} logits and target {target.name!r} "
            f"{target.decoder.vocab_size}: pad the smaller vocabulary so that both agree"
        )
    return CausalDraft(decoder)
