"""torch.compile for the two halves of a round: fewer and larger kernels, and the code of one layer for all layers."""

import re
from collections.abc import Callable, Sequence
from functools import cache
from threading import Thread
from typing import Any

import torch

COMPILE_OPTIONS: dict[str, dict[str, Any]] = {
    # Checks of shapes before each kernel take a tenth of a small model's round.
    "cpu": {"size_asserts": False, "alignment_asserts": False},
    # decode/engine/cuda_graph.py captures CUDA graphs, of a whole round each.
    "cuda": {"max_autotune": True, "triton.cudagraphs": False},
}
UNCHECKED = re.compile(r"_modules\[.[1-9]\d*.\]\.(_modules|forward)|\.packed$")
"""Matches dynamo's names of everything inside a layer after the first, and of packed weights, which have no strides."""
RECOMPILE_LIMIT = 64
"""Compiled versions of one function that may exist at once: batch sizes, draft lengths, models."""


@cache
def compile_function(function: Callable[..., Any], device_type: str) -> Callable[..., Any]:
    """`function` compiled as one graph for fixed shapes, with the layers of a model as regions of it that share code.

    Changed lengths need no new compilation, nor do changed weights, which are inputs of the code. Inductor caches its
    results on disk (TORCHINDUCTOR_CACHE_DIR); dynamo's trace is made anew in each process.
    Raises what torch.compile raises if a part cannot be compiled: there is no silent fallback to eager mode.
    """
    torch._dynamo.config.recompile_limit = max(
        RECOMPILE_LIMIT, torch._dynamo.config.recompile_limit
    )
    options = dict(COMPILE_OPTIONS[device_type])
    if device_type == "cpu":
        # On CUDA replaying a CUDA graph checks no guards.
        options["guard_filter_fn"] = filter_guards
        begin_instruction_trials()
    return torch.compile(function, fullgraph=True, dynamic=False, options=options)


@cache
def begin_instruction_trials() -> None:
    """Has inductor try the CPU's vector instructions in a thread, for which it would wait after dynamo's trace."""
    from torch._inductor.cpu_vec_isa import valid_vec_isa_list  # takes a second

    Thread(target=valid_vec_isa_list, daemon=True).start()


def filter_guards(guards: Sequence[Any]) -> list[bool]:
    """Dynamo guard filter: True for guards that are checked before each call. All 2,600 would take a tenth of a round.

    Left out are other libraries' globals, packed weights and everything inside a model's layers after the first:
    weights are inputs; models differ in their first layer, the number of layers and each layer's hooks, the taps.
    """
    return [
        guard.name.endswith("SETTINGS.split_kv")
        if guard.is_global
        else UNCHECKED.search(guard.name) is None
        for guard in guards
    ]
