"""What training does by default on a GPU, seen by stand-ins: one kernel for AdamW, flex_attention for masks."""

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from decode.common.settings import parse_settings
from decode.model import attention
from tests.fake_gpu import NOT_HERE, device_guard
from tests.tiny import tiny_target
from tests.train.data.test_packing import SAMPLES, trainee_of
from tests.train.families.test_heads_training import assert_same, learned, model_of
from tests.train.families.test_long_samples import small  # noqa: F401 (a fixture)
from train.data import batching
from train.settings.training import LoopConfig
from train.trainer import launch
from train.trainer.launch import attention_in_force
from train.trainer.loop import build_optimizers
from train.trainer.settings import DistillConfig


def draft_on(device: str, low: str) -> Any:
    """A draft of one layer, with a weight of a low learning rate on the device `low`."""
    model = torch.nn.Linear(4, 4, device=device)
    slow = [torch.nn.Parameter(torch.zeros(2, device=low))] if low else []
    return SimpleNamespace(model=model, muon_parameters=[model.weight], low_lr_parameters=slow)


@pytest.mark.skipif(NOT_HERE is not None, reason=str(NOT_HERE))
@pytest.mark.parametrize(
    ("device", "changes", "low", "fused"),
    [
        ("cuda", {}, "", True), ("cuda", {"fused_adamw": False}, "", None), ("cpu", {}, "", None),
        ("cuda", {"muon_lr": 0.02}, "", True), ("cuda", {}, "cuda", True),
        ("cuda", {}, "cpu", None), ("meta", {}, "", None),
    ],
)  # fmt: skip
def test_adamw_is_one_kernel_on_a_gpu(
    device: str, changes: dict[str, Any], low: str, fused: bool | None
) -> None:
    """Catches copies of all gradients on a GPU, a kernel for weights that are elsewhere, another AdamW on a CPU, and a
    setting that forbids nothing."""
    with device_guard(), FakeTensorMode():
        draft = draft_on(device, low)
        adamw, *muon = build_optimizers(draft, replace(LoopConfig(), **changes))
    assert isinstance(adamw, torch.optim.AdamW)
    assert [group["fused"] for group in adamw.param_groups] == [fused] * len(adamw.param_groups)
    assert len(muon) == ("muon_lr" in changes)


@pytest.mark.parametrize(
    ("asked", "device", "triton", "capability", "found"),
    [
        ("auto", "cuda", True, (8, 0), "flex"), ("auto", "cuda", True, (9, 0), "flex"),
        ("auto", "cuda", True, (12, 0), "flex"), ("auto", "cuda", True, (7, 5), "auto"),
        ("auto", "cuda", False, (9, 0), "auto"), ("auto", "cpu", True, (9, 0), "auto"),
        ("dense", "cuda", True, (9, 0), "dense"), ("blockwise", "cuda", True, (9, 0), "blockwise"),
        ("flex", "cuda", False, (7, 5), "flex"),
    ],
)  # fmt: skip
def test_masks_are_flex_attention_s_on_a_gpu(
    asked: str, device: str, triton: bool, capability: tuple[int, int], found: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """Catches masks in memory on a GPU, kernels that a T4 or a torch without Triton does not have, and a setting that
    forbids nothing."""
    monkeypatch.setattr(launch, "has_triton", lambda: triton)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: capability)
    assert attention_in_force(asked, device) == found


@pytest.mark.usefixtures("small")
def test_the_path_in_force_is_the_one_that_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches a choice that training does not follow, and another loss by it: packed texts with flex_attention's
    reference code."""
    monkeypatch.setattr(launch, "has_triton", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (9, 0))
    calls, attend = list[int](), attention.attend_flex

    def counted(*args: Any) -> Any:
        calls.append(1)
        return attend(*args)

    monkeypatch.setattr(attention, "attend_flex", counted)
    trainee, results = trainee_of("causal", tiny_target(model_of())), list[Any]()
    batch = batching.pack(SAMPLES, 0)
    for device in ("cuda", "cpu"):
        with attention.training_attention(attention_in_force("auto", device)):
            results.append(learned(trainee, batch))
        calls.append(0)
    assert_same(*results)
    assert sum(calls) > 0
    assert calls[-2:] == [0, 0]  # none on the CPU


@pytest.mark.parametrize(
    ("device", "fused", "said"),
    [("cuda", "true", ", attention flex, AdamW fused"), ("cuda", "false", ", attention flex"), ("cpu", "true", "")],
)  # fmt: skip
def test_the_run_says_what_is_in_force(
    device: str, fused: str, said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Catches a log that does not tell which kernels trained the draft."""
    monkeypatch.setattr(launch, "has_triton", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (9, 0))
    monkeypatch.setattr(launch.LaunchKind, "of", lambda accelerator: "one process")
    accelerator: Any = SimpleNamespace(device=torch.device(device), num_processes=1)
    s = parse_settings(DistillConfig, "", ["--loop.fused_adamw", fused])
    line = launch.in_force(s, accelerator)
    assert line.startswith(f"one process, {device}, loop.clip 1,")
    assert line.endswith(f"in a process){said}")
