"""What may import what, which file names are safe, and that every configuration file is accepted."""

import ast
import importlib
import sys
from collections.abc import Iterator
from importlib.metadata import packages_distributions
from pathlib import Path

import pytest
from accelerate.commands.config.config_args import load_config_from_file

from decode.common.cli import parse_settings
from decode.common.errors import UserError

ROOT = Path(__file__).resolve().parents[1]
BELOW = {
    "decode": set(),
    "eval": {"decode"},
    "train": {"decode", "eval"},
    "scripts": {"decode", "eval", "train"},
}
OURS = {*BELOW, "tests"}


def imports(source: str) -> Iterator[str]:
    """The full names that a module imports anywhere in it; a relative one begins with a dot."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield "." * node.level + (node.module or "")


def trespasses(package: str, source: str) -> list[str]:
    """Imports that `package` may not make."""
    return [
        name
        for name in imports(source)
        if name.startswith(".") or name.split(".")[0] in OURS - BELOW[package] - {package}
    ]


@pytest.mark.parametrize("package", BELOW)
def test_imports_point_down(package: str) -> None:
    """Catches a cycle between rooms: decode <- eval <- train <- scripts, absolute imports only."""
    files = sorted((ROOT / package).rglob("*.py"))
    assert len(files) > 0
    for file in files:
        assert trespasses(package, file.read_text()) == [], file


def test_trespasses_are_seen() -> None:
    """The test above is blind if one of these passes, wherever in the file it stands."""
    assert trespasses("decode", "import os\nfrom decode.model.runner import Target\n") == []
    assert trespasses("eval", "def f():\n    from decode import verify\n") == []
    assert trespasses("decode", "def f():\n    from eval.metrics.acceptance import tau\n") == [
        "eval.metrics.acceptance"
    ]
    assert trespasses("eval", "import torch, train.losses.divergences as t\n") == [
        "train.losses.divergences"
    ]
    assert trespasses("train", "from scripts import publish\n") == ["scripts"]
    assert trespasses("train", "from .losses import kl\nfrom . import x\n") == [".losses", "."]
    assert trespasses("scripts", "from tests.tiny import tiny_model\n") == ["tests.tiny"]


def test_no_file_hides_a_module() -> None:
    """Catches train/datasets.py: `python train/x.py` puts train/ first on the path."""
    taken = {*sys.stdlib_module_names, *packages_distributions()}
    assert {"datasets", "queue"} < taken
    for package in ("decode", "eval", "train"):
        for file in (ROOT / package).rglob("*.py"):
            assert file.stem == "__init__" or file.stem not in taken, file


def load_config(file: Path) -> object:
    """The settings that `file` gives to the command named in its first line."""
    first = file.read_text().splitlines()[0]
    prefix = "# command: "
    if not first.startswith(prefix):
        raise UserError(f"{file} must begin with a line like '{prefix}train/sample.py'")
    command = Path(first.removeprefix(prefix).strip())
    assert (ROOT / command).is_file(), f"{file} names {command}, which is not there"
    module = importlib.import_module(".".join(command.with_suffix("").parts))
    return parse_settings(module.Settings, "", ["--config", str(file)])


def test_every_config_is_accepted() -> None:
    """Catches a YAML that its command refuses, or that no command reads: each is loaded as a user's would be."""
    files = sorted((ROOT / "configs").rglob("*.y*ml"))
    assert len(files) > 0
    for file in files:
        if file.parent.name == "accelerate":
            load_config_from_file(str(file))
        else:
            load_config(file)


def test_bad_configs_are_seen(tmp_path: Path) -> None:
    """The test above is blind if one of these passes."""
    file = tmp_path / "a.yaml"
    file.write_text("target: x\n")
    with pytest.raises(UserError, match="must begin with"):
        load_config(file)
    file.write_text("# command: train/sample.py\nno_such_setting: 1\n")
    with pytest.raises(UserError, match="no_such_setting"):
        load_config(file)
    file.write_text("# command: train/none.py\n")
    with pytest.raises(AssertionError, match="not there"):
        load_config(file)
    file.write_text("distributed_type: MULTI_GPU\nno_such_setting: 1\n")
    with pytest.raises(ValueError, match="no_such_setting"):
        load_config_from_file(str(file))


def listed(text: str) -> set[str]:
    """The files that the tables at the end of docs/architecture.md name, with their folders."""
    found, folder = set(), ""
    for line in text.partition("## Every file")[2].splitlines():
        name = line.split("`")[1] if line.startswith("| `") else ""
        if name.endswith("/"):
            folder = name
        elif name:
            found.add(folder + name)
    return found


def test_every_file_is_listed() -> None:
    """Catches a file that came or went and a page that still tells of another house."""
    there = {
        str(file.relative_to(ROOT))
        for package in BELOW
        for pattern in ("*.py", "*.sh")
        for file in (ROOT / package).rglob(pattern)
        if file.name != "__init__.py"
    }
    assert listed((ROOT / "docs" / "architecture.md").read_text()) == there
