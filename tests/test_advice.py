"""Every setting that a message names exists: the texts of all modules are read, whoever they are shown to."""

import ast
import functools
import re
from collections.abc import Iterator

import pytest

from decode.common.settings import setting_names
from tests.test_settings import COMMANDS, ROOT, classes_in, settings_of

FLAG = re.compile(r"(?<![\w-])--([a-z][\w-]*(?:\.\w+)*)")
DOTTED = re.compile(r"(?<![\w./-])([a-z]\w*(?:\.[a-z]\w*)+)(?![\w(/])")
ADVISED = re.compile(
    r"\b(?:lower|raise|set|give|change|drop|loosen|try|choose)s? ([a-z]+(?:_[a-z]+)+)\b"
)


FILE_ENDINGS = ("py", "safetensors", "json", "jsonl", "yaml", "txt", "md", "gguf", "html")
FOREIGN = {
    "num_processes": "accelerate launch",
    "zero_stage": "accelerate config",
    "fsdp_config": "accelerate config",
    "key": "stands for any",
    "tensor_parallel": "a value of placement.kind",
}
"""{what texts name beside the settings of commands: whose it is}"""


@functools.cache
def known() -> frozenset[str]:
    """Every dotted name of a setting of any command, and those within lists, such as `response` of a source."""
    names = {name for command in COMMANDS for name in setting_names(settings_of(command))}
    classes = {cls for command in COMMANDS for cls in classes_in(settings_of(command))}
    within = {name for cls in classes for name in setting_names(cls)}
    return frozenset(names | within | {"help", "config", "print_config", "help_all"})


@functools.cache
def groups() -> set[str]:
    return {name.partition(".")[0] for name in known() if "." in name}


def texts_in(source: str) -> Iterator[tuple[int, str]]:
    """(line, text) of each string of a program that is no docstring; what an f-string inserts is left as {}."""
    tree = ast.parse(source)
    skipped: set[int] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
            skipped.add(id(node.value))
        if isinstance(node, ast.JoinedStr):
            skipped |= {id(part) for part in node.values}
            parts = [p.value if isinstance(p, ast.Constant) else "{}" for p in node.values]
            yield node.lineno, "".join(map(str, parts))
    for node in ast.walk(tree):
        if (
            isinstance(node, ast.Constant)
            and isinstance(node.value, str)
            and id(node) not in skipped
        ):
            yield node.lineno, node.value


def named_in(text: str) -> set[str]:
    """The settings that a text names: --flags, dotted names of a group of settings, and what it advises to change."""
    if " " not in text.strip():  # no sentence, such as a name that is looked up
        return set()
    if "\nimport " in text or "\nfrom " in text:  # a program for others
        return set()
    dotted = {
        name
        for name in DOTTED.findall(text)
        if name.partition(".")[0] in groups() and not name.endswith(FILE_ENDINGS)
    }
    # No setting here has a hyphen, but one may be written so by mistake.
    flags = {f for f in FLAG.findall(text) if "-" not in f or f.replace("-", "_") in known()}
    return {*flags, *dotted, *ADVISED.findall(text)}


def unknown_in(source: str) -> list[tuple[int, str]]:
    """(line, name) of what the texts of a program call a setting, and no command has."""
    return [
        (line, name)
        for line, text in texts_in(source)
        for name in sorted(named_in(text) - known() - FOREIGN.keys())
    ]


FILES = sorted(
    file
    for package in ("decode", "eval", "train", "scripts")
    for file in (ROOT / package).rglob("*.py")
    if file.name != "house.py"  # counts words of the code, and has flags of argparse
)


def test_every_setting_that_a_text_names_exists() -> None:
    """Bug: the doctor advised to set sampling.repetition_penalty, which no command has."""
    found = {str(file.relative_to(ROOT)): unknown_in(file.read_text()) for file in FILES}
    assert {name: names for name, names in found.items() if names} == {}


def test_what_others_have_is_still_named() -> None:
    """Catches an exception that covers a fault to come."""
    texts = [text for file in FILES for _, text in texts_in(file.read_text())]
    named = set().union(*map(named_in, texts))
    assert FOREIGN.keys() - named == set()


@pytest.mark.parametrize(
    ("program", "wanted"),
    [
        ("x = 'raise sampling.repetition_penalty above 1'", ["sampling.repetition_penalty"]),
        ("raise E(f'{name} is bad: lower loop.rate, or loop.lr')", ["loop.rate"]),
        ("raise E('too long: '\n 'set --loop.length')", ["loop.length"]),
        ("x = 'choose max_old_tokens or max_new_tokens'", ["max_old_tokens"]),
        ("x = 'give --max-bad-rows or --no-such-thing'", ["max-bad-rows"]),
        ("x = ('--max_bad_row', 'give --max_bad_row 1')", ["max_bad_row"]),
        ("x = f'set loop.{name}, {a.b} or draft.vocabs'", ["draft.vocabs"]),
        ("def f():\n    'Sets sampling.none of all.'", []),
        ("x = 'read loop.py and draft.safetensors in train/loop.none of sampling.params()'", []),
        ("x = 'lower loop.lr, draft.vocab, --max_bad_rows or `response` of the source'", []),
    ],
)
def test_names_of_settings_are_found_in_texts(program: str, wanted: list[str]) -> None:
    """The test above is blind if one of these passes."""
    assert [name for _, name in unknown_in(program)] == wanted
