"""The settings of all commands: every number has a range, defaults are in it, and values out of it are refused."""

import dataclasses
import importlib
import inspect
import itertools
import math
import re
import subprocess
import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Annotated, Any, get_args, get_origin, get_type_hints

import pytest

from decode import continuation
from decode.common.errors import UserError
from decode.common.ranges import Range, at_least, check_ranges, range_of
from decode.common.settings import parse_settings, setting_names
from eval import measuring
from eval.benchmark import config
from eval.settings.evaluation import EvalConfig, MethodConfig, TreeConfig
from eval.tuning import search
from scripts.lab import bundled_model
from scripts.lab.settings import BuildTargetConfig
from tests.tiny import tiny_model, tiny_target
from tests.worlds import byte_tokenizer
from train import answering
from train.families.registry import TRAINED_FAMILIES
from train.settings.training import AcceptanceEvalConfig, LossName
from train.trainer.acceptance_eval import AcceptanceEval

ROOT = Path(__file__).resolve().parents[1]
COMMANDS = sorted(
    str(file.relative_to(ROOT))
    for package in ("decode", "eval", "train", "scripts")
    for file in (ROOT / package).rglob("*.py")
    if "\n    run_command(main" in file.read_text()
)


def settings_of(command: str) -> type:
    """The settings class of a command."""
    module = importlib.import_module(command.removesuffix(".py").replace("/", "."))
    (parameter,) = inspect.signature(module.main).parameters.values()
    return parameter.annotation


def classes_in(kind: Any) -> Iterator[type]:
    """The settings classes that an annotation names, and those of their fields."""
    if isinstance(kind, type) and dataclasses.is_dataclass(kind):
        yield kind
        for field_ in dataclasses.fields(kind):
            yield from classes_in(get_type_hints(kind, include_extras=True)[field_.name])
    else:
        for inner in get_args(kind):
            yield from classes_in(inner)


def has_bare_number(kind: Any) -> bool:
    """Whether numbers of this annotation have no range."""
    if get_origin(kind) is Annotated and any(isinstance(x, Range) for x in get_args(kind)):
        return False
    return kind in (int, float) or any(has_bare_number(inner) for inner in get_args(kind))


def fields_without_range(settings: type) -> list[str]:
    """Class and name of each field, in `settings` and in the classes within, whose numbers have no range."""
    found = set()
    for cls in classes_in(settings):
        hints = get_type_hints(cls, include_extras=True)
        names = [f.name for f in dataclasses.fields(cls)]
        found |= {f"{cls.__name__}.{name}" for name in names if has_bare_number(hints[name])}
    return sorted(found)


def test_the_commands_are_found() -> None:
    assert len(COMMANDS) >= 20
    assert {"train/distill.py", "decode/generate.py", "scripts/referee.py"} < set(COMMANDS)


@pytest.mark.parametrize("command", COMMANDS)
def test_the_short_help_names_settings_that_exist(
    command: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Catches a renamed setting that the short --help leaves out from then on."""
    settings = settings_of(command)
    with pytest.raises(SystemExit):
        parse_settings(settings, "", ["--help"])
    said = capsys.readouterr().out
    for name in vars(settings).get("COMMON", "").split():
        assert re.search(rf"^--{re.escape(name)}\b", said, re.MULTILINE), name


@pytest.mark.parametrize("command", COMMANDS)
def test_every_number_has_a_range(command: str) -> None:
    assert fields_without_range(settings_of(command)) == []


SLOW = ("torch", "transformers", "accelerate", "datasets", "peft", "pyarrow", "matplotlib", "wandb")
"""Packages that take longer to import than --help may take."""
HELP = f"""
import runpy, sys
sys.modules |= dict.fromkeys({SLOW})  # importing one of them raises ImportError
for file in sys.argv[1:]:
    sys.argv = [file, "--help"]
    try:
        runpy.run_path(file, run_name="__main__")
    except SystemExit as end:
        if end.code:
            raise
"""


def say_help(*files: object) -> subprocess.CompletedProcess[str]:
    """The --help of these commands, one after the other in one process that has none of SLOW."""
    words = [sys.executable, "-c", HELP, *map(str, files)]
    return subprocess.run(words, cwd=ROOT, capture_output=True, text=True, check=False)


@pytest.mark.parametrize(
    ("command", "name", "choices"),
    [
        ("train/distill.py", "--draft.family", TRAINED_FAMILIES),
        ("train/distill.py", "--loss", get_args(LossName)),
        ("eval/run.py", "--mode", ("auto", "eager", "captured", "compiled", "graph")),
    ],
)
def test_the_short_help_lists_choices(
    command: str, name: str, choices: Iterable[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Catches a help of 80 columns that cuts off what can be chosen."""
    monkeypatch.setenv("COLUMNS", "80")
    lines = say_help(command).stdout.splitlines()
    at = next(i for i, line in enumerate(lines) if line.startswith(f"{name} "))
    below = itertools.takewhile(lambda line: line.startswith("    "), lines[at + 1 :])
    assert " ".join(below).split()[::2] == [*choices]


def test_help_is_said_without_torch() -> None:
    """Bug: a --help that takes seconds, because what a command does is imported before it knows that it is asked."""
    scripts = ("draftsmith", "get_models", "house", "lab/quickstart")
    others = [f"scripts/{name}.py" for name in scripts]
    done = say_help(*COMMANDS, *others)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.count("\n--config FILE") == len(COMMANDS)


def test_an_import_of_torch_is_seen(tmp_path: Path) -> None:
    """The test above is blind if this passes."""
    file = tmp_path / "planted.py"
    file.write_text("from decode.model import loading\n")
    assert "import of torch halted" in say_help(file).stderr


JUDGED = f"""
import runpy, sys
sys.modules |= dict.fromkeys({SLOW})
sys.argv = sys.argv[1:]
runpy.run_path(sys.argv[0], run_name="__main__")
"""


@pytest.mark.parametrize("command", ["eval/advise.py", "scripts/lab/quickstart.py seen"])
def test_reports_are_judged_without_torch(command: str) -> None:
    """Bug: half a second of reading takes five, for types of results that stand beside a model's."""
    words = [sys.executable, "-c", JUDGED, *command.split(), "docs/results/quickstart_smollm2.json"]
    done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    assert "α" in done.stdout


@dataclass
class Inner:
    good: Annotated[int, at_least(1)] = 1
    bad: dict[str, float] = field(default_factory=dict)


@dataclass
class Planted:
    name: str = ""
    flag: bool = False
    steps: int = 1
    ranks: list[list[int]] = field(default_factory=list)
    limit: int | None = None
    fine: list[Annotated[int, at_least(1)] | None] = field(default_factory=list)
    data: str | list[Inner] = ""


def test_numbers_without_a_range_are_seen() -> None:
    """The test above is blind if one of these passes."""
    bare = ["Inner.bad", "Planted.limit", "Planted.ranks", "Planted.steps"]
    assert fields_without_range(Planted) == bare


@pytest.mark.parametrize("command", COMMANDS)
def test_defaults_are_in_range(command: str) -> None:
    settings = settings_of(command)
    required = [f.name for f in dataclasses.fields(settings) if is_required(f)]
    words = [
        word for name in required for word in (f"--{name}", "{}" if name == "sources" else "x")
    ]
    parse_settings(settings, "", words)


def is_required(f: dataclasses.Field[Any]) -> bool:
    return f.default is f.default_factory is dataclasses.MISSING


def outside(range_: Range) -> list[float]:
    """Numbers around the range that are not in it."""
    low = range_.low - 1 if range_.low_included else range_.low
    high = range_.high + 1 if range_.high_included else range_.high
    return [math.nan, math.inf, -math.inf, low, high, 10**30]


def wrap(kind: Any, number: float) -> Any:
    """A value of the annotation `kind` that holds the number."""
    if get_origin(kind) is list:
        return [wrap(*get_args(kind), number)]
    if get_origin(kind) is dict:
        return {"x": wrap(get_args(kind)[1], number)}
    return number


@pytest.mark.parametrize("command", COMMANDS)
def test_numbers_out_of_range_are_refused(command: str) -> None:
    """Catches a number that no one looks at, for every field of every class, whatever holds it."""
    for cls in set(classes_in(settings_of(command))):
        required = {f.name: "x" for f in dataclasses.fields(cls) if is_required(f)}
        hints = get_type_hints(cls, include_extras=True)
        for f in dataclasses.fields(cls):
            range_ = range_of(hints[f.name])
            for number in [] if range_ is None else outside(range_):
                settings = cls(**required)
                object.__setattr__(settings, f.name, wrap(hints[f.name], number))
                with pytest.raises(UserError, match=rf"^{f.name}\S* is .*: it must be"):
                    check_ranges(settings)


@pytest.mark.parametrize(
    ("command", "argv", "said"),
    [
        ("train/distill.py", "--loop.clip=-1", "loop.clip is -1.0: it must be above 0"),
        ("train/distill.py", "--loop.lr=.nan", "loop.lr is nan"),
        ("train/distill.py", "--seed=-1", "seed is -1: it must be from 0 to 4,294,967,295"),
        ("train/distill.py", "--divergence.mix={hard_ce: -1}", "divergence.mix.hard_ce is -1.0"),
        ("train/distill.py", "--draft.family=eagle3 --draft.width=10000000", "draft.width is 10000000"),
        ("train/distill.py", "--check.k=1000000", "check.k is 1000000: it must be from 1 to 1,024"),
        ("train/distill.py", "--data=[{path: a, weight: .inf}]", "data[0].weight is inf"),
        ("eval/run.py", "--temperatures=[0, .nan]", "temperatures[1] is nan"),
        ("eval/run.py", "--methods=[{name: a, confidence: 2}]", "methods[0].confidence is 2.0"),
        ("eval/run.py", "--methods=[{name: a, tree: {width: 0}}]", "methods[0].tree.width is 0"),
        ("eval/run.py", "--methods=[{name: a, tree: {paths: [[64]]}}]", "methods[0].tree.paths[0][0]"),
        ("decode/generate.py", "--sampling.temperature=1e-30", "sampling.temperature is 1e-30"),
    ],
)  # fmt: skip
def test_the_message_names_setting_value_and_range(command: str, argv: str, said: str) -> None:
    with pytest.raises(UserError) as error:
        parse_settings(settings_of(command), "", re.split(" (?=--)", argv))
    assert str(error.value).startswith(said)


def test_useful_values_are_in_range() -> None:
    """Catches a range that refuses what users do: off by 0, all by 0, very long and very short runs."""
    distill = settings_of("train/distill.py")
    off = ["steps", "epochs", "eval_every", "warmup", "muon_lr", "weight_decay"]
    settings = parse_settings(distill, "", [f"--loop.{name}=0" for name in off])
    assert settings.loop.steps == 0
    big = ["--loop.steps=2000000", "--loop.batch_size=65536", "--loop.clip=1e6", "--loop.lr=3e-6"]
    parse_settings(distill, "", [*big, "--loop.max_length=131072", "--draft.vocab=0"])
    parse_settings(settings_of("train/sample.py"), "", ["--sampling.temperature=0", "--k=16"])
    words = ["--temperatures=[0, 0.01, 2]", "--top_k=0", "--top_p=0.001", "--check_law=0"]
    parse_settings(settings_of("eval/run.py"), "", words)
    assert "loop.clip" in setting_names(distill)


def test_fixed_trees_have_a_limit_too() -> None:
    """Catches paths that say what `nodes` may not."""
    paths = [[0] * depth for depth in range(1, 1026)]
    method = MethodConfig("ngram", tree=TreeConfig(paths=paths))
    with pytest.raises(UserError, match=r"tree\.paths has 1025 nodes: give at most 1,024"):
        config.check(EvalConfig(methods=[method]))


def test_a_step_of_the_bundled_models_holds_a_window() -> None:
    """Catches a step without any window, which ends in a stack trace after the corpus was read."""
    with pytest.raises(UserError, match="batch_tokens is 100: give at least 512"):
        bundled_model.build_bundled(BuildTargetConfig(batch_tokens=100))


LOADS_TARGET = {
    "decode/generate.py": continuation, "train/sample.py": answering, "eval/run.py": measuring,
    "eval/tune.py": search,
}  # fmt: skip
"""{command: the module that loads its target}"""


def refuse_long_drafts(command: str, monkeypatch: pytest.MonkeyPatch, argv: list[str]) -> str:
    """The error of a command whose target has a context of 64 tokens."""
    module = importlib.import_module(command.removesuffix(".py").replace("/", "."))
    target = replace(tiny_target(tiny_model("llama")), tokenizer=byte_tokenizer())
    monkeypatch.setattr(LOADS_TARGET[command], "load_target", lambda *args: target)
    with pytest.raises(UserError) as error:
        module.main(parse_settings(settings_of(command), "", argv))
    return str(error.value)


@pytest.mark.parametrize(
    ("command", "argv", "name"),
    [
        ("decode/generate.py", ["--prompt", "x", "--k", "64"], "k"),
        ("train/sample.py", ["--k", "64", "--draft", "ngram"], "k"),
        ("eval/run.py", ["--k", "64"], "k of method 'ngram'"),
        ("eval/run.py", ["--methods", "[{name: ngram, k: 64}]"], "k of method 'ngram'"),
        ("eval/tune.py", ["--ks", "[2, 64]"], "ks"),
        ("eval/tune.py", ["--batch_ks", "[64]"], "batch_ks"),
        ("eval/tune.py", ["--tree_levels", "64"], "tree_levels"),
    ],
)
def test_drafts_longer_than_the_context_are_refused_before_anything_is_written(
    command: str, argv: list[str], name: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Catches a draft length that ends in the kernel's out-of-memory killer, or after a folder was deleted."""
    out = tmp_path / "out"
    out_words = [] if command == "decode/generate.py" else ["--out", str(out)]
    said = refuse_long_drafts(command, monkeypatch, [*argv, *out_words])
    assert said == f"{name} is 64: give 1 to 63, since the context of tiny holds 64 tokens"
    assert not out.exists()


def test_training_measures_with_drafts_that_fit() -> None:
    """Catches a check.k that fails at the first measurement, steps after the start."""
    target = tiny_target(tiny_model("llama"))
    with pytest.raises(UserError, match=r"check\.k is 64: give 1 to 63"):
        AcceptanceEval(AcceptanceEvalConfig(k=64), target, 0)
