"""The model of a round's memory against the tensors that a round holds, at a vocabulary of 152 thousand."""

import pytest
import torch
from torch import Tensor

from decode.drafts.causal import CausalDraft
from decode.engine.round import StepConfig, round_bytes, run_round
from decode.model.runner import ModelRunner
from decode.verification import sampling as samplings
from decode.verification.sampling import CounterRNG, SamplingParams
from tests.allocations import Allocations
from tests.decode.drafts.test_token_trees import BUSHY
from tests.decode.engine.test_capture_lint import as_on_a_gpu, seated  # noqa: F401
from tests.params import slow_except
from tests.tiny import tiny_model, tiny_target

VOCAB, K, ROWS = 152_064, 3, 3
SAMPLINGS = {
    "greedy": SamplingParams(),
    "sampled": SamplingParams(1.0),
    "top_p": SamplingParams(1.0, top_p=0.9),
    "top_k": SamplingParams(1.0, top_k=20),
}
CASES = [
    f"{draft} {how} {rule}"
    for draft in ("plain", "chain", "tree")
    for how in SAMPLINGS
    for rule in ("exact", "block", "typical")
]
KEPT = ["chain greedy exact", "chain sampled exact", "chain top_p block", "tree sampled exact"]


def measured(
    draft: str, sampling: SamplingParams, rule: str, dtype: torch.dtype = torch.float32
) -> tuple[int, Allocations]:
    """Tokens that a row verifies, and what a round holds, of a model that is narrow but for its vocabulary."""
    model = tiny_model("llama", dtype=dtype, vocab_size=VOCAB, num_hidden_layers=1)
    target = tiny_target(model, eos=(5,))
    assert len(target.eos_ids) == 1
    shape = BUSHY if draft == "tree" else None
    drafts = None if draft == "plain" else CausalDraft(ModelRunner(model), shape=shape)
    config = StepConfig(K, sampling, CounterRNG(torch.arange(ROWS)), rule)
    with torch.inference_mode():
        state = seated(target, drafts, config)
    run_round(target, drafts, state, config)
    with Allocations() as allocations:
        run_round(target, drafts, state, config)
    tokens = {"plain": 1, "chain": K + 1, "tree": len(BUSHY.parents) + 1}[draft]
    return tokens, allocations


@pytest.mark.usefixtures("as_on_a_gpu")
@pytest.mark.parametrize("case", slow_except(CASES, KEPT))
def test_a_round_holds_what_the_model_says(case: str) -> None:
    """Catches a tensor as wide as the vocabulary that is new, or kept longer, and a model that leaves one out."""
    draft, how, rule = case.split()
    tokens, allocations = measured(draft, SAMPLINGS[how], rule)
    want = round_bytes(ROWS, tokens, VOCAB, SAMPLINGS[how], rule=rule, tree=draft == "tree")
    assert allocations.peak == pytest.approx(want, rel=0.12), allocations.largest


@pytest.mark.usefixtures("as_on_a_gpu")
def test_logits_of_16_bits_take_half() -> None:
    """Catches probabilities in the dtype of the logits, or logits widened and kept."""
    tokens, allocations = measured("chain", SAMPLINGS["top_p"], "exact", torch.bfloat16)
    want = round_bytes(ROWS, tokens, VOCAB, SAMPLINGS["top_p"], itemsize=2)
    assert allocations.peak == pytest.approx(want, rel=0.12), allocations.largest


@pytest.mark.usefixtures("as_on_a_gpu")
def test_one_copy_more_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """Planted: probabilities of the whole vocabulary in fp64 are kept beside their sums."""
    draw = samplings.sample_inverse_cdf

    def wasteful(weights: Tensor, uniform: Tensor) -> Tensor:
        copy = weights.double()
        return draw(copy, uniform)

    monkeypatch.setattr(samplings, "sample_inverse_cdf", wasteful)
    tokens, allocations = measured("tree", SAMPLINGS["sampled"], "exact")
    want = round_bytes(ROWS, tokens, VOCAB, SAMPLINGS["sampled"], tree=True)
    assert allocations.peak > 1.2 * want
