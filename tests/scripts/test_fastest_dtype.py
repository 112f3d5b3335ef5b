"""scripts/fastest_dtype.py: the choice, and what it prints."""

import pytest
import torch

from decode.devices import choice
from scripts import fastest_dtype
from train.trainer.launch import Claims, settle_precision


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


@pytest.mark.parametrize(
    ("capability", "printed", "precision"),
    [((7, 5), "float16 fp16", "fp16"), ((8, 0), "bfloat16 bf16", "bf16"),
     ((7, 0), "float16 fp16", "fp16"), ((9, 0), "bfloat16 bf16", "bf16")],
)  # fmt: skip
def test_bfloat16_that_is_emulated_is_not_chosen(
    capability: tuple[int, int], printed: str, precision: str, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    """Catches bf16 on a T4 or V100, which torch calls supported since it emulates it."""
    monkeypatch.setattr(fastest_dtype, "find_gpu", lambda: True)

    def supported(including_emulation: bool = True) -> bool:
        return including_emulation or capability >= (8, 0)

    monkeypatch.setattr(torch.cuda, "is_bf16_supported", supported)
    fastest_dtype.main()
    assert capsys.readouterr().out == f"{printed}\n"
    assert settle_precision("auto", Claims(), "cuda", choice.has_bfloat16()) == precision
    assert settle_precision("auto", Claims(), "cpu", choice.has_bfloat16()) == "no"
