"""Prefill and rounds of every draft family on a GPU that is not there (tests/fake_gpu.py).

On a GPU a round waits for nothing: no number is read, no tensor of the host takes part, and no shape depends on data.
"""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from decode.common.errors import UserError
from decode.drafts.base import Draft, DraftContext, Proposal
from decode.drafts.causal import CausalDraft
from decode.drafts.registry import DRAFT_FAMILIES, create_draft
from decode.drafts.wrappers import DraftWrapper
from decode.engine.batch import ActiveRequest, DecodeRequests
from decode.engine.engine import SpeculativeEngine
from decode.engine.round import run_round
from decode.model.gpu import cuda_layers
from decode.model.loading import Target
from decode.model.runner import ModelRunner
from decode.verification.registry import VERIFICATION_RULES
from decode.verification.sampling import SamplingParams
from decode.verification.tree import DynamicTree
from tests.decode.engine.test_compile import FAMILIES, HOW, make
from tests.fake_gpu import NOT_HERE, GpuBug, OneDevice, fake_gpu
from tests.gpu_counts import gpu_layers
from tests.heads import random_draft
from tests.params import pairwise, rotated, slow_except
from tests.tiny import ARCHITECTURES, FEW, tiny_model, tiny_prompts, tiny_target

pytestmark = pytest.mark.skipif(NOT_HERE is not None, reason=str(NOT_HERE))
K, ROUNDS = 3, 2
SAMPLED = SamplingParams(0.8, top_k=20, top_p=0.9)


def draft_for(name: str, target: Target) -> Draft | None:
    if name == "eagle1":
        return random_draft("eagle1", target)
    return create_draft(name, target) if name == "grammar" else make(name, target)


def run_on_fake_gpu(
    target: Target,
    draft: Draft | None,
    rows: int,
    sampling: SamplingParams,
    rule: str,
    k: int = K,
    rounds: int = ROUNDS,
) -> torch.Size:
    """Prefill and some rounds. Returns the shape of the last results; GpuBug for what a GPU would not do."""
    prompts = tiny_prompts(13, 4, 9)[:rows]
    new = {row: ActiveRequest(row, len(prompt), 100) for row, prompt in enumerate(prompts)}
    with fake_gpu(target, draft):
        engine = SpeculativeEngine(
            target, draft, k=k, sampling=sampling, rule=rule, mode="captured"
        )
        size = engine.num_slots(prompts, 64, rows)
        state, config = engine._prepare_batch(rows, size, size, None, 0)
        engine._prefill(state, DecodeRequests(prompts, list(range(rows)), 64), new)
        for _ in range(rounds):
            with OneDevice():
                results = run_round(target, draft, state, config)
        assert results.is_cuda
        return results.shape


NAMES = [*FAMILIES, "eagle1", "grammar"]
SAME_DRAFT = {"medusa2": "medusa", "layerskip2": "early-exit"}
"""Families whose draft is that of another one."""
HOST_DRAFTS = {"suffix", "swift"}
"""Families that draft on the host: engines do not capture them."""
KEPT = [
    ("plain", "greedy", 1, "exact"),
    ("ngram", "sampled", 3, "exact"),
    ("causal", "sampled", 3, "block"),
    ("static", "sampled", 3, "exact"),
    ("dynamic", "greedy", 1, "typical"),
    ("dynamic", "sampled", 3, "block"),
    ("medusa", "sampled", 1, "exact"),
    ("eagle3", "sampled", 3, "exact"),
    ("dflash", "sampled", 3, "block"),
    ("mtp", "greedy", 3, "exact"),
]
WAYS = HOW, (1, 3), list(VERIFICATION_RULES)
OTHERS = [row for row in rotated(NAMES, *WAYS) if row[0] not in {name for name, *_ in KEPT}]
CASES = dict.fromkeys([*KEPT, *pairwise(["causal"], *WAYS), *OTHERS])
"""Each family once, and causal drafts with any two of the ways."""


@pytest.mark.parametrize(("name", "how", "rows", "rule"), slow_except(CASES, KEPT))
def test_a_round_stays_on_the_gpu(name: str, how: str, rows: int, rule: str) -> None:
    """Catches, in every family, rule and batch, what a CPU does without complaint and a GPU does not."""
    target = tiny_target(tiny_model("llama"), eos=(5,))
    sampling = SAMPLED if how == "sampled" else SamplingParams()
    shape = run_on_fake_gpu(target, draft_for(name, target), rows, sampling, rule)
    assert shape[0] == rows
    # The results have columns of drafts
    assert (shape[1] > 5) == (name not in ("plain", "grammar"))


@pytest.mark.parametrize("arch", slow_except(ARCHITECTURES, FEW))
def test_a_round_of_any_architecture_stays_on_the_gpu(arch: str) -> None:
    """Catches RoPE, masks, experts and caches of a model that compute on the host, in a target and in a draft."""
    model = tiny_model(arch, dtype=torch.bfloat16)  # in which alone GPUs multiply grouped experts
    target = tiny_target(model, eos=(5,))
    draft = CausalDraft(ModelRunner(model), shape=DynamicTree(2, 4))
    run_on_fake_gpu(target, draft, 3, SAMPLED, "exact", k=2, rounds=1)


@pytest.mark.parametrize("name", slow_except([name for name, *_ in KEPT], ["causal", "eagle3"]))
def test_a_round_with_own_kernels_stays_on_the_gpu(name: str) -> None:
    """Catches what kernels of ours and joined products need of the host, in drafts and targets."""
    with gpu_layers(True):
        target = tiny_target(tiny_model("llama", dtype=torch.bfloat16), eos=(5,))
        cuda_layers.use_own_kernels(target.runner.model)
        run_on_fake_gpu(target, draft_for(name, target), 3, SAMPLED, "exact")


def test_every_family_is_here() -> None:
    """Catches a new family that no case covers, and one that is left out although engines capture it."""
    known = {*NAMES, *SAME_DRAFT, *HOST_DRAFTS}
    assert set(DRAFT_FAMILIES) <= known
    target = tiny_target(tiny_model("llama"), eos=(5,))
    for name in HOST_DRAFTS:
        draft = create_draft(name, target, 1)
        assert draft is not None
        with fake_gpu(target), pytest.raises(UserError, match=r"mode captured needs|mode eager"):
            SpeculativeEngine(target, draft, mode="captured")


# ---- planted ----


class Doing(DraftWrapper):
    """Does `act` with the lengths in every round."""

    def __init__(self, inner: Draft, act: Callable[[Tensor], Any]):
        super().__init__(inner)
        self.act = act

    def propose(self, history: Tensor, length: Tensor, k: int) -> Proposal:
        self.act(length)
        return self.inner.propose(history, length, k)


PLANTED: dict[str, tuple[Callable[[Tensor], Any], str]] = {
    "a read": (lambda length: length.sum().item(), "DataDependentOutput.*local_scalar_dense"),
    "a branch": (lambda length: 1 if (length > 5).any() else 2, "DataDependentOutput"),
    "a list": (lambda length: length.tolist(), "DataDependentOutput"),
    "a tensor on the CPU": (lambda length: length + torch.ones(3), "devices|on the host"),
    "an index on the CPU": (lambda length: length[torch.arange(2)], "on the host"),
    "a copy to the host": (lambda length: length.cpu(), "on the host"),
    "an upload": (lambda length: torch.tensor([1, 2], device=length.device), "on the host"),
    "a shape of data": (lambda length: length[length > 5], "DynamicOutputShape.*nonzero"),
    "repeats by data": (lambda length: length.repeat_interleave(length), "DynamicOutputShape"),
}


@pytest.mark.parametrize("bug", PLANTED)
def test_a_planted_bug_is_found(bug: str) -> None:
    """Planted: one thing a round that a GPU does not do or waits for. The error names its line."""
    act, said = PLANTED[bug]
    target = tiny_target(tiny_model("llama"), eos=(5,))
    draft = Doing(CausalDraft(ModelRunner(tiny_model("llama"))), act)
    with pytest.raises(GpuBug, match=r"test_fake_gpu_rounds\.py:\d+: \S(.|\n)*(" + said + ")"):
        run_on_fake_gpu(target, draft, 3, SamplingParams(), "exact")


def test_a_draft_left_on_the_cpu_is_found() -> None:
    """Planted: the tensors of a draft that are made in the middle of a batch are the host's."""
    target = tiny_target(tiny_model("llama"), eos=(5,))
    draft = random_draft("medusa", target)
    begin = draft.begin_batch

    def begin_on_cpu(request: DraftContext) -> None:
        begin(request)
        draft.state_buffer.offsets = torch.arange(1)

    draft.begin_batch = begin_on_cpu  # type: ignore[method-assign]
    with pytest.raises(GpuBug, match=r"hidden_states\.py:\d+: .*offsets"):
        run_on_fake_gpu(target, draft, 3, SamplingParams(), "exact")
