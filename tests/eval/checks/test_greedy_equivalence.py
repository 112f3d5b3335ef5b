"""Greedy output is that of transformers' generate; only what rounding can swap at this place is a tie."""

import copy
import json
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch

from decode.common.typed_json import to_json
from decode.model.loading import Target, load_model, load_target
from eval.checks import greedy_equivalence
from eval.tasks.loading import TaskPrompt
from tests import worlds
from tests.seq2seq import START, generated, t5_target, tiny_t5
from tests.tiny import FEW, VOCAB, reference, tiny_model, tiny_prompts
from tests.worlds import World

K, NEW = 3, 16


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> World:
    return worlds.build(tmp_path_factory.mktemp("world"), prompts=12)


@pytest.fixture(scope="module")
def target(world: World) -> Target:
    return load_target(str(world.target), "cpu")


@pytest.fixture(scope="module")
def greedy(world: World, target: Target) -> tuple[Any, TaskPrompt, list[int]]:
    """(the plain model, a prompt, its greedy answer of 16 tokens)."""
    model = load_model(str(world.target), "target", "cpu", "float32")
    for text in world.texts:
        item = TaskPrompt("task", text, target.tokenizer(text)["input_ids"])
        answer = greedy_equivalence.reference_greedy_output(model, item.prompt_ids, NEW, target)
        if len(answer) == NEW:
            return model, item, answer
    raise AssertionError("every answer of this world is short")


def verdict_on(
    model: Any, item: TaskPrompt, answer: list[int], outputs: Sequence[list[int]]
) -> Any:
    items = [replace(item, id=str(i)) for i in range(len(outputs))]

    def measure(item: TaskPrompt, before: list[int], pair: tuple[int, int]) -> tuple[float, float]:
        return greedy_equivalence.measure_pair(model, item.prompt_ids, before, pair, K)

    found = greedy_equivalence.find_mismatches(items, [answer] * len(items), outputs, measure)
    return greedy_equivalence.greedy_verdict(items, found)


def other_than(*tokens: int) -> int:
    return next(token for token in range(20, 30) if token not in tokens)


@pytest.mark.parametrize("change", ["first", "middle", "last", "shorter", "longer"])
def test_a_wrong_output_is_a_failure(
    greedy: tuple[Any, TaskPrompt, list[int]], change: str
) -> None:
    """Bug: a real divergence is excused as a tie, or a missing end is not compared at all."""
    model, item, answer = greedy
    at = {"first": 0, "middle": 7, "last": NEW - 1, "shorter": NEW - 1, "longer": NEW}[change]
    wrong = [] if change == "shorter" else [other_than(*answer[at : at + 1])]
    output = answer[:at] + wrong + answer[at + 1 :]
    verdict = verdict_on(model, item, answer, [answer, output])
    assert verdict.greedy_identical is False
    assert (verdict.prompts, verdict.identical, verdict.ties) == (2, 1, [])
    assert [f.position for f in verdict.failures] == [at]
    assert (verdict.exact, verdict.tied, verdict.failed) == (0.5, 0.0, 0.5)
    # A missing token has no logit to be infinitely far from.
    json.dumps(to_json(verdict), allow_nan=False)


def test_an_answer_past_its_end_is_a_failure(greedy: tuple[Any, TaskPrompt, list[int]]) -> None:
    """Bug: an output that goes on past the limit with the model's own tokens has no gap and counts as a tie."""
    model, item, answer = greedy
    verdict = verdict_on(model, item, answer[:-1], [answer])
    assert verdict.greedy_identical is False
    assert verdict.failures[0].gap is None


def test_nothing_compared_proves_nothing() -> None:
    """Bug: a task whose prompts all failed is called identical."""
    assert greedy_equivalence.greedy_verdict([], []).greedy_identical is None


def test_only_the_twin_of_an_exact_tie_is_a_tie(
    world: World, greedy: tuple[Any, TaskPrompt, list[int]]
) -> None:
    """Bug: two equal logits swap between passes, and a lossless decoder is called broken; or where two logits tie, any
    token at all is excused."""
    _, item, answer = greedy
    twin = other_than(*answer)
    model = load_model(str(world.target), "target", "cpu", "float32")
    with torch.no_grad():  # the token at 5 has a twin with the very same logit
        model.lm_head.weight[twin] = model.lm_head.weight[answer[5]]
    for token, is_tie in ((twin, True), (other_than(*answer, twin), False)):
        verdict = verdict_on(model, item, answer, [[*answer[:5], token, *answer[6:]]])
        assert verdict.greedy_identical is is_tie
        assert [(t.position, t.gap) for t in verdict.ties] == [(5, 0.0)] * is_tie
        assert len(verdict.failures) == (not is_tie)


def test_second_best_tokens_close_by_are_failures(world: World, target: Target) -> None:
    """Bug: in bf16 a decoder that takes the second-best token wherever it is close passes, since the noise is that of
    the worst token of the vocabulary."""
    model = load_model(str(world.target), "target", "cpu", "bfloat16")
    exact = copy.deepcopy(model).float()
    close = passed = noisy = 0
    for text in world.texts:
        prompt = target.tokenizer(text)["input_ids"]
        answer = greedy_equivalence.reference_greedy_output(model, prompt, NEW, target)
        with torch.inference_mode():
            logits = exact(torch.tensor([[*prompt, *answer]])).logits[0, len(prompt) - 1 : -1]
        for at, (token, row) in enumerate(zip(answer, logits, strict=True)):
            second = next(t for t in row.topk(2).indices.tolist() if t != token)
            gap = float(row[token] - row[second])
            if not 0.06 < gap < 0.12:  # 4 to 8 units in the last place of a logit around 3
                continue
            output = [*answer[:at], second, *answer[at + 1 :]]
            verdict = verdict_on(model, TaskPrompt("t", text, prompt), answer, [output])
            close += 1
            passed += verdict.greedy_identical
            noisy += verdict.noise > 0
            (found,) = verdict.ties + verdict.failures
            assert found.gap == pytest.approx(gap, abs=1e-4)
    assert close >= 10
    assert noisy == close
    assert passed == 0


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("arch", FEW)
def test_wider_precision_is_that_of_a_wider_model(arch: str, dtype: torch.dtype) -> None:
    """Bug: some weights stay narrow, or stay wide afterwards, also after an error."""
    model = reference(tiny_model(arch, dtype=dtype))
    wide = copy.deepcopy(model).to(greedy_equivalence.WIDER_DTYPE.get(dtype, torch.float64))
    wide.set_experts_implementation("eager")
    ids = list(range(5, 25))
    before = [weight.data_ptr() for weight in model.parameters()]
    want = greedy_equivalence.logits_after(wide, ids, len(ids), 1)
    with greedy_equivalence.wider_precision(model):
        found = greedy_equivalence.logits_after(model, ids, len(ids), 1)
        with pytest.raises((AttributeError, TypeError, ValueError)):
            model(object())
    narrow = greedy_equivalence.logits_after(model, ids, len(ids), 1)
    rounding = float((narrow - want).abs().max())
    assert float((found - want).abs().max()) < max(1e-6, rounding / 100)
    assert [weight.data_ptr() for weight in model.parameters()] == before
    assert {weight.dtype for weight in model.parameters()} == {dtype}


@pytest.mark.parametrize("width", [1, 3, 7])
def test_passes_of_any_width_read_the_same_text(
    greedy: tuple[Any, TaskPrompt, list[int]], width: int
) -> None:
    """Bug: a pass reads a token twice or not at all, or the filler behind the text."""
    model, item, answer = greedy
    ids = [*item.prompt_ids, *answer]
    whole = greedy_equivalence.logits_after(model, ids, len(ids), 1)
    parts = greedy_equivalence.logits_after(model, ids, len(item.prompt_ids), width)
    assert torch.allclose(parts, whole, atol=1e-4)


def test_a_decoder_may_have_more_layers_than_its_encoder() -> None:
    """Catches transformers' own cache, which has the encoder's layers: no such T5 has a reference then."""
    model = tiny_t5(num_layers=1, num_decoder_layers=3)
    [prompt] = tiny_prompts(9)
    answer: list[int] = []
    for _ in range(6):
        read = torch.tensor([[START, *answer]])
        with torch.no_grad():
            logits = model(input_ids=torch.tensor([prompt]), decoder_input_ids=read).logits
        answer.append(int(logits[0, -1].argmax()))
    found = greedy_equivalence.reference_greedy_output(model, prompt, 6, t5_target(model))
    assert found == answer


def test_an_encoder_decoder_is_judged_by_its_own_passes() -> None:
    """Catches a gap after the prompt instead of the answer, and an encoder that runs in another precision."""
    model = tiny_t5()
    [prompt] = tiny_prompts(9)
    answer = generated(model, prompt, 8)
    pair = answer[5], (answer[5] + 1) % VOCAB
    gap, noise = greedy_equivalence.measure_pair(model, prompt, answer[:5], pair, K)
    read = torch.tensor([[START, *answer[:5]]])
    with torch.no_grad():
        wide = copy.deepcopy(model).double()
        logits = wide(input_ids=torch.tensor([prompt]), decoder_input_ids=read).logits[0, -1]
    assert gap == pytest.approx(float(logits[pair[0]] - logits[pair[1]]), abs=1e-5)
    assert 0 < noise < 1e-3
