"""The tests that plant a bug and see it found are those of tests/golden/planted.txt: none is lost while tests move.

A line is a test, FILE::NAME, or a planted case in a table such as BUGS, FILE::TABLE[CASE]. Folders and parameters are
left out, so a test may move with its file. WRITE_GOLDENS=1 writes the list again: read what `git diff` removes.
"""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

from tests.goldens import WRITES
from tests.worlds import ROOT

LIST = ROOT / "tests" / "golden" / "planted.txt"
PLANTED = re.compile(r"bug|planted|is_found|are_found|are_seen|is_seen", re.IGNORECASE)
TABLE = re.compile(r"BUGS?|PLANTED|MUTATIONS?|MUTANTS?|DEFECTS?|CORRUPTIONS?")


def planted_in(file: Path) -> Iterator[str]:
    """The lines of a test file: a test counts by its name, its file's name, or its parameters."""
    for node in statements(ast.parse(file.read_text()).body):
        if isinstance(node, ast.FunctionDef) and node.name.startswith("test_"):
            decorators = " ".join(map(ast.unparse, node.decorator_list))
            if PLANTED.search(f"{file.stem} {node.name} {decorators}"):
                yield f"{file.stem}::{node.name}"
        elif isinstance(node, ast.Assign | ast.AnnAssign) and node.value is not None:
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            names = [t.id for t in targets if isinstance(t, ast.Name) and TABLE.search(t.id)]
            for name in names:
                yield from (f"{file.stem}::{name}[{case}]" for case in cases(node.value))


def statements(body: list[ast.stmt]) -> Iterator[ast.stmt]:
    """Those of a module and of its classes; what functions do is not looked at, which takes longest."""
    for node in body:
        yield node
        if isinstance(node, ast.ClassDef):
            yield from statements(node.body)


def cases(value: ast.expr) -> Iterator[str]:
    """The names in a literal table: keys of a dict, constants of a list, or what its calls and tuples begin with."""
    keys = value.keys if isinstance(value, ast.Dict) else getattr(value, "elts", [])
    for key in keys:
        if isinstance(key, ast.Call):
            key = (key.args or [key.func])[0]
        elif isinstance(key, ast.Tuple) and key.elts:
            key = key.elts[0]
        if key is not None:
            yield str(key.value) if isinstance(key, ast.Constant) else ast.unparse(key)


def planted(folder: Path) -> list[str]:
    """All lines of the test files below a folder, sorted."""
    return sorted({line for file in folder.rglob("*.py") for line in planted_in(file)})


def test_the_planted_bugs_are_those_that_are_written_down() -> None:
    """Bug: a test that proved another one's eyes is dropped with the lines that it took."""
    found = planted(ROOT / "tests")
    if WRITES:
        LIST.write_text("\n".join(found) + "\n")
    listed = LIST.read_text().splitlines()
    assert sorted(set(listed) - set(found)) == []
    assert sorted(set(found) - set(listed)) == []


def test_the_list_is_read_from_names_parameters_and_tables(tmp_path: Path) -> None:
    (tmp_path / "test_a.py").write_text(
        'BUGS = {"one": 1, "two": 2}\nPLANTED: list = [Case("three", 3), ("four", 4)]\nOTHER = {"x": 1}\n'
        "def test_a_bug_is_found(): ...\ndef test_plain(): ...\nclass TestIt:\n    def test_planted(self): ...\n"
        '@pytest.mark.parametrize("bug", BUGS)\ndef test_law(bug): ...\ndef helper_bug(): ...\n'
    )
    names = ["BUGS[one]", "BUGS[two]", "PLANTED[four]", "PLANTED[three]"]
    names += ["test_a_bug_is_found", "test_law", "test_planted"]
    assert planted(tmp_path) == [f"test_a::{name}" for name in names]
