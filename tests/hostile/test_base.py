"""The command lines that every bad one is made from: they work, so what a case refuses is its own mistake."""

from pathlib import Path

import pytest

from tests.hostile.case import Case, check, difference, snapshot
from tests.hostile.files import copy, write
from tests.hostile.lab import BASE, EARLIER_RUNS, Lab, call

QUICK = {
    "eval/report.py": (copy("report"),), "eval/advise.py": (),
    "eval/fidelity.py": (),
    "eval/rescore.py": (), "train/doctor.py": (), "decode/generate.py": (),
    "scripts/lab/floor.py": (), "scripts/export.py": (), "scripts/publish.py": (),
    "scripts/check_draft.py": (), "scripts/audit.py": (),
    "scripts/readme_table.py": (write("page.md", "<!-- table: begin -->\n<!-- table: end -->\n"),),
    "scripts/track_report.py": (copy("causal"),),
    "scripts/lab/task_prompts.py": (),
}  # fmt: skip
"""Commands, besides those whose results make the lab, that need neither minutes nor another machine."""


@pytest.mark.parametrize("command", QUICK)
def test_the_base_works(command: str, lab: Lab, tmp_path: Path) -> None:
    for step in QUICK[command]:
        step(lab, tmp_path)
    before = snapshot(lab.folder)
    call(command, lab.words(BASE[command], tmp_path), tmp_path).ok()
    assert difference(before, snapshot(lab.folder)) == []


@pytest.mark.parametrize("command", EARLIER_RUNS)
def test_the_base_goes_on_in_its_own_folder(command: str, lab: Lab, tmp_path: Path) -> None:
    """Catches a lab whose earlier runs no command takes for its own: no case of overwriting would test anything."""
    copy(EARLIER_RUNS[command], "out")(lab, tmp_path)
    call(command, lab.words(f"{BASE[command]} --overwrite true", tmp_path), tmp_path).ok()


@pytest.mark.parametrize(
    "case",
    [
        Case("decode/generate.py", "", "anything"),  # it works
        Case("decode/generate.py", "--k 0", "no such word"),
        Case("scripts/export.py", "", "anything"),  # it writes
    ],
)
def test_the_check_sees_what_is_wrong(case: Case, lab: Lab, tmp_path: Path) -> None:
    """The tables are blind if one of these passes."""
    with pytest.raises(AssertionError):
        check(case, lab, tmp_path)
