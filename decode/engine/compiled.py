"""A round in fewer launches: torch.compile for its two halves, and CUDA graphs of the whole.

NO GPU HAS RUN THE CUDA GRAPHS YET (docs/gpu_checks.md says what stood in).
"""

import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from threading import Thread
from typing import Any

import torch
from torch import Tensor

# ---- torch.compile ----

COMPILE_OPTIONS: dict[str, dict[str, Any]] = {
    # Checks of shapes before each kernel take a tenth of a small model's round.
    # The sums of one row are not split over threads where those of several rows are not: W8A8 makes a rounding of
    # another value of their last bits.
    "cpu": {"size_asserts": False, "alignment_asserts": False, "cpp.min_chunk_size": 1 << 14},
    # decode/engine/compiled.py captures CUDA graphs, of a whole round each.
    # Combo kernels: RoPE of queries and of keys and the writes to the buffers, which do not depend on each other.
    "cuda": {"max_autotune": True, "triton.cudagraphs": False, "combo_kernels": True},
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
    from decode.model import inductor_linear  # imports inductor: takes a second

    inductor_linear.register_lowerings()
    torch._dynamo.config.recompile_limit = max(
        RECOMPILE_LIMIT, torch._dynamo.config.recompile_limit
    )
    options = dict(COMPILE_OPTIONS[device_type])
    options["post_grad_custom_pre_pass"] = inductor_linear.MergeEqualNodes()
    if device_type == "cuda":
        options["pre_grad_custom_pass"] = inductor_linear.HandOnTerms()
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
    weights are inputs; models differ in their first layer, the number of layers and each layer's hooks, the aux_layers.
    """
    return [
        guard.name.endswith("SETTINGS.split_kv")
        if guard.is_global
        else UNCHECKED.search(guard.name) is None
        for guard in guards
    ]


# ---- CUDA graphs ----

WARM_UPS = 3
"""Calls before the capture, which load and tune kernels and allocate workspaces."""


@cache
def graph_pool() -> Any:
    """The memory pool of all graphs of this process: a graph for another batch takes the memory that others left.

    Graphs that share a pool may only be replayed one after the other, as the rounds of engines are.
    """
    return torch.cuda.graph_pool_handle()


@contextmanager
def put_back(changed: Sequence[Tensor]) -> Iterator[None]:
    """Whatever the block does to these tensors, in place, is undone at its end."""
    kept = [tensor.clone() for tensor in changed]
    yield
    for tensor, value in zip(changed, kept, strict=True):
        tensor.copy_(value)


class CudaGraphRunner:
    """`run` captured once and replayed; it must use fixed shapes and addresses and never read a tensor on the host.

    `changed`, at least one, are the tensors whose values `run` changes: they are restored after the warm-up.
    `keep_alive` holds references to objects whose tensors the graph uses, since it stores only their addresses.
    """

    @torch.inference_mode()  # `changed` may be inference tensors, which nothing else may write to
    def __init__(
        self, run: Callable[[], Tensor], changed: Sequence[Tensor], keep_alive: Sequence[Any] = ()
    ):
        self.keep_alive = run, *keep_alive
        with torch.cuda.device(changed[0].device), put_back(changed):
            stream = torch.cuda.Stream()
            stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(stream):
                for _ in range(WARM_UPS):
                    run()
            torch.cuda.current_stream().wait_stream(stream)
            self.graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(self.graph, pool=graph_pool()):
                self.out = run()

    @torch.inference_mode()
    def __call__(self) -> Tensor:
        """Replays the graph and returns a copy of its result, which the next replay does not overwrite."""
        self.graph.replay()
        return self.out.clone()


class AsyncHostCopy:
    """An asynchronous device-to-host copy with its own event: `wait` does not wait for work that was queued later.

    `.tolist()` of a tensor on the device would wait for the whole queue, including the round after it.
    """

    def __init__(self, tensor: Tensor):
        self.host = tensor
        self.copy_done: torch.cuda.Event | None = None
        if tensor.is_cuda:
            self.host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
            self.host.copy_(tensor, non_blocking=True)
            self.copy_done = torch.cuda.current_stream(tensor.device).record_event()

    def wait(self) -> Tensor:
        if self.copy_done is not None:
            self.copy_done.synchronize()
        return self.host
