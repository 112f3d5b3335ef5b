"""Which device a command runs on, and why torch cannot use the NVIDIA GPU of this machine.

No GPU has run this yet (docs/gpu_checks.md): tests put a driver's files and torch's answers in place.
"""

import os
import re
import shutil
import subprocess
from pathlib import Path

import torch

from decode.common import damage
from decode.common.errors import UserError, first_line

SYSTEM = Path("/")
"""Where the driver's files are looked for; tests have others."""
OLDEST_DRIVER = {12: 525, 13: 580}
"""{CUDA's major version: the first driver for wheels of it}, also for its later minor versions."""
WHEELS = {580: "cu130", 570: "cu128", 525: "cu126"}
"""{driver: the index of the newest wheels of torch that it runs}, newest first."""
ON_CPU = "choose --device cpu, or set CUDA_VISIBLE_DEVICES to nothing"


def pick_device(device: str) -> str:
    """`device`, but for `auto`: cuda if there is a GPU that torch can use, else cpu.

    UserError for one that this machine has not, and for an NVIDIA GPU that torch cannot use, of which `auto` says only
    a line where the wheel of torch is one without CUDA. Where CUDA_VISIBLE_DEVICES hides all GPUs there is none.
    """
    if device == "auto":
        return "cuda" if find_gpu() else "cpu"
    accelerator = torch.accelerator.current_accelerator()
    kinds = {"cpu": 1}
    if accelerator is not None:
        kinds[accelerator.type] = torch.accelerator.device_count()
    names = [*kinds, *(f"{kind}:{i}" for kind, n in kinds.items() for i in range(n))]
    names = [name for name in names if kinds[name.split(":")[0]]]
    if device not in names:
        reason = unusable_gpu() if re.fullmatch(r"cuda(:\d+)?", device) else None
        choices = ", ".join(["auto", *(name for name in names if name != "cpu:0")])
        raise UserError(
            f"device {device!r}: {reason}"
            if reason
            else f"device {device!r} is not on this machine: choose among {choices}"
        )
    if device.startswith("cuda"):
        check_card(int(device.partition(":")[2] or 0))
    return device


def find_gpu() -> bool:
    """Whether torch can use a GPU. UserError for an NVIDIA GPU that it cannot use; a warning instead, once, where this
    wheel of torch has no CUDA, as it was asked for."""
    if torch.cuda.is_available():
        check_card(0)
        return True
    reason = unusable_gpu()
    if reason and torch.version.cuda:
        raise UserError(reason)
    if reason:
        damage.warn_once(reason)
    return False


def unusable_gpu() -> str | None:
    """Why torch cannot use the NVIDIA GPU of this machine and what to change, in one line; None where there is none,
    or where CUDA_VISIBLE_DEVICES hides it."""
    if hides_gpus(os.environ.get("CUDA_VISIBLE_DEVICES")):
        return None
    driver = nvidia_driver()
    if driver is None:
        return None
    number = _first_number(driver)
    index = next((wheel for oldest, wheel in WHEELS.items() if number >= oldest), "")
    install = f"install its wheel for this driver ({reinstall(index)})" if index else ""
    here = f"an NVIDIA GPU is here (driver {driver or 'unknown'})"
    cuda = torch.version.cuda
    if not cuda:
        what = install or f"update the driver to {OLDEST_DRIVER[13]} or newer"
        return f"{here} and torch {torch.__version__} is a build without CUDA: {what}, or {ON_CPU}"
    oldest = OLDEST_DRIVER.get(_first_number(cuda), 0)
    which = f"torch {torch.__version__}, a wheel for CUDA {cuda},"
    if number and number < oldest:
        update = f"update the driver to {oldest} or newer"
        what = f"{install}, {update}" if install else update
        return f"{here} and {which} needs driver {oldest} or newer: {what}, or {ON_CPU}"
    said = os.environ.get("CUDA_VISIBLE_DEVICES")
    shown = f"; CUDA_VISIBLE_DEVICES is {said!r}" if said else ""
    return (
        f"{here} and {which} cannot use it ({why_not()}{shown}): see what nvidia-smi says (and whether the "
        f"container was given the GPU), or {ON_CPU}"
    )


def check_card(index: int) -> None:
    """UserError for a GPU whose compute capability this wheel of torch has no kernels for."""
    listed = " ".join(torch.cuda.get_arch_list())  # nothing where torch does not say
    targets = sorted((int(n), kind) for kind, n in re.findall(r"(sm|compute)_(\d+)", listed))
    if not targets:
        return
    major, minor = torch.cuda.get_device_capability(index)
    card = 10 * major + minor
    # Kernels run on later cards of the same major version, PTX ("compute") on all later ones.
    if any(n <= card and (kind == "compute" or n // 10 == major) for n, kind in targets):
        return
    driver = _first_number(nvidia_driver() or "") or max(WHEELS)
    newest = next((wheel for oldest, wheel in WHEELS.items() if driver >= oldest), "cu126")
    wheel = newest if card > targets[-1][0] else "cu126"
    raise UserError(
        f"cuda:{index}, {torch.cuda.get_device_name(index)}, has compute capability {major}.{minor}, and torch "
        f"{torch.__version__} has kernels for {', '.join(f'{n // 10}.{n % 10}' for n, _ in targets)}: install another "
        f"wheel ({reinstall(wheel)}), or {ON_CPU}"
    )


def has_bfloat16() -> bool:
    """Whether the GPU itself multiplies in bfloat16. On a T4 torch says that it is supported, and emulates it."""
    return torch.cuda.is_bf16_supported(including_emulation=False)


def fastest_dtype() -> str:
    """The number type in which this machine decodes and trains fastest: bfloat16 where the device multiplies it itself
    (a CPU: by AVX512-BF16), else float16 on a GPU and float32 on a CPU. UserError as of `find_gpu`."""
    if find_gpu():
        return "bfloat16" if has_bfloat16() else "float16"
    return "bfloat16" if torch.cpu._is_avx512_bf16_supported() else "float32"


def hides_gpus(visible: str | None) -> bool:
    """Whether this value of CUDA_VISIBLE_DEVICES (None: it is not set) hides all GPUs on purpose."""
    return visible is not None and visible.split(",")[0].strip() in ("", "-1", "NoDevFiles")


def nvidia_driver() -> str | None:
    """The version of this machine's NVIDIA driver, such as "535.183.01"; "" where a GPU is there and its driver does
    not say it; None where no NVIDIA GPU is seen."""
    kernel = SYSTEM / "proc/driver/nvidia/version"
    if kernel.is_file():
        found = re.search(r"\d{3,}\.\d+(\.\d+)*", kernel.read_text())
        return found[0] if found else ""
    smi = shutil.which("nvidia-smi")  # under WSL the driver is that of Windows
    if smi:
        ask = [smi, "--query-gpu=driver_version", "--format=csv,noheader"]
        try:
            done = subprocess.run(ask, capture_output=True, text=True, timeout=30)
        except (OSError, subprocess.TimeoutExpired):
            return ""
        lines = done.stdout.split()
        if done.returncode == 0 and lines:
            return lines[0]
    return "" if any((SYSTEM / "dev").glob("nvidia[0-9]*")) else None


def why_not() -> str:
    """What torch itself says when it is to use a GPU, in one line."""
    try:
        torch.cuda.init()
    except (RuntimeError, AssertionError) as error:
        return first_line(error)
    return "it finds no device"


def reinstall(index: str) -> str:
    return (
        f"pip install --force-reinstall torch --index-url https://download.pytorch.org/whl/{index}"
    )


def _first_number(version: str) -> int:
    return int(version.partition(".")[0] or 0)
