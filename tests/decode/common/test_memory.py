"""Freed memory stays with a process that decodes or trains on a CPU, but for that of a model that was loaded."""

import platform
import subprocess
import sys

import pytest

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
