"""CUDA graphs: a whole round as one launch. NOT RUN ON A GPU YET (docs/architecture.md says what was)."""

from collections.abc import Callable, Sequence

import torch

WARM_UPS = 3
"""Calls before capture: kernels are loaded and tuned, workspaces allocated."""


class Graph:
    """`run` captured once and replayed; it must keep to fixed shapes and addresses and never read the device.

    `changed` are the tensors that running it changes and that matter: they are put back after the warm-up.
    """

    def __init__(self, run: Callable[[], torch.Tensor], changed: Sequence[torch.Tensor]):
        kept = [tensor.clone() for tensor in changed]
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(WARM_UPS):
                run()
        torch.cuda.current_stream().wait_stream(stream)
        self.graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self.graph):
            self.out = run()
        for tensor, value in zip(changed, kept, strict=True):
            tensor.copy_(value)

    def __call__(self) -> torch.Tensor:
        """The result of one more run, copied out so that the next replay cannot overwrite it."""
        self.graph.replay()
        return self.out.clone()
