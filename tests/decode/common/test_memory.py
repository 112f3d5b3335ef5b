"""Freed memory stays with a process that decodes or trains on a CPU, but for that of a model that was loaded."""

import platform
import subprocess
import sys
from collections import namedtuple

import pytest

from decode.common import machine
from decode.engine import engine
from tests.tiny import tiny_model, tiny_prompts, tiny_target
from tests.worlds import ROOT

FAULTS = """
import resource, torch
from decode.common.machine import keep_freed_memory

def tensors():
    # 80 MB, beyond what glibc ever keeps by itself, and many of 4 MB
    return float(torch.ones(20_000_000)[0]) + sum(float(torch.ones(1_000_000)[0]) for _ in range(20))

for keep in (False, True):
    if keep:
        keep_freed_memory()
    for _ in range(8):  # until the heap has found its form
        tensors()
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for _ in range(5):
        tensors()
    print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="other allocators do as they like")
def test_tensors_get_the_pages_of_those_before() -> None:
    """Catches settings that glibc does not take, and a measure that sees nothing: without them 80 MB are new pages."""
    words = [sys.executable, "-c", FAULTS]
    done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, check=True)
    new_pages, new_pages_when_kept = map(int, done.stdout.split())
    assert new_pages_when_kept < 500
    assert new_pages > 5000


LOADED_LATER = """
import torch
from decode.common.machine import keep_freed_memory
from decode.model.loading import build_runner
from tests.tiny import tiny_model

def held():
    lines = open("/proc/self/status").read().splitlines()
    return next(int(line.split()[1]) // 1000 for line in lines if line.startswith("RssAnon"))

keep_freed_memory()
model = tiny_model("llama")
before = held()
weights = [torch.ones(1_000_000) for _ in range(100)]
above = torch.ones(1_000)  # so that the heap cannot be cut off at its end
weights.clear()
kept = held() - before
build_runner(model)
print(kept, held() - before)
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="other allocators do as they like")
def test_a_model_that_is_loaded_later_does_not_hold_its_float_weights() -> None:
    """Catches gigabytes that a process keeps once it has decoded: float weights of a draft that was then rounded."""
    words = [sys.executable, "-c", LOADED_LATER]
    done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, check=True)
    kept, held = map(int, done.stdout.split())
    assert kept > 300  # MB: without giving it back
    assert held < 50


@pytest.mark.parametrize("available", [10, 90])
def test_freed_memory_is_returned_where_it_is_scarce(
    available: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Catches a training that grows by half a gigabyte a step until the system ends it, and pages that are mapped anew
    for each step of a machine with room."""
    memory = namedtuple("memory", "available total")
    returned: list[int] = []
    monkeypatch.setattr(machine.psutil, "virtual_memory", lambda: memory(available, 100))
    monkeypatch.setattr(machine, "return_freed_memory", lambda: returned.append(1))
    machine.return_freed_memory_if_scarce()
    assert returned == [1] * (available == 10)


def test_requests_return_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches a sampling run that holds the holes between prompts of ever other lengths."""
    returned: list[int] = []
    monkeypatch.setattr(engine, "return_freed_memory_if_scarce", lambda: returned.append(1))
    for _ in range(2):
        engine.decode(tiny_target(tiny_model("llama")), None, tiny_prompts(5), max_new_tokens=2)
    assert returned == [1, 1]
