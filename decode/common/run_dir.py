"""A command's output folder: which run may write into it, and the provenance of the files in it."""

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
from decode.common.renamed_settings import rename_keys, renamed_settings

RUN_FILE = "run.yaml"
CONTROL_SETTINGS = ("overwrite", "resume", "dry_run", "publish")
"""Settings that say how a run starts and ends. They may differ between two starts of one run."""


def claim_run_dir(folder: str, settings: Any) -> bool:
    """Makes `folder` the output folder of this run; True if it continues an earlier run with equal settings there.

    Settings have a field `overwrite` and may have `resume`. A folder of a run with other settings is refused with
    UserError (which names those that differ) unless one of the two is set; a folder with files but without run.yaml is
    always refused. Writes run.yaml, which `--config` reads back.
    """
    path = Path(folder)
    run_file = path / RUN_FILE
    asked = to_dict(settings)
    resumes = False
    if path.is_dir() and any(path.iterdir()):
        partial = run_file.with_name(run_file.name + ".tmp")
        if not run_file.is_file() and list(path.iterdir()) == [partial]:
            partial.unlink()  # the earlier run was killed while it wrote run.yaml
        elif not run_file.is_file():
            raise UserError(
                f"{folder} holds files that no run wrote: choose another folder with --out"
            )
        elif asked["overwrite"]:
            shutil.rmtree(path)
        else:
            differing = _differing_settings(run_file, settings)
            resumes = not differing or asked.get("resume", False)
            if not resumes:
                advice = "--resume true continues it, " if "resume" in asked else ""
                raise UserError(
                    f"{folder} belongs to another run (different: {', '.join(differing)}): {advice}"
                    "--overwrite true deletes it, --out names another folder"
                )
    if path.exists() and not path.is_dir():
        raise UserError(f"{folder} is a file: name a folder with --out")
    path.mkdir(parents=True, exist_ok=True)
    write_atomically(run_file, to_yaml(settings))
    return resumes


def _differing_settings(run_file: Path, settings: Any) -> list[str]:
    """Names of the settings whose values in `run_file`, read under their new names, are not those of `settings`."""
    try:
        earlier = yaml.safe_load(run_file.read_text()) or {}
    except yaml.YAMLError:
        earlier = None
    if not isinstance(earlier, dict):
        return [f"{run_file.name} is damaged"]
    earlier = rename_keys(earlier, renamed_settings(type(settings)), str(run_file))
    wanted = to_dict(settings)
    keys = (set(earlier) | set(wanted)) - set(CONTROL_SETTINGS)
    return sorted(key for key in keys if earlier.get(key) != wanted.get(key))


def hardware() -> dict[str, Any]:
    """Device name, number of GPUs, CPU threads and architecture of the machine that this process runs on."""
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


def provenance() -> dict[str, Any]:
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
