"""Dataclasses as JSON: `to_json` writes every field, `from_json` reads it back, and files of earlier versions.

Fields may be dataclasses, lists, tuples, dicts, unions, and an Estimate, which is two fields in JSON.
"""

from collections.abc import Iterator
from dataclasses import MISSING, dataclass, fields, is_dataclass
from functools import cache
from itertools import repeat
from pathlib import Path
from types import NoneType, UnionType
from typing import (  # fmt: skip
    Annotated,
    Any,
    Literal,
    NamedTuple,
    TypeVar,
    Union,
    get_args,
    get_origin,
    get_type_hints,
)

from decode.common.errors import UserError
from decode.common.files import read_json_object
from decode.common.ranges import OneOf

T = TypeVar("T")


class Estimate(NamedTuple):
    """A value with its interval: `tau` and `tau_ci` in JSON, null where there is none. A list of them is two lists."""

    value: float | None = None
    ci: tuple[float, float] | None = None


@dataclass(frozen=True)
class IntervalKey:
    """The JSON name of an Estimate's interval, where it is not the value's name with _ci."""

    name: str


NUMBER: Any = float | None
INTERVAL: Any = tuple[float, float] | None
OMITTED = object()
Omitted = Annotated[T | None, OMITTED]  # not in JSON where it is None


class WrongTypeError(ValueError):
    """A value that is not of its type; the message says what is wrong."""


class Field(NamedTuple):
    """A field of a dataclass. `keys` are its names in JSON with their types: two of an Estimate."""

    name: str
    keys: dict[str, Any]
    marks: tuple[Any, ...]  # its annotations
    required: bool


@cache
def fields_of(cls: Any) -> list[Field]:
    hints, found = get_type_hints(cls, include_extras=True), []
    for field in fields(cls):
        kind = hints[field.name]
        marks = getattr(kind, "__metadata__", ())
        interval = next((m.name for m in marks if isinstance(m, IntervalKey)), f"{field.name}_ci")
        arms = [arm for arm, _ in arms_of(kind)]
        keys = {field.name: kind}
        if Estimate in arms:
            keys = {field.name: NUMBER, interval: INTERVAL}
        elif list[Estimate] in arms:
            keys = {field.name: list[NUMBER] | None, interval: list[INTERVAL] | None}
        required = field.default is MISSING and field.default_factory is MISSING
        found.append(Field(field.name, keys, marks, required))
    return found


def arms_of(kind: Any) -> list[tuple[Any, tuple[Any, ...]]]:
    """(type, its annotations) of each type in a union, None left out."""
    if get_origin(kind) is Annotated:
        return [(arm, (*own, *kind.__metadata__)) for arm, own in arms_of(kind.__origin__)]
    if get_origin(kind) in (Union, UnionType):
        return [pair for arm in get_args(kind) if arm is not NoneType for pair in arms_of(arm)]
    return [(kind, ())]


def arm_for(kind: Any, value: Any) -> tuple[Any, tuple[Any, ...]]:
    """The arm of a union that the JSON `value` belongs to: by its shape, and among dataclasses by their tags, fields
    with one literal value. The first arm if it belongs to none."""
    arms = arms_of(kind)
    for group in [mark for _, marks in arms for mark in marks if isinstance(mark, OneOf)]:
        if isinstance(value, dict) and value.get(group.tag) in group.classes:
            return group.classes[value[group.tag]], ()
    fitting = [arm for arm in arms if shape_of(arm[0]) in (JSON_SHAPES.get(type(value)), Any)]
    if len(fitting) > 1:
        fitting = [arm for arm in fitting if _has_tags(arm[0], value)]
    if len(fitting) > 1:
        fitting = [arm for arm in fitting if _required(arm[0]) <= set(value)]
    return (*fitting, *arms)[0]


def _has_tags(arm: Any, value: Any) -> bool:
    tags = [
        (field.name, get_args(field.keys[field.name]))
        for field in (fields_of(arm) if is_dataclass(arm) else ())  # type: ignore[arg-type]
        if get_origin(field.keys[field.name]) is Literal
    ]
    return all(value.get(name) in words for name, words in tags if len(words) == 1)


def _required(arm: Any) -> set[str]:
    found: list[Field] = fields_of(arm) if is_dataclass(arm) else []  # type: ignore[arg-type]
    return {field.name for field in found if field.required}


JSON_SHAPES: dict[Any, Any] = {kind: kind for kind in (dict, list, str, bool, float)}
JSON_SHAPES |= {tuple: list, int: float}
SHAPES = dict(
    zip(JSON_SHAPES, ("a mapping", "a list", "a text", "true or false", "a number"), strict=False)
)


def shape_of(arm: Any) -> Any:
    """What JSON has for the type, as JSON_SHAPES; Any where it may have anything."""
    if is_dataclass(arm):
        return dict
    return str if get_origin(arm) is Literal else JSON_SHAPES.get(get_origin(arm) or arm, Any)


def to_json(value: Any) -> Any:
    """The value with all its fields, as dicts, lists, texts and numbers."""
    if isinstance(value, dict):
        return {key: to_json(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [to_json(item) for item in value]
    if not is_dataclass(value):
        return value
    found: dict[str, Any] = {}
    for name, keys, marks, _ in fields_of(type(value)):  # type: ignore[arg-type]
        item = getattr(value, name)
        if len(keys) == 2:
            both: Any = ([], []) if item == [] else item or (None, None)
            if isinstance(item, list) and item:
                both = zip(*item, strict=True)
            found |= zip(keys, to_json(list(both)), strict=True)
        elif item is not None or OMITTED not in marks:
            found[name] = to_json(item)
    return found


def from_json(kind: type[T], data: Any) -> T:
    """What `to_json` wrote: missing fields get their defaults, and unknown ones are ignored.

    WrongTypeError that names the field for a value of another type, and for a missing field without a default.
    """
    value: T = _read(kind, data, "")
    return value


def _read(kind: Any, data: Any, where: str) -> Any:
    arm, _ = arm_for(kind, data)
    shape, inner = shape_of(arm), get_args(arm)
    if data is None and _takes_none(kind):
        return None
    if shape not in (JSON_SHAPES.get(type(data)), Any):
        raise WrongTypeError(f"{where or 'it'} is not {SHAPES[shape]}")
    if is_dataclass(arm):
        return arm(**dict(_read_fields(arm, data, where)))  # type: ignore[operator]
    if shape is list:
        items = [_read(inner[0], item, f"{where}[{i}]") for i, item in enumerate(data)]
        return items if get_origin(arm) is list else tuple(items)
    if shape is dict:
        return {key: _read(inner[1], item, f"{where}.{key}") for key, item in data.items()}
    return data


def _takes_none(kind: Any) -> bool:
    if get_origin(kind) is Annotated:
        return _takes_none(kind.__origin__)
    return kind is Any or NoneType in get_args(kind)


def _read_fields(cls: Any, data: dict[str, Any], where: str) -> Iterator[tuple[str, Any]]:
    prefix = f"{where}." if where else ""
    for name, keys, _, required in fields_of(cls):
        if name not in data:
            if required:
                raise WrongTypeError(f"{where or 'it'} has no {name!r}")
            continue
        values = [_read(kind, data.get(key), f"{prefix}{key}") for key, kind in keys.items()]
        if len(keys) == 2 and keys[name] == NUMBER:
            yield name, Estimate(*values)
        elif len(values) == 1 or values[0] is None:
            yield name, values[0]
        elif len(values[0]) == len(values[1] or values[0]):
            yield name, list(map(Estimate, values[0], values[1] or repeat(None)))
        else:
            raise WrongTypeError(f"{where or 'it'} has other numbers of {' and '.join(keys)}")


def read_object(cls: type[T], path: str | Path, what: str) -> T:
    """The JSON file as a `cls`. UserError that names it unless it is `what`, as "tuned.json of eval/tune.py"."""
    try:
        return from_json(cls, read_json_object(path, what))
    except WrongTypeError as error:
        raise UserError(f"{path} is not {what}: {error}") from None
