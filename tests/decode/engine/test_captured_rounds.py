"""Rounds in a CUDA graph, on a CPU: the operations of one round are recorded and replayed on the very same tensors.

As a graph does, the replay runs no Python, reads what the recorded addresses hold, and writes there.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from decode.common.errors import UserError
from decode.drafts.base import Draft, Proposal
from decode.drafts.causal import CausalDraft
from decode.drafts.wrappers import ConfidentDraft, DraftWrapper
from decode.engine import engine as engines
from decode.engine.compiled import WARM_UPS, put_back
from decode.engine.engine import SpeculativeEngine
from decode.engine.records import DecodeRecord, collect_outputs
from decode.model.loading import Target
from decode.model.runner import ModelRunner
from decode.verification.sampling import SamplingParams
from tests.decode.drafts.test_confident_draft import DRAFTS as CHAINS
from tests.decode.engine.test_capture_lint import as_on_a_gpu  # noqa: F401
from tests.decode.engine.test_compile import FAMILIES, HOW, graphs, make  # noqa: F401  a fixture
from tests.fake_gpu import fake_gpu
from tests.params import rotated, slow_except
from tests.tiny import noisy, tiny_model, tiny_prompts, tiny_target

PROMPTS = tiny_prompts(13, 4, 9, 6, 11)
"""More than rows: some are refilled while others run."""
SAMPLED = SamplingParams(0.8, top_p=0.9)
READS = {"aten::_local_scalar_dense", "aten::item", "aten::is_nonzero", "aten::equal"}
READS |= {"aten::nonzero", "aten::masked_select", "aten::lift_fresh"}
"""What a graph cannot hold: the host waits for a value, or sends numbers of its own (lift_fresh). One number alone, as
in `x[0] = 1`, is an argument of a kernel and stays in the graph."""


def tensors(values: Any) -> list[Tensor]:
    return [x for x in tree_leaves(values) if isinstance(x, Tensor)]


def addresses(values: Any) -> set[int]:
    return {x.untyped_storage().data_ptr() for x in tensors(values) if x.layout == torch.strided}


class Tape(TorchDispatchMode):
    """Records every operation with the tensors that it read and made; `replay` runs them again on the same ones."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[Any, Any, Any, Any]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = func._schema.name
        one = name == "aten::lift_fresh" and args[0].ndim == 0
        assert one or name not in READS, f"{name} in a round that is to be captured"
        out = func(*args, **kwargs)
        # a view stays valid: its storage is written by those that follow
        if func._schema.is_mutable or not addresses(out) & addresses((args, kwargs)):
            self.calls.append((func, args, kwargs, out))
        return out

    def replay(self) -> None:
        for func, args, kwargs, out in self.calls:
            made = func(*args, **kwargs)
            if not func._schema.is_mutable:
                for old, new in zip(tensors(out), tensors(made), strict=True):
                    old.copy_(new)


class RecordedRunner:
    """Stands in for CudaGraphRunner: the same warm-up, and a tape in place of the graph."""

    made: list["RecordedRunner"]

    @torch.inference_mode()
    def __init__(
        self, run: Callable[[], Tensor], changed: Sequence[Tensor], keep_alive: Sequence[Any] = ()
    ):
        self.made.append(self)
        self.keep_alive = run, *keep_alive
        self.tape = Tape()
        with put_back(changed):
            for _ in range(WARM_UPS):
                run()
            with self.tape:
                self.out = run()

    @torch.inference_mode()
    def __call__(self) -> Tensor:
        self.tape.replay()
        return self.out.clone()


@pytest.fixture
def recorded(monkeypatch: pytest.MonkeyPatch, as_on_a_gpu: None) -> list[RecordedRunner]:  # noqa: F811
    """The graphs that engines make, recorded on the CPU."""
    RecordedRunner.made = []
    monkeypatch.setattr(engines, "CudaGraphRunner", RecordedRunner)
    return RecordedRunner.made


def runs(
    target: Target,
    draft: Draft | None,
    mode: str,
    sampling: SamplingParams,
    rows: int = 2,
    new: int = 16,
) -> list[DecodeRecord]:
    """Two runs of one engine over all prompts in few rows; the second finds the graph of the first."""
    engine = SpeculativeEngine(target, draft, k=3, sampling=sampling)
    engine.mode = mode  # past the check for a GPU
    found = []
    for seed in (3, 4):
        found += collect_outputs(
            PROMPTS, engine.speculate(PROMPTS, max_new_tokens=new, rows=rows, seed=seed)
        )
    return found


KEPT = [("plain", "greedy"), ("causal", "sampled")]


@pytest.mark.parametrize(
    ("name", "how"), slow_except(dict.fromkeys([*KEPT, *rotated(FAMILIES, HOW)]), KEPT)
)
def test_a_replayed_round_is_an_eager_one(
    name: str, how: str, recorded: list[RecordedRunner]
) -> None:
    """Catches state that a round keeps at new addresses or as Python numbers, values that the host reads or sends,
    and what the rounds before the capture leave behind: text and rounds of every family."""
    sampling = SAMPLED if how == "sampled" else SamplingParams()
    target = tiny_target(tiny_model("llama"))
    want = runs(target, make(name, target), "eager", sampling)
    assert recorded == []
    got = runs(target, make(name, target), "captured", sampling)
    assert len(recorded) == 1
    assert len(recorded[0].tape.calls) > 50
    assert [o.output_ids for o in got] == [o.output_ids for o in want]
    assert [o.rounds for o in got] == [o.rounds for o in want]


@pytest.mark.parametrize(
    ("name", "how"),
    slow_except([("causal", "sampled"), ("eagle3", "greedy"), ("static", "greedy")], ["causal"]),
)
def test_rounds_beyond_a_short_draft_are_captured_too(
    name: str, how: str, recorded: list[RecordedRunner]
) -> None:
    """Catches a graph that goes on drafting where no row is within the draft's context, and one that is captured anew
    for each such round."""
    sampling = SAMPLED if how == "sampled" else SamplingParams()
    target = tiny_target(tiny_model("llama"))
    found = []
    for mode in ("eager", "captured"):
        draft = make(name, target)
        assert draft is not None
        draft.reads = replace(draft.reads, context=20)
        with pytest.warns(UserWarning, match="context of 20 tokens"):
            found.append(runs(target, draft, mode, sampling))
    want, got = found
    assert [o.output_ids for o in got] == [o.output_ids for o in want]
    assert [o.rounds for o in got] == [o.rounds for o in want]
    assert len(recorded) == 2
    assert {(0, 0)} < {one for o in got for one in o.rounds}


def run_lengths(
    target: Target, draft: Draft | None, mode: str, calls: Sequence[tuple[int, int]]
) -> list[DecodeRecord]:
    """One engine over all prompts, once for each (K, rows)."""
    engine = SpeculativeEngine(target, draft, k=calls[0][0], sampling=SAMPLED)
    engine.mode = mode  # past the check for a GPU
    found = []
    for k, rows in calls:
        engine.k = k
        found += collect_outputs(PROMPTS, engine.speculate(PROMPTS, max_new_tokens=12, rows=rows))
    return found


LENGTHS = [(3, 2), (1, 2), (3, 2), (2, 2), (1, 2)]


@pytest.mark.parametrize(
    "name",
    slow_except(["causal", "early-exit", "medusa", "pard", "dflash", "mtp"], ["causal"]),
)
def test_each_draft_length_is_captured_once(name: str, recorded: list[RecordedRunner]) -> None:
    """Catches a capture for a K that was captured before, and a graph of another K."""
    target = tiny_target(tiny_model("llama"))
    want = run_lengths(target, make(name, target), "eager", LENGTHS)
    got = run_lengths(target, make(name, target), "captured", LENGTHS)
    assert len(recorded) == 3
    assert [(o.output_ids, o.rounds) for o in got] == [(o.output_ids, o.rounds) for o in want]


MOVING = [(1, 2), (3, 2), (3, 1), (3, 2)]
"""The first K is the smaller one: buffers that have room for it alone move. Then other rows, and back."""


@pytest.mark.parametrize("name", slow_except(["causal", "mtp", "dynamic"], ["causal"]))
def test_graphs_end_where_buffers_move(name: str, recorded: list[RecordedRunner]) -> None:
    """Catches a graph that goes on writing to buffers of another batch."""
    target = tiny_target(tiny_model("llama"))
    want = run_lengths(target, make(name, target), "eager", MOVING)
    got = run_lengths(target, make(name, target), "captured", MOVING)
    assert len(recorded) == 4
    assert [(o.output_ids, o.rounds) for o in got] == [(o.output_ids, o.rounds) for o in want]


@pytest.mark.parametrize("stale", [False, True])
def test_a_stale_graph_is_seen(
    stale: bool, recorded: list[RecordedRunner], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Catches a graph over buffers that another engine of the same target has replaced. Planted: it is kept."""
    target = tiny_target(tiny_model("llama"))
    engine, other = (SpeculativeEngine(target, k=3) for _ in range(2))
    engine.mode = "captured"  # past the check for a GPU
    texts = []
    for one, rows in ((engine, 2), (other, 1), (engine, 2)):
        prompts = PROMPTS if one is other else PROMPTS[::-1] if texts else PROMPTS
        found = collect_outputs(prompts, one.speculate(prompts, max_new_tokens=12, rows=rows))
        texts.append([o.output_ids for o in found])
        if stale:
            monkeypatch.setattr(engines, "same_objects", lambda one, other: True)
    assert len(recorded) == (1 if stale else 2)
    assert (texts[2][::-1] == texts[1]) != stale
    assert texts[0] == texts[1]


# ---- lengths by confidence ----


def test_lengths_by_confidence_are_not_captured() -> None:
    target = tiny_target(tiny_model("llama"))
    for name in ("causal", "causal+ngram"):
        draft = ConfidentDraft(CHAINS[name](target), 0.3)
        with (
            fake_gpu(target, draft),
            pytest.raises(UserError, match="a draft that proposes on it"),
        ):
            SpeculativeEngine(target, draft, mode="captured")


# ---- planted ----


class Replacing(DraftWrapper):
    """Counts rounds in a tensor that each round makes anew, and drafts by it."""

    def __init__(self, inner: Draft):
        super().__init__(inner)
        self.count = torch.zeros((), dtype=torch.long)

    def propose(self, history: Tensor, length: Tensor, k: int) -> Proposal:
        proposal = self.inner.propose(history, length, k)
        self.count = self.count + 1
        return Proposal((proposal.tokens + self.count) % 7, proposal.q, finite=proposal.finite)


class Reading(DraftWrapper):
    """Asks the device for a number in every round."""

    def propose(self, history: Tensor, length: Tensor, k: int) -> Proposal:
        return self.inner.propose(history, length, k if int(length.max()) > 0 else 1)


class Sending(DraftWrapper):
    """Makes a tensor of Python's numbers in every round."""

    def propose(self, history: Tensor, length: Tensor, k: int) -> Proposal:
        proposal = self.inner.propose(history, length, k)
        tokens = torch.where(torch.tensor([True] * k), proposal.tokens, 0)
        return Proposal(tokens, proposal.q, finite=proposal.finite)


def causal(target: Target) -> CausalDraft:
    return CausalDraft(ModelRunner(noisy(target.runner.model, 0.01)))


def test_state_at_a_new_address_is_seen(recorded: list[RecordedRunner]) -> None:
    """Planted: the replay goes on with the tensor of the recorded round."""
    target = tiny_target(tiny_model("llama"))
    got, want = (
        runs(target, Replacing(causal(target)), mode, SamplingParams())
        for mode in ("captured", "eager")
    )
    assert [o.rounds for o in got] != [o.rounds for o in want]


@pytest.mark.parametrize(("kind", "name"), [(Reading, "scalar"), (Sending, "lift_fresh")])
def test_a_number_that_passes_the_host_is_seen(
    kind: type[DraftWrapper], name: str, recorded: list[RecordedRunner]
) -> None:
    """Planted: one read of the device, and one tensor of the host's numbers."""
    target = tiny_target(tiny_model("llama"))
    with pytest.raises(AssertionError, match=name):
        runs(target, kind(causal(target)), "captured", SamplingParams())


@pytest.mark.parametrize(
    "name",
    slow_except(["medusa", "eagle3", "mtp", "peagle", "dflash", "dspark"], ["dflash"]),
)
def test_what_a_warm_up_changes_is_put_back(
    name: str, recorded: list[RecordedRunner], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Catches states of tokens that only the warm-up said, in every family that keeps states; and, planted, the same
    comparison finds them if nothing of the draft is put back."""
    target = tiny_target(tiny_model("llama"))
    for named in (True, False):
        draft: Any = make(name, target)
        same: list[bool] = []

        class Comparing(RecordedRunner):
            def __init__(self, run: Any, changed: Sequence[Tensor], keep_alive: Sequence[Any] = ()):
                own = [draft.state_buffer.states]  # noqa: B023
                before = [x.clone() for x in own]
                super().__init__(run, changed, keep_alive)
                same.extend(torch.equal(x, y) for x, y in zip(own, before, strict=True))  # noqa: B023

        monkeypatch.setattr(engines, "CudaGraphRunner", Comparing)
        if not named:
            whole = draft.buffers
            draft.buffers = lambda: replace(whole(), state=[])  # noqa: B023
        runs(target, draft, "captured", SamplingParams())
        assert same == [named]


def test_the_modes_of_graphs_need_a_gpu() -> None:
    target = tiny_target(tiny_model("llama"))
    for mode in ("captured", "graph"):
        with pytest.raises(UserError, match=f"mode {mode} needs a CUDA device"):
            SpeculativeEngine(target, mode=mode)


def test_what_is_put_back_is_as_before() -> None:
    values = [torch.arange(4), torch.ones(2)]
    before = [x.clone() for x in values]
    with put_back(values):
        for x in values:
            x.add_(1)
        assert not torch.equal(values[0], before[0])
    assert all(torch.equal(x, y) for x, y in zip(values, before, strict=True))
