"""The rules of the tree: folder sizes, class names, import directions, safe file names, and configs that are accepted.

Each rule is a function of a folder that holds packages and returns what breaks it, a line each. One test applies the
rules to this checkout; the others plant a violation in a temporary folder and expect it to be found.
"""

import ast
import importlib
import inspect
import sys
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from importlib.metadata import packages_distributions
from itertools import pairwise
from pathlib import Path

import pytest
from accelerate.commands.config.config_args import load_config_from_file

from decode.common.errors import UserError
from decode.common.files import read_yaml
from decode.common.settings import parse_settings

ROOT = Path(__file__).resolve().parents[1]
MAX_FILES = 20
"""Source files of one folder, `__init__.py` not counted."""
PACKAGES = ("decode", "eval", "train", "scripts")
"""Each may import the ones before it."""
ALLOWED: dict[str, dict[str, set[str]]] = {
    "decode": {
        "common": set(),
        "devices": {"common"},
        "model": {"common", "devices"},
        "distributed": {"common", "devices", "model"},
        "verification": {"common"},
        "constraints": {"common", "model", "verification"},
        "checkpoints": {"common", "model"},
        "drafts": {"common", "devices", "model", "verification", "constraints", "checkpoints"},
        "engine": {"common", "model", "verification", "constraints", "checkpoints", "drafts"},
        "serving": {"common", "model", "verification", "checkpoints", "drafts", "engine"},
    },
    "eval": {
        "settings": set(),
        "metrics": set(),
        "results": {"metrics"},
        "tasks": {"settings"},
        "benchmark": {"settings", "metrics", "results", "tasks"},
        "checks": {"settings", "metrics", "results", "tasks", "benchmark"},
        "reporting": {"metrics", "results"},
        "tuning": {"settings", "metrics", "results", "tasks", "benchmark", "reporting"},
        "served": {"settings", "metrics", "tasks", "reporting"},
    },
    "train": {
        "settings": set(),
        "data": {"settings"},
        "sampling": {"settings", "data"},
        "doctor_checks": {"settings", "data"},
        "losses": {"settings", "data"},
        "teacher": {"settings", "data", "losses"},
        "families": {"settings", "data", "losses", "teacher"},
        "trainer": {"settings", "data", "losses", "teacher", "families"},
        "planning": {"settings", "data", "losses", "teacher", "families", "trainer"},
        "hub": {"settings", "data", "families"},
    },
    "scripts": {"lab": set()},
}
"""{package: {subpackage: the subpackages of the same package that it may import}}, each after those that it may import.

Files at a package's top are commands above all its subpackages: they may import all of them, and no subpackage
imports a command.
"""


def modules(root: Path) -> dict[str, Path]:
    """{full module name: file} of all packages below `root`; a package itself goes by its folder's name."""
    found = {}
    for package in PACKAGES:
        for file in sorted((root / package).rglob("*.py")):
            parts = file.relative_to(root).with_suffix("").parts
            found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = file
    return found


def imported_names(file: Path) -> Iterator[str]:
    """The full names that a file imports anywhere in it, "a.b" and "a.b.c" for `from a.b import c`.

    A relative import begins with a dot."""
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = "." * node.level + (node.module or "")
            yield base
            yield from (f"{base}.{alias.name}" for alias in node.names)


def import_graph(root: Path) -> dict[str, set[str]]:
    """{module: the modules of ours that it imports}; names of functions and classes are left out."""
    files = modules(root)
    return {
        name: {other for other in imported_names(file) if other in files and other != name}
        for name, file in files.items()
    }


def crowded_folders(root: Path) -> list[str]:
    """Folders with more than MAX_FILES source files (*.py, *.sh, *.j2)."""
    counts: dict[Path, int] = defaultdict(int)
    for package in PACKAGES:
        for file in (root / package).rglob("*"):
            counts[file.parent] += file.suffix in (".py", ".sh", ".j2") and (
                file.name != "__init__.py"
            )
    return [
        f"{folder.relative_to(root)}: {count} files"
        for folder, count in sorted(counts.items())
        if count > MAX_FILES
    ]


def repeated_classes(root: Path) -> list[str]:
    """Names that more than one class of a module's top level has."""
    places: dict[str, list[str]] = defaultdict(list)
    for name, file in modules(root).items():
        for node in ast.parse(file.read_text()).body:
            if isinstance(node, ast.ClassDef):
                places[node.name].append(name)
    return [f"{name}: {', '.join(where)}" for name, where in places.items() if len(where) > 1]


def forbidden_package_imports(root: Path) -> list[str]:
    """Relative imports, imports of tests, and imports of a package that stands above."""
    found = []
    for name, file in modules(root).items():
        own = name.split(".")[0]
        above = {*PACKAGES[PACKAGES.index(own) + 1 :], "tests"}
        for other in imported_names(file):
            if other.startswith(".") or other.split(".")[0] in above:
                found.append(f"{name} imports {other}")
    return found


def forbidden_subpackage_imports(
    root: Path, allowed: Mapping[str, Mapping[str, set[str]]] = ALLOWED
) -> list[str]:
    """Imports between subpackages of one package that `allowed` does not name, and imports of its top files."""
    found = []
    for name, others in import_graph(root).items():
        package, *rest = name.split(".")
        if not rest or not (root / package / rest[0]).is_dir():
            continue  # a file at the top of its package
        may = allowed[package].get(rest[0], set()) | {rest[0]}
        for other in sorted(others):
            if not other.startswith(f"{package}."):
                continue
            sub = other.split(".")[1]
            if sub not in may:
                found.append(f"{name} imports {other}")
    return found


def unlisted_subpackages(
    root: Path, allowed: Mapping[str, Mapping[str, set[str]]] = ALLOWED
) -> list[str]:
    """Subpackages that `allowed` does not name, and named ones that are not there."""
    found = []
    for package in PACKAGES:
        there = {file.parent.name for file in (root / package).glob("*/*.py")}
        found += [f"{package}/{name}" for name in there ^ set(allowed[package])]
    return sorted(found)


def upward_edges(allowed: Mapping[str, Mapping[str, set[str]]] = ALLOWED) -> list[str]:
    """Allowed imports of a subpackage that is listed later: with none, the allowed imports have no cycle."""
    found = []
    for subpackages in allowed.values():
        order = list(subpackages)
        for name, others in subpackages.items():
            found += [f"{name} may import {x}" for x in others - set(order[: order.index(name)])]
    return found


def import_cycles(root: Path) -> list[str]:
    """One line for each cycle of modules that a depth-first search meets, as "a -> b -> a"."""
    graph, found, finished = import_graph(root), [], set[str]()

    def visit(name: str, path: list[str]) -> None:
        if name in path:
            found.append(" -> ".join([*path[path.index(name) :], name]))
        elif name not in finished:
            for other in sorted(graph[name]):
                visit(other, [*path, name])
            finished.add(name)

    for name in sorted(graph):
        visit(name, [])
    return found


def shadowing_files(root: Path) -> list[str]:
    """Files named as an installed module: `python train/x.py` puts train/ first on the import path."""
    taken = {*sys.stdlib_module_names, *packages_distributions()}
    assert {"datasets", "queue"} < taken
    return [
        str(file.relative_to(root))
        for name, file in modules(root).items()
        if file.name != "__init__.py" and not name.startswith("scripts.") and file.stem in taken
    ]


def folders_without_docstring(root: Path) -> list[str]:
    """Folders of source files without an `__init__.py` that begins with a docstring."""
    folders = {file.parent for file in modules(root).values()}
    found = []
    for folder in sorted(folders):
        init = folder / "__init__.py"
        if not init.is_file() or not ast.get_docstring(ast.parse(init.read_text())):
            found.append(str(folder.relative_to(root)))
    return found


RULES = [
    crowded_folders, repeated_classes, forbidden_package_imports, forbidden_subpackage_imports,
    unlisted_subpackages, import_cycles, shadowing_files, folders_without_docstring,
]  # fmt: skip


@pytest.mark.parametrize("rule", RULES)
def test_the_tree_keeps_the_rule(rule: Callable[[Path], list[str]]) -> None:
    assert len(modules(ROOT)) > 100
    assert rule(ROOT) == []


# ---- planted violations ----


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """A small tree that keeps every rule but the list of subpackages."""
    write(tmp_path, "decode/model/runner.py", "class Runner: ...\n")
    write(tmp_path, "decode/engine/loop.py", "from decode.model.runner import Runner\n")
    write(tmp_path, "decode/generate.py", "import decode.engine.loop\n")
    write(tmp_path, "eval/metrics/tau.py", "def f():\n    from decode.model import runner\n")
    write(tmp_path, "train/distill.py", "import torch\nfrom eval.metrics.tau import tau\n")
    write(tmp_path, "scripts/publish.py", "from train import distill\n")
    for rule in RULES:
        assert rule is unlisted_subpackages or rule(tmp_path) == []
    return tmp_path


def write(root: Path, path: str, text: str) -> None:
    """Writes a file, and an `__init__.py` with a docstring in every folder above it that has none."""
    file = root / path
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(text)
    for folder in file.relative_to(root).parents[:-1]:
        if not (root / folder / "__init__.py").exists():
            (root / folder / "__init__.py").write_text('"""A package."""\n')


def test_a_file_too_many_is_found(tree: Path) -> None:
    for number in range(MAX_FILES - 1):
        write(tree, f"decode/model/part{number}.py", "")
    assert crowded_folders(tree) == []
    write(tree, "decode/model/page.j2", "")
    assert crowded_folders(tree) == [f"decode/model: {MAX_FILES + 1} files"]


def test_a_second_class_of_one_name_is_found(tree: Path) -> None:
    write(tree, "train/data/rows.py", "class Other: ...\n\nclass Runner: ...\n")
    assert repeated_classes(tree) == ["Runner: decode.model.runner, train.data.rows"]


@pytest.mark.parametrize(
    ("path", "text", "found"),
    [
        ("decode/model/x.py", "def f():\n    from eval.metrics.tau import tau\n", "eval.metrics.tau"),
        ("eval/metrics/x.py", "import torch, train.losses.kl as t\n", "train.losses.kl"),
        ("train/data/x.py", "from scripts import publish\n", "scripts"),
        ("train/data/x.py", "from .losses import kl\n", ".losses"),
        ("scripts/x.py", "from tests.tiny import tiny_model\n", "tests.tiny"),
    ],
)  # fmt: skip
def test_an_import_of_an_upper_package_is_found(
    tree: Path, path: str, text: str, found: str
) -> None:
    write(tree, path, text)
    module = path.removesuffix(".py").replace("/", ".")
    assert f"{module} imports {found}" in forbidden_package_imports(tree)


@pytest.mark.parametrize(
    ("path", "text"),
    [
        ("decode/model/x.py", "from decode.engine import loop\n"),  # back
        ("decode/model/x.py", "def f():\n    import decode.engine.loop\n"),
        ("decode/engine/x.py", "from decode.generate import main\n"),
        ("decode/verification/x.py", "from decode.checkpoints.y import z\n"),
    ],
)
def test_an_import_back_inside_a_package_is_found(tree: Path, path: str, text: str) -> None:
    write(tree, "decode/checkpoints/y.py", "")
    write(tree, path, text)
    module = path.removesuffix(".py").replace("/", ".")
    assert all(line.startswith(f"{module} imports ") for line in forbidden_subpackage_imports(tree))
    assert len(forbidden_subpackage_imports(tree)) > 0


def test_an_unlisted_subpackage_is_found(tree: Path) -> None:
    allowed: dict[str, dict[str, set[str]]] = {
        "decode": {"model": set(), "engine": {"model"}}, "eval": {"metrics": set()}, "train": {},
        "scripts": {"benchmarks": set()},
    }  # fmt: skip
    assert unlisted_subpackages(tree, allowed) == ["scripts/benchmarks"]
    write(tree, "decode/misc/x.py", "")
    assert unlisted_subpackages(tree, allowed) == ["decode/misc", "scripts/benchmarks"]


def test_allowed_imports_have_no_cycle() -> None:
    assert upward_edges() == []
    assert upward_edges({"decode": {"model": {"engine"}, "engine": {"model"}}}) == [
        "model may import engine"
    ]


def test_a_cycle_of_modules_is_found(tree: Path) -> None:
    write(tree, "decode/model/a.py", "from decode.model.b import f\n")
    write(tree, "decode/model/b.py", "def f():\n    from decode.model import c\n")
    write(tree, "decode/model/c.py", "import decode.model.a\n")
    cycle = ["decode.model.a", "decode.model.b", "decode.model.c", "decode.model.a"]
    assert import_cycles(tree) == [" -> ".join(cycle)]
    assert all(after in import_graph(tree)[before] for before, after in pairwise(cycle))


def test_a_file_named_as_an_installed_module_is_found(tree: Path) -> None:
    write(tree, "train/data/datasets.py", "")
    assert shadowing_files(tree) == ["train/data/datasets.py"]


def test_a_folder_without_a_docstring_is_found(tree: Path) -> None:
    (tree / "decode" / "model" / "__init__.py").write_text("")
    (tree / "eval" / "metrics" / "__init__.py").unlink()
    assert folders_without_docstring(tree) == ["decode/model", "eval/metrics"]


# ---- configs ----


def load_config(file: Path) -> object:
    """The settings that `file` gives to the command named in its first line."""
    first = file.read_text().splitlines()[0]
    prefix = "# command: "
    if not first.startswith(prefix):
        raise UserError(f"{file} must begin with a line like '{prefix}train/sample.py'")
    command = Path(first.removeprefix(prefix).strip())
    assert (ROOT / command).is_file(), f"{file} names {command}, which is not there"
    module = importlib.import_module(".".join(command.with_suffix("").parts))
    (settings,) = inspect.signature(module.main).parameters.values()
    return parse_settings(settings.annotation, "", ["--config", str(file)])


def accept_wandb_sweep(file: Path) -> None:
    """Parses the settings of a W&B sweep as an agent passes them, at one end of each parameter's range."""
    from wandb.sdk.launch.sweeps.utils import create_sweep_command_args  # two seconds

    sweep = read_yaml(file)
    first = {
        name: next(
            p[key] if key != "values" else p[key][0]
            for key in ("value", "values", "min")
            if key in p
        )
        for name, p in sweep["parameters"].items()
    }
    args = create_sweep_command_args({"args": {name: {"value": v} for name, v in first.items()}})
    module = importlib.import_module(sweep["program"].removesuffix(".py").replace("/", "."))
    (settings,) = inspect.signature(module.main).parameters.values()
    parse_settings(settings.annotation, "", args["args"])


def test_every_config_is_accepted() -> None:
    """Catches a YAML that its command refuses, or that no command reads: each is loaded as a user's would be."""
    files = sorted((ROOT / "configs").rglob("*.y*ml"))
    assert len(files) > 0
    for file in files:
        if file.parent.name == "accelerate":
            load_config_from_file(str(file))
        elif file.name == "wandb.yaml":
            accept_wandb_sweep(file)
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
    file.write_text("program: train/distill.py\nparameters: {loop.learning_rate: {min: 1}}\n")
    with pytest.raises(UserError, match="learning_rate"):
        accept_wandb_sweep(file)
    file.write_text("distributed_type: MULTI_GPU\nno_such_setting: 1\n")
    with pytest.raises(ValueError, match="no_such_setting"):
        load_config_from_file(str(file))
