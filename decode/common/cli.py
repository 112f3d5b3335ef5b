"""Typed settings for every command: dataclass defaults < --config YAML < --key value.

An unknown key is an error, `--help` is written from the docstrings of the fields, and bad input
ends a command with one line that says what to change and exit code 2.
"""

import dataclasses
import difflib
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar, get_args, get_origin

import jsonargparse
import yaml

from decode.common.errors import UserError

T = TypeVar("T")

jsonargparse.set_parsing_settings(docstring_parse_attribute_docstrings=True)


class _Parser(jsonargparse.ArgumentParser):
    """Raises UserError where argparse would print a page of usage."""

    def error(self, message: str, ex: Exception | None = None) -> Any:
        raise UserError(_one_line(message)) from ex


def parse_settings(settings: type[T], about: str, argv: list[str] | None = None) -> T:
    """An instance of the dataclass `settings` from the command line `argv` (sys.argv by default).

    Raises UserError for an unknown key, a value of the wrong type or a missing config file.
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
    lists = {f"--{f.name}" for f in dataclasses.fields(settings) if _takes_list(f.type)}  # type: ignore[arg-type]
    fresh: list[str] = []
    for word in argv:  # jsonargparse would merge lists of equal length item by item
        fresh += [f"{word.split('=')[0]}=[]", word] if word.split("=")[0] in lists else [word]
    argv = fresh
    try:
        parsed = parser.parse_args(argv)
        return settings(**_fields(parser.instantiate(parsed), settings))
    except UserError as error:
        raise UserError(_with_hint(str(error), settings)) from error


def run_command(
    main: Callable[[T], None], settings: type[T], about: str | None, first: str = ""
) -> None:
    """Parse the command line, call `main`, and turn UserError into one line and exit code 2.

    The setting named `first` may stand at the front of the command line without its flag.
    """
    argv = sys.argv[1:]
    if first and argv and not argv[0].startswith("-"):
        argv = [f"--{first}", *argv]
    try:
        main(parse_settings(settings, about or "", argv))
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)


def to_yaml(settings: Any) -> str:
    """YAML that `--config` reads back into equal settings."""
    return yaml.safe_dump(to_dict(settings), sort_keys=False)


def to_dict(settings: Any) -> dict[str, Any]:
    """Plain containers only (tuples become lists), ready for YAML or JSON."""

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
    """Adds `did you mean` when the message names an unknown key close to a real one."""
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
