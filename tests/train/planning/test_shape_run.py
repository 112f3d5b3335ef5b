"""Estimates of a training step without data, beside real steps of the same code."""

import subprocess
import sys
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM

from decode.model.linear import PackedLinear
from decode.model.loading import Target
from decode.model.runner import ModelRunner
from tests import worlds
from tests.allocations import Allocations
from tests.hybrids import HYBRIDS
from tests.seq2seq import tiny_t5
from tests.tiny import tiny_config
from train.data import batching
from train.data.sample_store import SampleRow
from train.families.base import FamilyContext, TrainableDraft
from train.families.builders import build_trainable
from train.families.registry import TRAINED_FAMILIES, family_settings
from train.families.settings.heads import MedusaSettings
from train.losses import chunked_sums
from train.planning import estimates, resources, shape_run
from train.planning.shape_run import ShapeRun, StepWorkload, made_up_rows
from train.settings.training import LoopConfig
from train.trainer.settings import DistillConfig

VOCAB, LENGTH = 256, 89
TARGET, DRAFT, STATES = resources.WEIGHTS
LLAMA: dict[str, Any] = {"hidden_size": 64, "intermediate_size": 192, "num_hidden_layers": 8}
LLAMA |= {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "vocab_size": VOCAB}


def config(**changes: Any) -> Any:
    return AutoConfig.for_model("llama", **LLAMA | changes)


def settings(family: str, mixed: bool = False, **draft: Any) -> DistillConfig:
    own = family_settings(family)().having(layers=[0, 1], steps=3, vocab=64, **draft)
    return DistillConfig(draft=own, target_dtype="bfloat16" if mixed else "float32")


@pytest.fixture(autouse=True)
def plain_products(monkeypatch: pytest.MonkeyPatch) -> None:
    """Real steps multiply as a GPU does, not by weights packed for a CPU."""
    monkeypatch.setattr(PackedLinear, "forward", torch.nn.Linear.forward)


def real_draft(s: DistillConfig, target_config: Any) -> TrainableDraft:
    dtype = getattr(torch, s.target_dtype)
    model = AutoModelForCausalLM.from_config(target_config, dtype=dtype)
    target = Target(ModelRunner(model), None, "x", None, "f", frozenset())
    return build_trainable(s.draft, FamilyContext(s, target, made_up_rows(1, 64, 32, VOCAB)))


def forward(trainable: TrainableDraft, rows: list[SampleRow], mixed: bool) -> Tensor:
    """The loss of a real step, computed as accelerate does."""

    def run(*inputs: Any) -> Any:
        with torch.autocast("cpu", torch.bfloat16, enabled=mixed):
            return trainable.model(*inputs)

    return trainable.loss(run, batching.collate(rows, 0))["loss"]  # type: ignore[arg-type]


def real_step(trainable: TrainableDraft, rows: list[SampleRow], mixed: bool) -> tuple[int, int]:
    """(peak bytes beside weights, operations) of a real step."""
    with Allocations() as allocations, shape_run.count_flops() as flops:
        forward(trainable, rows, mixed).backward()
    return allocations.peak, flops.get_total_flops()


def passing(cost: shape_run.TrainingCost) -> int:
    """The estimated bytes beside weights and the optimiser's states."""
    return sum(cost.memory.values()) - sum(cost.memory[name] for name in (TARGET, DRAFT, STATES))


CASES = [
    *((family, False, False) for family in TRAINED_FAMILIES),
    *((family, True, False) for family in ("causal", "eagle3", "medusa2", "mtp", "dspark")),
    *((family, True, True) for family in ("causal", "eagle1", "peagle")),
]


@pytest.mark.parametrize(("family", "mixed", "recompute"), CASES)
def test_a_step_without_data_costs_what_a_real_one_does(
    family: str, mixed: bool, recompute: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Catches an operation that is not seen, a view that counts twice, autocast or recomputation unlike torch's."""
    monkeypatch.setattr(chunked_sums, "max_chunk_rows", lambda vocab: 48)
    s = settings(family, mixed, activation_checkpointing=recompute)
    rows = made_up_rows(1, LENGTH, LENGTH - 7, VOCAB)
    run, trainable = ShapeRun(s, config()), real_draft(s, config())
    cost = run.step(rows, mixed)
    peak, flops = real_step(trainable, rows, mixed)
    assert passing(cost) == pytest.approx(peak, rel=0.02)
    assert cost.flops == flops
    parameters = list(trainable.model.parameters())
    assert run.trained == sum(p.numel() for p in parameters if p.requires_grad)
    assert run.trained + run.frozen == sum(p.numel() for p in parameters)
    assert (cost.target_flops == 0) == run.trains_target


def test_planted_bugs_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """What the comparison above is for: an output that is kept twice, a layer left out, views that count twice."""
    s, rows = settings("eagle3"), made_up_rows(1, LENGTH, LENGTH - 7, VOCAB)
    cost = ShapeRun(s, config()).step(rows, False)
    trainable, kept = real_draft(s, config()), list[Tensor]()
    for part in trainable.model.modules():
        part.register_forward_hook(lambda m, args, out: kept.extend(copies(out)))
    peak, flops = real_step(trainable, rows, False)
    assert peak > 1.15 * passing(cost)
    assert flops == cost.flops
    less = ShapeRun(s, config(num_hidden_layers=7)).step(rows, False)
    assert less.target_flops < cost.target_flops
    assert less.flops < cost.flops
    monkeypatch.setattr(shape_run, "_address", id)
    twice = ShapeRun(s, config()).step(rows, False)
    assert passing(twice) > 1.15 * passing(cost)


def copies(out: Any) -> Iterator[Tensor]:
    if isinstance(out, Tensor):
        yield out.clone()


def test_gradients_of_an_earlier_micro_batch_are_there() -> None:
    """Catches a second micro-batch that is thought to begin without the gradients of the first."""
    s, rows = settings("medusa"), made_up_rows(1, LENGTH, LENGTH - 7, VOCAB)
    run = ShapeRun(s, config())
    first, second = run.step(rows, False), run.step(rows, False, accumulates=True)
    assert second.memory[shape_run.GRADIENTS] == 4 * run.trained
    assert run.step(rows, False).memory == first.memory  # nothing is left of a step
    trainable = real_draft(s, config())
    forward(trainable, rows, False).backward()
    peak, _ = real_step(trainable, rows, False)
    assert passing(second) == pytest.approx(peak + 4 * run.trained, rel=0.02)


def test_operations_are_those_of_the_text_book() -> None:
    """By hand: two for each weight of a linear layer and token, four for each pair of tokens and column of a layer."""
    tokens = 96
    cost = ShapeRun(settings("medusa"), config()).step(made_up_rows(1, tokens, 40, VOCAB), False)
    layer = 64 * (64 + 2 * 32 + 64) + 3 * 64 * 192
    assert cost.target_flops == 8 * (2 * tokens * layer + 4 * tokens**2 * 64)


def test_experts_that_are_not_asked_cost_nothing() -> None:
    """Catches a mixture of experts whose arithmetic counts all of them."""
    moe = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
    model = AutoConfig.for_model("qwen3_moe", **LLAMA | moe)
    cost = ShapeRun(settings("medusa"), model).step(made_up_rows(1, 96, 40, VOCAB), False)
    layer = 64 * (64 + 2 * 32 + 64) + 64 * 8 + 2 * 3 * 64 * 32
    assert cost.target_flops == 8 * (2 * 96 * layer + 4 * 96**2 * 64)


KINDS = ["gemma2", "gemma3_text", "gpt_oss", "mixtral", "deepseek_v3", "gpt2"]


@pytest.mark.parametrize("kind", [*KINDS, "qwen3_next", "lfm2", "t5"])
def test_targets_of_all_kinds_have_estimates(kind: str) -> None:
    """Windows, soft caps, sinks, experts, values narrower than keys, recurrent layers, encoders."""
    if kind == "t5":
        target = tiny_t5().config
    elif kind in HYBRIDS:
        ids = dict.fromkeys(("bos_token_id", "eos_token_id", "pad_token_id"))
        target = AutoConfig.for_model(kind, **{"vocab_size": 97, **HYBRIDS[kind], **ids})
    else:
        target = tiny_config(kind)
    run = ShapeRun(settings("causal"), target)
    cost = run.step(made_up_rows(2, 40, 20, run.vocab), mixed=True)
    assert cost.flops > cost.target_flops > 0
    assert sum(cost.memory.values()) > cost.memory[TARGET] + cost.memory[DRAFT] > 0


@pytest.mark.parametrize(("fused", "copies"), [(True, 0), (False, 350)])
def test_copies_of_gradients_are_those_of_an_update_in_pieces(fused: bool, copies: int) -> None:
    """Catches copies that a fused update does not make, and an update in pieces that is estimated without them."""
    step = {TARGET: 7, DRAFT: 400, STATES: 800, shape_run.GRADIENTS: 400, shape_run.ACTIVATIONS: 50}
    run: Any = SimpleNamespace(
        vocab=9, trained=100, fused=fused, step=lambda *_: SimpleNamespace(memory=step)
    )
    load = StepWorkload(1, 4, 2, 4, 2, 1)
    parts = resources.memory_breakdown(run, load, mixed=True)
    assert parts["optimiser's copies beyond that"] == copies


def test_memory_and_disk_are_what_they_are_made_of() -> None:
    """By hand: weights in the target's dtype, and for each trained number its weight and two moments."""
    s = settings("eagle3", mixed=True)
    run = ShapeRun(s, config())
    load = StepWorkload(
        samples=8, tokens=60, supervised_tokens=30, max_tokens=96, max_supervised_tokens=48,
        micro_batch=2,
    )  # fmt: skip
    parts = resources.memory_breakdown(run, load, mixed=True)
    assert parts[TARGET] == pytest.approx(2 * run.target_parameters, rel=0.01)
    assert parts[DRAFT] == pytest.approx(4 * run.trained, rel=0.02)  # and the ids of its vocabulary
    assert parts[STATES] == pytest.approx(8 * run.trained, rel=0.01)
    assert parts[shape_run.GRADIENTS] == 4 * run.trained
    many = StepWorkload(**{**vars(load), "processes": 2})
    assert resources.memory_breakdown(run, many, True)["gradients in exchange"] == 4 * run.trained
    wider = StepWorkload(**{**vars(load), "micro_batch": 4})
    activations = resources.memory_breakdown(run, wider, True)[shape_run.ACTIVATIONS]
    assert activations == pytest.approx(2 * parts[shape_run.ACTIVATIONS], rel=0.1)
    disk = resources.disk_breakdown(run, 2, keep=2)
    assert disk["draft"] == 2 * run.trained
    assert sum(disk.values()) == pytest.approx((2 + 3 * 12) * run.trained, rel=0.01)


def test_muon_keeps_one_moment() -> None:
    """Catches the states of AdamW counted for matrices that Muon trains."""
    s = settings("medusa")
    s.loop = LoopConfig(muon_lr=0.02)
    run = ShapeRun(s, config())
    inner = sum(p.numel() for p in run.trainable.muon_parameters)
    assert inner > 0
    assert run.state_bytes == pytest.approx(8 * run.trained - 4 * inner, rel=0.01)


def test_operations_of_any_length_follow_from_a_few(monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches a share of the peak (MFU) that holds for one length alone."""
    s = settings("eagle3", activation_checkpointing=True)
    monkeypatch.setattr(estimates, "load_config", lambda *args: config())
    counter = estimates.FlopsCounter(s, mixed=False)
    run = ShapeRun(settings("eagle3"), config())  # what is computed a second time does not count
    for tokens, labels in ((128, 100), (448, 60)):
        rows = made_up_rows(2, tokens, labels, VOCAB)
        with shape_run.attention.training_attention("dense"):
            want = 2 * run.step(rows[:1], False).flops
        assert sum(counter.count(rows).values()) == pytest.approx(want, rel=0.01)


def test_an_estimate_needs_no_samples() -> None:
    """Catches a dry run that fails before it has said anything, because nothing is sampled yet."""
    target = str(worlds.ROOT / "assets" / "target")
    s = DistillConfig(target=target, data="no/such/folder", draft=MedusaSettings())
    _, sums = estimates.estimate_resources(s, 1, mixed=True)
    assert sums["memory"] > 0 < sums["flops"]
    assert sums["trained"] > 0


LARGE = """
import re, time
from pathlib import Path
from tests.train.planning.test_recipes import config_of
from train.trainer.settings import DistillConfig
from train.families.settings.eagle import Eagle3Settings
from train.planning.shape_run import ShapeRun, made_up_rows
s = DistillConfig(target="Qwen/Qwen3-8B", target_dtype="bfloat16", draft=Eagle3Settings())
began = time.process_time()
run = ShapeRun(s, config_of(s.target))
cost = run.step(made_up_rows(1, 2048, 2047, run.vocab), mixed=True)
seconds = time.process_time() - began
# ru_maxrss of a child begins with what its parent held when it forked
peak = int(re.search(r"VmHWM:\\s+(\\d+)", Path("/proc/self/status").read_text())[1])
print(seconds, peak * 1024, run.trained, cost.target_flops)
"""


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc/self/status")
def test_a_large_target_takes_seconds_and_little_memory() -> None:
    """Catches weights, logits or masks of a large model that are really made."""
    done = subprocess.run(
        [sys.executable, "-c", LARGE], capture_output=True, text=True, cwd=worlds.ROOT, check=True
    )
    seconds, peak, trained, flops = map(float, done.stdout.split()[-4:])
    assert seconds < 60
    assert peak < 1e9
    assert trained == pytest.approx(400e6, rel=0.01)
    body = 8.19e9 - 2 * 151936 * 4096
    assert flops == pytest.approx(2048 * 2 * body + 36 * 4 * 2048**2 * 4096, rel=0.01)
