"""What scripts/env.sh tells the other scripts of a device; the Python of the folder's .venv installs nothing."""

import subprocess
import sys
from pathlib import Path

import pytest

from tests.worlds import ROOT

PYTHON = f"""#!/bin/sh
[ "$1" = -m ] && exit
case "$2" in *cpu_count*) echo 2; exit ;; esac
[ -f answer ] || PYTHONPATH={ROOT} exec {sys.executable} "$@"
echo 'warning: an NVIDIA GPU is here' >&2
cat answer
[ -s answer ] || {{ echo 'error: no GPU that torch can use' >&2; exit 1; }}
"""


def pick(folder: Path, answer: str | None, **env: str) -> subprocess.CompletedProcess[str]:
    """A script that asks for the dtype, which this machine's Python answers, or the text `answer`."""
    python = folder / ".venv/bin/python"
    python.parent.mkdir(parents=True)
    python.write_text(PYTHON)
    python.chmod(0o755)
    (folder / "pyproject.toml").touch()
    if answer is not None:
        (folder / "answer").write_text(answer)
    script = f"set -euo pipefail; . {ROOT / 'scripts/env.sh'}; pick_dtype; echo $dtype $precision"
    path = {"PATH": "/usr/bin:/bin"}
    return subprocess.run(
        ["bash", "-c", script], cwd=folder, env=path | env, capture_output=True, text=True
    )


@pytest.mark.parametrize(
    ("dtype", "precision"), [("bfloat16", "bf16"), ("float16", "fp16"), ("float32", "no")]
)
def test_a_dtype_has_its_name_for_accelerate(tmp_path: Path, dtype: str, precision: str) -> None:
    """Catches a warning that is taken for the dtype, and the precision of another one."""
    done = pick(tmp_path, dtype)
    assert (done.returncode, done.stdout.splitlines()[-1]) == (0, f"{dtype} {precision}")


def test_a_device_that_cannot_be_used_ends_the_script(tmp_path: Path) -> None:
    """Catches an empty dtype that goes on."""
    done = pick(tmp_path, "")
    assert (done.returncode, done.stderr.splitlines()[-1]) == (
        2,
        "error: no GPU that torch can use",
    )


def test_this_machine_answers(tmp_path: Path) -> None:
    """Catches Python in the shell that does not run."""
    done = pick(tmp_path, None, CUDA_VISIBLE_DEVICES="")
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] in ("float32 no", "bfloat16 bf16")
