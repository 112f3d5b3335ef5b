"""scripts/house.py counts what it says, in a tree that was written for it."""

import ast
from pathlib import Path

import pytest

from scripts import house

FILES = {
    "pyproject.toml": "[tool.ruff]\nline-length = 100\n",
    "decode/__init__.py": '"""Decoding."""\n',
    "decode/base.py": '"""Drafts."""\n\nfrom typing import Any\n\nFacts = dict[str, Any]\n# why\n\n\n'
    'class Draft:\n    """A draft."""\n\n    def a(self) -> None:\n        ...\n\n'
    '    def b(self, x: dict[str, Any]) -> Facts:\n'
    "        return x\n",
    "decode/names.py": 'FAMILIES = {"head": "train.head:Head", "none": ""}\n',
    "train/__init__.py": "",
    "train/distill.py": "from decode import names\n\n\ndef main() -> None:\n    from train import late\n",
    "train/late.py": "import decode.base\n",
    "train/head.py": "import torch\nfrom dataclasses import dataclass\n\n\n@dataclass\nclass HeadConfig:\n"
    "    markov_rank: int = 8\n    vLLM: str = ''\n    markov_ranks: int = 1\n",
    "train/apart.py": "import torch\n\nretentions = 1\n",
    "train/page.html.j2": "one\ntwo\n",
    "scripts/long.py": "x = 1\n" * 401,
    "scripts/run.sh": "true\n",
    "tests/test_a.py": "def test_a(): ...\n",
}  # fmt: skip


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    for name, text in FILES.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    return tmp_path


def test_counts(tree: Path) -> None:
    found = house.count_house(tree)
    python = {name: text for name, text in FILES.items() if name.endswith(".py")}
    product = {name: text for name, text in python.items() if not name.startswith("tests/")}
    assert found["line length"] == 100
    assert found["product files (.py)"] == len(product)
    assert found["product lines (.py)"] == sum(text.count("\n") for text in product.values())
    assert found["product lines (.j2)"] == 2
    assert found["product lines, all kinds"] == found["product lines (.py)"] + 3
    assert found["test lines"] == found["test files"] == 1
    # all but the two packages' own files are short, or longer than 400 lines
    assert found["files below 60 or above 400 lines"] == len(product) - 2
    assert found["files that name markov_rank"] == 1
    assert found["files that name retention"] == 0
    assert found["files that name vLLM"] == found["files that name vLLM in train/"] == 1
    assert found["files that name vLLM in scripts/"] == 0
    assert found["lines with dict[str, Any]"] == 2
    assert found["lines with another name for it"] == 1
    assert found["methods of Draft"] == 2
    assert found["own-line comments"] == 1
    assert found["modules of settings that import torch"] == 1


def test_statements_are_counted_without_docstrings() -> None:
    """Bug: a count that a formatter or a longer docstring changes."""
    text = '"""Doc."""\n\ndef f():\n    """Doc."""\n    x = 1; y = 2\n    return x\n'
    assert house.count_statements(text) == 4
    assert house.count_statements(ast.unparse(ast.parse(text))) == 4


def test_the_closure_has_what_is_named_by_string(tree: Path) -> None:
    """Bug: trainers that are named in a registry, or imported inside a function, are not seen."""
    found = house.import_closure(house.read_sources(tree), "train/distill.py")
    names = {
        "decode/__init__.py", "decode/base.py", "decode/names.py", "train/__init__.py",
        "train/distill.py",
    }  # fmt: skip
    assert found == names | {"train/late.py", "train/head.py"}
