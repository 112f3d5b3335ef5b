"""A few fixed prompts on which a draft in training is measured with the real decoder."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from decode.common.errors import UserError
from decode.drafts.base import Draft
from decode.engine.engine import decode
from decode.model.loading import Target
from decode.verification.sampling import SamplingParams
from eval.metrics import acceptance
from eval.metrics.records import DecodeRecord
from train.data.prompts import encode_prompt, read_prompts
from train.data.sources import DOMAINS, PromptSource


@dataclass
class AcceptanceEvalConfig:
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


def make_acceptance_eval(
    s: AcceptanceEvalConfig, target: Target, seed: int
) -> Callable[[Draft], dict[str, float]]:
    """What measures τ and α of a draft as it is: on the same prompts each time, from each bundled domain alike."""
    share = max(1, s.prompts // len(DOMAINS))
    sources = [PromptSource("bundled", domain, limit=share) for domain in DOMAINS]
    prompts = [encode_prompt(target.tokenizer, prompt) for prompt in read_prompts(sources, seed)]
    return lambda draft: measure_acceptance(target, draft, prompts, s.k, s.max_new_tokens, seed)


def measure_acceptance(
    target: Target,
    draft: Draft,
    prompts: Sequence[list[int]],
    k: int,
    max_new_tokens: int,
    seed: int,
) -> dict[str, float]:
    """τ and α (also by position) of a draft as it is now, from the real decoder at temperature 1."""
    outputs = decode(
        target,
        draft,
        list(prompts),
        k=k,
        sampling=SamplingParams(temperature=1.0),
        max_new_tokens=max_new_tokens,
        seed=seed,
    )
    target.decoder.capture_hidden_states(None)  # training catches what it needs by itself
    samples = [
        DecodeRecord("train", str(i), len(o.prompt_ids), len(o.output_ids), o.rounds, 0.0, 0.0, [])
        for i, o in enumerate(outputs)
    ]
    values = {"accept/tau": acceptance.tau(samples), "accept/alpha": acceptance.alpha(samples, k)}
    for i, alpha in enumerate(acceptance.alpha_by_position(samples, k), 1):
        values[f"accept/alpha_{i}"] = alpha
    return {name: value for name, value in values.items() if value is not None}
