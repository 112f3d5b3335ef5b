"""A round reads nothing from the device and sends nothing to it, so that a CUDA graph can hold it. Found on a CPU."""

from collections import Counter
from collections.abc import Callable
from types import TracebackType
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

import decode.engine.round
from decode.drafts.base import Draft, DraftContext, Proposal
from decode.drafts.causal import CausalDraft
from decode.drafts.early_exit import EarlyExitDraft
from decode.drafts.lookup import NgramDraft
from decode.engine.round import BatchState, StepConfig, read_results, run_round
from decode.model import linear
from decode.model.loading import Target
from decode.model.runner import ModelRunner
from decode.verification import sampling
from decode.verification.registry import VERIFICATION_RULES
from decode.verification.sampling import CounterRNG, SamplingParams
from decode.verification.tree import DynamicTree
from tests.decode.drafts.test_exit_adapter import IDS
from tests.decode.drafts.test_exit_adapter import draft_of as exit_draft
from tests.decode.drafts.test_token_trees import BUSHY
from tests.heads import random_draft
from tests.params import pairwise, slow_except
from tests.tiny import ARCHITECTURES, FEW, noisy, tiny_model, tiny_prompts, tiny_target

ROUNDS, SIZE, K = 3, 60, 3


class Operations(TorchDispatchMode):
    """Counts operations whose result, or the shape of it, the host must wait for."""

    SYNC = {"_local_scalar_dense", "item", "is_nonzero", "equal", "allclose", "nonzero", "argwhere"}
    SYNC |= {"masked_select", "_unique2", "unique_consecutive", "unique_dim", "bincount"}
    SYNC |= {"repeat_interleave.Tensor", "repeat_interleave.self_Tensor", "where.default"}
    SYNC |= {"multinomial"}
    INDEXED = {"index", "index_put", "index_put_", "_index_put_impl_"}

    def __init__(self, counts: Counter[str]):
        super().__init__()
        self.counts = counts

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        packet, overload = func.overloadpacket.__name__, func._overloadname
        if packet in self.SYNC or f"{packet}.{overload}" in self.SYNC:
            self.counts[packet] += 1
        by = args[1] if packet in self.INDEXED else []
        if any(index is not None and index.dtype in (torch.bool, torch.uint8) for index in by):
            self.counts[f"{packet} by a mask"] += 1  # inside, this is nonzero
        return func(*args, **(kwargs or {}))


class Calls(TorchFunctionMode):
    """Counts what passes the dispatcher unseen: copies of a tensor for the host and of the host's data."""

    COPY = {"tolist", "numpy", "__array__", "cpu", "tensor", "as_tensor", "from_numpy"}

    def __init__(self, counts: Counter[str]):
        super().__init__()
        self.counts = counts

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = getattr(func, "__name__", "")
        if name in self.COPY:
            self.counts[name] += 1
        if name in ("__getitem__", "__setitem__"):
            parts = args[1] if isinstance(args[1], tuple) else (args[1],)
            self.counts["index by a list"] += sum(isinstance(part, list) for part in parts)
        return func(*args, **(kwargs or {}))


class Lint:
    """Within it, everything is counted that would break the capture of a CUDA graph or wait for the device."""

    def __init__(self) -> None:
        self.counts: Counter[str] = Counter()

    def __enter__(self) -> "Lint":
        self.modes = Operations(self.counts), Calls(self.counts)
        for mode in self.modes:
            mode.__enter__()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        at: TracebackType | None,
    ) -> None:
        for mode in reversed(self.modes):
            mode.__exit__(kind, error, at)

    @property
    def found(self) -> dict[str, int]:
        return {name: count for name, count in self.counts.items() if count > 0}


def seated(target: Target, draft: Draft | None, rules: StepConfig) -> BatchState:
    """Three prompts of unequal length in their rows, prefilled, with their first token."""
    prompts = tiny_prompts(13, 4, 9)
    target.runner.allocate(len(prompts), SIZE)
    target.runner.capture_hidden_states(None if draft is None else draft.reads.aux_layers)
    state = BatchState.empty(len(prompts), SIZE, target.runner.device)
    length = torch.tensor([len(prompt) for prompt in prompts])
    tokens = torch.tensor([prompt + [0] * (13 - len(prompt)) for prompt in prompts])
    first = target.runner.prefill(tokens, length).argmax(-1)
    if draft is not None:
        draft.begin_batch(DraftContext(len(prompts), SIZE, rules.k, rules.sampling, rules.choose))
        features = None if draft.reads.aux_layers is None else target.runner.features
        draft.prefill(torch.arange(len(prompts)), tokens, length, features)
    state.history[:, :13] = tokens
    state.history[torch.arange(len(prompts)), length] = first
    state.length.copy_(length + 1)
    state.limit.fill_(SIZE)
    state.done.fill_(False)
    return state


@pytest.fixture
def as_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Chains keep their empty columns and top-p sorts the whole vocabulary: only a CPU looks what can be left out, and
    only on a CPU are there packed copies that are compared with their weights."""
    monkeypatch.setattr(linear, "digest", lambda tensor: 0)
    monkeypatch.setattr(sampling, "reads_are_free", lambda tensor: False)
    monkeypatch.setattr(
        decode.engine.round, "drop_empty_columns", lambda proposal, compiled: proposal
    )


def reads(target: Target, draft: Draft | None, sampled: bool = False, rule: str = "exact") -> Any:
    """What the lint finds in a few rounds, after one in which buffers are made."""
    target.eos_ids  # noqa: B018  made at its first use, which is admission in the engine
    dice = CounterRNG(torch.arange(3))
    rules = StepConfig(K, SamplingParams(1.0, 20, 0.9) if sampled else SamplingParams(), dice, rule)
    with torch.inference_mode():
        state = seated(target, draft, rules)
    lint, before = Lint(), int(state.length.sum())
    with lint:
        for _ in range(ROUNDS):
            run_round(target, draft, state, rules)
    assert int(state.length.sum()) >= before + 3 * ROUNDS  # the rounds did happen
    return lint.found


# ---- no finding ----


@pytest.mark.usefixtures("as_on_a_gpu")
@pytest.mark.parametrize("arch", slow_except(ARCHITECTURES, FEW))
def test_a_round_of_any_architecture_reads_nothing(arch: str) -> None:
    """Catches experts that are run one by one, RoPE and masks that look at positions on the host, a draft's too."""
    model = tiny_model(arch)
    target, moved = tiny_target(model), ModelRunner(noisy(model, 0.01))
    assert reads(target, CausalDraft(moved, shape=DynamicTree(width=3, nodes=9))) == {}
    if arch in FEW:
        assert reads(target, CausalDraft(moved)) == {}
        assert reads(target, random_draft("eagle3", target)) == {}


FAMILIES: dict[str, Callable[[Any, Target], Draft | None]] = {
    "plain": lambda model, target: None,
    "ngram": lambda model, target: NgramDraft(),
    "chain": lambda model, target: CausalDraft(ModelRunner(model)),
    "static tree": lambda model, target: CausalDraft(ModelRunner(model), shape=BUSHY),
    "dynamic tree": lambda model, target: CausalDraft(ModelRunner(model), shape=DynamicTree(3, 9)),
    "early exit": lambda model, target: EarlyExitDraft(target, 2),
    "early exit tree": lambda model, target: EarlyExitDraft(target, 2, DynamicTree(3, 9)),
    "trained exit": lambda model, target: exit_draft(target, ids=IDS),
    "medusa": lambda model, target: random_draft("medusa", target),
    "medusa tree": lambda model, target: random_draft("medusa", target, BUSHY),
    "eagle1": lambda model, target: random_draft("eagle1", target),
    "eagle3 static tree": lambda model, target: random_draft("eagle3", target, BUSHY),
    "eagle3 dynamic tree": lambda model, target: random_draft("eagle3", target, DynamicTree(3, 9)),
}


@pytest.mark.usefixtures("as_on_a_gpu")
@pytest.mark.parametrize(
    ("rule", "family", "sampled"),
    slow_except(pairwise(VERIFICATION_RULES, FAMILIES, [False, True]), ["exact"]),
)
def test_a_round_of_any_family_reads_nothing(rule: str, family: str, sampled: bool) -> None:
    """Catches a rule, a draft or a warp that asks the host, or that makes a tensor of Python numbers every round."""
    model = tiny_model("llama")
    target = tiny_target(model)
    draft = FAMILIES[family](noisy(model, 0.02), target)
    assert reads(target, draft, sampled, rule) == {}


def test_a_report_is_read_at_once() -> None:
    """Catches a wait for the device for every row or number of a round's report."""
    with Lint() as lint:
        rows = read_results(torch.tensor([[2, 1, 2, 3, 7, 8, 0, 7, 9]] * 3))
    assert lint.found == {"tensor": 1, "tolist": 1}  # the first is this test's own
    assert [row.tokens for row in rows] == [[7, 8]] * 3


# ---- the lint finds ----


@pytest.mark.usefixtures("as_on_a_gpu")
def test_the_lint_finds_experts_that_run_one_by_one() -> None:
    """Planted: the experts that transformers calls eager, in the target only."""
    target = tiny_target(tiny_model("qwen3_moe"))
    target.runner.model.set_experts_implementation("eager")
    assert reads(target, None).keys() >= {"nonzero"}


def test_the_lint_finds_what_only_a_cpu_may_do() -> None:
    """Planted: the columns that no row fills are looked for, as on a CPU."""
    assert reads(tiny_target(tiny_model("llama")), NgramDraft()) == {"item": ROUNDS}


PLANTED: dict[str, tuple[Callable[[Tensor], Any], set[str]]] = {
    "int": (lambda length: int(length.max()), {"item"}),
    "if": (lambda length: 1 if (length > 5).all() else 2, {"is_nonzero"}),
    "slice": (lambda length: length[: length[0]], {"item"}),
    "list": (lambda length: length.tolist(), {"tolist"}),
    "numpy": (lambda length: length.numpy(), {"numpy"}),
    "cpu": (lambda length: length.cpu(), {"cpu"}),
    "mask": (lambda length: length[length > 5], {"index by a mask"}),
    "masked write": (
        lambda length: length.clone().index_put_((length > 5,), length[0]),
        {"index_put_ by a mask"},
    ),
    "where": (lambda length: torch.where(length > 5), {"where"}),
    "equal": (lambda length: torch.equal(length, length), {"equal"}),
    "repeat": (lambda length: length.repeat_interleave(length), {"repeat_interleave"}),
    "upload": (lambda length: torch.tensor([1, 2]), {"tensor"}),
    "list index": (lambda length: length[[0, 1]], {"index by a list"}),
}


@pytest.mark.usefixtures("as_on_a_gpu")
@pytest.mark.parametrize("bug", PLANTED)
def test_the_lint_finds_a_planted_read(bug: str) -> None:
    """Planted: a draft that does one forbidden thing a round; a lint that is blind to it would pass any engine."""
    act, found = PLANTED[bug]

    class Asking(Draft):
        name = "asking"

        def propose(self, history: Tensor, length: Tensor, k: int) -> Proposal:
            act(length)
            return Proposal(history[:, :k], None)

    counts = reads(tiny_target(tiny_model("llama")), Asking())
    assert counts == dict.fromkeys(found, ROUNDS)
