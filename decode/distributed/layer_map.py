"""Which device each layer of a model is on, where one device cannot hold all: GPUs, then CPU memory, then disk.

What is not a layer (embedding, final norm, LM head) is on the first device, where hidden states and logits are asked
for and where drafts run. Layers in memory or on disk are copied to the first device for each pass that needs them.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import psutil
import torch
from transformers import AutoModelForCausalLM

from decode.common.errors import UserError
from decode.model.layer_stack import layer_stack_name

FIRST_SHARE, SHARE = 0.4, 0.8
"""Shares of free memory that the target may take by default: the draft and its training are on the first device."""


def default_room(first: str) -> dict[str, int]:
    """{device: bytes that it may hold}, in the order in which devices are filled, beginning with `first`."""
    free = {"cpu": psutil.virtual_memory().available}
    for index in range(torch.cuda.device_count() if first.startswith("cuda") else 0):
        free[f"cuda:{index}"] = torch.cuda.mem_get_info(index)[0]
    first = "cuda:0" if first == "cuda" else first
    order = [first, *(name for name in sorted(free) if name not in (first, "cpu")), "cpu"]
    return {name: int(free[name] * (FIRST_SHARE if name == first else SHARE)) for name in order}


def plan_layers(rest: int, layers: Sequence[int], room: Mapping[str, int]) -> list[str]:
    """The device of each layer, of these sizes in bytes, or "disk" where `room` has no more.

    `room` is filled in its order; its first device holds `rest` bytes besides. UserError if it has no room for that.
    """
    left = dict(room)
    first = next(iter(left))
    left[first] -= rest
    if left[first] < 0:
        raise UserError(
            f"placement.max_gib: {first} holds the embedding and the LM head, {rest / 2**30:.2f} GiB, and may hold "
            f"{room[first] / 2**30:.2f}: raise it"
        )
    devices, found = list(left), []
    for size in layers:
        while devices and left[devices[0]] < size:
            devices.pop(0)
        if devices:
            left[devices[0]] -= size
        found.append(devices[0] if devices else "disk")
    return found


def device_map(config: Any, dtype: torch.dtype, room: Mapping[str, int]) -> dict[str, str]:
    """{module: device} for the causal LM with this config in `dtype`, as transformers' `device_map` takes it.

    UserError if embedding and LM head do not fit on the first device of `room`.
    """
    with torch.device("meta"):
        model: Any = AutoModelForCausalLM.from_config(config, dtype=dtype)
    stack = layer_stack_name(model)
    layers = model.get_submodule(stack)
    sizes = [module_bytes(layer) for layer in layers]
    devices = plan_layers(module_bytes(model) - sum(sizes), sizes, room)
    placed = {f"{stack}.{number}": device for number, device in enumerate(devices)}
    inside = [
        name for name, _ in model.named_modules() if name and f"{stack}.".startswith(f"{name}.")
    ]
    first = next(iter(room))
    for name, _ in model.named_modules():
        parent = name.rpartition(".")[0]
        if name and name not in inside and (not parent or parent in inside) and parent != stack:
            placed[name] = first
    return placed


def module_bytes(module: torch.nn.Module) -> int:
    """Bytes of the weights of `module`, each counted once."""
    return sum(parameter.nbytes for parameter in module.parameters())
