"""decode/ as a library: what a program that imports it needs."""

import subprocess
import sys
from pathlib import Path

PROGRAM = """
import sys

sys.modules["decode.common.settings"] = None  # importing it raises ImportError
from decode.common.errors import UserError
from decode.drafts.registry import load_draft
from decode.engine.engine import SpeculativeEngine, speculate
from decode.model.loading import load_target

try:
    load_target("./nowhere")
except UserError as error:
    print("said:", error)
"""


def test_decoding_needs_no_command_line() -> None:
    """Catches UserError, loading or decoding that import the parser of commands."""
    root = Path(__file__).parents[2]
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM], cwd=root, capture_output=True, text=True, check=False
    )
    assert done.stdout.startswith("said: "), done.stderr[-2000:]
    assert "nowhere" in done.stdout
