"""Which verification rule each engine has, and the setting that chooses it."""

from collections.abc import Sequence
from dataclasses import dataclass

from decode.common.errors import UserError


@dataclass(frozen=True)
class EngineRule:
    """One way in which an engine accepts chains at a temperature above 0; `rule` is one of eval.forecasting.rounds."""

    engine: str
    rule: str
    setting: str


ENGINE_RULES = (
    EngineRule("vllm", "greedy", "default (draft_sample_method greedy); n-grams and Medusa always"),
    EngineRule("vllm", "probabilistic", "draft_sample_method probabilistic"),
    EngineRule(
        "vllm", "block", "draft_sample_method probabilistic, rejection_sample_method block; runner V2"
    ),
    EngineRule("sglang", "greedy", "default, with --speculative-eagle-topk 1 and thresholds of 1"),
    EngineRule("draftsmith", "probabilistic", "rule exact"),
    EngineRule("draftsmith", "block", "rule block"),
    EngineRule(
        "transformers", "probabilistic", "assistant_model, constant schedule, confidence threshold 0"
    ),
)  # fmt: skip
"""Those of vLLM were read in the code of 0.32 (v1/sample/rejection_sampler.py, v1/worker/gpu/spec_decode); SGLang's in
copies of its kernel tree_speculative_sampling_target_only, which accepts with p. Only vLLM's first two were compared
with the engine (docs/results/forecast_vllm.json)."""


def rules_of(engines: Sequence[str]) -> list[str]:
    """The rules that these engines have. UserError for an unknown engine."""
    known = list(dict.fromkeys(x.engine for x in ENGINE_RULES))
    for engine in engines:
        if engine not in known:
            raise UserError(f"no engine {engine!r}: give some of {', '.join(known)}")
    return list(dict.fromkeys(x.rule for x in ENGINE_RULES if x.engine in engines))
