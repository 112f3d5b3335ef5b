"""Kernels of ours are used on a GPU where they pass their check, and one line says where they do not."""

from collections.abc import Callable

import pytest
import torch

from decode.common import damage
from decode.common.errors import UserError
from decode.model import attention
from decode.model.gpu import kernel_choice
from decode.model.gpu.cuda_operations import KERNELS
from decode.model.gpu.kernel_choice import (
    ATTENTION_SETTING,
    KERNELS_SETTING,
    StepShape,
    check_close,
    choose_kernels,
)

GPU = torch.device("cuda", 0)
SHAPE = StepShape(2, 4, 64, 64, torch.bfloat16, 0.125, None, None, False)
OTHER = StepShape(2, 4, 256, 256, torch.bfloat16, 0.125, None, None, False)


@pytest.fixture(autouse=True)
def card(monkeypatch: pytest.MonkeyPatch) -> None:
    """A card of 9.0 with Triton, on which every check passes."""
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    monkeypatch.setattr(attention, "HAS_TRITON", True)
    monkeypatch.setattr(kernel_choice, "VERDICTS", {})
    damage.warn_once.cache_clear()
    monkeypatch.setattr(attention.SETTINGS, "split_kv", False)
    monkeypatch.setattr(KERNELS, "own", False)
    for name in ("compare_attention", "compare_layer_kernels"):
        monkeypatch.setattr(kernel_choice, name, lambda *args: None)
    for name in (ATTENTION_SETTING, KERNELS_SETTING):
        monkeypatch.delenv(name, raising=False)


def failing(message: str) -> Callable[..., None]:
    def check(*args: object) -> None:
        raise RuntimeError(message)

    return check


def chosen(*shapes: StepShape, device: torch.device = GPU) -> tuple[bool, bool]:
    choose_kernels(shapes, torch.bfloat16, device)
    return attention.SETTINGS.split_kv, KERNELS.own


def test_kernels_that_agree_are_used() -> None:
    """Catches kernels that stay off where every check passes, or that a CPU is given."""
    assert chosen(SHAPE, device=torch.device("cpu")) == (False, False)
    assert chosen(SHAPE) == (True, True)


def test_a_kernel_that_fails_is_left_out_for_good(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Catches a verdict that the next model's load forgets, and a fall-back without a word."""
    monkeypatch.setattr(
        kernel_choice, "compare_attention", failing("out of resource: shared\nmore")
    )
    assert chosen(OTHER) == (False, True)
    said = capsys.readouterr().err
    assert len(said.splitlines()) == 1
    assert "(out of resource: shared; DRAFTSMITH_STEP_ATTENTION)" in said
    monkeypatch.setattr(kernel_choice, "compare_attention", lambda *args: None)
    assert chosen(SHAPE) == (False, True)


def test_settings_force_and_forbid(monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches settings without effect: forced kernels are not checked, forbidden ones stay off."""
    monkeypatch.setattr(kernel_choice, "compare_attention", failing("wrong"))
    monkeypatch.setenv(ATTENTION_SETTING, "split_kv")
    monkeypatch.setenv(KERNELS_SETTING, "torch")
    assert chosen(SHAPE) == (True, False)
    monkeypatch.setenv(ATTENTION_SETTING, "sdpa")
    assert chosen(SHAPE) == (False, False)
    monkeypatch.setenv(ATTENTION_SETTING, "flash")
    with pytest.raises(UserError, match="auto, split_kv, sdpa"):
        chosen(SHAPE)


def test_old_cards_keep_attention_of_torch(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Catches a T4 that is given a kernel whose products spill."""
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (7, 5))
    assert chosen(SHAPE) == (False, True)
    assert "old card" in capsys.readouterr().err


@pytest.mark.parametrize("error", [0.0, 0.02, 0.2])
def test_differences_beyond_rounding_are_found(error: float) -> None:
    """Catches a tolerance in which wrong attention passes; bf16 rounds at 0.004."""
    right = torch.ones(8)
    found = (right + error).bfloat16()
    if error < 0.1:
        check_close(found, right, "x")
    else:
        with pytest.raises(AssertionError, match="x differs by 2"):
            check_close(found, right, "x")
