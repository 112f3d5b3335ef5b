"""A small causal LM as draft: K sampled (or greedy) tokens, one small forward each."""

import torch

from decode.drafts.base import Proposal, Request, check_tokenizer
from decode.sampling import warp
from decode.settings import UserError
from decode.target import Decoder, Target, fingerprint, load_model, load_tokenizer


class CausalDraft:
    """Keeps its own K/V store, rolled back by length like the target's."""

    def __init__(self, decoder: Decoder, name: str = "causal"):
        self.decoder = decoder
        self.name = name

    def begin(self, request: Request) -> None:
        self.request = request
        self.decoder.allocate(len(request.length), request.slots)
        self.decoder.prefill(request.prompts, request.length)

    @torch.inference_mode()
    def propose(self, history: torch.Tensor, length: torch.Tensor, k: int) -> Proposal:
        """The first step reads the last two committed tokens: if all drafts were accepted in the round before,
        the second last was drafted but never fed to this model, and so needs no case of its own."""
        last_two = history.gather(1, torch.stack([length - 2, length - 1], 1))
        logits = self.decoder.step(last_two, length - 2)[:, -1]
        sampling = self.request.sampling
        tokens, laws = [], []
        for i in range(k):
            if sampling.greedy:
                tokens.append(logits.argmax(-1))
            else:
                laws.append(warp(logits, sampling))
                tokens.append(self.request.choose(laws[-1]))
            if i + 1 < k:
                logits = self.decoder.step(tokens[-1][:, None], length + i)[:, -1]
        return Proposal(torch.stack(tokens, 1), torch.stack(laws, 1) if laws else None)


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
