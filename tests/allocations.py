"""Bytes of tensors that are alive while code runs, on any device."""

import weakref
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class Allocations(TorchDispatchMode):
    """Counts the storages that operations return, from then until they are freed; those within an operation are not
    seen."""

    def __init__(self) -> None:
        super().__init__()
        self.alive: dict[int, int] = {}
        self.peak = 0
        """The most bytes that were alive at once."""
        self.largest: list[str] = []
        """What was alive then: an operation, dtype and shape each."""
        self.names: dict[int, str] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        inputs = {key(x) for x in tensors((args, kwargs))}
        out = func(*args, **(kwargs or {}))
        for tensor in tensors(out):
            if key(tensor) not in inputs | self.alive.keys():
                self.add(tensor, func)
        return out

    def add(self, tensor: torch.Tensor, func: Any) -> None:
        storage, at = tensor.untyped_storage(), key(tensor)
        self.alive[at] = storage.nbytes()
        self.names[at] = f"{func} {tensor.dtype} {list(tensor.shape)}"
        weakref.finalize(storage, self.alive.pop, at, None)
        if sum(self.alive.values()) > self.peak:
            self.peak = sum(self.alive.values())
            self.largest = [self.names[i] for i in self.alive]


def tensors(values: Any) -> list[torch.Tensor]:
    """Those with a storage; oneDNN's packed weights have none."""
    found = [x for x in tree_leaves(values) if isinstance(x, torch.Tensor)]
    return [x for x in found if x.layout == torch.strided]


def key(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage()._cdata
