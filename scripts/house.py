"""Counts what a reader of this code has to read: lines, statements, and files that name one thing.

    python scripts/house.py                              # the files of this checkout
    python scripts/house.py --at 9deae10                 # this checkout beside an earlier commit
    python scripts/house.py --at 9deae10 --then HEAD     # one commit beside another
    python scripts/house.py --json docs/results/house.json

A commit is unpacked by `git archive` into a temporary folder, so the checkout is not touched. Texts and syntax trees
are counted, and nothing is run. --help_lines also asks train/distill.py for its help for each draft family, which
takes minutes.
"""

import argparse
import ast
import io
import json
import os
import re
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

PACKAGES = ("decode", "eval", "train", "scripts")
OTHER_SUFFIXES = (".j2", ".yaml", ".sh")
"""What Python lines can become without getting fewer: counted beside them."""
FAMILIES = (
    "causal", "pard", "medusa", "eagle1", "eagle3", "peagle", "dflash", "dspark", "mtp", "medusa2", "layerskip",
    "layerskip2",
)  # fmt: skip
UNTYPED = re.compile(r"(?:dict|Mapping)\[str, Any\]|Report(?:Entry)?\b = dict")
ALIAS = re.compile(r"^(\w+)(?:: TypeAlias)? = (?:dict|Mapping)\[str, Any\]", re.MULTILINE)
TREE_REFUSALS = r"give it no tree|drafts chains only|drafts trees, wh"
DRAFT_CLASSES = r"isinstance\([^)]*(?:Adaptive|Mirror|Simulated|CrossDevice|Causal)Draft"
SETTINGS_CLASS = re.compile(r"(?:Config|Settings|Choice|Spec)$")

Sources = dict[str, str]
"""{path below the root: text} of the product's Python files."""
Counts = dict[str, int | float | str | None]


def read_sources(root: Path) -> Sources:
    files = (file for package in PACKAGES for file in sorted((root / package).rglob("*.py")))
    return {str(file.relative_to(root)): file.read_text(encoding="utf-8") for file in files}


def count_lines(text: str) -> int:
    return text.count("\n")


def count_statements(text: str) -> int:
    """Statements without docstrings: no formatter changes their number."""
    nodes = list(ast.walk(ast.parse(text)))
    strings = sum(
        isinstance(node, ast.Expr)
        and isinstance(node.value, ast.Constant)
        and isinstance(node.value.value, str)
        for node in nodes
    )
    return sum(isinstance(node, ast.stmt) for node in nodes) - strings


def files_with(sources: Sources, pattern: str, flags: int = 0) -> int:
    return sum(re.search(pattern, text, flags) is not None for text in sources.values())


def lines_with(sources: Sources, pattern: str | re.Pattern[str]) -> int:
    found = re.compile(pattern)
    return sum(bool(found.search(line)) for text in sources.values() for line in text.splitlines())


def alias_lines(sources: Sources) -> int:
    """Lines that hide a `dict[str, Any]` behind another name, in the files that define or import it."""
    names = {name for text in sources.values() for name in ALIAS.findall(text)}
    total = 0
    for text in sources.values():
        own = {name for name in names if re.search(rf"^{name}(: TypeAlias)? = ", text, re.M)}
        own |= names & {a.asname or a.name for n in imports_in(text) for a in n.names}
        if own:
            used = re.compile(rf"\b(?:{'|'.join(sorted(own))})\b(?! = )")
            rows = [row for row in text.splitlines() if not re.match(r"from |import ", row)]
            total += sum(bool(used.search(row)) for row in rows)
    return total


def imports_in(text: str) -> Iterator[ast.Import | ast.ImportFrom]:
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Import | ast.ImportFrom):
            yield node


def imported_files(text: str, sources: Sources) -> set[str]:
    """The product's files that importing this text reads, at any depth of its code, or names as "module:Class"."""
    names = set(re.findall(r"\"([\w.]+):\w+\"", text))
    for node in imports_in(text):
        if isinstance(node, ast.ImportFrom):
            names.add(node.module or "")
            names |= {f"{node.module}.{alias.name}" for alias in node.names}
        else:
            names |= {alias.name for alias in node.names}
    files = set()
    for name in names:
        parts = name.split(".")
        for end in range(1, len(parts) + 1):
            path = "/".join(parts[:end])
            files |= {f"{path}.py", f"{path}/__init__.py"} & sources.keys()
    return files


def import_closure(sources: Sources, start: str) -> set[str]:
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


def imports_torch(text: str) -> bool:
    """Whether importing this text imports torch by a line of its own."""
    names = []
    for node in ast.parse(text).body:
        if isinstance(node, ast.Import):
            names += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            names.append(node.module or "")
    return any(name.split(".")[0] == "torch" for name in names)


def defines_settings(text: str) -> bool:
    """Whether it has a dataclass that is named like settings."""
    return any(
        isinstance(node, ast.ClassDef)
        and SETTINGS_CLASS.search(node.name) is not None
        and any("dataclass" in ast.unparse(decorator) for decorator in node.decorator_list)
        for node in ast.parse(text).body
    )


def is_short_or_long(path: str, text: str) -> bool:
    return not path.endswith("__init__.py") and not 60 <= count_lines(text) <= 400


def below(sources: Sources, package: str) -> Sources:
    return {path: text for path, text in sources.items() if path.startswith(f"{package}/")}


CHECKS: dict[str, Callable[[Sources], int | float | None]] = {
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
    "files that name vLLM": lambda s: files_with(s, "vllm", re.IGNORECASE),
    "files that name vLLM in train/": lambda s: files_with(below(s, "train"), "vllm", re.I),
    "files that name vLLM in scripts/": lambda s: files_with(below(s, "scripts"), "vllm", re.I),
    "lines with isinstance of a draft": lambda s: lines_with(s, DRAFT_CLASSES),
    "lines that set draft.shape": lambda s: lines_with(s, r"draft\.shape = "),
    "methods of Draft": draft_methods,
    "own-line comments": lambda s: lines_with(s, r"^ *# "),
    "modules of settings that import torch": lambda s: sum(
        defines_settings(text) and imports_torch(text) for text in s.values()
    ),
    "files imported by train/distill.py": lambda s: len(import_closure(s, "train/distill.py")),
    "lines imported by train/distill.py": lambda s: sum(
        count_lines(s[path]) for path in import_closure(s, "train/distill.py")
    ),
}
"""{what is counted: how}, of the product's Python files."""


def count_house(root: Path, help_lines: bool = False) -> Counts:
    """{what is counted: its number} of the tree below `root`."""
    sources = read_sources(root)
    # this file names what it counts
    counted = {path: text for path, text in sources.items() if path != "scripts/house.py"}
    counts: Counts = {"line length": line_length(root)}
    counts |= {name: check(counted) for name, check in CHECKS.items()}
    for suffix in OTHER_SUFFIXES:
        files = [file for package in PACKAGES for file in (root / package).rglob(f"*{suffix}")]
        counts[f"product lines ({suffix})"] = sum(count_lines(f.read_text()) for f in files)
    tests = list((root / "tests").rglob("*.py"))
    counts["test lines"] = sum(count_lines(file.read_text()) for file in tests)
    counts["test files"] = len(tests)
    lines = [counts[f"product lines ({suffix})"] for suffix in (".py", *OTHER_SUFFIXES)]
    counts["product lines, all kinds"] = sum(int(n or 0) for n in lines)
    if help_lines:
        counts |= settings_in_help(root)
    return counts


def line_length(root: Path) -> int | None:
    """The formatter's: counts of lines compare only where it is the same."""
    found = re.search(r"^line-length = (\d+)", (root / "pyproject.toml").read_text(), re.M)
    return int(found[1]) if found else None


def settings_in_help(root: Path) -> Counts:
    """Lines of train/distill.py --help that name a setting of the draft, for each family, and the exit code of a
    setting that belongs to another family."""
    counts: Counts = {}
    for family in FAMILIES:
        done = distill(root, "--draft.family", family, "--help")
        lines = [line for line in done.stdout.splitlines() if "--draft." in line]
        counts[f"settings in help of {family}"] = len(lines) if done.returncode == 0 else None
    words = ("--draft.family", "dspark", "--draft.steps", "3", "--print_config")
    counts["exit code of dspark with steps"] = distill(root, *words).returncode
    return counts


def distill(root: Path, *words: str) -> subprocess.CompletedProcess[str]:
    environment = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    command = [sys.executable, "train/distill.py", *words]
    return subprocess.run(command, cwd=root, env=environment, capture_output=True, text=True)


def git(*words: str) -> bytes:
    """What git says in this checkout. SystemExit with its own words where it fails."""
    root = Path(__file__).resolve().parents[1]
    done = subprocess.run(["git", "-C", str(root), *words], capture_output=True)
    if done.returncode != 0:
        raise SystemExit(f"error: git {words[0]}: {done.stderr.decode().strip()}")
    return done.stdout


def count_commit(commit: str, help_lines: bool) -> Counts:
    """`count_house` of a commit, unpacked into a temporary folder."""
    with tempfile.TemporaryDirectory() as folder:
        archive = io.BytesIO(git("archive", "--format=tar", commit))
        with tarfile.open(fileobj=archive) as files:
            files.extractall(folder, filter="data")
        return count_house(Path(folder), help_lines)


def name_of(commit: str) -> str:
    return git("rev-parse", "--verify", f"{commit}^{{commit}}").decode().strip()


def ratio(before: object, after: object) -> float | None:
    if not isinstance(before, int | float) or not isinstance(after, int | float) or before == 0:
        return None
    return round(after / before, 3)


def print_table(columns: dict[str, Counts]) -> None:
    """A line for each count: the columns, and behind two of them their ratio."""
    names = list(dict.fromkeys(name for counts in columns.values() for name in counts))
    wide = max(map(len, names))
    print(
        " " * wide,
        *(f"{title[:12]:>12}" for title in columns),
        *(["   ratio"] * (len(columns) > 1)),
    )
    for name in names:
        values = [counts.get(name) for counts in columns.values()]
        share = ratio(*values) if len(values) == 2 else None
        cells = ["-" if value is None else f"{value:,}" for value in values]
        shown = "" if share is None else f"{share:8.3f}"
        print(f"{name:{wide}}", *(f"{cell:>12}" for cell in cells), shown)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--at", default="", help="the commit to compare with, or to count alone")
    parser.add_argument("--then", default="", help="the later commit; empty: this checkout's files")
    parser.add_argument("--alone", action="store_true", help="count --at alone")
    parser.add_argument("--help_lines", action="store_true", help="count the settings in help too")
    parser.add_argument("--json", default="", help="write the counts to this file too")
    s = parser.parse_args()
    columns: dict[str, Counts] = {}
    if s.at:
        columns[name_of(s.at)] = count_commit(s.at, s.help_lines)
    if s.then:
        columns[name_of(s.then)] = count_commit(s.then, s.help_lines)
    elif not s.alone:
        columns["checkout"] = count_house(Path(__file__).resolve().parents[1], s.help_lines)
    print_table(columns)
    if s.json:
        facts = {"command": f"python {' '.join(['scripts/house.py', *sys.argv[1:]])}"}
        Path(s.json).write_text(json.dumps(facts | {"counts": columns}, indent=1) + "\n")


if __name__ == "__main__":
    main()
