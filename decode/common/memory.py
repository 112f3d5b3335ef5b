"""How this process uses the memory of the host."""

import ctypes
import functools
import platform

M_TRIM_THRESHOLD, M_TOP_PAD, M_MMAP_MAX = -1, -2, -4
"""Parameters of glibc's mallopt."""
TOP_PAD = 1 << 26


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
    libc.mallopt(M_MMAP_MAX, 0)  # no block has a mapping of its own
    libc.mallopt(M_TRIM_THRESHOLD, -1)  # free memory at the end of the heap stays
    libc.mallopt(M_TOP_PAD, TOP_PAD)
