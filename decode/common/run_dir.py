"""A command's output folder: who may write into it, and what it tells of its making."""

import platform
import shutil
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
import yaml

from decode.common.cli import to_dict, to_yaml
from decode.common.errors import UserError
from decode.common.files import write_atomically

RUN_FILE = "run.yaml"
CONTROL_SETTINGS = (
    "overwrite",
    "resume",
    "dry_run",
    "publish",
)  # how to start and end, not what to do


def claim_run_dir(folder: str, settings: Any) -> bool:
    """Makes `folder` this run's; True if it goes on with an earlier, equal run found there.

    Settings carry `overwrite` and may carry `resume`. A folder of another run is refused with UserError (naming what
    differs) unless one of them is set; a folder that no run of ours made is never touched. Writes run.yaml, which
    `--config` reads back.
    """
    path = Path(folder)
    wanted = {k: v for k, v in to_dict(settings).items() if k not in CONTROL_SETTINGS}
    asked = to_dict(settings)
    found = path / RUN_FILE
    goes_on = False
    if path.is_dir() and any(path.iterdir()):
        scratch = found.with_name(found.name + ".tmp")
        if not found.is_file() and list(path.iterdir()) == [scratch]:
            scratch.unlink()  # a run that was killed in this very function
        elif not found.is_file():
            raise UserError(
                f"{folder} holds files that no run wrote: choose another folder with --out"
            )
        elif asked["overwrite"]:
            shutil.rmtree(path)
        else:
            goes_on = _same_run(found, wanted) or asked.get("resume", False)
            if not goes_on:
                names = ", ".join(_differences(found, wanted))
                advice = "--resume true goes on with it, " if "resume" in asked else ""
                raise UserError(
                    f"{folder} belongs to another run (different: {names}): {advice}"
                    "--overwrite true deletes it, --out names another folder"
                )
    if path.exists() and not path.is_dir():
        raise UserError(f"{folder} is a file: name a folder with --out")
    path.mkdir(parents=True, exist_ok=True)
    write_atomically(found, to_yaml(settings))
    return goes_on


def _same_run(found: Path, wanted: dict[str, Any]) -> bool:
    return not _differences(found, wanted)


def _differences(found: Path, wanted: dict[str, Any]) -> list[str]:
    try:
        earlier = yaml.safe_load(found.read_text()) or {}
    except yaml.YAMLError:
        return [f"{found.name} is damaged"]
    keys = (set(earlier) | set(wanted)) - set(CONTROL_SETTINGS)
    return sorted(key for key in keys if earlier.get(key) != wanted.get(key))


def hardware() -> dict[str, Any]:
    """What the numbers of this process were measured on."""
    cuda = torch.cuda.is_available()
    return {
        "device": torch.cuda.get_device_name() if cuda else _cpu_name(),
        "gpus": torch.cuda.device_count() if cuda else 0,
        "threads": torch.get_num_threads(),
        "machine": platform.machine(),
    }


def versions() -> dict[str, str]:
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


def provenance() -> dict[str, Any]:
    """Command line, commit, versions and hardware, to stand beside every artefact."""
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
