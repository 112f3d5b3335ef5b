"""Which mode `auto` is: on a GPU that a target and drafts of a few facts stand for."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from decode.engine.engine import SpeculativeEngine
from decode.engine.modes import MODES, pick_mode
from tests.tiny import tiny_model, tiny_target


def target(device: str = "cuda", can_compile: bool = True) -> Any:
    runner = SimpleNamespace(device=torch.device(device), can_compile=can_compile)
    return SimpleNamespace(runner=runner, name="T")


def draft(name: str, runs: str = "device") -> Any:
    return SimpleNamespace(name=name, runs=runs)


EAGLE, LOOKUP = draft("eagle"), draft("ngram", "host")
MIRROR = draft("mirror", "pass")


@pytest.mark.parametrize(
    ("target", "drafts", "on_host", "triton", "line"),
    [
        (target(), [None], "", True, "graph"),
        (target(), [None, EAGLE], "", True, "graph"),
        (target(), [EAGLE], "", False, "captured, since torch has no Triton here"),
        (target(), [None, EAGLE, LOOKUP], "", True,
         "eager, since the host takes part in rounds of ngram"),
        (target(), [MIRROR, LOOKUP], "", True,
         "eager, since the host takes part in rounds of mirror, ngram"),
        (target(), [EAGLE], "grammars", True, "eager, since the host takes part in rounds of grammars"),
        (target(can_compile=False), [None, EAGLE], "", True,
         "eager, since target 'T' has more than attention, or is on several devices"),
    ],
)  # fmt: skip
def test_auto_on_a_gpu(
    target: Any, drafts: list[Any], on_host: str, triton: bool, line: str,
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    """Catches Python's eager rounds where a graph could replay them, a graph that target or a draft cannot have, and a
    choice that nobody is told."""
    monkeypatch.setattr("decode.engine.modes.has_triton", lambda: triton)
    assert pick_mode("auto", target, drafts, on_host) == line.split(",")[0]
    assert capsys.readouterr().err == f"mode auto: {line}\n"
    for asked in MODES:
        assert pick_mode(asked, target, drafts, on_host) == asked


def test_auto_compiles_nothing_for_one_answer(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Catches a minute of compilation before the first token of a single prompt."""
    monkeypatch.setattr("decode.engine.modes.has_triton", lambda: True)
    assert pick_mode("auto", target(), [EAGLE], compiles=False) == "captured"
    assert capsys.readouterr().err == "mode auto: captured\n"


def test_auto_on_a_cpu_is_eager(capsys: pytest.CaptureFixture[str]) -> None:
    """Catches a line, or another mode, on a CPU."""
    assert pick_mode("auto", target("cpu"), [None, EAGLE]) == "eager"
    assert SpeculativeEngine(tiny_target(tiny_model("llama")), mode="auto").mode == "eager"
    assert capsys.readouterr().err == ""
