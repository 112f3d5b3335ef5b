"""Old names of settings: read under their new names, with one line of advice on stderr for each.

A settings class lists them as `RENAMED_SETTINGS: ClassVar[dict[str, str]]`, dotted old name -> dotted new name, in its
own terms. A group may be renamed as a whole: {"compare": "divergence"} covers `compare.top` too.
"""

import copy
import dataclasses
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from decode.common.errors import UserError


def renamed_settings(settings: type) -> dict[str, str]:
    """Old -> new dotted names of the dataclass `settings` and of the settings classes nested in it."""
    renamed = dict(vars(settings).get("RENAMED_SETTINGS", {}))
    for field in dataclasses.fields(settings):
        if isinstance(field.type, type) and dataclasses.is_dataclass(field.type):
            for old, new in renamed_settings(field.type).items():
                renamed[f"{field.name}.{old}"] = f"{field.name}.{new}"
    return renamed


def rename_keys(values: dict[str, Any], renamed: Mapping[str, str], source: str) -> dict[str, Any]:
    """A copy of the nested dict `values`, as read from YAML, in which old names became new ones.

    Prints one line for each old name. UserError when `values` has both the old and the new name of a setting;
    `source` says in these messages where the values come from.
    """
    values = copy.deepcopy(values)
    for old, new in renamed.items():
        group, key = _find(values, old)
        if key not in group:
            continue
        new_group, new_key = _find(values, new, create=True)
        if new_key in new_group:
            raise _both(old, new, source)
        new_group[new_key] = group.pop(key)
        _advise(old, new, source)
    return values


def rename_arguments(argv: Sequence[str], renamed: Mapping[str, str]) -> list[str]:
    """The command line `argv` with new names for old ones: of its options, and of the YAML that they name or hold.

    A file with old names becomes the YAML text of its content. UserError as in `rename_keys`, also when an old name
    and its new one both stand on the command line.
    """
    words, given = list(argv), {_option(word) for word in argv}
    for old, new in renamed.items():
        used = {name for name in given if _is_within(name, old)}
        if not used:
            continue
        if any(_is_within(name, new) for name in given):
            raise _both(old, new, "the command line")
        words = [
            f"--{new}{word[2 + len(old) :]}" if _option(word) in used else word for word in words
        ]
        _advise(old, new, "the command line")
    for at, word in enumerate(words):
        name, equals, value = word.partition("=")
        group = "" if name == "--config" else f"{_option(word)}."
        inner = {
            old.removeprefix(group): new.removeprefix(group)
            for old, new in renamed.items()
            if old.startswith(group) and new.startswith(group)
        }
        if not inner or not name.startswith("--"):
            continue
        if equals:
            words[at] = f"{name}={_rename_yaml(value, inner)}"
        elif at + 1 < len(words):
            words[at + 1] = _rename_yaml(words[at + 1], inner)
    return words


def _rename_yaml(value: str, renamed: Mapping[str, str]) -> str:
    """`value` itself (a path or YAML text), or the renamed YAML text when a mapping with old names is in it.

    What cannot be read is left for the parser, which says why.
    """
    try:
        is_file = "\n" not in value and Path(value).is_file()
        values = yaml.safe_load(Path(value).read_text(encoding="utf-8") if is_file else value)
    except (OSError, ValueError, yaml.YAMLError):
        return value
    if not isinstance(values, dict):
        return value
    changed = rename_keys(values, renamed, value if is_file else "the command line")
    return value if changed == values else yaml.safe_dump(changed, sort_keys=False)


def _find(values: dict[str, Any], name: str, create: bool = False) -> tuple[dict[str, Any], str]:
    """The dict that holds the setting `name`, and its key there; an empty dict where an outer group is absent.

    With `create` absent groups are added to `values`.
    """
    *groups, key = name.split(".")
    for group in groups:
        inner = values.setdefault(group, {}) if create else values.get(group)
        values = inner if isinstance(inner, dict) else {}
    return values, key


def _option(word: str) -> str:
    """The dotted name in `--name`, `--name=value` or `--name+=value`; empty for a value."""
    return word[2:].split("=")[0].rstrip("+") if word.startswith("--") else ""


def _is_within(name: str, group: str) -> bool:
    return name == group or name.startswith(f"{group}.")


def _both(old: str, new: str, source: str) -> UserError:
    return UserError(f"{source} sets both {old} and {new}, its new name: leave out {old}")


def _advise(old: str, new: str, source: str) -> None:
    sys.stderr.write(f"{source}: setting {old} is now called {new}: use the new name\n")
