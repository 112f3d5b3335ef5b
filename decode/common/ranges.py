"""Ranges of the numbers in settings: declared in the annotation of a field, and checked here.

    batch_size: Annotated[int, at_least(1)] = 32
    temperatures: list[Temperature]

A field has one range, for every number in it. Numbers that mean the same in several commands share an alias below.
Other marks of annotations, which decode/common/settings.py reads, are here too: they need no command line.
"""

import dataclasses
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Literal, get_args, get_type_hints

from decode.common.errors import UserError

LARGEST = 10**9
"""No setting is larger unless its range says so."""


@dataclass(frozen=True, repr=False)
class Range:
    """The finite numbers from `low` to `high`; `str` gives it in words."""

    low: float
    high: float = LARGEST
    low_included: bool = True
    high_included: bool = True
    or_zero: bool = False
    """0 is allowed as well, where it means off."""

    def __contains__(self, value: float) -> bool:
        if value == 0 and self.or_zero:
            return True
        above = value >= self.low if self.low_included else value > self.low
        return above and (value <= self.high if self.high_included else value < self.high)

    def __repr__(self) -> str:
        zero = "0, or " if self.or_zero else ""
        if self.low_included and self.high != LARGEST:
            return f"{zero}from {self.low:g} to {self.high:,}"
        low = f"{'at least' if self.low_included else 'above'} {self.low:g}"
        high = f" and {'at most' if self.high_included else 'below'} {self.high:,}"
        return f"{zero}{low}{high if self.high != LARGEST else ''}"


@dataclass(frozen=True)
class Spellings:
    """Marks a text that other tools spell otherwise: {their spelling: ours}."""

    ours: Mapping[str, str]


@dataclass(frozen=True)
class Meaning:
    """Says what a setting that several commands have is for, in place of a docstring in each of them."""

    text: str


@dataclass(frozen=True)
class OneOf:
    """Marks the annotation of a group that has one of several classes: `draft: Annotated[Base, OneOf("family", ...)]`.

    A default of the field says which class it is where nothing is set.
    """

    tag: str
    """The setting in the group that names its class."""
    classes: Mapping[str, type]
    """{value of that setting: the class}"""


DtypeName = Annotated[
    str,
    Spellings(
        {
            "bf16": "bfloat16",
            "fp16": "float16",
            "half": "float16",
            "fp32": "float32",
            "float": "float32",
        }
    ),
]
"""The name of a dtype in settings."""
FloatName = Literal["float32", "bfloat16", "float16"]
"""The dtypes that weights are written in."""


def at_least(low: float, most: float = LARGEST) -> Range:
    """From `low` to `most`."""
    return Range(low, most)


def above(low: float, most: float = LARGEST) -> Range:
    """Above `low`, to `most`."""
    return Range(low, most, low_included=False)


def inside(low: float, high: float) -> Range:
    """Above `low` and below `high`."""
    return Range(low, high, low_included=False, high_included=False)


def zero_or(low: float, most: float = LARGEST) -> Range:
    """0, or from `low` to `most`."""
    return Range(low, most, or_zero=True)


MAX_DRAFT_LENGTH = 1024
DraftLength = Annotated[int, at_least(1, MAX_DRAFT_LENGTH)]
"""Tokens of a chain, or levels of a tree; the target's context is a further limit, known when it is loaded."""
MatchLength = Annotated[int, at_least(1, 16)]
"""Tokens of the text's end that a lookup must find earlier in it."""
TreeNodes = Annotated[int, at_least(1, MAX_DRAFT_LENGTH)]
MAX_TREE_WIDTH = 64
TreeWidth = Annotated[int, at_least(1, MAX_TREE_WIDTH)]
TreeRank = Annotated[int, at_least(0, MAX_TREE_WIDTH - 1)]
"""Of a node among the children of its parent: 0 is the draft's most probable token."""
Count = Annotated[int, at_least(1)]
"""Of what there must be one at least: tokens, rows, steps."""
CountOrZero = Annotated[int, at_least(0)]
"""Where 0 has a meaning of its own, such as all or never."""
Temperature = Annotated[float, zero_or(0.001, 100)]
"""0 is greedy; below the least one, logits divided by it overflow."""
TopP = Annotated[float, above(0, 1)]
Share = Annotated[float, at_least(0, 1)]
Seed = Annotated[int, at_least(0, 2**32 - 1)]
"""What every library takes as a seed."""
LearningRate = Annotated[float, above(0, 10)]


def check_ranges(settings: Any, prefix: str = "") -> None:
    """UserError for a number in the dataclass `settings`, or in what it holds, that is not in its range or not finite.

    The message names the setting with its groups, `prefix` in front: methods[0].tree.nodes.
    """
    hints = get_type_hints(type(settings), include_extras=True)
    for field in dataclasses.fields(settings):
        value = getattr(settings, field.name)
        _check(value, f"{prefix}{field.name}", range_of(hints[field.name]))


def range_of(hint: Any) -> Range | None:
    """The range that stands in an annotation, also in that of the items of a list or a dict."""
    for inner in get_args(hint):
        found = inner if isinstance(inner, Range) else range_of(inner)
        if found is not None:
            return found
    return None


def _check(value: Any, name: str, range_: Range | None) -> None:
    if dataclasses.is_dataclass(value):
        check_ranges(value, f"{name}.")
    elif isinstance(value, dict):
        for key, item in value.items():
            _check(item, f"{name}.{key}", range_)
    elif isinstance(value, list | tuple):
        for i, item in enumerate(value):
            _check(item, f"{name}[{i}]", range_)
    elif isinstance(value, int | float) and not isinstance(value, bool):
        if range_ is None:
            needed = "" if isinstance(value, int) or math.isfinite(value) else "finite"
        elif value in range_:
            needed = ""
        else:
            needed = f"at most {LARGEST:,}" if value > range_.high == LARGEST else str(range_)
        if needed:
            raise UserError(f"{name} is {value}: it must be {needed}")
