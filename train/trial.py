"""A few fixed prompts on which a draft in training is measured with the real decoder."""

from collections.abc import Callable
from dataclasses import dataclass

from decode.drafts.base import Draft
from decode.settings import UserError
from decode.target import Target
from train.objectives import measure_acceptance
from train.prompts import encode, load_prompts
from train.sources import DOMAINS, Source


@dataclass
class CheckSettings:
    """The fixed prompts on which τ and α are measured during training, with the real decoder."""

    prompts: int = 6
    """How many; taken from the bundled training prompts, never from those of evaluation."""
    k: int = 4
    """Tokens drafted a round."""
    max_new_tokens: int = 32
    """Longest answer."""

    def __post_init__(self) -> None:
        if min(self.prompts, self.k, self.max_new_tokens) < 1:
            raise UserError("check: need prompts >= 1, k >= 1 and max_new_tokens >= 1")


def trial(s: CheckSettings, target: Target, seed: int) -> Callable[[Draft], dict[str, float]]:
    """What measures τ and α of a draft as it is: on the same prompts each time, from each bundled domain alike."""
    share = max(1, s.prompts // len(DOMAINS))
    sources = [Source("bundled", domain, limit=share) for domain in DOMAINS]
    prompts = [encode(target.tokenizer, prompt) for prompt in load_prompts(sources, seed)]
    return lambda draft: measure_acceptance(target, draft, prompts, s.k, s.max_new_tokens, seed)
