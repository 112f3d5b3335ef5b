"""versions.txt has the lower bounds of pyproject.toml."""

import re
import tomllib
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_the_lowest_versions_are_those_of_pyproject() -> None:
    """Catches a bound that is changed and not tested, and a dependency without one."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    wanted = {}
    for dependency in project["dependencies"]:
        name, bound = re.match(r"([\w]+)(?:\[\w+\])?>=([\d.]+)", dependency).groups()  # type: ignore[union-attr]
        wanted[name] = bound
    lines = Path(__file__).with_name("versions.txt").read_text().splitlines()
    found = dict(line.split("==") for line in lines if not line.startswith("#"))
    assert wanted.keys() == found.keys()
    for name, bound in wanted.items():
        assert f"{found[name]}.".startswith(f"{bound}."), name
