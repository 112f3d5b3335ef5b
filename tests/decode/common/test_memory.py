"""Freed memory stays with a process that decodes or trains on a CPU."""

import platform
import subprocess
import sys

import pytest

from tests.worlds import ROOT

FAULTS = """
import resource, torch
from decode.common.memory import keep_freed_memory

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
