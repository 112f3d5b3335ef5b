"""scripts/fastest_dtype.py: the choice, and what it prints."""

import pytest

from scripts import fastest_dtype


@pytest.mark.parametrize(
    ("float32", "bfloat16", "chosen"),
    [
        ([10, 40], [5, 20], "bfloat16"),
        ([10, 40], [12, 90], "float32"),  # has the instructions, and is slower
        ([10, 40], [13, 20], "bfloat16"),
        ([10, 40], [25, 30], "float32"),
    ],
)
def test_the_faster_dtype_is_chosen(
    float32: list[float], bfloat16: list[float], chosen: str
) -> None:
    """Catches the slower one, and a choice by one size alone."""
    assert fastest_dtype.fastest({"float32": float32, "bfloat16": bfloat16}) == chosen


def test_it_prints_what_the_shell_reads(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Catches words in another order: scripts/env.sh reads the dtype, then accelerate's name."""
    monkeypatch.setattr(fastest_dtype, "LAYERS", 2)
    monkeypatch.setattr(fastest_dtype, "REPEATS", 1)
    fastest_dtype.main()
    assert capsys.readouterr().out in ("float32 no\n", "bfloat16 bf16\n")
