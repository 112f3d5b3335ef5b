"""Where results come from: command line, commit, versions of libraries, and hardware."""

import platform
import subprocess
import sys
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path

from decode.common.published import Digest, Name, Private, Version, Word
from decode.common.typed_json import Omitted


@dataclass(frozen=True)
class Hardware:
    """The machine that a process ran on. Older results lack some of it."""

    device: Omitted[Name] = None
    gpus: Omitted[int] = None
    threads: Omitted[int] = None
    machine: Omitted[Name] = None


@dataclass(frozen=True)
class Provenance:
    """What is stored beside every result."""

    argv: Private[list[str]]
    git: Digest | None
    """Commit of this checkout, with "+dirty" when files differ from it; None outside git."""
    versions: dict[Word, Version]
    hardware: Hardware


def hardware() -> Hardware:
    import torch  # slow to import, and commands say their --help without it

    cuda = torch.cuda.is_available()
    return Hardware(
        torch.cuda.get_device_name() if cuda else _cpu_name(),
        torch.cuda.device_count() if cuda else 0,
        torch.get_num_threads(),
        platform.machine(),
    )


def versions() -> dict[str, str]:
    """Versions of Python and of the libraries that results depend on."""
    names = ("torch", "transformers", "accelerate", "datasets")
    return {"python": platform.python_version(), **{name: version(name) for name in names}}


def git_sha() -> str | None:
    root = Path(__file__).resolve().parents[2]

    def git(*args: str) -> str:
        return subprocess.run(
            ["git", "-C", str(root), *args], capture_output=True, text=True, check=True
        ).stdout.strip()

    try:
        return git("rev-parse", "HEAD") + ("+dirty" if git("status", "--porcelain", "-uno") else "")
    except (OSError, subprocess.CalledProcessError):
        return None


def collect() -> Provenance:
    return Provenance(sys.argv, git_sha(), versions(), hardware())


def _cpu_name() -> str:
    info = Path("/proc/cpuinfo")
    if info.is_file():
        for line in info.read_text().splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    return platform.processor() or platform.machine()
