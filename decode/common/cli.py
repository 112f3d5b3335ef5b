"""Typed settings of every command: dataclass defaults, overridden by --config YAML, overridden by --key value.

Files and arguments become one nested dict, whose names and shape are checked here. jsonargparse converts its values to
their types and writes `--help` from the docstrings of the fields; decode/common/ranges.py checks the numbers. Old names
of settings are read too (decode/common/renamed_settings.py).
"""

import copy
import dataclasses
import difflib
import re
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

import jsonargparse
import yaml

from decode.common.errors import UserError, first_line
from decode.common.files import parse_yaml_value, read_yaml
from decode.common.ranges import check_ranges
from decode.common.renamed_settings import new_name, rename_keys, renamed_settings

T = TypeVar("T")

TYPE_NAMES = {"int": "a whole number", "float": "a number", "bool": "true or false"}
LONGEST_MESSAGE = 400
"""Characters kept of a message of jsonargparse, which repeats values of any length."""

WANTED: dict[type, str] = {
    dict: "a mapping, {name: value, …}",
    list: "a list, [value, …]",
    str: "a single value",
}

jsonargparse.set_parsing_settings(docstring_parse_attribute_docstrings=True)


class _Parser(jsonargparse.ArgumentParser):
    """An argument parser that raises UserError where argparse would print its usage and exit."""

    def format_help(self, formatter: Any = None) -> str:
        text = re.sub(r"Annotated\[(\w+),(\s[^]]*)]", r"\1\2", super().format_help(formatter))
        return re.sub(r", --[\w.]+\+ \S+", "", text)  # --NAME+ would append to a list

    def error(self, message: str, ex: Exception | None = None) -> Any:
        line = re.sub(r'Parser key "(.*?)":', r"\1:", " ".join(message.split()))
        for kind, words in TYPE_NAMES.items():
            line = line.replace(f"a <class '{kind}'>", words)
        raise UserError(line[:LONGEST_MESSAGE]) from ex


def parse_settings(settings: type[T], about: str, argv: Sequence[str] | None = None) -> T:
    """An instance of the dataclass `settings` from the command line `argv` (sys.argv by default).

    UserError for an unknown name, a value of the wrong type or out of its range, a config file that cannot be read, or
    a setting that is given under its old and its new name. SystemExit after --help and --print_config.
    """
    words = list(sys.argv[1:] if argv is None else argv)
    parser = _Parser(description=about, default_env=False, allow_abbrev=False)
    parser.add_argument("--config", help="YAML file with settings; --key value wins over it")
    parser.add_argument("--print_config", action="store_true", help="print the settings and exit")
    parser.add_class_arguments(settings, as_group=False)
    for word in words:
        if word in ("-h", "--help") or (word.startswith("--") and word.endswith(".help")):
            parser.parse_args([word])
    values = _read_values([word for word in words if word != "--print_config"], settings)
    try:
        parsed = parser.instantiate(parser.parse_object(copy.deepcopy(values)))
    except (OverflowError, TypeError, ValueError) as error:  # of converting a value
        raise UserError(f"the settings cannot be read: {first_line(error)}") from error
    # jsonargparse would read the texts in a mapping of any values as YAML: "007" would be 7.
    free = {
        name: values[name]
        for name, kind in _types(settings).items()
        if dict[str, Any] in _arms(kind) and isinstance(values.get(name), dict)
    }
    result = settings(**{name: parsed[name] for name in _types(settings)} | free)
    check_ranges(result)
    if "--print_config" in words:
        sys.stdout.write(to_yaml(result))
        sys.exit(0)
    return result


def to_yaml(settings: Any) -> str:
    """YAML that `--config` reads back into equal settings."""
    return yaml.safe_dump(to_dict(settings), sort_keys=False)


def to_dict(settings: Any) -> dict[str, Any]:
    """The settings as nested dicts and lists (tuples become lists), ready for YAML or JSON."""

    def plain(value: Any) -> Any:
        if isinstance(value, dict):
            return {k: plain(v) for k, v in value.items()}
        return [plain(v) for v in value] if isinstance(value, list | tuple) else value

    return plain(dataclasses.asdict(settings))


def setting_names(settings: type) -> list[str]:
    """Every dotted name that the command line accepts for `settings`."""
    out = []
    for name, kind in _types(settings).items():
        out.append(name)
        if dataclasses.is_dataclass(kind):
            out += [f"{name}.{inner}" for inner in setting_names(kind)]  # type: ignore[arg-type]
    return out


def _read_values(words: Sequence[str], settings: type) -> dict[str, Any]:
    """What the config files and, over them, the arguments set: nested dicts that have the shape of `settings`."""
    renamed = renamed_settings(settings)
    values: dict[str, Any] = {}
    given: dict[str, Any] = {}
    for name, text in _options(words):
        if name == "config":
            _merge(values, rename_keys(read_yaml(text), renamed, text), settings)
        else:
            value = _parse_text(text, name, _type_of(new_name(name, renamed), settings))
            for group in reversed(name.split(".")):
                value = {group: value}
            _merge(given, value, None)
    _merge(values, rename_keys(given, renamed, "the command line"), settings)
    _check_shape(values, settings, "")
    return values


def _options(words: Sequence[str]) -> Iterator[tuple[str, str]]:
    """(name, text) of each `--name text` and `--name=text`. UserError for other words and for a name without text."""
    rest = iter(words)
    for word in rest:
        if not word.startswith("--"):
            raise UserError(f"{word[:60]!r} is no setting: write --NAME VALUE")
        name, equals, text = word[2:].partition("=")
        if not equals:
            text = next(rest, "--")
            if text.startswith("--") and " " not in text:
                raise UserError(f"--{name} has no value: write --{name} VALUE")
        yield name, text


def _parse_text(text: str, name: str, kind: Any) -> Any:
    """The value of an argument for a setting of type `kind` (None: there is no such setting).

    Text stays text where the setting takes text, and numbers stay text for jsonargparse. A group may name a YAML file.
    """
    arms = _arms(kind)
    if any(dataclasses.is_dataclass(arm) for arm in arms) and Path(text).is_file():
        return read_yaml(text)
    takes_text = kind is None or any(arm is str or get_origin(arm) is Literal for arm in arms)
    takes_list = any(get_origin(arm) is list for arm in arms)
    takes_mapping = any(get_origin(arm) is dict for arm in arms)
    is_other = (takes_list and text.startswith("[")) or (takes_mapping and text.startswith("{"))
    if takes_text and not is_other:
        return text
    return parse_yaml_value(text, f"--{name}")


def _merge(values: dict[str, Any], new: dict[str, Any], kind: Any) -> None:
    """Sets what `new` sets; groups are merged, while lists and settings that are dicts are replaced (with `kind` None
    dicts are merged as well)."""
    types = _types(kind) if dataclasses.is_dataclass(kind) else {}
    for key, value in new.items():
        inner = types.get(key)
        if (
            isinstance(value, dict)
            and isinstance(values.get(key), dict)
            and not any(get_origin(arm) is dict for arm in _arms(inner))
        ):
            _merge(values[key], value, inner)
        else:
            values[key] = value


def _check_shape(value: Any, kind: Any, name: str) -> None:
    """UserError unless `value` has the shape of the type `kind`: a mapping with known names, a list, or a scalar."""
    if kind is Any:
        return
    arms = {_shape(arm): arm for arm in _arms(kind)}
    shape: type = type(value) if isinstance(value, dict | list | NoneType) else str
    if shape not in arms:
        wanted = " or ".join(WANTED[one] for one in arms if one is not NoneType)
        shown = "null" if value is None else f"{value!r:.60}"
        raise UserError(f"{name} is {shown}: give {wanted}")
    if arms[shape] is str and not isinstance(value, str):
        raise UserError(f"{name} is {value!s:.60}: write it in quotes, it is a text")
    if isinstance(value, int) and value.bit_length() > 64:
        raise UserError(f"{name} has {value.bit_length()} binary digits: give a smaller number")
    if isinstance(value, list):
        for i, item in enumerate(value):
            _check_shape(item, get_args(arms[list])[0], f"{name}[{i}]")
    if isinstance(value, dict):
        types = _types(arms[dict]) if dataclasses.is_dataclass(arms[dict]) else None
        for key, item in value.items():
            if types is not None and key not in types:
                raise _unknown(key, arms[dict], name)
            inner = get_args(arms[dict])[1] if types is None else types[key]
            _check_shape(item, inner, f"{name}.{key}" if name else str(key))


def _shape(kind: Any) -> type:
    """dict, list or NoneType where values of type `kind` are that; str for a scalar."""
    if dataclasses.is_dataclass(kind) or get_origin(kind) is dict:
        return dict
    return list if get_origin(kind) is list else NoneType if kind is NoneType else str


def _unknown(key: Any, group: type, name: str) -> UserError:
    """The error for a name that the settings class `group`, itself called `name`, does not have."""
    prefix = f"{name}." if name else ""
    known = setting_names(group)
    ends = [other for other in known if other.rpartition(".")[2] == key]
    close = ends or difflib.get_close_matches(str(key), known, n=1, cutoff=0.8)
    hint = f"did you mean {prefix + close[0]!r}?" if close else "--help lists all of them"
    return UserError(f"there is no setting {' '.join(f'{prefix}{key}'.split()):.60} ({hint})")


def _type_of(name: str, settings: type) -> Any:
    """The type of the setting with this dotted name; None if there is none."""
    kind: Any = settings
    for part in name.split("."):
        inner = [get_args(arm)[1] for arm in _arms(kind) if get_origin(arm) is dict]
        kind = _types(kind).get(part) if dataclasses.is_dataclass(kind) else (*inner, None)[0]
    return kind


def _types(settings: Any) -> dict[str, Any]:
    """{name: type} of the fields of a dataclass, without their ranges."""
    hints = get_type_hints(settings)
    return {field.name: hints[field.name] for field in dataclasses.fields(settings)}


def _arms(kind: Any) -> tuple[Any, ...]:
    """The types of a union, or the one type that `kind` is."""
    return get_args(kind) if get_origin(kind) in (Union, UnionType) else (kind,)
