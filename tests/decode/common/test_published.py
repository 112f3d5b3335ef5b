"""Dataclasses become JSON and come back; what is published of them is what their fields say."""

import json
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

import pytest

from decode.common.errors import UserError
from decode.common.published import Digest, Name, Place, Private, Word, published
from decode.common.typed_json import (
    Estimate,
    IntervalKey,
    Omitted,
    WrongTypeError,
    from_json,
    read_object,
    to_json,
)
from tests.planted_secrets import MARKED


@dataclass(frozen=True)
class Chain:
    kind: Literal["chain"]
    k: int


@dataclass(frozen=True)
class Tree:
    kind: Literal["tree"]
    paths: list[list[int]]


@dataclass(frozen=True)
class Row:
    name: Name
    tau: Estimate
    pooled: Annotated[Estimate, IntervalKey("ci")]
    alpha: list[Estimate]
    argv: Private[list[str]]
    draft: Place | None = None
    counts: dict[Word, int] = field(default_factory=dict)
    weights: Omitted[Digest] = None
    shape: Chain | Tree | None = None
    note: Name | bool | float = 0


ROW = Row(
    "a", Estimate(1.5, (1, 2)), Estimate(2), [Estimate(0.5, (0.1, 0.6)), Estimate()], ["x"], "/home/me/d",
    {"eos": 3}, None, Tree("tree", [[0], [0, 1]]), True,
)  # fmt: skip
JSON: dict[str, Any] = {
    "name": "a", "tau": 1.5, "tau_ci": [1, 2], "pooled": 2, "ci": None, "alpha": [0.5, None],
    "alpha_ci": [[0.1, 0.6], None], "argv": ["x"], "draft": "/home/me/d", "counts": {"eos": 3},
    "shape": {"kind": "tree", "paths": [[0], [0, 1]]}, "note": True,
}  # fmt: skip


def test_a_result_comes_back_as_it_was_written() -> None:
    """Catches an interval that is lost, another order of fields, a union that is read as its other type."""
    assert json.dumps(to_json(ROW)) == json.dumps(JSON)
    assert from_json(Row, json.loads(json.dumps(JSON))) == ROW
    none = Row("a", Estimate(), Estimate(), [], [], weights="abcd")
    assert from_json(Row, to_json(none)) == none
    assert {"weights": "abcd", "alpha": [], "alpha_ci": []}.items() <= to_json(none).items()


def test_earlier_and_later_files_are_read() -> None:
    old = {"name": "a", "tau": 1, "pooled": 1, "alpha": [1], "argv": [], "unknown": 3}
    assert from_json(Row, old) == Row("a", Estimate(1), Estimate(1), [Estimate(1)], [])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"tau": "x"}, "tau is not a number"),
        ({"tau_ci": [1, True]}, r"tau_ci\[1\] is not a number"),
        ({"name": None}, "name is not a text"),
        ({"counts": {"eos": None}}, "counts.eos is not a number"),
        ({"shape": {"kind": "chain"}}, "shape has no 'k'"),
        ({"alpha_ci": [None]}, "other numbers of alpha and alpha_ci"),
        ({"draft": 3}, "draft is not a text"),
    ],
)
def test_what_is_of_another_type_is_told(change: Any, message: str, tmp_path: Any) -> None:
    with pytest.raises(WrongTypeError, match=message):
        from_json(Row, JSON | change)
    (tmp_path / "row.json").write_text(json.dumps(JSON | change))
    with pytest.raises(UserError, match=rf"row.json is not a row: .*{message}"):
        read_object(Row, tmp_path / "row.json", "a row")


def test_private_and_unknown_fields_are_left_out() -> None:
    shown = published(ROW, Row, "row.json")
    assert shown == {k: v for k, v in JSON.items() if k != "argv"} | {"draft": "d"}
    assert published(JSON | {"unknown": "x"}, Row, "row.json") == shown
    assert list(published(dict(reversed(JSON.items())), Row, "row.json")) == list(shown)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"name": MARKED["GitHub"]}, "row.json: name holds what looks like a GitHub token"),
        ({"counts": {MARKED["GitHub"]: 1}}, "a key of row.json: counts holds"),
        ({"tau": MARKED["GitHub"]}, "row.json: tau holds"),
        ({"tau": float("nan")}, "row.json: tau is not a number"),
        ({"shape": {"kind": "tree", "paths": [["x"]]}}, r"shape.paths\[0\]\[0\] is not a number"),
        ({"alpha": {}}, "row.json: alpha is not a list"),
        ({"name": "x" * 81}, "row.json: name is not a name of at most 80"),
    ],
)
def test_what_is_not_to_be_published_is_refused(change: Any, message: str) -> None:
    with pytest.raises(UserError, match=message) as caught:
        published(JSON | change, Row, "row.json")
    assert MARKED["GitHub"] not in str(caught.value)


@pytest.mark.parametrize("kind", [str, list[str], dict[str, int], dict[Name, str], Any, str | None])
def test_a_text_must_say_what_it_holds(kind: Any) -> None:
    """Catches a new field of free text, which would be published as it is."""
    value: Any = {"a": "b"} if "dict" in str(kind) else ["a"] if "list" in str(kind) else "a"
    with pytest.raises(TypeError, match="does not say what the text may hold"):
        published(value, kind, "x")
