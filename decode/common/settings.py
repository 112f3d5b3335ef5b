"""Typed settings of every command: dataclass defaults, overridden by --config YAML, overridden by --key value, or by
keywords in Python.

Files and arguments become one nested dict, in which old names are replaced by new ones; `read_group` makes a dataclass
of it, and decode/common/ranges.py checks the numbers. `--help` is written from the docstrings of the fields.

A settings class lists its old names as `RENAMED_SETTINGS: ClassVar[dict[str, str]]`, dotted old name -> dotted new
name, in its own terms. A group may be renamed as a whole: {"compare": "divergence"} covers `compare.top` too. Of the
classes of a OneOf, an old name of one is not renamed where another has a setting of that name.
"""

import ast
import contextlib
import copy
import dataclasses
import difflib
import inspect
import json
import re
import shutil
import sys
import textwrap
from collections import deque
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import MISSING
from pathlib import Path
from types import NoneType, UnionType
from typing import (
    Annotated,
    Any,
    Literal,
    Protocol,
    Self,
    TypeVar,
    Union,
    get_args,
    get_origin,
    get_type_hints,
    runtime_checkable,
)

import yaml

from decode.common.errors import UserError
from decode.common.files import find_bundled, parse_yaml_value, read_yaml
from decode.common.ranges import Meaning, OneOf, Range, Spellings, check_ranges

T = TypeVar("T")
SHAPES: dict[type, str] = {
    dict: "a mapping, {name: value, …}",
    list: "a list, [value, …]",
    str: "a single value",
}
SCALARS: dict[type, str] = {int: "a whole number", float: "a number", bool: "true or false"}


OTHER_NAMES = {
    "learning_rate": "lr", "max_grad_norm": "clip", "warmup_ratio": "warmup", "warmup_steps": "warmup",
    "num_train_epochs": "epochs", "max_steps": "steps", "per_device_train_batch_size": "micro_batch",
    "gradient_accumulation_steps": "batch_size", "max_seq_length": "max_length", "seq_length": "max_length",
    "output_dir": "out", "save_path": "out", "model": "target", "model_name_or_path": "target",
    "target_model_path": "target", "base_model": "target", "verifier": "target", "dataset": "data sources",
    "data_path": "data sources", "train_data_path": "data sources", "draft_model": "draft", "assistant_model": "draft",
    "num_speculative_tokens": "k", "num_assistant_tokens": "k", "num_draft_tokens": "k", "ttt_length": "steps",
    "ttt_steps": "steps", "block_size": "block", "num_layers": "depth", "num_hidden_layers": "depth",
    "target_layer_ids": "taps", "draft_vocab_size": "vocab", "num_anchors": "anchors", "max_anchors": "anchors",
    "down_sample_ratio": "retention", "loss_decay_gamma": "decay", "strategy": "family", "speculator_type": "family",
    "report_to": "tracker", "hidden_states_path": "features", "vllm_endpoint": "url", "max_tokens": "max_new_tokens",
}  # fmt: skip
"""{name of a setting in other tools: our settings', without their groups}, for advice."""
PHRASES = {"draft": "--methods '[{name: ngram}, {name: mine, draft: DIR}]'"}
"""What to write instead of a setting that exists elsewhere, where a command has the setting named first in it."""


def parse_settings(settings: type[T], about: str, argv: Sequence[str] | None = None) -> T:
    """An instance of the dataclass `settings` from the command line `argv` (sys.argv by default).

    UserError for an unknown name, a value of the wrong type or out of its range, a config file that cannot be read, or
    a setting that is given under its old and its new name. SystemExit after --help and --print_config.
    """
    words = list(sys.argv[1:] if argv is None else argv)
    asked = {"-h", "--help", "--help_all", "--print_config"}.intersection(words)
    values = _collect([word for word in words if word not in asked], settings)
    start: T | None = None
    if asked - {"--print_config"}:
        with contextlib.suppress(UserError):  # help is given for wrong values too
            start = _start(values, settings)
        sys.stdout.write(_help(settings, about, values, start, "--help_all" in asked))
        sys.exit(0)
    result = _checked(values, settings)
    if asked:
        sys.stdout.write(to_yaml(result))
        sys.exit(0)
    return _with_bundled(result)


def make_settings(settings: type[T], given: Mapping[str, Any]) -> T:
    """An instance of the dataclass `settings` from values of Python: those `given` above those of the YAML file that
    `config` among them names, if it does. Groups are dicts or dataclasses, paths may be Path.

    UserError as from `parse_settings`.
    """
    said: dict[str, Any] = plain({**given})
    config = said.pop("config", "")
    values = _read_config(find_bundled(config), settings) if config else {}
    values = rename_keys(values, renamed_settings(settings), config)
    _lay_over(values, said, settings, "the call")
    return _with_bundled(_checked(values, settings))


def _checked(values: dict[str, Any], settings: type[T]) -> T:
    """The settings with these values and the defaults that they lead to, their numbers in their ranges."""
    result = read_group(values, settings, start=_start(values, settings))
    check_ranges(result)
    return result


def _with_bundled(value: Any) -> Any:
    """The settings with the places of files of this project that they name; what is written is left as it is."""
    if isinstance(value, str):
        return find_bundled(value)
    if isinstance(value, list):
        return [_with_bundled(item) for item in value]
    if isinstance(value, dict):
        return {key: _with_bundled(item) for key, item in value.items()}
    if not dataclasses.is_dataclass(value) or isinstance(value, type):
        return value
    found = {name: _with_bundled(x) for name, x in vars(value).items() if name != "out"}
    changed = {name: x for name, x in found.items() if x != vars(value)[name]}
    return dataclasses.replace(value, **changed) if changed else value


@runtime_checkable
class HasDefaults(Protocol):
    """Settings whose defaults depend on some of them."""

    def defaults(self, given: Collection[str]) -> Self:
        """The defaults where these settings are what they are; `given` are the names of those that were set."""


def _start(values: dict[str, Any], settings: type[T]) -> T | None:
    """The settings whose values are the defaults beside the given `values`; None: those of the class."""
    result = read_group(values, settings)
    return result.defaults(values.keys()) if isinstance(result, HasDefaults) else None


def to_yaml(settings: Any) -> str:
    """YAML that `--config` reads back into equal settings."""
    return yaml.safe_dump(to_dict(settings), sort_keys=False)


def to_dict(settings: Any) -> dict[str, Any]:
    """The settings as nested dicts and lists, ready for YAML or JSON."""
    return plain(dataclasses.asdict(settings))


def plain(value: Any) -> Any:
    """`value` as YAML has it: dataclasses are dicts, tuples lists, paths texts."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        value = dataclasses.asdict(value)
    if isinstance(value, dict):
        return {k: plain(v) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [plain(v) for v in value]
    return str(value) if isinstance(value, Path) else value


def setting_names(settings: Any) -> list[str]:
    """Every dotted name that the command line accepts for `settings`, a dataclass or a OneOf."""
    out = []
    for name, kind in _fields(settings).items():
        out.append(name)
        for group in filter(_is_group, _arms(kind)):
            out += [f"{name}.{inner}" for inner in setting_names(group)]
    return out


# ---- what types say ----


def _arms(kind: Any) -> list[Any]:
    """The types of a union, or the one type that `kind` is, without ranges; a OneOf where there is one."""
    if get_origin(kind) is Annotated:
        inner, *marks = get_args(kind)
        return [mark for mark in marks if isinstance(mark, OneOf)] or _arms(inner)
    if get_origin(kind) in (Union, UnionType):
        return [arm for one in get_args(kind) for arm in _arms(one)]
    return [kind]


def _is_group(arm: Any) -> bool:
    return isinstance(arm, OneOf) or dataclasses.is_dataclass(arm)


def _shape(arm: Any) -> Any:
    """dict, list or NoneType where values of this type are that; str for a scalar."""
    if _is_group(arm) or get_origin(arm) is dict:
        return dict
    return list if get_origin(arm) is list else NoneType if arm is NoneType else str


def _is_named(kind: Any) -> bool:
    """Whether a group's first setting is its name, which may stand for it where nothing else is set."""
    return dataclasses.is_dataclass(kind) and next(iter(_fields(kind))) == "name"


def _fields(group: Any) -> dict[str, Any]:
    """{name: type} of the settings in a dataclass, or in all classes of a OneOf."""
    if isinstance(group, OneOf):
        return {name: kind for cls in group.classes.values() for name, kind in _fields(cls).items()}
    hints = get_type_hints(group, include_extras=True)
    return {field.name: hints[field.name] for field in dataclasses.fields(group)}


def _type_of(name: str, settings: Any) -> Any:
    """The type of the setting with this dotted name; None if there is none."""
    kind: Any = settings
    for part in name.split("."):
        found = None
        for arm in _arms(kind):
            if _is_group(arm):
                found = _fields(arm).get(part)
            elif get_origin(arm) is dict:
                found = get_args(arm)[1]
        kind = found
    return kind


def _default(field: Any) -> Any:
    """The default of a field of a dataclass; MISSING if it has none."""
    return field.default if field.default_factory is MISSING else field.default_factory()


# ---- files and arguments become one nested dict ----


def _collect(words: Sequence[str], settings: type) -> dict[str, Any]:
    """What the config files and, over them, the arguments set: nested dicts."""
    renamed = renamed_settings(settings)
    values: dict[str, Any] = {}
    given: dict[str, Any] = {}

    def is_switch(name: str) -> bool:
        return bool in _arms(_type_of(new_name(name, renamed), settings))

    for name, text in _options(words, is_switch):
        if name == "config":
            read = _read_config(find_bundled(text), settings)
            _merge(values, rename_keys(read, renamed, text), settings)
        else:
            value = _parse_text(text, name, _type_of(new_name(name, renamed), settings))
            for group in reversed(name.split(".")):
                value = {group: value}
            _merge(given, value, None)
    _lay_over(values, given, settings, "the command line")
    return values


def _lay_over(values: dict[str, Any], given: dict[str, Any], settings: type, source: str) -> None:
    """Sets in `values`, those of files, what `source` has `given`."""
    given = rename_keys(given, renamed_settings(settings), source)
    drop_foreign(values, settings, given)
    _merge(values, given, settings)


def _read_config(file: str, settings: type) -> dict[str, Any]:
    """The settings in a YAML file. UserError that says what it is where it is of another command or tool."""
    values = read_yaml(file)
    foreign = (
        set(values)
        - set(_fields(settings))
        - {name.partition(".")[0] for name in renamed_settings(settings)}
    )
    if "draft_model_config" in str(values.get("model")):
        raise UserError(
            f"{file} is a config of SpecForge: configs/README.md lists recipes with the same values, and "
            "docs/glossary.md what its settings are called here"
        )
    first = Path(file).read_text(encoding="utf-8").partition("\n")[0]
    command, own = first.removeprefix("# command: "), Path(sys.argv[0]).name
    if foreign and command != first and Path(command).name != own:
        raise UserError(
            f"{file} has settings of {command}, such as {min(foreign)}, not of {own}: run that command with it"
        )
    return values


def _options(words: Sequence[str], is_switch: Callable[[str], bool]) -> Iterator[tuple[str, str]]:
    """(name, text) of each `--name text`, `--name=text` and, for switches, `--name`, whose text is "true".

    UserError for other words and for a name without text.
    """
    rest = deque(words)
    while rest:
        word = rest.popleft()
        if not word.startswith("--"):
            raise UserError(f"{word[:60]!r} is no setting: write --NAME VALUE")
        name, equals, text = word[2:].partition("=")
        if not equals:
            has_text = bool(rest) and (not rest[0].startswith("--") or " " in rest[0])
            if not has_text and not is_switch(name):
                raise UserError(f"--{name} has no value: write --{name} VALUE")
            text = rest.popleft() if has_text else "true"
        yield name, text


def _parse_text(text: str, name: str, kind: Any) -> Any:
    """The value of an argument for a setting of type `kind` (None: there is no such setting).

    Text stays text where the setting takes text. A group may name a YAML file.
    """
    arms = _arms(kind)
    if any(map(_is_group, arms)) and Path(text).is_file():
        return read_yaml(text)
    takes_text = kind is None or any(arm is str or get_origin(arm) is Literal for arm in arms)
    shapes = {_shape(arm) for arm in arms}
    starts = (list in shapes and text[:1] == "[") or (dict in shapes and text[:1] == "{")
    if takes_text and not starts and not (text == "null" and NoneType in shapes):
        return text
    if (
        list in shapes
        and not starts
        and any(_is_named(get_args(arm)[0]) for arm in arms if get_origin(arm) is list)
    ):
        return text.split(",")  # --tasks humaneval,gsm8k
    return parse_yaml_value(text, f"--{name}")


def _merge(values: dict[str, Any], new: dict[str, Any], kind: Any) -> None:
    """Sets what `new` sets; groups are merged, while lists and settings that are dicts are replaced (with `kind` None
    dicts are merged as well)."""
    for key, value in new.items():
        inner = None if kind is None else _type_of(key, kind)
        mapping = any(get_origin(arm) is dict for arm in _arms(inner))
        if isinstance(value, dict) and isinstance(values.get(key), dict) and not mapping:
            _merge(values[key], value, inner)
        else:
            values[key] = value


# ---- old names ----


def renamed_settings(settings: Any) -> dict[str, str]:
    """Old -> new dotted names of the dataclass or OneOf `settings` and of the groups in it."""
    if isinstance(settings, OneOf):
        found = (x for cls in settings.classes.values() for x in renamed_settings(cls).items())
        today = _fields(settings)
        return {old: new for old, new in found if old not in today}
    renamed = dict(getattr(settings, "RENAMED_SETTINGS", {}))
    for name, kind in _fields(settings).items():
        for group in filter(_is_group, _arms(kind)):
            for old, new in renamed_settings(group).items():
                renamed[f"{name}.{old}"] = f"{name}.{new}"
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


def drop_foreign(values: Any, settings: type, given: Any = None, prefix: str = "") -> None:
    """Takes from the nested dict `values` what another class of a OneOf has, where it is at its default there.

    Files of earlier versions hold the settings of all classes. `given` are values that will be set over these.
    UserError where such a setting has another value, since somebody meant it.
    """
    for field in dataclasses.fields(settings):
        name, inner = prefix + field.name, values.get(field.name)
        over = given.get(field.name) if isinstance(given, dict) else None
        for arm in _arms(_fields(settings)[field.name]) if isinstance(inner, dict) else []:
            if dataclasses.is_dataclass(arm):
                drop_foreign(inner, arm, over, f"{name}.")  # type: ignore[arg-type]
            if not isinstance(arm, OneOf):
                continue
            tags = inner | over if isinstance(over, dict) else inner
            chosen = _chosen(arm, tags, _default(field), name)
            for key in _foreign_keys(inner, arm, chosen):
                value = _read(inner[key], _fields(arm)[key], f"{name}.{key}")
                owners = [cls for cls in arm.classes.values() if key in _fields(cls)]
                usual = [getattr(cls(), key) for cls in owners]
                usual += [getattr(cls, "FORMER_DEFAULTS", {}).get(key) for cls in owners]
                if value not in usual:
                    raise _foreign(key, arm, chosen, name)
                del inner[key]


def _foreign_keys(values: dict[str, Any], group: OneOf, chosen: type) -> list[str]:
    """Names in `values` that other classes of the group have and the `chosen` one has not."""
    return [key for key in values if key in _fields(group) and key not in _fields(chosen)]


def _chosen(arm: OneOf, values: dict[str, Any], default: Any, name: str) -> type:
    """The class of the group `name` with these values, of which `default` is the default."""
    tag = values.get(arm.tag, getattr(default, arm.tag, ""))
    if not isinstance(tag, str) or tag not in arm.classes:
        known = ", ".join(arm.classes)
        raise UserError(f"{name}.{arm.tag} {tag!r} is not known: choose one of {known}")
    return arm.classes[tag]


def _foreign(key: str, group: OneOf, chosen: type, name: str) -> UserError:
    """The error for a setting that other classes than the `chosen` one have; `name` is that of the group."""
    others = [tag for tag, cls in group.classes.items() if key in _fields(cls)]
    own = next(tag for tag, cls in group.classes.items() if cls is chosen)
    return UserError(
        f"{name}.{key} is a setting of {', '.join(others)}, and {name}.{group.tag} is {own}: leave it out"
    )


# ---- the nested dict becomes a dataclass ----


def read_group(values: dict[str, Any], cls: type[T], name: str = "", start: T | None = None) -> T:
    """A `cls` with these values, and for the rest those of `start` or the defaults. `name`: that of the group."""
    prefix = f"{name}." if name else ""
    known, given = _fields(cls), {}
    for key in values:
        if key not in known:
            raise _unknown(key, cls, prefix)
    for field in dataclasses.fields(cls):  # type: ignore[arg-type]
        default = _default(field) if start is None else getattr(start, field.name)
        if field.name in values:
            kind = known[field.name]
            given[field.name] = _read(values[field.name], kind, prefix + field.name, default)
        elif default is MISSING:
            raise UserError(f"{prefix}{field.name} has no value: give one")
    return cls(**given) if start is None else dataclasses.replace(start, **given)  # type: ignore[type-var]


def _read(value: Any, kind: Any, name: str, default: Any = None) -> Any:
    """The `value` of setting `name`, of YAML or an argument, as its type `kind` has it. UserError for other values."""
    if Any in _arms(kind):
        return value
    if isinstance(value, str) and _is_named(kind):
        value = {"name": value}
    for mark in kind.__metadata__ if get_origin(kind) is Annotated else ():
        if isinstance(mark, Spellings):
            value = mark.ours.get(value, value) if isinstance(value, str) else value
    arms = [arm for arm in _arms(kind) if _shape(arm) is _shape_of(value)]
    if not arms:
        shapes = dict.fromkeys(shape for shape in map(_shape, _arms(kind)) if shape in SHAPES)
        wanted = " or ".join(SHAPES[shape] for shape in shapes)
        raise UserError(f"{name} is {_shown(value)}: give {wanted}")
    if isinstance(value, list):
        return [_read(x, get_args(arms[0])[0], f"{name}[{i}]") for i, x in enumerate(value)]
    if not isinstance(value, dict):
        return _read_scalar(value, arms, name)
    if get_origin(arms[0]) is dict:
        return {key: _read(x, get_args(arms[0])[1], f"{name}.{key}") for key, x in value.items()}
    cls = arms[0]
    if isinstance(cls, OneOf):
        cls = _chosen(cls, value, default, name)
        for key in _foreign_keys(value, arms[0], cls):
            raise _foreign(key, arms[0], cls, name)
    return read_group(value, cls, name, default if type(default) is cls else None)


def _shape_of(value: Any) -> type:
    return type(value) if isinstance(value, dict | list | NoneType) else str


def _shown(value: Any) -> str:
    return "null" if value is None else f"{value!r:.60}"


def _read_scalar(value: Any, arms: list[Any], name: str) -> Any:
    """`value` as one of the scalar types `arms`. A number may be a text, as 1e-5 is in YAML."""
    choices = [choice for arm in arms if get_origin(arm) is Literal for choice in get_args(arm)]
    takes_text = str in arms or any(isinstance(choice, str) for choice in choices)
    if isinstance(value, int) and value.bit_length() > 64:
        raise UserError(f"{name} has {value.bit_length()} binary digits: give a smaller number")
    if takes_text and not isinstance(value, str):
        raise UserError(f"{name} is {value!s:.60}: write it in quotes, it is a text")
    if str in arms or value is None or value in choices:
        return value
    if choices:
        raise UserError(f"{name} is {_shown(value)}: choose one of {', '.join(map(str, choices))}")
    found = value
    if isinstance(value, str):
        with contextlib.suppress(ValueError, yaml.YAMLError):
            found = float(value) if float in arms else yaml.safe_load(value)
    if float in arms and type(found) is int:
        found = float(found)
    if type(found) not in arms:
        wanted = " or ".join(SCALARS[arm] for arm in arms)
        raise UserError(f"{name} is {_shown(value)}: give {wanted}")
    return found


def _unknown(key: Any, group: type, prefix: str) -> UserError:
    """The error for a name that the settings class `group` does not have; `prefix` is the group's name and a dot."""
    known = setting_names(group)
    if key in PHRASES and PHRASES[key].split()[0][2:] in known:
        return UserError(f"there is no setting {prefix}{key} (write {PHRASES[key]})")
    names = (*OTHER_NAMES.get(str(key), "").split(), str(key))
    ends = [other for name in names for other in known if other.rpartition(".")[2] == name]
    close = ends or difflib.get_close_matches(str(key), known, n=1, cutoff=0.8)
    hint = f"did you mean {prefix + close[0]!r}?" if close else "--help_all lists all of them"
    return UserError(f"there is no setting {' '.join(f'{prefix}{key}'.split()):.60} ({hint})")


# ---- help ----


def _help(settings: type, about: str, values: dict[str, Any], start: Any, everything: bool) -> str:
    """The text of --help; `values` say which class a OneOf has, and `start` has the defaults that they lead to.

    Where a settings class names its `COMMON` settings (a group's name stands for all in it), only these are shown,
    unless `everything` is asked for.
    """
    width = min(shutil.get_terminal_size().columns, 100)
    described = list(_described(settings, values, "--", start))
    common = [] if everything else vars(settings).get("COMMON", "").split()
    lines = [about.strip(), ""]
    if common:
        shown = [item for one in common for item in described if _is_in(item[0], one)]
        column = max(len(name) for name, _ in shown) + 2
        for name, text in shown:
            meaning = textwrap.shorten(_first_sentence(text), width - column, placeholder=" …")
            lines += [f"{name:{column}}{meaning}"]
            if choices := re.search(r" \(type: ([^,()]+(?: \| [^,()]+)+)", text):
                # Values are not broken at their hyphens.
                wrapped = textwrap.wrap(choices[1], width - 4, break_on_hyphens=False)
                lines += [" " * 4 + line for line in wrapped]
        names = sum(name.startswith("--") for name, _ in described)
        lines += [
            "",
            f"--config FILE reads settings from YAML, --print_config prints them, --help_all explains all {names}.",
        ]
        return "\n".join(lines) + "\n"
    lines += ["--config FILE"]
    lines += ["    YAML with settings; --key value wins over it, and over an earlier --config."]
    lines += ["--print_config", "    Print the settings as YAML, and exit."]
    for name, text in described:
        lines += [
            name,
            *textwrap.wrap(text, width, initial_indent=" " * 4, subsequent_indent=" " * 4),
        ]
    return "\n".join(lines) + "\n"


def _is_in(name: str, one: str) -> bool:
    return name == f"--{one}" or name.startswith(f"--{one}.")


def _first_sentence(text: str) -> str:
    """The first sentence of a setting's meaning, and its default."""
    meaning, _, facts = text.rpartition(" (type: ")
    default = facts.rpartition(", default: ")[2].removesuffix(")") if ", default: " in facts else ""
    first = re.split(r"(?<=[.;])\s", meaning, maxsplit=1)[0].rstrip(".;")
    return f"{first} [{default}]" if default and len(default) < 40 else first


def _described(
    cls: type, values: Any, prefix: str, start: Any = None, one_of: OneOf | None = None
) -> Iterator[tuple[str, str]]:
    """(name, meaning with type and default) of each setting of a dataclass, perhaps one of several, and of the groups
    in it."""
    values = values if isinstance(values, dict) else {}
    meanings = _meanings(cls)
    for field in dataclasses.fields(cls):
        kind = _fields(cls)[field.name]
        default = getattr(start, field.name) if type(start) is cls else _default(field)
        name, inner = prefix + field.name, values.get(field.name, {})
        (arm, *_) = arms = _arms(kind)
        group = arm if isinstance(arm, OneOf) else None
        if group is not None:
            arm = _chosen(group, inner if isinstance(inner, dict) else {}, default, name)
        if dataclasses.is_dataclass(arm):
            yield from _described(arm, inner, f"{name}.", default, group)  # type: ignore[arg-type]
            continue
        is_tag = one_of is not None and field.name == one_of.tag
        facts = f"type: {' | '.join(one_of.classes) if one_of and is_tag else _named(kind)}"
        if default is not MISSING:
            plain = json.dumps(default, default=dataclasses.asdict, ensure_ascii=False)
            facts += f", default: {default if isinstance(default, str) and default else plain}"
        yield name, f"{meanings.get(field.name, '')} ({facts})"
        for items in [get_args(x)[0] for x in arms if get_origin(x) is list]:
            if dataclasses.is_dataclass(items):
                yield from _described(items, {}, f"    {field.name}[].")  # type: ignore[arg-type]


def _meanings(cls: type) -> dict[str, str]:
    """{name: docstring} of the fields of a dataclass, or what their types say (`Meaning`)."""
    found = {
        name: mark.text
        for name, kind in _fields(cls).items()
        for mark in (kind.__metadata__ if get_origin(kind) is Annotated else ())
        if isinstance(mark, Meaning)
    }
    for base in reversed([base for base in cls.__mro__ if dataclasses.is_dataclass(base)]):
        body = ast.parse(textwrap.dedent(inspect.getsource(base))).body[0]
        assert isinstance(body, ast.ClassDef)
        for node, after in zip(body.body, body.body[1:], strict=False):
            if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
                text = after.value if isinstance(after, ast.Expr) else None
                if isinstance(text, ast.Constant) and isinstance(text.value, str):
                    found[node.target.id] = " ".join(text.value.split())
    return found


def _named(kind: Any) -> str:
    """A type in words, as --help shows it."""
    if get_origin(kind) is Annotated:
        inner, *marks = get_args(kind)
        return " ".join([_named(inner), *(str(mark) for mark in marks if isinstance(mark, Range))])
    if get_origin(kind) in (Union, UnionType):
        return " or ".join(_named(one) for one in get_args(kind))
    if get_origin(kind) is Literal:
        return " | ".join(map(str, get_args(kind)))
    if get_origin(kind) in (list, dict):
        return f"{get_origin(kind).__name__} of {_named(get_args(kind)[-1])}"
    return "null" if kind is NoneType else "any" if kind is Any else str(kind.__name__)
