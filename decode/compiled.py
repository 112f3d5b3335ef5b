"""torch.compile for the two halves of a round: fewer and larger kernels, no Python between them."""

from collections.abc import Callable
from functools import cache
from typing import Any

import torch

OPTIONS: dict[str, dict[str, Any]] = {
    # Weights become constants and are packed for the matrix products; the whole graph is one C++ function.
    "cpu": {"freezing": True, "cpp_wrapper": True, "max_autotune": True},
    # Graphs of kernels are captured by decode/graphs.py, a round at a time.
    "cuda": {"max_autotune": True, "triton.cudagraphs": False},
}
SHAPES = 64
"""Versions of one function that may exist at once: batch sizes, draft lengths, models."""


@cache
def fast(function: Callable[..., Any], device_type: str) -> Callable[..., Any]:
    """`function` compiled whole for fixed shapes: the first call of each shape takes about a minute.

    Lengths may change without compiling anew. Inductor keeps its results on disk (TORCHINDUCTOR_CACHE_DIR).
    Raises what torch.compile raises if a part cannot be compiled: nothing falls back to eager unseen.
    """
    torch._dynamo.config.recompile_limit = max(SHAPES, torch._dynamo.config.recompile_limit)
    return torch.compile(function, fullgraph=True, dynamic=False, options=OPTIONS[device_type])
