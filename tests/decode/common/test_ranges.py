"""Ranges of numbers: what they hold, how they read, and where a number out of range is found."""

import math
from dataclasses import dataclass, field
from typing import Annotated, Any

import pytest

from decode.common.errors import UserError
from decode.common.ranges import (
    LARGEST,
    Count,
    Range,
    Temperature,
    above,
    at_least,
    check_ranges,
    inside,
    range_of,
    zero_or,
)
from decode.common.settings import parse_settings


@dataclass
class Part:
    """Settings within settings."""

    weight: Annotated[float, above(0)] = 1.0
    rows: list[list[Annotated[int, at_least(0, 3)]]] = field(default_factory=list)


@dataclass
class Whole:
    """Settings of a command."""

    count: Count = 1
    maybe: Count | None = None
    temperatures: list[Temperature] = field(default_factory=list)
    mix: dict[str, Annotated[float, at_least(0)]] = field(default_factory=dict)
    part: Part = field(default_factory=Part)
    parts: list[Part] = field(default_factory=list)
    named: dict[str, Part] = field(default_factory=dict)
    data: str | list[Part] = "x"
    free: dict[str, Any] = field(default_factory=dict)
    flag: bool = True
    text: str = ""


@pytest.mark.parametrize(
    ("range_", "inner", "outer", "words"),
    [
        (at_least(1), [1, LARGEST], [0, -1, LARGEST + 1], "at least 1"),
        (at_least(0, 3), [0, 3], [-1, 4], "from 0 to 3"),
        (above(0), [1e-300, 1], [0, -0.0, -1], "above 0"),
        (above(0, 1), [0.5, 1], [0, 1.1], "above 0 and at most 1"),
        (inside(0, 1), [0.5], [0, 1], "above 0 and below 1"),
        (zero_or(0.6, 1), [0, 0.6, 1], [0.5, 1.1, -1], "0, or from 0.6 to 1"),
        (at_least(0, 2**32 - 1), [0, 2**32 - 1], [2**32, 10**5000], "from 0 to 4,294,967,295"),
    ],
)
def test_bounds(range_: Range, inner: list[float], outer: list[float], words: str) -> None:
    """Catches a bound that is off, an open end that is closed, and words that say something else."""
    assert all(value in range_ for value in inner)
    assert not any(value in range_ for value in [*outer, math.nan, math.inf, -math.inf])
    assert str(range_) == words


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        (Whole(count=0), "count is 0: it must be at least 1"),
        (Whole(count=10**10), "count is 10000000000: it must be at most 1,000,000,000"),
        (Whole(maybe=0), "maybe is 0"),
        (Whole(temperatures=[0, -1.0]), r"temperatures\[1\] is -1.0: it must be 0, or from 0.001"),
        (Whole(temperatures=[math.nan]), r"temperatures\[0\] is nan"),
        (Whole(mix={"a": 1.0, "b": -0.1}), "mix.b is -0.1: it must be at least 0"),
        (Whole(part=Part(math.inf)), "part.weight is inf"),
        (Whole(parts=[Part(), Part(rows=[[0], [1, 9]])]), r"parts\[1\].rows\[1\]\[1\] is 9"),
        (Whole(named={"x": Part(0.0)}), "named.x.weight is 0.0: it must be above 0"),
        (Whole(data=[Part(-1.0)]), r"data\[0\].weight is -1.0"),
        (Whole(free={"a": [math.nan]}), r"free.a\[0\] is nan: it must be finite"),
    ],
)
def test_numbers_out_of_range_are_named(settings: Whole, said: str) -> None:
    """Catches a number that is passed over because of where it stands, and a name that is not the setting's."""
    with pytest.raises(UserError, match=f"^{said}") as error:
        check_ranges(settings)
    assert "\n" not in str(error.value)


def test_what_is_in_range_passes() -> None:
    """Catches booleans, texts, null and free numbers that are taken for numbers with a range."""
    check_ranges(Whole(maybe=None, free={"a": -3, "b": True}, flag=False, text="-1", data="-1"))
    check_ranges(Whole(5, 5, [0.0, 1.0], {"a": 0.0}, Part(2.0, [[], [3]]), [Part()]))


def test_the_parser_checks_ranges_and_shows_them(capsys: pytest.CaptureFixture[str]) -> None:
    """Catches settings that no one checks, and a --help that says nothing of a range."""
    for argv, said in (
        (["--count", "0"], "count is 0"),
        (["--parts", "[{weight: .nan}]"], r"parts\[0\].weight is nan"),
        (["--part.weight=-.inf"], "part.weight is -inf"),
        (["--mix", "{a: 1e999}"], "mix.a is inf"),
    ):
        with pytest.raises(UserError, match=said):
            parse_settings(Whole, "", argv)
    with pytest.raises(SystemExit):
        parse_settings(Whole, "", ["--help"])
    text = " ".join(capsys.readouterr().out.split())
    assert "(type: int at least 1, default: 1)" in text
    assert "Annotated" not in text


def test_range_of_looks_into_lists_and_unions() -> None:
    """Catches an annotation whose range is overlooked."""
    for kind in (Count, Count | None, list[Count], list[list[Count]], dict[str, Count]):
        assert range_of(kind) == at_least(1)
    assert range_of(int) is range_of(list[int]) is None
