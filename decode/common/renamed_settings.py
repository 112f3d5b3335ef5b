"""Old names of settings: read under their new names, with one line of advice on stderr for each.

A settings class lists them as `RENAMED_SETTINGS: ClassVar[dict[str, str]]`, dotted old name -> dotted new name, in its
own terms. A group may be renamed as a whole: {"compare": "divergence"} covers `compare.top` too.
"""

import copy
import dataclasses
import sys
from collections.abc import Mapping
from typing import Any

from decode.common.errors import UserError


def renamed_settings(settings: type) -> dict[str, str]:
    """Old -> new dotted names of the dataclass `settings` and of the settings classes nested in it."""
    renamed = dict(vars(settings).get("RENAMED_SETTINGS", {}))
    for field in dataclasses.fields(settings):
        if isinstance(field.type, type) and dataclasses.is_dataclass(field.type):
            for old, new in renamed_settings(field.type).items():
                renamed[f"{field.name}.{old}"] = f"{field.name}.{new}"
    return renamed


def new_name(name: str, renamed: Mapping[str, str]) -> str:
    """The dotted name of the setting `name` today."""
    for old, new in renamed.items():
        if name == old or name.startswith(f"{old}."):
            return new + name.removeprefix(old)
    return name


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
            raise UserError(f"{source} sets both {old} and {new}, its new name: leave out {old}")
        new_group[new_key] = group.pop(key)
        sys.stderr.write(f"{source}: setting {old} is now called {new}: use the new name\n")
    return values


def _find(values: dict[str, Any], name: str, create: bool = False) -> tuple[dict[str, Any], str]:
    """The dict that holds the setting `name`, and its key there; an empty dict where an outer group is absent.

    With `create` absent groups are added to `values`.
    """
    *groups, key = name.split(".")
    for group in groups:
        inner = values.setdefault(group, {}) if create else values.get(group)
        values = inner if isinstance(inner, dict) else {}
    return values, key
