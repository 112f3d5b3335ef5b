"""Simulated acceptance: it is what was asked for, the text is the target's own, and the draft's cost is paid."""

import pytest

from decode.drafts.causal import CausalDraft
from decode.engine.engine import decode
from decode.model.runner import ModelRunner
from decode.verification.sampling import SamplingParams
from eval.benchmark.methods import Method
from eval.benchmark.simulated_draft import SimulatedDraft
from eval.benchmark.timing import TimingContext
from eval.benchmark.untimed_passes import decode_untimed
from eval.metrics.acceptance import Acceptance
from eval.tasks.loading import TaskPrompt
from tests.tiny import noisy, tiny_model, tiny_prompts, tiny_target

ALPHA, K, NEW = [0.8, 0.5], 3, 40


@pytest.mark.parametrize("costly", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_acceptance_is_what_was_asked_for(costly: bool) -> None:
    """Bug: positions are shifted, unconditional for conditional, or spoilt by EOS, batch or the draft that is paid
    for. About 500 rounds: α_1 within 0.07 of what was asked, four standard deviations; α_2 and α_3 within 0.12."""
    model = tiny_model("llama")
    target = tiny_target(model, eos=(3, 5))
    prompts = tiny_prompts(*[3 + i % 7 for i in range(40)])
    cost = CausalDraft(ModelRunner(noisy(model, 0.1))) if costly else None
    draft = SimulatedDraft(ALPHA, target.runner.vocab_size, cost)
    draft.record_answers(target, prompts, NEW + K + 1, rows=16)
    outputs = decode(target, draft, prompts, k=K, max_new_tokens=NEW, rows=6)
    plain = decode(target, None, prompts, max_new_tokens=NEW, rows=6)
    assert [o.output_ids for o in outputs] == [o.output_ids for o in plain]
    items = [TaskPrompt("t", str(i), prompt) for i, prompt in enumerate(prompts)]
    method = Method("simulated", draft, K)
    context = TimingContext(target, items, NEW)
    samples = decode_untimed(context, method, items, SamplingParams(), 8, lambda: None)
    found = Acceptance.of(samples, K)
    alpha = [x.value for x in found.alpha_by_position]
    reached = found.reached_at.sum(0)
    assert reached[0] > 400
    assert alpha[0] == pytest.approx(0.8, abs=0.07)
    assert alpha[1:] == pytest.approx([0.5, 0.5], abs=0.12)


def test_the_draft_is_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """Bug: the draft whose cost is asked for is never called, so that speed-ups are too good."""
    model = tiny_model("llama")
    target, calls = tiny_target(model), []
    cost = CausalDraft(ModelRunner(noisy(model, 0.1)))
    propose = cost.propose
    monkeypatch.setattr(cost, "propose", lambda *args: calls.append(1) or propose(*args))
    draft = SimulatedDraft([1.0], target.runner.vocab_size, cost)
    prompts = tiny_prompts(4)
    draft.record_answers(target, prompts, 20, rows=1)
    output = decode(target, draft, prompts, k=K, max_new_tokens=13)[0]
    assert output.rounds == [(K, K)] * 3
    assert len(calls) == 3
