"""Where results come from: command line, commit, versions of libraries, and hardware."""

import platform
import subprocess
import sys
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path

from decode.common.published import Digest, Name, Private, Version, Word
from decode.common.typed_json import Omitted

CALLS: list[type] = []
"""Settings of the functions that run in somebody's process (`called` in decode/common/command.py), whose command line
does not tell how to repeat the result."""


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

    gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    name = torch.cuda.get_device_name() if gpus else _cpu_name()
    return Hardware(name, gpus, torch.get_num_threads(), platform.machine())


def versions() -> dict[str, str]:
    names = ("torch", "transformers", "accelerate", "datasets")
    return {"python": platform.python_version(), **{name: version(name) for name in names}}


def git_sha() -> str | None:
    root = Path(__file__).resolve().parents[2]
    try:
        top, sha, changes = (
            subprocess.run(
                ["git", "-C", str(root), *words], capture_output=True, text=True, check=True
            ).stdout.strip()
            for words in (
                ["rev-parse", "--show-toplevel"],
                ["rev-parse", "HEAD"],
                ["status", "--porcelain", "-uno"],
            )
        )
    except (OSError, subprocess.CalledProcessError):
        return None
    # An install may lie in the repository of another project.
    return sha + ("+dirty" if changes else "") if Path(top) == root else None


def collect() -> Provenance:
    return Provenance([] if CALLS else sys.argv, git_sha(), versions(), hardware())


def _cpu_name() -> str:
    info = Path("/proc/cpuinfo")
    lines = info.read_text("utf-8", "replace").splitlines() if info.is_file() else []
    names = (line.split(":", 1)[1].strip() for line in lines if line.startswith("model name"))
    return next(names, platform.processor() or platform.machine())
