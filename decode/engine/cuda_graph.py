"""CUDA graphs: a whole round as one launch. NOT RUN ON A GPU YET (docs/gpu_checks.md says what stood in)."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from typing import Any

import torch

WARM_UPS = 3
"""Calls before the capture, which load and tune kernels and allocate workspaces."""


@cache
def graph_pool() -> Any:
    """The memory pool of all graphs of this process: a graph for another batch takes the memory that others left.

    Graphs that share a pool may only be replayed one after the other, as the rounds of engines are.
    """
    return torch.cuda.graph_pool_handle()


@contextmanager
def put_back(changed: Sequence[torch.Tensor]) -> Iterator[None]:
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
        self,
        run: Callable[[], torch.Tensor],
        changed: Sequence[torch.Tensor],
        keep_alive: Sequence[Any] = (),
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
    def __call__(self) -> torch.Tensor:
        """Replays the graph and returns a copy of its result, which the next replay does not overwrite."""
        self.graph.replay()
        return self.out.clone()


class AsyncHostCopy:
    """An asynchronous device-to-host copy with its own event: `wait` does not wait for work that was queued later.

    `.tolist()` of a tensor on the device would wait for the whole queue, including the round after it.
    """

    def __init__(self, tensor: torch.Tensor):
        self.host = tensor
        self.copy_done: torch.cuda.Event | None = None
        if tensor.is_cuda:
            self.host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
            self.host.copy_(tensor, non_blocking=True)
            self.copy_done = torch.cuda.current_stream(tensor.device).record_event()

    def wait(self) -> torch.Tensor:
        """The tensor on the host."""
        if self.copy_done is not None:
            self.copy_done.synchronize()
        return self.host
