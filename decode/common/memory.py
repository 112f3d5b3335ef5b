"""How this process uses the memory of the host."""

import ctypes
import functools
import os
import platform


@functools.cache
def keep_freed_memory() -> None:
    """Makes this process keep freed memory for its next tensors. Without glibc nothing is changed.

    By default glibc returns large blocks to the system, which maps and zeroes other pages for the next tensor: on a CPU
    that takes longer than many an operation on them (docs/log, 2026-11-24). The price is that the process holds as
    much memory as it ever needed until it ends.
    """
    if platform.libc_ver()[0] != "glibc":
        return
    libc = ctypes.CDLL(None)
    libc.mallopt(-4, 0)  # M_MMAP_MAX: no block has a mapping of its own
    libc.mallopt(-1, -1)  # M_TRIM_THRESHOLD: free memory at the end of the heap stays
    libc.mallopt(-2, 1 << 26)  # M_TOP_PAD: the heap grows by 64 MiB at least


def return_freed_memory() -> None:
    """Gives the system what was freed until now, also after `keep_freed_memory`. Without glibc nothing is done.

    A model whose float weights were replaced by others would hold their memory as well.
    """
    if platform.libc_ver()[0] == "glibc":
        ctypes.CDLL(None).malloc_trim(0)


def use_huge_pages() -> None:
    """Makes torch ask Linux for pages of 2 MiB for large tensors, unless the environment says otherwise.

    Products of few rows read all weights: in eight bits at 55 to 59 GB/s instead of 39 (docs/log, 2026-11-26). torch
    reads the variable at its first tensor, so this is called before torch is loaded.
    """
    os.environ.setdefault("THP_MEM_ALLOC_ENABLE", "1")
