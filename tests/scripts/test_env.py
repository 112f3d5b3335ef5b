"""What scripts/env.sh keeps of a device: in a folder with a .venv whose Python answers at once."""

import subprocess
from pathlib import Path

import pytest

from tests.worlds import ROOT

PYTHON = """#!/bin/sh
[ "$1" = -m ] && exit
[ "$1" = -c ] && { echo 2; exit; }
echo asked >> asked
cat answer
[ -s answer ] || { echo 'error: no GPU that torch can use' >&2; exit 2; }
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A checkout whose fastest_dtype.py answers with the file `answer`, on one GPU that the file `gpu` names."""
    scripts = {".venv/bin/python": PYTHON, "bin/nvidia-smi": "#!/bin/sh\ncat gpu\n"}
    for name, text in scripts.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
        (tmp_path / name).chmod(0o755)
    (tmp_path / ".venv/lib/python3.12/site-packages/torch-2.13.0+cu130.dist-info").mkdir(
        parents=True
    )
    for name, text in {
        "pyproject.toml": "",
        "gpu": "NVIDIA H100\n",
        "answer": "bfloat16 bf16\n",
    }.items():
        (tmp_path / name).write_text(text)
    return tmp_path


def pick(folder: Path, **env: str) -> tuple[int, str, int]:
    """(exit code, the dtype and precision, how often the measurement has run in all)."""
    script = f"set -euo pipefail; . {ROOT / 'scripts/env.sh'}; pick_dtype; echo $dtype $precision"
    path = {"PATH": f"{folder / 'bin'}:/usr/bin:/bin"}
    done = subprocess.run(
        ["bash", "-c", script], cwd=folder, env=path | env, capture_output=True, text=True
    )
    lines = done.stdout.splitlines()
    asked = folder / "asked"
    count = len(asked.read_text().splitlines()) if asked.is_file() else 0
    return done.returncode, lines[-1] if done.returncode == 0 else "", count


def test_the_dtype_of_a_device_is_measured_once(folder: Path) -> None:
    """Catches a measurement for each start."""
    assert pick(folder) == (0, "bfloat16 bf16", 1)
    assert pick(folder) == (0, "bfloat16 bf16", 1)


@pytest.mark.parametrize("change", ["gpu", "hidden", "torch", "format"])
def test_a_dtype_belongs_to_its_device(folder: Path, change: str) -> None:
    """Catches a kept dtype of another GPU, of a GPU that is hidden by now, of another torch, and a file of the time
    when no device was kept."""
    pick(folder)
    (folder / "answer").write_text("float32 no\n")
    env = {"CUDA_VISIBLE_DEVICES": ""} if change == "hidden" else {}
    if change == "gpu":
        (folder / "gpu").write_text("Tesla T4\n")
    if change == "torch":
        site = folder / ".venv/lib/python3.12/site-packages"
        (site / "torch-2.13.0+cu130.dist-info").rename(site / "torch-2.13.0+cpu.dist-info")
    if change == "format":
        (folder / ".venv/dtype").write_text("bfloat16 bf16\n")
    assert pick(folder, **env) == (0, "float32 no", 2)


def test_a_measurement_that_fails_ends_the_script(folder: Path) -> None:
    """Catches an empty dtype that goes on, and one that is kept."""
    (folder / "answer").write_text("")
    assert pick(folder)[0] == 2
    assert not (folder / ".venv/dtype").exists()
