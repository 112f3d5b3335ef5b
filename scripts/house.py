"""Counts what a reader of this code has to read: lines, statements, and files that name one thing.

    python scripts/house.py                              # the files of this checkout
    python scripts/house.py --at 9deae10                 # this checkout beside an earlier commit
    python scripts/house.py --at 9deae10 --then HEAD     # one commit beside another
    python scripts/house.py --json docs/results/house.json

A commit is unpacked by `git archive` into a temporary folder, so the checkout is not touched. Texts and syntax trees
are counted, and nothing is run.
"""

import argparse
import ast
import io
import json
import re
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PACKAGES = ("decode", "eval", "train", "scripts")
OTHER_SUFFIXES = (".j2", ".yaml", ".sh")
"""What Python lines can become without getting fewer: counted beside them."""
UNTYPED = r"(?:dict|Mapping)\[str, Any\]|Report(?:Entry)?\b = dict"
ALIAS = re.compile(r"^(\w+)(?:: TypeAlias)? = (?:dict|Mapping)\[str, Any\]", re.MULTILINE)
TREE_REFUSALS = r"give it no tree|drafts chains only|drafts trees, wh"
DRAFT_CLASSES = r"isinstance\([^)]*(?:Confident|Mirror|CrossDevice|Causal)Draft"
SETTINGS_CLASS = re.compile(r"(?:Config|Settings|Choice|Spec)$")

Sources = dict[str, str]
"""{path below the root: text} of the product's Python files."""
Counts = dict[str, int | None]


def read_sources(root: Path) -> Sources:
    files = (file for package in PACKAGES for file in sorted((root / package).rglob("*.py")))
    return {str(file.relative_to(root)): file.read_text(encoding="utf-8") for file in files}


def count_lines(text: str) -> int:
    return text.count("\n")


def count_statements(text: str) -> int:
    """Statements without docstrings: no formatter changes their number."""
    nodes = list(ast.walk(ast.parse(text)))
    texts = [node.value for node in nodes if isinstance(node, ast.Expr)]
    docstrings = [x for x in texts if isinstance(x, ast.Constant) and isinstance(x.value, str)]
    return sum(isinstance(node, ast.stmt) for node in nodes) - len(docstrings)


def files_with(sources: Sources, pattern: str, below: str = "") -> int:
    own = (text for path, text in sources.items() if path.startswith(below))
    return sum(re.search(pattern, text) is not None for text in own)


def lines_with(sources: Sources, pattern: str) -> int:
    found = re.compile(pattern)
    return sum(bool(found.search(line)) for text in sources.values() for line in text.splitlines())


def imported_names(nodes: Iterator[ast.AST] | list[ast.stmt]) -> Iterator[str]:
    """The full names that these statements import: "a.b" and "a.b.c" for `from a.b import c`."""
    for node in nodes:
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield from (node.module or "", *(f"{node.module}.{x.name}" for x in node.names))


def alias_lines(sources: Sources) -> int:
    """Lines that hide a `dict[str, Any]` behind another name, in the files that define or import it."""
    names = {name for text in sources.values() for name in ALIAS.findall(text)}
    total = 0
    for text in sources.values():
        imported = {x.rpartition(".")[2] for x in imported_names(ast.walk(ast.parse(text)))}
        own = {name for name in names if name in imported or name in ALIAS.findall(text)}
        if own:
            used = re.compile(rf"\b(?:{'|'.join(sorted(own))})\b(?! = )")
            rows = [row for row in text.splitlines() if not re.match(r"from |import ", row)]
            total += sum(bool(used.search(row)) for row in rows)
    return total


def imported_files(text: str, sources: Sources) -> set[str]:
    """The product's files that importing this text reads, at any depth of its code, or names as "module:Class"."""
    named = re.findall(r"\"([\w.]+):\w+\"", text)
    files = set()
    for name in (*named, *imported_names(ast.walk(ast.parse(text)))):
        parts = name.split(".")
        for end in range(1, len(parts) + 1):
            path = "/".join(parts[:end])
            files |= {f"{path}.py", f"{path}/__init__.py"} & sources.keys()
    return files


def import_closure(sources: Sources, start: str = "train/distill.py") -> set[str]:
    """`start` and all that it imports, and they."""
    seen: set[str] = set()
    waiting = {start} & sources.keys()
    while waiting:
        file = waiting.pop()
        seen.add(file)
        waiting |= imported_files(sources[file], sources) - seen
    return seen


def draft_methods(sources: Sources) -> int | None:
    """Methods of the class Draft, from which all drafts inherit; None if there is no such class."""
    for text in sources.values():
        for node in ast.parse(text).body:
            if isinstance(node, ast.ClassDef) and node.name == "Draft":
                return sum(isinstance(inner, ast.FunctionDef) for inner in node.body)
    return None


def has_settings_and_torch(text: str) -> bool:
    """Whether it has a dataclass that is named like settings, and imports torch by a line of its own."""
    body = ast.parse(text).body
    classes = [node for node in body if isinstance(node, ast.ClassDef)]
    settings = any(
        SETTINGS_CLASS.search(node.name)
        and any("dataclass" in ast.unparse(decorator) for decorator in node.decorator_list)
        for node in classes
    )
    return settings and any(name.split(".")[0] == "torch" for name in imported_names(body))


def is_short_or_long(path: str, text: str) -> bool:
    return not path.endswith("__init__.py") and not 60 <= count_lines(text) <= 400


CHECKS: dict[str, Callable[[Sources], int | None]] = {
    "product lines (.py)": lambda s: sum(map(count_lines, s.values())),
    "product statements": lambda s: sum(map(count_statements, s.values())),
    "product files (.py)": len,
    "files below 60 or above 400 lines": lambda s: sum(is_short_or_long(*x) for x in s.items()),
    "commands": lambda s: files_with(s, r"\n    run_command\(main"),
    "files that name markov_rank": lambda s: files_with(s, r"\bmarkov_rank\b"),
    "files that name exit_width": lambda s: files_with(s, r"\bexit_width\b"),
    "files that name retention": lambda s: files_with(s, r"\bretention\b"),
    "files that name tau_ci": lambda s: files_with(s, r"\btau_ci\b"),
    "files that refuse trees": lambda s: files_with(s, TREE_REFUSALS),
    "lines with dict[str, Any]": lambda s: lines_with(s, UNTYPED),
    "lines with another name for it": alias_lines,
    "lines with inspect.getsource or import ast": lambda s: lines_with(
        s, r"inspect\.getsource|^import ast"
    ),
    "files that name vLLM": lambda s: files_with(s, "(?i)vllm"),
    "files that name vLLM in train/": lambda s: files_with(s, "(?i)vllm", "train/"),
    "files that name vLLM in scripts/": lambda s: files_with(s, "(?i)vllm", "scripts/"),
    "lines with isinstance of a draft": lambda s: lines_with(s, DRAFT_CLASSES),
    "lines that set draft.shape": lambda s: lines_with(s, r"draft\.shape = "),
    "methods of Draft": draft_methods,
    "own-line comments": lambda s: lines_with(s, r"^ *# "),
    "modules of settings that import torch": lambda s: sum(map(has_settings_and_torch, s.values())),
    "files imported by train/distill.py": lambda s: len(import_closure(s)),
    "lines imported by train/distill.py": lambda s: sum(
        count_lines(s[path]) for path in import_closure(s)
    ),
}
"""{what is counted: how}, of the product's Python files."""


def count_house(root: Path) -> Counts:
    """{what is counted: its number} of the tree below `root`."""
    sources = read_sources(root)
    sources.pop("scripts/house.py", None)  # this file names what it counts
    # The formatter's: counts of lines compare only where it is the same.
    length = re.search(r"^line-length = (\d+)", (root / "pyproject.toml").read_text(), re.M)
    counts: Counts = {"line length": int(length[1]) if length else None}
    counts |= {name: check(sources) for name, check in CHECKS.items()}
    for suffix in OTHER_SUFFIXES:
        files = [file for package in PACKAGES for file in (root / package).rglob(f"*{suffix}")]
        counts[f"product lines ({suffix})"] = sum(count_lines(f.read_text()) for f in files)
    tests = list((root / "tests").rglob("*.py"))
    counts["test lines"] = sum(count_lines(file.read_text()) for file in tests)
    counts["test files"] = len(tests)
    lines = [counts[f"product lines ({suffix})"] or 0 for suffix in (".py", *OTHER_SUFFIXES)]
    return counts | {"product lines, all kinds": sum(lines)}


def git(*words: str) -> bytes:
    """What git says in this checkout. SystemExit with its own words where it fails."""
    done = subprocess.run(["git", "-C", str(ROOT), *words], capture_output=True)
    if done.returncode != 0:
        raise SystemExit(f"error: git {words[0]}: {done.stderr.decode().strip()}")
    return done.stdout


def count_commit(commit: str) -> dict[str, Counts]:
    """{the commit's full name: its counts}."""
    with tempfile.TemporaryDirectory() as folder:
        archive = io.BytesIO(git("archive", "--format=tar", commit))
        with tarfile.open(fileobj=archive) as files:
            files.extractall(folder, filter="data")
        name = git("rev-parse", "--verify", f"{commit}^{{commit}}").decode().strip()
        return {name: count_house(Path(folder))}


def print_table(columns: dict[str, Counts]) -> None:
    """A line for each count: the columns, and behind two of them their ratio."""
    names = list(dict.fromkeys(name for counts in columns.values() for name in counts))
    wide = max(map(len, names))
    last = ["   ratio"] * (len(columns) > 1)
    print(" " * wide, *(f"{title[:12]:>12}" for title in columns), *last)
    for name in names:
        values = [counts.get(name) for counts in columns.values()]
        cells = ["-" if value is None else f"{value:,}" for value in values]
        before, after = (values * 2)[:2]
        both = len(values) == 2 and before and after is not None
        share = f"{(after or 0) / (before or 1):8.3f}" if both else ""
        print(f"{name:{wide}}", *(f"{cell:>12}" for cell in cells), share)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--at", default="", help="the commit to compare with, or to count alone")
    parser.add_argument("--then", default="", help="the later commit; empty: this checkout's files")
    parser.add_argument("--alone", action="store_true", help="count --at alone")
    parser.add_argument("--json", default="", help="write the counts to this file too")
    s = parser.parse_args()
    columns = {**(count_commit(s.at) if s.at else {}), **(count_commit(s.then) if s.then else {})}
    if not s.then and not s.alone:
        columns["checkout"] = count_house(ROOT)
    print_table(columns)
    if s.json:
        facts = {"command": f"python {' '.join(['scripts/house.py', *sys.argv[1:]])}"}
        Path(s.json).write_text(json.dumps(facts | {"counts": columns}, indent=1) + "\n", "utf-8")


if __name__ == "__main__":
    main()
