"""No CUDA graph is captured while a clock runs, whatever turns of methods and prompts: counted on a CPU."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from torch import Tensor

from decode.common.journal import Journal
from decode.drafts.base import Draft
from decode.drafts.causal import CausalDraft
from decode.drafts.eagle import CachedHead
from decode.engine import engine as engines
from decode.engine.engine import SpeculativeEngine
from decode.model.loading import Target
from decode.model.runner import ModelRunner
from decode.verification.tree import DynamicTree
from eval.benchmark import timing, untimed_passes
from eval.benchmark.methods import PLAIN_DECODING, Method
from eval.benchmark.timing import TimingContext
from eval.tasks.loading import TaskPrompt
from tests.decode.engine.test_capture_lint import as_on_a_gpu  # noqa: F401  a fixture
from tests.heads import random_draft
from tests.params import slow_except
from tests.tiny import noisy, tiny_model, tiny_prompts, tiny_target

NEW = 24


@pytest.fixture
def captures(monkeypatch: pytest.MonkeyPatch, as_on_a_gpu: None) -> list[object]:  # noqa: F811
    """One element for each graph that an engine captures. A replay is the round itself."""
    made: list[object] = []

    class CountedRunner:
        def __init__(self, run: Callable[[], Tensor], changed: Any, keep_alive: Any):
            made.append(self)
            self.run = run

        def __call__(self) -> Tensor:
            return self.run()

    def build(self: TimingContext, method: Method, sampling: Any) -> SpeculativeEngine:
        if method.draft is not None:
            method.draft.shape = method.shape
        engine = SpeculativeEngine(self.target, method.draft, k=max(1, method.k), sampling=sampling)
        engine.mode, engine.grows, engine.rounds_ahead = "captured", False, 1  # as on a GPU
        return engine

    monkeypatch.setattr(engines, "CudaGraphRunner", CountedRunner)
    monkeypatch.setattr(TimingContext, "build_engine", build)
    return made


def causal(target: Target) -> Draft:
    return CausalDraft(ModelRunner(noisy(target.runner.model, 0.02)))


def two_lengths(target: Target) -> list[Method]:
    draft = random_draft("eagle3", target)
    return [Method("k2", draft, 2), Method("k5", draft, 5)]


def chain_and_tree(target: Target) -> list[Method]:
    draft, tree = random_draft("eagle3", target), DynamicTree(3, 8)
    return [Method("chain", draft, 2), Method("tree", draft, 3, shape=tree)]


def short(target: Target) -> list[Method]:
    draft = causal(target)
    draft.reads = replace(draft.reads, context=110)
    return [Method("short", draft, 4)]


CASES: dict[str, tuple[Callable[[Target], list[Method]], Sequence[int], int]] = {
    "around a power of two": (lambda t: [Method("causal", causal(t), 4)], (482, 482), 1),
    "short and long prompts": (lambda t: [Method("causal", causal(t), 4)], (20, 700, 20), 1),
    "a smaller last batch": (lambda t: [Method("causal", causal(t), 4)], (20, 130, 9, 40, 30), 2),
    "one draft, two K": (two_lengths, (20, 40), 1),
    "one draft, chain and tree": (chain_and_tree, (20, 40), 1),
    "beyond a short draft": (short, (20, 105), 1),
}


def captured_in_time(
    name: str, captures: list[object], monkeypatch: pytest.MonkeyPatch, folder: Path
) -> tuple[int, int]:
    """(graphs that were captured before the first clock, those captured by timed requests)."""
    make, lengths, rows = CASES[name]
    target = tiny_target(tiny_model("llama", num_hidden_layers=3, max_position_embeddings=1024))
    items = [TaskPrompt("t", str(i), ids) for i, ids in enumerate(tiny_prompts(*lengths))]
    context, counts = TimingContext(target, items, NEW), list[int]()
    decode = timing.decode_batch

    def counted(*args: Any) -> Any:
        before = len(captures)
        records = decode(*args)
        counts.append(len(captures) - before)
        return records

    for module in (timing, untimed_passes):
        monkeypatch.setattr(module, "decode_batch", counted)
    methods = make(target)
    journal = Journal(folder / "journal", {})
    found = timing.time_methods(context, methods, 0.0, rows, journal, lambda: None)
    assert {m.label for m in found.records} == {m.label for m in [PLAIN_DECODING, *methods]}
    assert not any(found.failures.values())
    batches = context.batches(rows)
    untimed_passes.measure_steps(context, methods, batches, context.sampling(0.0))
    return len(captures) - sum(counts), sum(counts)


@pytest.mark.filterwarnings("ignore:.*context of 110 tokens")
@pytest.mark.parametrize("name", slow_except(CASES, ["around a power of two", "one draft, two K"]))
def test_nothing_is_captured_while_a_clock_runs(
    name: str, captures: list[object], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Catches buffers that move as methods, prompts or the last batch take turns, and rounds of a kind that the warm-up
    left out."""
    before, timed = captured_in_time(name, captures, monkeypatch, tmp_path)
    assert before > 0
    assert timed == 0


@pytest.mark.filterwarnings("ignore:.*context of 110 tokens")
@pytest.mark.parametrize(
    ("name", "fault"),
    slow_except(
        [
            ("around a power of two", "own buffers"), ("short and long prompts", "own buffers"),
            ("a smaller last batch", "own buffers"), ("one draft, two K", "one state buffer"),
            ("beyond a short draft", "no skipped round"),
        ],
        [("around a power of two", "own buffers")],
    ),
)  # fmt: skip
def test_a_capture_in_a_timed_request_is_seen(
    name: str, fault: str, captures: list[object], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Planted: each fault that the test above is for."""
    if fault == "own buffers":
        num_slots = SpeculativeEngine.num_slots

        def own(self: SpeculativeEngine, *args: Any) -> int:
            with monkeypatch.context() as patch:
                patch.setattr(type(self.target.runner), "shape", (0, 0))
                return num_slots(self, *args)

        monkeypatch.setattr(SpeculativeEngine, "num_slots", own)
        monkeypatch.setattr(timing, "share_buffers", lambda *_: None)
    elif fault == "one state buffer":
        begin = CachedHead.begin_batch

        def forget(self: CachedHead, request: Any) -> None:
            self.state_buffers = {}
            begin(self, request)

        monkeypatch.setattr(CachedHead, "begin_batch", forget)
    else:
        monkeypatch.setattr(SpeculativeEngine, "_may_skip", lambda *_: False)
    assert captured_in_time(name, captures, monkeypatch, tmp_path)[1] > 0
