"""Where results come from: command line, commit, versions of libraries, and hardware."""

import platform
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path
from typing import Any


def hardware() -> dict[str, Any]:
    """Device name, number of GPUs, CPU threads and architecture of the machine that this process runs on."""
    import torch  # slow to import, and commands say their --help without it

    cuda = torch.cuda.is_available()
    return {
        "device": torch.cuda.get_device_name() if cuda else _cpu_name(),
        "gpus": torch.cuda.device_count() if cuda else 0,
        "threads": torch.get_num_threads(),
        "machine": platform.machine(),
    }


def versions() -> dict[str, str]:
    """Versions of Python and of the libraries that results depend on."""
    names = ("torch", "transformers", "accelerate", "datasets")
    return {"python": platform.python_version(), **{name: version(name) for name in names}}


def git_sha() -> str | None:
    """Commit of this checkout, with "+dirty" when files differ from it; None outside git."""
    root = Path(__file__).resolve().parents[2]

    def git(*args: str) -> str:
        return subprocess.run(
            ["git", "-C", str(root), *args], capture_output=True, text=True, check=True
        ).stdout.strip()

    try:
        return git("rev-parse", "HEAD") + ("+dirty" if git("status", "--porcelain", "-uno") else "")
    except (OSError, subprocess.CalledProcessError):
        return None


def collect() -> dict[str, Any]:
    """Command line, commit, versions and hardware, as stored beside every result."""
    return {
        "argv": sys.argv,
        "git": git_sha(),
        "versions": versions(),
        "hardware": hardware(),
    }


def _cpu_name() -> str:
    info = Path("/proc/cpuinfo")
    if info.is_file():
        for line in info.read_text().splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    return platform.processor() or platform.machine()
