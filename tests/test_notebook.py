"""docs/notebook.ipynb: every cell runs, in order, in a fresh process and an empty folder."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.worlds import ENV, PATIENCE, ROOT

NOTEBOOK = ROOT / "docs" / "notebook.ipynb"


@pytest.mark.slow
def test_the_notebook_runs(tmp_path: Path) -> None:
    """Catches a cell that fails, a result that does not draw itself, and a distilled draft that changes the text."""
    env = {**os.environ, **ENV, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [sys.executable, "-m", "tests.notebooks", NOTEBOOK], cwd=tmp_path, env=env, capture_output=True,
        text=True, timeout=PATIENCE, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    cells = [x for x in json.loads(done.stdout)["cells"] if x["cell_type"] == "code"]
    drawn = ["".join(html_of(cell)) for cell in cells]
    assert [bool(page) for page in drawn] == [True, True, True, True, True, False]
    assert drawn[2].count("<svg") == 2
    assert "srcdoc=" in drawn[4]
    assert "the same text: True" in "".join(cells[3]["outputs"][0]["text"])
    assert "distilled" in "".join(cells[5]["outputs"][0]["text"])


def html_of(cell: dict[str, Any]) -> list[str]:
    return [line for one in cell["outputs"] for line in one.get("data", {}).get("text/html", [])]
