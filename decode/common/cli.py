"""Typed settings of every command: dataclass defaults, overridden by --config YAML, overridden by --key value.

An unknown key is an error, and `--help` shows the docstrings of the fields. Old names of settings are read too
(decode/common/renamed_settings.py).
"""

import dataclasses
import difflib
import sys
from pathlib import Path
from typing import Any, TypeVar, get_args, get_origin

import jsonargparse
import yaml

from decode.common.errors import UserError
from decode.common.ranges import check_ranges
from decode.common.renamed_settings import rename_arguments, renamed_settings

T = TypeVar("T")

jsonargparse.set_parsing_settings(docstring_parse_attribute_docstrings=True)


class _Parser(jsonargparse.ArgumentParser):
    """An argument parser that raises UserError where argparse would print its usage and exit."""

    def error(self, message: str, ex: Exception | None = None) -> Any:
        raise UserError(_one_line(message)) from ex


def parse_settings(settings: type[T], about: str, argv: list[str] | None = None) -> T:
    """An instance of the dataclass `settings` from the command line `argv` (sys.argv by default).

    Raises UserError for an unknown key, a value of the wrong type, a missing config file, or a setting that is given
    under its old and its new name.
    """
    parser = _Parser(description=about, default_env=False, allow_abbrev=False)
    parser.add_argument(
        "--config", action="config", help="YAML file; later --key value win over it"
    )
    parser.add_class_arguments(settings, as_group=False, sub_configs=True)
    argv = sys.argv[1:] if argv is None else argv
    for flag, value in zip(argv, argv[1:], strict=False):
        if flag == "--config" and not Path(value).is_file():
            raise UserError(f"config file {value!r} does not exist: check the path after --config")
    argv = rename_arguments(argv, renamed_settings(settings))
    lists = {f"--{f.name}" for f in dataclasses.fields(settings) if _takes_list(f.type)}  # type: ignore[arg-type]
    words: list[str] = []
    for (
        word
    ) in argv:  # jsonargparse would merge lists of equal length item by item: empty them first
        name = word.split("=")[0]
        words += [f"{name}=[]", word] if name in lists else [word]
    try:
        parsed = parser.parse_args(words)
        result = settings(**_fields(parser.instantiate(parsed), settings))
        check_ranges(result)
        return result
    except UserError as error:
        raise UserError(_with_hint(str(error), settings)) from error


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
    for field in dataclasses.fields(settings):
        out.append(field.name)
        if dataclasses.is_dataclass(field.type):
            out += [f"{field.name}.{inner}" for inner in setting_names(field.type)]  # type: ignore[arg-type]
    return out


def _takes_list(kind: Any) -> bool:
    """Whether a list is one of the types that a field may have."""
    return any(get_origin(one) is list for one in (kind, *get_args(kind)))


def _fields(namespace: Any, settings: type) -> dict[str, Any]:
    return {f.name: namespace[f.name] for f in dataclasses.fields(settings)}


def _one_line(message: str) -> str:
    return " ".join(str(message).split())


def _with_hint(message: str, settings: type) -> str:
    """`message` with `did you mean` added when it names an unknown key that is close to a real one."""
    dotted = setting_names(settings)
    names = [*dotted, *(name.rsplit(".", 1)[-1] for name in dotted)]
    for word in message.replace("'", " ").replace('"', " ").replace("=", " ").split():
        key = word.lstrip("-").rstrip(".,:")
        if key in names:
            continue
        close = difflib.get_close_matches(key, names, n=1, cutoff=0.8)
        if close and ("nrecognized" in message or "not accept" in message):
            return f"{message} (did you mean {close[0]!r}?)"
    return message
