"""torch.compile for the two halves of a round: fewer and larger kernels, no Python between them."""

import re
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import torch
from torch._inductor import config
from torch.backends import mkldnn

COMPILE_OPTIONS: dict[str, dict[str, Any]] = {
    # The whole graph is one C++ function; matrix products are chosen by timing, which needs `frozen` weights.
    "cpu": {"cpp_wrapper": True, "max_autotune": True},
    # Graphs of kernels are captured by decode/engine/cuda_graph.py, a round at a time.
    "cuda": {"max_autotune": True, "triton.cudagraphs": False},
}
LATER_LAYER_GUARD = re.compile(r"_modules\[.[1-9]\d*.\]\._modules")
"""What lies inside a layer after the first, in the tracer's names of things."""
RECOMPILE_LIMIT = 64
"""Versions of one function that may exist at once: batch sizes, draft lengths, models."""


@cache
def compile_function(function: Callable[..., Any], device_type: str) -> Callable[..., Any]:
    """`function` compiled whole for fixed shapes: the first call of each shape takes a minute or two.

    Lengths may change without compiling anew. Inductor keeps its results on disk (TORCHINDUCTOR_CACHE_DIR), from where
    the next process has them in about a quarter of the time.
    Raises what torch.compile raises if a part cannot be compiled: nothing falls back to eager unseen.
    """
    torch._dynamo.config.recompile_limit = max(
        RECOMPILE_LIMIT, torch._dynamo.config.recompile_limit
    )
    options = dict(COMPILE_OPTIONS[device_type])
    if device_type == "cpu":
        # Elsewhere weights are inputs, whose identity no guard asks for; and a CUDA graph asks none.
        options["guard_filter_fn"] = filter_guards
    made = torch.compile(function, fullgraph=True, dynamic=False, options=options)
    return with_frozen_weights(made) if device_type == "cpu" else made


def filter_guards(guards: Sequence[Any]) -> list[bool]:
    """Which of the tracer's guards are asked before each call: asking all 2,600 takes as long as a tenth of a round.

    Left out are other libraries' globals, and what lies inside a model's layers after the first: models are told apart
    by their first layer's (frozen) weights, how many layers they have and each layer's hooks, which are the taps.
    """
    return [
        guard.name.endswith("ForwardContext.split_kv")
        if guard.is_global
        else LATER_LAYER_GUARD.search(guard.name) is None
        for guard in guards
    ]


def with_frozen_weights(made: Callable[..., Any]) -> Callable[..., Any]:
    """`made` with weights as constants, packed once for the matrix products: a copy, and later changes go unseen.

    The tracer asks for this setting as well, and among the options of torch.compile it is not seen: without it
    products of few rows take three times as long. oneDNN's own packing, which is slower, cannot be kept on disk.
    """

    def run(*args: Any) -> Any:
        before = config.freezing, mkldnn.enabled
        config.freezing, mkldnn.enabled = True, False  # type: ignore[assignment]
        try:
            return made(*args)
        finally:
            config.freezing, mkldnn.enabled = before

    return run
