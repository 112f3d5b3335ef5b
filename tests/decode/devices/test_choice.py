"""The device of a command, on machines that a driver's files and torch's own answers stand for."""

import os
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from decode.common import damage
from decode.common.errors import UserError
from decode.devices import choice
from decode.devices.choice import fastest_dtype, pick_device
from train.trainer import launch
from train.trainer.collective import join_processes

KERNEL = (
    "NVRM version: NVIDIA UNIX {}x86_64{}  {}  Sun May 12 19:39:15 UTC 2024\n"
    "GCC version:  gcc version 12.2.0 (Debian 12.2.0-14)\n"
)
Machine = Callable[..., None]


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Machine:
    """Makes the machine: the wheel's CUDA, and what shows its NVIDIA driver (a kernel's file, nvidia-smi, a device)."""

    def make(
        cuda: str | None, kernel: str = "", smi: str | None = None, device: bool = False
    ) -> None:
        for folder in ("dev", "bin", "proc/driver/nvidia"):
            (tmp_path / folder).mkdir(parents=True, exist_ok=True)
        if kernel:
            (tmp_path / "proc/driver/nvidia/version").write_text(kernel)
        if device:
            (tmp_path / "dev/nvidia0").touch()
        if smi is not None:
            file = tmp_path / "bin/nvidia-smi"
            file.write_text(f"#!/bin/sh\n{smi}\n")
            file.chmod(0o755)
        monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}{os.pathsep}/bin")
        monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
        monkeypatch.setattr(choice, "SYSTEM", tmp_path)
        monkeypatch.setattr(torch.version, "cuda", cuda)
        monkeypatch.setattr(
            torch, "__version__", "2.13.0+" + (f"cu{cuda.replace('.', '')}" if cuda else "cpu")
        )
        monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
        kind = torch.device("cuda") if cuda else None
        monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda: kind)
        monkeypatch.setattr(torch.accelerator, "device_count", lambda: 0)
        damage.warn_once.cache_clear()

    return make


def wheel(index: str) -> str:
    return (
        f"pip install --force-reinstall torch --index-url https://download.pytorch.org/whl/{index}"
    )


@pytest.mark.parametrize("device", ["auto", "cuda", "cuda:0"])
@pytest.mark.parametrize(
    ("cuda", "seen", "driver", "advice"),
    [
        ("13.0", {"kernel": KERNEL.format("", " Kernel Module", "535.183.01")}, "535.183.01",
         f"install its wheel for this driver ({wheel('cu126')}), update the driver to 580 or newer"),
        ("13.0", {"kernel": KERNEL.format("Open Kernel Module for ", "", "570.86.15")}, "570.86.15",
         f"install its wheel for this driver ({wheel('cu128')}), update the driver to 580 or newer"),
        ("13.2", {"smi": "echo 550.54.15; echo 550.54.15"}, "550.54.15",
         f"install its wheel for this driver ({wheel('cu126')}), update the driver to 580 or newer"),
        ("12.6", {"kernel": KERNEL.format("", " Kernel Module", "470.256.02")}, "470.256.02",
         "update the driver to 525 or newer"),
    ],
)  # fmt: skip
def test_a_driver_that_is_too_old_for_the_wheel(
    machine: Machine, device: str, cuda: str, seen: dict[str, str], driver: str, advice: str
) -> None:
    """Catches `auto` that is the CPU without a word, and a traceback of torch for `cuda`."""
    machine(cuda, **seen)
    oldest = 580 if cuda.startswith("13") else 525
    with pytest.raises(UserError) as error:
        pick_device(device)
    before = "" if device == "auto" else f"device '{device}': "
    assert str(error.value) == (
        f"{before}an NVIDIA GPU is here (driver {driver}) and torch 2.13.0+cu{cuda.replace('.', '')}, a wheel for CUDA "
        f"{cuda}, needs driver {oldest} or newer: {advice}, or choose --device cpu, or set CUDA_VISIBLE_DEVICES to "
        "nothing"
    )


@pytest.mark.parametrize(
    ("seen", "driver"),
    [
        ({"kernel": KERNEL.format("", " Kernel Module", "580.65.06")}, "580.65.06"),
        ({"device": True}, "unknown"),
        ({"device": True, "smi": "echo 'Failed to initialize NVML'; exit 18"}, "unknown"),
        ({"smi": "echo 581.29"}, "581.29"),
        ({"kernel": "NVRM version: of no known form\n"}, "unknown"),
    ],
)
def test_a_gpu_that_torch_cannot_use_for_another_reason(
    machine: Machine, monkeypatch: pytest.MonkeyPatch, seen: dict[str, object], driver: str
) -> None:
    """Catches `auto` that is the CPU where the device, not the driver, is at fault; torch's own reason is told."""
    machine("13.0", **seen)

    def init() -> None:
        raise RuntimeError("No CUDA GPUs are available\nmore")

    monkeypatch.setattr(torch.cuda, "init", init)
    with pytest.raises(UserError, match="^an NVIDIA GPU is here") as error:
        pick_device("auto")
    assert f"(driver {driver}) and torch 2.13.0+cu130" in str(error.value)
    assert "cannot use it (No CUDA GPUs are available): see what nvidia-smi says" in str(
        error.value
    )
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "7")
    with pytest.raises(UserError, match=r"available; CUDA_VISIBLE_DEVICES is '7'\)"):
        pick_device("auto")


@pytest.mark.parametrize("hidden", ["", "-1", " -1", "-1,0", "NoDevFiles"])
def test_a_gpu_that_the_user_hides(
    machine: Machine, monkeypatch: pytest.MonkeyPatch, hidden: str
) -> None:
    """Catches an error, or a line, for whoever chose the CPU."""
    machine("13.0", KERNEL.format("", " Kernel Module", "535.183.01"))
    assert pick_device("cpu") == "cpu"
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", hidden)
    assert pick_device("auto") == "cpu"
    with pytest.raises(
        UserError, match=r"^device 'cuda' is not on this machine: choose among auto, cpu$"
    ):
        pick_device("cuda")


@pytest.mark.parametrize("smi", [None, "echo 'NVIDIA-SMI has failed'; exit 9"])
def test_a_machine_without_a_gpu(
    machine: Machine, capsys: pytest.CaptureFixture[str], smi: str | None
) -> None:
    """Catches a refusal where no GPU is, also by the tools of a driver that are installed on such a machine, and a
    "cuda" that a wheel with CUDA lets pass without one."""
    machine("13.0", smi=smi)
    assert pick_device("auto") == "cpu"
    assert capsys.readouterr().err == ""
    with pytest.raises(
        UserError, match=r"^device 'cuda' is not on this machine: choose among auto, cpu$"
    ):
        pick_device("cuda")


def test_a_wheel_without_cuda_is_told_once(
    machine: Machine, capsys: pytest.CaptureFixture[str]
) -> None:
    """Catches the CPU's wheel on a machine with a GPU that nobody is told of, and an error for who installed it."""
    machine(None, KERNEL.format("", " Kernel Module", "580.65.06"))
    assert [pick_device("auto"), pick_device("auto")] == ["cpu", "cpu"]
    said = (
        "an NVIDIA GPU is here (driver 580.65.06) and torch 2.13.0+cpu is a build without CUDA: install its wheel for "
        f"this driver ({wheel('cu130')}), or choose --device cpu, or set CUDA_VISIBLE_DEVICES to nothing"
    )
    assert capsys.readouterr().err == f"warning: {said}\n"
    with pytest.raises(UserError) as error:
        pick_device("cuda")
    assert str(error.value) == f"device 'cuda': {said}"


KERNELS = {
    "cu130": ["sm_75", "sm_80", "sm_86", "sm_90", "sm_100", "sm_120", "compute_120"],
    "old": ["sm_50", "sm_60", "sm_70", "sm_75", "sm_80", "sm_86", "sm_90"],
}


@pytest.mark.parametrize(
    ("compiled", "capability", "advised"),
    [
        ("cu130", (7, 0), "cu126"), ("cu130", (6, 1), "cu126"), ("cu130", (7, 5), None),
        ("cu130", (8, 9), None), ("cu130", (12, 1), None), ("old", (6, 1), None),
        ("old", (10, 0), "cu130"),
    ],
)  # fmt: skip
def test_a_card_that_the_wheel_has_no_kernels_for(
    machine: Machine, monkeypatch: pytest.MonkeyPatch, compiled: str, capability: tuple[int, int],
    advised: str | None,
) -> None:  # fmt: skip
    """Catches "no kernel image" in the first operation on a card that torch says is available."""
    machine("13.0", KERNEL.format("", " Kernel Module", "580.65.06"))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.accelerator, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "get_arch_list", lambda: KERNELS[compiled])
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda index: capability)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda index: "Some Card")
    for device in ("auto", "cuda:0"):
        if advised is None:
            assert pick_device(device) == ("cuda" if device == "auto" else device)
            continue
        at = f"cuda:0, Some Card, has compute capability {capability[0]}.{capability[1]}, and torch"
        with pytest.raises(UserError) as error:
            pick_device(device)
        assert str(error.value).startswith(at)
        assert f"install another wheel ({wheel(advised)})" in str(error.value)


def test_training_and_sampling_ask_as_well(
    machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Catches a launch that trains on the CPU beside a GPU; ACCELERATE_USE_CPU is the user's choice."""
    machine("13.0", KERNEL.format("", " Kernel Module", "535.183.01"))
    monkeypatch.setenv("ACCELERATE_USE_CPU", "false")
    with pytest.raises(UserError, match="needs driver 580 or newer"):
        join_processes()
    monkeypatch.setenv("ACCELERATE_USE_CPU", "true")
    assert join_processes().device == torch.device("cpu")


@pytest.mark.parametrize(
    ("capability", "dtype", "precision"),
    [((7, 5), "float16", "fp16"), ((8, 0), "bfloat16", "bf16"),
     ((7, 0), "float16", "fp16"), ((9, 0), "bfloat16", "bf16")],
)  # fmt: skip
def test_bfloat16_that_is_emulated_is_not_chosen(
    capability: tuple[int, int], dtype: str, precision: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Catches bf16 on a T4 or V100, which torch calls supported since it emulates it."""
    monkeypatch.setattr(choice, "find_gpu", lambda: True)

    def supported(including_emulation: bool = True) -> bool:
        return including_emulation or capability >= (8, 0)

    monkeypatch.setattr(torch.cuda, "is_bf16_supported", supported)
    assert fastest_dtype() == dtype
    bf16 = choice.has_bfloat16()
    assert launch.settle_precision("auto", launch.Claims(), "cuda", bf16) == precision
    assert launch.settle_precision("auto", launch.Claims(), "cpu", bf16) == "no"


@pytest.mark.parametrize(("has", "dtype"), [(True, "bfloat16"), (False, "float32")])
def test_a_cpu_without_products_in_bfloat16_computes_in_float32(
    has: bool, dtype: str, machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Catches bf16 on CPUs that would emulate it."""
    machine(None)
    monkeypatch.setattr(torch.cpu, "_is_avx512_bf16_supported", lambda: has)
    assert fastest_dtype() == dtype


def as_before(fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Puts a fault back that the first hour on a GPU would have met."""
    if fault == "torch alone is asked":
        monkeypatch.setattr(choice, "unusable_gpu", lambda: None)
    elif fault == "no card is looked at":
        monkeypatch.setattr(choice, "check_card", lambda index: None)
    else:
        monkeypatch.setattr(choice, "has_bfloat16", torch.cuda.is_bf16_supported)


@pytest.mark.parametrize(
    "fault", ["torch alone is asked", "no card is looked at", "emulated bfloat16 counts"]
)
@pytest.mark.parametrize("planted", [False, True])
def test_the_faults_of_the_first_hour_are_seen(
    planted: bool, fault: str, machine: Machine, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    """Planted: what the tests above and that of a T4 are for, each beside the same machine without it."""
    machine("13.0", KERNEL.format("", " Kernel Module", "535.183.01"))
    if fault != "torch alone is asked":
        monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
        monkeypatch.setattr(torch.cuda, "get_arch_list", lambda: KERNELS["cu130"])
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda index: (7, 0))
        monkeypatch.setattr(torch.cuda, "get_device_name", lambda index: "Tesla V100")
        monkeypatch.setattr(
            torch.cuda, "is_bf16_supported", lambda including_emulation=True: including_emulation
        )
    if planted:
        as_before(fault, monkeypatch)
    if fault == "emulated bfloat16 counts":
        claims = launch.Claims()
        found = launch.settle_precision("auto", claims, "cuda", choice.has_bfloat16())
        assert found == ("bf16" if planted else "fp16")
    elif planted:  # without a word
        where = "cpu" if fault == "torch alone is asked" else "cuda"
        assert (pick_device("auto"), capsys.readouterr().err) == (where, "")
    else:
        with pytest.raises(UserError, match="driver 580 or newer|compute capability 7.0"):
            pick_device("auto")
