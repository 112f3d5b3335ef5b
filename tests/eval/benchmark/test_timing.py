"""What is timed is decoding: every shape was compiled before the first clock starts."""

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

from decode.common.errors import UserError
from decode.common.journal import Journal
from decode.drafts.base import Draft
from decode.drafts.causal import CausalDraft
from decode.drafts.lookup import NgramDraft, SuffixDraft
from decode.drafts.wrappers import ConfidentDraft
from decode.engine import compiled as engine_compile
from decode.engine import round as rounds
from decode.engine.engine import SpeculativeEngine
from decode.engine.learning import LearningDraft
from decode.model.runner import ModelRunner
from decode.verification.sampling import SamplingParams
from decode.verification.tree import DynamicTree
from eval.benchmark import timing
from eval.benchmark.methods import Method
from eval.benchmark.timing import TimingContext, TimingResult
from eval.tasks.loading import TaskPrompt
from eval.tuning.sweep import SweepStage, run_sweep
from tests.params import slow_except
from tests.tiny import noisy, tiny_model, tiny_prompts, tiny_target

NEW = 40
LENGTHS = (6, 90, 12, 100)  # with 40 new tokens rows of 128 slots and of 256


@pytest.fixture
def graphs(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    """One element for each graph that dynamo makes; without a code generator, which nothing here depends on."""
    made: list[int] = []

    def backend(module: Any, inputs: Any) -> Callable[..., Any]:
        made.append(len(made))
        return module.forward

    @cache
    def fast(function: Callable[..., Any], device_type: str) -> Callable[..., Any]:
        options = {"guard_filter_fn": engine_compile.filter_guards}
        return torch.compile(
            function, fullgraph=True, dynamic=False, backend=backend, options=options
        )

    torch._dynamo.reset()
    monkeypatch.setattr(rounds, "compile_function", fast)
    yield made
    torch._dynamo.reset()


@pytest.fixture
def context() -> TimingContext:
    """A tiny target in compiled mode, and prompts of both shapes."""
    model = tiny_model("llama", num_hidden_layers=1, max_position_embeddings=512)
    target = tiny_target(model)
    items = [TaskPrompt("t", str(i), ids) for i, ids in enumerate(tiny_prompts(*LENGTHS))]
    return TimingContext(target, items, NEW, mode="compiled")


def method(name: str, context: TimingContext) -> Method:
    shape = DynamicTree(2, 5) if name == "tree" else None
    near = ModelRunner(noisy(context.target.runner.model, 0.01))
    drafts: dict[str, Callable[[], Draft]] = {
        "ngram": NgramDraft,
        "suffix": SuffixDraft,
        "causal": lambda: CausalDraft(near),
        "tree": lambda: CausalDraft(near, shape=shape),
    }
    return Method(name, drafts[name](), 3, shape=shape)


def time_all(context: TimingContext, own: Method, journal: Journal, rows: int) -> TimingResult:
    return timing.time_methods(context, [own], 0.0, rows, journal, lambda: None)


def sweep_all(context: TimingContext, own: Method, journal: Journal, rows: int) -> TimingResult:
    return run_sweep(context, SweepStage("s", (own,), 0.8, rows), journal, lambda: None)


CASES = [("suffix", 3, time_all), ("causal", 1, time_all), ("tree", 3, sweep_all)]
"""Copies and models, and rows of a batch with each way to time them."""


@pytest.mark.parametrize(("name", "rows", "measure"), slow_except(CASES, ["suffix", "causal"]))
def test_nothing_is_compiled_while_a_clock_runs(
    name: str, rows: int, measure: Callable[..., TimingResult], context: TimingContext,
    graphs: list[int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """Bug: a longer prompt, the smaller last batch, or a round without drafts is compiled when it is timed."""
    during = graphs_made_while_timing(monkeypatch, graphs)
    found = measure(context, method(name, context), Journal(tmp_path / "j", {}), rows)
    assert all(found.records.values())
    assert len(graphs) > 0
    assert during == [0] * len(during)
    assert len(during) > 0


@pytest.mark.slow
def test_a_shape_that_the_warm_up_leaves_out_is_caught(
    context: TimingContext, graphs: list[int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The test above is blind if this one does not see compilation: the last batch has one row instead of three."""
    of_each_shape = timing.one_batch_per_shape
    monkeypatch.setattr(timing, "one_batch_per_shape", lambda *args: of_each_shape(*args)[:1])
    during = graphs_made_while_timing(monkeypatch, graphs)
    time_all(context, method("ngram", context), Journal(tmp_path / "j", {}), 3)
    assert sum(during) > 0


def graphs_made_while_timing(monkeypatch: pytest.MonkeyPatch, graphs: list[int]) -> list[int]:
    """A list that gets, for each batch that is timed, the graphs that were made meanwhile."""
    decode, during = timing.decode_batch, []

    def counted(*args: Any) -> Any:
        before = len(graphs)
        records = decode(*args)
        during.append(len(graphs) - before)
        return records

    monkeypatch.setattr(timing, "decode_batch", counted)
    return during


def test_a_draft_that_learns_begins_anew_with_each_engine(context: TimingContext) -> None:
    """Catches acceptance of prompts that an earlier temperature or pass has taught."""
    context = replace(context, mode="eager")
    inner = method("causal", context).draft
    assert inner is not None
    draft = LearningDraft(inner, context.target)
    own = Method("learns", ConfidentDraft(draft, 0.1), 3)
    engine = context.build_engine(own, SamplingParams())
    list(engine.speculate([context.items[0].prompt_ids], max_new_tokens=8))
    assert draft.update is not None
    context.build_engine(own, SamplingParams())
    assert draft.update is None


@pytest.mark.parametrize("measure", [time_all, sweep_all])
@pytest.mark.parametrize("fewer", [1, 0])
def test_a_batch_beyond_the_memory_is_not_measured_as_a_smaller_one(
    fewer: int, measure: Callable[..., TimingResult], context: TimingContext, tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """Catches a batch of 3 that is decoded by 2 rows on a GPU without room, and told as one of 3."""
    monkeypatch.setattr(
        SpeculativeEngine, "rows_that_fit", lambda self, prompts, new, rows: min(rows, 3 - fewer)
    )
    context = replace(context, mode="eager")
    own = method("ngram", context)
    if fewer == 0:
        assert all(measure(context, own, Journal(tmp_path / "j", {}), 3).records.values())
        return
    with pytest.raises(UserError, match="^batch size 3: the GPU has memory for 2 rows of these"):
        measure(context, own, Journal(tmp_path / "j", {}), 3)
