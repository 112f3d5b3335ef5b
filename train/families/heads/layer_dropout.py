"""LayerSkip's layer dropout, which rises with depth, and its exits in a step with their weights (Elhoushi et al. 2024).

Layers and exits are counted from 1 to L: exit E reads the state behind layer E, and exit L is the model's own output.
"""

import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from decode.model.layer_stack import layer_stack
from train.data.batching import Batch


def dropout_rates(layers: int, highest: float) -> list[float]:
    """The probability with which each layer is dropped: 2^((l - 1) / (L - 1)) - 1 of `highest` (as in the
    paper, without its curriculum over time): 0 for the first layer, `highest` for the last."""
    return [highest * (2 ** (i / max(1, layers - 1)) - 1) for i in range(layers)]


def enabled_exits(layers: int, exit_layer: int, period: int, step: int) -> list[int]:
    """The exits that `step` trains, rising: those E with E = step modulo `period` (the rotational curriculum), always
    `exit_layer`, which will draft, and the last layer."""
    rotating = {e for e in range(1, layers) if e % period == step % period}
    return sorted(rotating | {exit_layer, layers})


def exit_weights(layers: int, exits: list[int], scale: float) -> list[float]:
    """The weight of each of `exits` in the loss; they add up to 1.

    In proportion to `scale` * (1 + 2 + … + E) for E < L, and to L + `scale` * (1 + 2 + … + (L - 1)) for the last layer
    (as in the paper, whose layers count from 0).
    """
    raw = [scale * e * (e + 1) / 2 for e in exits]
    raw = [
        r if e < layers else layers + scale * layers * (layers - 1) / 2
        for e, r in zip(exits, raw, strict=True)
    ]
    return [r / sum(raw) for r in raw]


def draw_dropped_layers(batch: Batch, rates: list[float]) -> Tensor:
    """[L, B, T] bool, the same at all tokens of a sample: whether it goes past the layer.

    A function of the sample's id and `batch.draw`: packing, the number of processes and a resumed run change nothing.
    """
    shape = batch.input_ids.shape
    dropped = torch.zeros(len(rates), *shape, dtype=torch.bool)
    numbers = None if batch.documents is None else batch.documents.cpu()
    for i, (line, _) in enumerate(batch.starts):
        seed = zlib.crc32(f"{batch.ids[i]}:{batch.draw}:layers".encode())
        drawn = torch.rand(len(rates), generator=torch.Generator().manual_seed(seed))
        own = torch.ones(shape[1], dtype=torch.bool) if numbers is None else numbers[line] == i
        dropped[:, line] |= (drawn < torch.tensor(rates))[:, None] & own
    return dropped.to(batch.input_ids.device)


@contextmanager
def layers_dropped(model: Any, dropped: Tensor) -> Iterator[None]:
    """Inside this block a layer's output is its input where `dropped` [L, B, T] is True.

    The layer is computed for all samples all the same: dropout changes what is learned and saves no time here.
    """

    def past(number: int) -> Any:
        def hook(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> Any:
            state = args[0] if args else kwargs["hidden_states"]
            if isinstance(out, tuple):
                return (torch.where(dropped[number][..., None], state, out[0]), *out[1:])
            return torch.where(dropped[number][..., None], state, out)

        return hook

    handles = [
        layer.register_forward_hook(past(number), with_kwargs=True)
        for number, layer in enumerate(layer_stack(model))
        if dropped[number].any()
    ]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()
