"""Verification rules by name: what is registered, and that one function and one call add a rule."""

import pytest
import torch

from decode.common.errors import UserError
from decode.drafts.lookup import NgramDraft
from decode.engine.engine import SpeculativeEngine, decode
from decode.verification import registry
from decode.verification.registry import (
    VERIFICATION_RULES,
    DraftedTokens,
    VerificationRule,
    find_rule,
    register_rule,
)
from decode.verification.rules import VerificationResult
from decode.verification.sampling import CounterRNG, SamplingParams, warp
from tests.tiny import tiny_model, tiny_prompts, tiny_target


def reject_all(drafted: DraftedTokens) -> VerificationResult:
    accepted = torch.zeros_like(drafted.logits[:, 0, 0], dtype=torch.long)
    return VerificationResult(accepted, drafted.sampler(drafted.p()[:, 0]))


def test_lossy_rules_are_marked() -> None:
    """Catches a lossy rule that reports would present as lossless."""
    lossless = {name: rule.lossless for name, rule in VERIFICATION_RULES.items()}
    assert lossless == {"exact": True, "block": True, "typical": False}
    assert all(find_rule(name).name == name for name in VERIFICATION_RULES)


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_a_rule_is_added_by_one_registration(
    temperature: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Catches a list of rules elsewhere: a rule that rejects everything decodes as plain decoding does."""
    monkeypatch.setattr(registry, "VERIFICATION_RULES", dict(VERIFICATION_RULES))
    register_rule(VerificationRule("reject", True, reject_all, "accepts nothing"))
    target, prompts = tiny_target(tiny_model("llama")), tiny_prompts(9, 14)
    settings = {"max_new_tokens": 16, "sampling": SamplingParams(temperature), "seed": 3}
    plain = decode(target, None, prompts, **settings)
    outputs = decode(target, NgramDraft(), prompts, rule="reject", **settings)
    assert {accepted for output in outputs for _, accepted in output.rounds} == {0}
    assert any(drafted for output in outputs for drafted, _ in output.rounds)
    if temperature == 0:  # else the two draw different random numbers
        assert [o.output_ids for o in outputs] == [o.output_ids for o in plain]


def test_unknown_and_repeated_names_are_refused() -> None:
    """Catches a typing error that decodes by another rule, and a rule that replaces another in silence."""
    with pytest.raises(UserError, match="no verification rule 'exactly'; there are exact, block"):
        find_rule("exactly")
    with pytest.raises(UserError, match="no verification rule 'exactly'"):
        SpeculativeEngine(tiny_target(tiny_model("llama")), None, rule="exactly")
    with pytest.raises(UserError, match="'exact' already"):
        register_rule(VerificationRule("exact", False, reject_all, ""))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_p_is_one_hot_for_greedy_decoding(dtype: torch.dtype) -> None:
    """Catches a division by temperature 0, and probabilities in bf16."""
    logits = torch.randn(2, 3, 5, generator=torch.Generator().manual_seed(0)).to(dtype)
    tokens = torch.zeros(2, 2, dtype=torch.long)
    rng = CounterRNG(torch.arange(2))
    for sampling in (SamplingParams(), SamplingParams(0.7, top_k=3)):
        p = DraftedTokens(tokens, logits, None, None, 2, sampling, rng).p()
        assert p.dtype == torch.promote_types(dtype, torch.float32)
        if sampling.greedy:
            assert torch.equal(p.argmax(-1), logits.argmax(-1))
            assert set(p.flatten().tolist()) == {0.0, 1.0}
        else:
            assert torch.equal(p, warp(logits, sampling))
