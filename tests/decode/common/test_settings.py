"""Settings from defaults, YAML and the command line, and what a user sees when one is wrong."""

import json
from dataclasses import dataclass, field
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Annotated, Any, Literal

import pytest

from decode.common.errors import UserError
from decode.common.ranges import OneOf
from decode.common.settings import parse_settings, to_dict, to_yaml


@dataclass(frozen=True)
class Inner:
    """Settings within settings."""

    temperature: float = 0.0
    """How bold the text is."""
    top_k: int = 0
    """How many tokens stay."""


@dataclass(frozen=True)
class Outer:
    """Settings of a command."""

    target: str = "assets/target"
    """The model to be made faster."""
    steps: int = 10
    """How long it trains."""
    rate: float = 1e-3
    """Step size."""
    verbose: bool = False
    """Say more."""
    device: str | None = None
    """Where it runs."""
    tasks: list[str] = field(default_factory=lambda: ["code"])
    """What is measured."""
    sampling: Inner = field(default_factory=Inner)
    """How text is drawn."""
    sweep: list[Inner] = field(default_factory=list)
    """Ways to draw it that are compared."""


@dataclass(frozen=True)
class Free:
    """Settings of a command whose names a model chooses."""

    template: str | dict[str, Any] | None = None
    """A name, or values of any kind."""


def read(*argv: str) -> Outer:
    return parse_settings(Outer, "A command.", list(argv))


def test_command_line_wins_over_yaml_over_defaults(tmp_path: Path) -> None:
    """Catches the reversed order, nested overrides that reset their siblings, and --config after an override."""
    file = tmp_path / "a.yaml"
    file.write_text("steps: 20\nrate: 0.5\nsampling:\n  temperature: 0.7\n  top_k: 5\n")
    config = f"--config={file}"
    assert read(config) == Outer(steps=20, rate=0.5, sampling=Inner(0.7, 5))
    got = read("--config", str(file), "--steps", "30", "--sampling.top_k", "9", "--tasks", "[a, b]")
    want = Outer(steps=30, rate=0.5, tasks=["a", "b"], sampling=Inner(0.7, 9))
    assert got == want
    assert isinstance(got.sampling, Inner)
    other = tmp_path / "b.yaml"
    other.write_text("steps: 40\n")
    assert read(config, f"--config={other}") == Outer(steps=40, rate=0.5, sampling=Inner(0.7, 5))


@pytest.mark.parametrize(
    ("key", "hint"),
    [("step", "steps"), ("sampling.topk", "sampling.top_k"), ("sampling.temprature", "sampling.temperature")],
)  # fmt: skip
def test_unknown_key_names_the_nearest(key: str, hint: str) -> None:
    """Catches a misspelt key that is ignored: the run would go on with the default."""
    for argv in ([f"--{key}", "3"], [f"--{key}=3"]):
        with pytest.raises(UserError, match=f"{key}.*did you mean '{hint}'"):
            read(*argv)


def test_unknown_key_in_yaml_names_the_nearest(tmp_path: Path) -> None:
    """Catches the same in a file, at the top and nested."""
    file = tmp_path / "a.yaml"
    for text, hint in (("step: 3\n", "steps"), ("sampling:\n  topk: 3\n", "top_k")):
        file.write_text(text)
        with pytest.raises(UserError, match=f"did you mean '[a-z.]*{hint}'"):
            read("--config", str(file))


def test_lists_hold_settings_too(tmp_path: Path) -> None:
    """Catches items that stay plain dicts, and an unknown key that is ignored inside a list."""
    want = Outer(sweep=[Inner(0.7), Inner(1.0, 5)])
    items = "[{temperature: 0.7}, {temperature: 1.0, top_k: 5}]"
    assert read("--sweep", items) == want
    file = tmp_path / "a.yaml"
    file.write_text(f"sweep: {items}\n")
    assert read("--config", str(file)) == want
    file.write_text("sweep: [{topk: 5}]\n")
    for argv in (["--config", str(file)], ["--sweep", "[{topk: 5}]"]):
        with pytest.raises(UserError, match="topk") as error:
            read(*argv)
        assert "\n" not in str(error.value)


def test_unknown_key_without_a_neighbour() -> None:
    """Catches a far-fetched suggestion."""
    with pytest.raises(UserError, match="zzz") as error:
        read("--zzz", "3")
    assert "did you mean" not in str(error.value)


@pytest.mark.parametrize(
    "argv", [["--steps", "many"], ["--rate", "[1]"], ["--steps", "1.5"], ["--sampling.top_k", "x"]]
)
def test_wrong_type_names_the_key(argv: list[str]) -> None:
    """Catches text where a number belongs, which would fail hours later, and a fraction cut to a whole."""
    with pytest.raises(UserError, match=argv[0].lstrip("-")):
        read(*argv)


BOMB = "a: &a [x, x, x, x, x, x, x, x, x, x]\n" + "".join(
    f"{name}: &{name} [{', '.join(10 * [f'*{before}'])}]\n" for before, name in pairwise("abcdefgh")
)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("just words", "a.yaml holds text: write settings as lines"),
        ("- steps: 1", "a.yaml holds a list"),
        ("5", "a.yaml holds a single value"),
        ("steps: [1", "a.yaml:1 is not valid YAML"),
        ("steps: {a: 1}", "steps is {'a': 1}: give a single value"),
        ("steps: [1]", r"steps is \[1\]: give a single value"),
        ("steps: null", "steps is null: give a single value"),
        ("steps:", "steps is null"),
        ("sampling: 3", "sampling is 3: give a mapping"),
        ("sampling: null", "sampling is null: give a mapping"),
        ("sampling: [1]", r"sampling is \[1\]: give a mapping"),
        (
            "sampling: {temperature: {a: 1}}",
            "sampling.temperature is {'a': 1}: give a single value",
        ),
        ("sampling: {1: 2}", "no setting sampling.1"),
        ("tasks: 5", "tasks is 5: give a list"),
        ("tasks: code", "tasks is 'code': give a list"),
        ("tasks: [null]", r"tasks\[0\] is null"),
        ("tasks: [5]", r"tasks\[0\] is 5: write it in quotes"),
        ("target: 5", "target is 5: write it in quotes"),
        ("target: on", "target is True: write it in quotes"),
        ("sweep: [3]", r"sweep\[0\] is 3: give a mapping"),
        ("sweep: [tests.tiny.Other]", r"sweep\[0\] is 'tests.tiny.Other': give a mapping"),
        ("sweep: [{class_path: tests.tiny}]", r"no setting sweep\[0\].class_path"),
        ("steps: 1\nsteps: 2", "a.yaml:2: 'steps' is set twice"),
        ("sampling: {top_k: 1, top_k: 2}", "a.yaml:1: 'top_k' is set twice"),
        (f"steps: {'9' * 5000}", "a.yaml is not valid YAML .*5000 digits"),
        (f"steps: 0x{'f' * 5000}", "a.yaml has a number of over"),
        (f"rate: {'9' * 400}", "rate has 1329 binary digits"),
        (f"steps: {'[' * 3000}", "a.yaml"),
        (f"sampling: {{temperature: {'x' * 9000}}}", "sampling.temperature is 'x+: give a number"),
        (BOMB, "a.yaml expands to over"),
        ("steps: !!python/object:os.system x", "a.yaml:1 is not valid YAML"),
        ("sampling: other.yaml", "sampling is 'other.yaml': give a mapping"),
        ("rate: x", "rate is 'x': give a number"),
        ("steps: 1.5", "steps is 1.5: give a whole number"),
        ("verbose: 1", "verbose is 1: give true or false"),
    ],
)
def test_yaml_of_the_wrong_shape_is_refused(tmp_path: Path, text: str, said: str) -> None:
    """Catches a stack trace, a page of values, half of a setting used, and code that a file names and that is run."""
    file = tmp_path / "a.yaml"
    file.write_text(text)
    with pytest.raises(UserError, match=said) as error:
        read("--config", str(file))
    assert len(str(error.value)) < 500
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("argv", "said"),
    [
        (["--steps"], "--steps has no value: write --steps VALUE"),
        (["--steps", "--rate", "1"], "--steps has no value"),
        (["steps=3"], "'steps=3' is no setting"),
        (["--sampling", "3"], "sampling is 3: give a mapping"),
        (["--sampling", "{top_k: 1, top_k: 2}"], "--sampling:1: 'top_k' is set twice"),
        (["--sweep", "[{top_k: 1, top_k: 2}]"], "--sweep:1: 'top_k' is set twice"),
        (
            ["--sweep", "[{topk: 1}]"],
            r"no setting sweep\[0\].topk .did you mean 'sweep\[0\].top_k'",
        ),
        (["--tasks", "[&a [*a]]"], "--tasks:1: an alias contains itself"),
        (["--tasks", "code"], "tasks is 'code': give a list"),
        (["--tasks", ""], "tasks is null: give a list"),
        (["--tasks+", "[b]"], "no setting tasks"),
        (["--steps", "9" * 5000], "--steps is not valid YAML"),
        (["--steps", ""], "steps is null"),
        (["--temperature", "1"], "no setting temperature .did you mean 'sampling.temperature'"),
        (["--target.x", "1"], "target is {'x': '1'}: give a single value"),
        (["--target.x", "1", "--target.y", "2"], "target is {'x': '1', 'y': '2'}: give a"),
        (["--target", "a", "--target.x", "1"], "target is {'x': '1'}"),
        (["--a.b", "1", "--a.c", "2"], "no setting a "),
        (["--a\nb", "1"], "no setting a b "),
    ],
)
def test_arguments_of_the_wrong_shape_are_refused(argv: list[str], said: str) -> None:
    """Catches the same on the command line."""
    with pytest.raises(UserError, match=said):
        read(*argv)


def test_text_is_taken_as_it_stands(tmp_path: Path) -> None:
    """Catches a text that is read as YAML, or as the name of a file whose content replaces it."""
    for text in ("3", "null", "a: b: c", "[1, 2]", "{a", "&a [*a]", "2024-01-01", __file__, "- x"):
        assert read("--target", text).target == text
    (tmp_path / "a.yaml").write_text("target: 2024-01-01")
    assert read("--config", str(tmp_path / "a.yaml")).target == "2024-01-01"
    assert read("--target=--x").target == "--x"
    assert read("--target", "-- a comment").target == "-- a comment"
    assert read("--device", "null").device is None


FREE: list[tuple[list[str], Any]] = [
    (["tool_use"], "tool_use"),
    (["none"], "none"),
    (["007"], "007"),
    (["{enable_thinking: false}"], {"enable_thinking": False}),
    (['{a: 2024-07-26, b: "007", c: 26 Jul 2024}'], {"a": "2024-07-26", "b": "007", "c": "26 Jul 2024"}),
    (['{a: null, b: [1, "2"], c: "{d: e}"}'], {"a": None, "b": [1, "2"], "c": "{d: e}"}),
]  # fmt: skip


@pytest.mark.parametrize(("words", "value"), FREE)
def test_a_mapping_of_any_values_keeps_them(tmp_path: Path, words: list[str], value: Any) -> None:
    """Catches texts that are read as YAML once more, dates that JSON cannot hold, and a file that reads otherwise."""
    read_free = partial(parse_settings, Free, "A command.")
    found = read_free(["--template", *words])
    assert found.template == value
    (tmp_path / "a.yaml").write_text(to_yaml(found))
    assert read_free(["--config", str(tmp_path / "a.yaml")]) == found
    json.dumps(to_dict(found))


def test_dotted_names_of_a_mapping_add_up(tmp_path: Path) -> None:
    """Catches the last one alone, a false that is a text, and values of the file beside those of the command line."""
    (tmp_path / "a.yaml").write_text("template: {date: 2026-01-02}")
    config = ["--config", str(tmp_path / "a.yaml")]
    argv = ["--template.name", "rag", "--template.think", "false"]
    found = parse_settings(Free, "A command.", [*config, *argv]).template
    assert found == {"name": "rag", "think": False}
    assert parse_settings(Free, "A command.", config).template == {"date": "2026-01-02"}


def test_a_group_may_be_a_file(tmp_path: Path) -> None:
    """Catches the file of a group, which --help offers, taken for a value."""
    file = tmp_path / "sampling.yaml"
    file.write_text("temperature: 0.7\n")
    assert read("--sampling", str(file), "--sampling.top_k", "5").sampling == Inner(0.7, 5)


@pytest.mark.parametrize("joined", [False, True])
def test_missing_config_file_is_named(tmp_path: Path, joined: bool) -> None:
    """Catches `--config=` and `--config ` being told apart, and a message about YAML for a wrong path."""
    file = str(tmp_path / "none.yaml")
    with pytest.raises(UserError, match="does not exist") as error:
        read(*([f"--config={file}"] if joined else ["--config", file]))
    assert file in str(error.value)


def test_dump_reads_back(tmp_path: Path) -> None:
    """Catches a resolved config beside a run that does not reproduce it (1e-5 read as text, None, tuples)."""
    for value in (
        Outer(),
        Outer("x: y", 3, 1e-5, True, "cpu", ["a", "b"], Inner(0.7, 5), [Inner()]),
    ):
        file = tmp_path / "run.yaml"
        file.write_text(to_yaml(value))
        assert read("--config", str(file)) == value


def test_to_dict_holds_plain_values_only() -> None:
    """Catches a tuple or a dataclass that YAML or JSON would write as something else."""

    @dataclass
    class Odd:
        pair: tuple[int, ...] = (1, 2)
        inner: Inner = field(default_factory=Inner)

    assert to_dict(Odd()) == {"pair": [1, 2], "inner": {"temperature": 0.0, "top_k": 0}}


def test_help_lists_every_docstring(capsys: pytest.CaptureFixture[str]) -> None:
    """Catches a --help without meanings: the parser must have read the fields' docstrings."""
    with pytest.raises(SystemExit) as stop:
        read("--help")
    assert stop.value.code == 0
    text = " ".join(capsys.readouterr().out.split())
    for phrase in ("A command.", "The model to be made faster.", "How bold the text is."):
        assert phrase in text
    assert "--sampling.top_k" in text


def test_print_config_is_a_config(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Catches a --print_config whose output --config refuses."""
    with pytest.raises(SystemExit) as stop:
        read("--steps", "7", "--print_config")
    assert stop.value.code == 0
    file = tmp_path / "printed.yaml"
    file.write_text(capsys.readouterr().out)
    assert read("--config", str(file)) == Outer(steps=7)


# ---- a group of one of several classes ----


@dataclass
class Animal:
    kind: str = ""
    """What it is."""
    legs: int = 4
    """How many it has."""


@dataclass
class Cat(Animal):
    kind: Literal["cat"] = "cat"
    lives: int = 9
    """How often it comes back."""


@dataclass
class Bird(Animal):
    kind: Literal["bird"] = "bird"
    legs: int = 2
    wings: int = 2
    """How many it flies with."""


@dataclass
class Home:
    pet: Annotated[Animal, OneOf("kind", {"cat": Cat, "bird": Bird})] = field(default_factory=Cat)
    size: int = 10
    """Rooms."""


@dataclass
class Street:
    home: Home = field(default_factory=Home)
    """The only one."""


LIVES = "pet.lives is a setting of cat, and pet.kind is bird: leave it out"


@pytest.mark.parametrize(
    ("yaml", "argv", "want"),
    [
        ("", [], Cat()),
        ("", ["--pet.wings", "3", "--pet.kind", "bird"], Bird(wings=3)),
        ("pet: {kind: bird}", ["--pet.wings", "3"], Bird(wings=3)),
        ("pet: {legs: 1}", ["--pet.kind", "bird"], Bird(legs=1)),
        ("pet: {kind: bird, wings: 1}", ["--pet.legs=0"], Bird(legs=0, wings=1)),
        ("", ["--pet", "{kind: bird, wings: 3}"], Bird(wings=3)),
        # as an earlier version wrote it, with what every kind has
        ("pet: {kind: bird, wings: 1, lives: 9}", [], Bird(wings=1)),
        ("pet: {lives: 9}", ["--pet.kind", "bird"], Bird()),
        ("pet: {kind: bird, lives: 8}", [], LIVES),
        ("pet: {lives: 8}", ["--pet.kind", "bird"], LIVES),
        ("", ["--pet.kind", "bird", "--pet.lives", "9"], LIVES),
        ("", ["--pet", "{kind: bird, lives: 9}"], LIVES),
        ("", ["--pet.kind", "fish"], "pet.kind 'fish' is not known: choose one of cat, bird"),
        ("pet: {kind: [1]}", [], r"pet.kind \[1\] is not known"),
        ("", ["--pet.live", "3"], "no setting pet.live .did you mean 'pet.li"),
        ("", ["--pet.wings", "3"], "pet.wings is a setting of bird, and pet.kind is cat"),
        ("pet: 3", [], "pet is 3: give a mapping"),
    ],
)
def test_the_class_is_chosen_by_its_tag(
    tmp_path: Path, yaml: str, argv: list[str], want: Animal | str
) -> None:
    """Catches the first class that has the name, a class that depends on the order, and settings lost in silence."""
    for settings, prefix in ((Home, ""), (Street, "home.")):
        text = f"home: {{{yaml}}}" if prefix else yaml
        (tmp_path / "a.yaml").write_text(text)
        words = [word.replace("--", f"--{prefix}") for word in argv]
        words = ["--config", str(tmp_path / "a.yaml"), *words]
        if isinstance(want, Animal):
            found: Any = parse_settings(settings, "", words)
            assert (found.home if prefix else found).pet == want
            (tmp_path / "b.yaml").write_text(to_yaml(found))
            assert parse_settings(settings, "", ["--config", str(tmp_path / "b.yaml")]) == found
        else:
            with pytest.raises(UserError, match=want.replace("pet.", f"{prefix}pet.")):
                parse_settings(settings, "", words)


def test_help_is_that_of_the_class(capsys: pytest.CaptureFixture[str]) -> None:
    for argv, shown in (([], "lives"), (["--pet.kind", "bird"], "wings")):
        with pytest.raises(SystemExit):
            parse_settings(Home, "", [*argv, "--help"])
        lines = [line for line in capsys.readouterr().out.splitlines() if "--pet" in line]
        assert lines == ["--pet.kind", "--pet.legs", f"--pet.{shown}"]
