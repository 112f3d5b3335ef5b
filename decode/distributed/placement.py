"""Where a target's weights are: the setting `placement` of the commands, and the target that it gives.

Where one device cannot hold all layers, they are on several GPUs, then in CPU memory, then on disk. What is not a layer
(embedding, final norm, LM head) is on the first device, where hidden states and logits are asked for and where drafts
run. Layers in memory or on disk are copied to the first device for each pass that needs them.
"""

import atexit
import os
import shutil
import tempfile
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, TypeVar

import psutil
import torch
from transformers import AutoModelForCausalLM

from decode.common import damage, machine
from decode.common.errors import UserError
from decode.common.target_settings import QUANTIZED_DTYPES, PlacementConfig
from decode.devices.choice import pick_device
from decode.distributed.passes import LeadingRunner, PassSender, lead
from decode.distributed.tensor_parallel import LAUNCH, load_sharded, send
from decode.model import loading
from decode.model.layer_stack import layer_stack_name
from decode.model.loading import Target
from decode.model.recurrent import has_recurrent_layers
from decode.model.runner import ModelRunner
from decode.model.vision import is_vision_language

T = TypeVar("T")

# ---- devices of the layers ----


def default_room(first: str) -> dict[str, int]:
    """{device: bytes that it may hold}, in the order in which devices are filled, beginning with `first`."""
    free = {"cpu": psutil.virtual_memory().available}
    for index in range(torch.cuda.device_count() if first.startswith("cuda") else 0):
        free[f"cuda:{index}"] = torch.cuda.mem_get_info(index)[0]
    first = "cuda:0" if first == "cuda" else first
    order = [first, *(name for name in sorted(free) if name not in (first, "cpu")), "cpu"]
    # The draft and its training are on the first device.
    return {name: int(free[name] * (0.4 if name == first else 0.8)) for name in order}


def plan_layers(rest: int, layers: Sequence[int], room: Mapping[str, int]) -> list[str]:
    """The device of each layer, of these sizes in bytes, or "disk" where `room` has no more. `room` is filled in its
    order; its first device holds `rest` bytes besides. UserError if it has no room for that."""
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
    """{module: device} for the causal LM with this config in `dtype`, as transformers' `device_map` takes it. UserError
    if embedding and LM head do not fit on the first device of `room`."""
    with torch.device("meta"):
        model: Any = AutoModelForCausalLM.from_config(config, dtype=dtype)
    stack = layer_stack_name(model)
    whole, *sizes = (
        sum(parameter.nbytes for parameter in module.parameters())
        for module in (model, *model.get_submodule(stack))
    )
    devices = plan_layers(whole - sum(sizes), sizes, room)
    placed = {f"{stack}.{number}": device for number, device in enumerate(devices)}
    around = ["", *(stack.rsplit(".", i)[0] for i in range(stack.count(".") + 1))]
    for name, _ in model.named_modules():  # the outermost ones beside the layers
        parent = name.rpartition(".")[0]
        if name not in around and parent in around and parent != stack:
            placed[name] = next(iter(room))
    return placed


# ---- settings and target ----


def run_placed(s: PlacementConfig, run: Callable[[], T]) -> T | None:
    """What `run` returns, the rest of a command that loads its target with `load_target`; under tensor parallelism it
    runs in the first process alone, which the others follow, and they return None. UserError for a launch whose
    processes do not suit the placement."""
    if s.kind == "tensor_parallel":
        return lead(run, load_part)
    if s.kind == "device_map" and machine.process_count() > 1:
        raise UserError(
            "placement.kind device_map gives one process all devices of the machine: start one process, or choose "
            "tensor_parallel"
        )
    return run()


def load_target(
    s: PlacementConfig,
    name: str,
    device: str = "auto",
    dtype: str = "float32",
    revision: str | None = None,
    with_layers: bool = True,
) -> Target:
    """The target `name`, placed as `s` says and ready to decode. UserError as from `decode.model.loading.load_target`,
    and for what the placement does not allow. A warning where the launcher's mixed_precision is not `dtype`."""
    precision = os.environ.get("ACCELERATE_MIXED_PRECISION", "no")
    means = {"bf16": "bfloat16", "fp16": "float16"}.get(precision, dtype)
    if os.environ.get("RANK", "0") == "0" and means != dtype:
        damage.warn(
            f"the target computes in {dtype}, as this command's settings say: the launcher's mixed_precision "
            f"{precision} is of drafts in training"
        )
    if s.kind == "single":
        return loading.load_target(name, device, dtype, revision, with_layers)
    if not with_layers:
        raise UserError(
            f"placement.kind {s.kind}: a server has the target's layers (states.url): leave it at single"
        )
    model = load_model(s, name, "target", device, dtype, revision)
    if s.kind == "tensor_parallel":
        runner: ModelRunner = LeadingRunner(model, LAUNCH.senders[-1])
    else:
        runner = ModelRunner(model)
    runner.can_compile = False
    return loading.load_target(name, device, dtype, revision, runner=runner)


def load_model(
    s: PlacementConfig, name: str, what: str, device: str, dtype: str, revision: str | None = None
) -> Any:
    """A causal LM of transformers, placed as `s` says. UserError as from `decode.model.loading.load_model`."""
    if s.kind == "single":
        return loading.load_model(name, what, device, dtype, revision)
    if dtype in QUANTIZED_DTYPES:
        raise UserError(
            f"placement.kind {s.kind}: weights are placed as they are: choose another dtype than {dtype}"
        )
    check_placeable(loading.load_config(name, what, revision), f"{what} {name!r}", s.kind)
    if s.kind == "device_map":
        place = partial(load_over_devices, s, pick_device(device))
        return loading.load_model(name, what, device, dtype, revision, place=place)
    if LAUNCH.messages is None:
        raise UserError("placement.kind tensor_parallel: this command runs in one process only")
    settings: dict[str, Any] = {"name": name, "what": what, "dtype": dtype, "revision": revision}
    send(("load", settings))
    model = load_part(**settings)
    LAUNCH.senders.append(PassSender(model, len(LAUNCH.senders)))
    return model


def check_placeable(config: Any, what: str, kind: str) -> None:
    """UserError for a model whose layers are more than those of a decoder with K/V caches."""
    parts = {
        "an encoder": config.is_encoder_decoder,
        "a vision part": is_vision_language(config),
        "recurrent layers": has_recurrent_layers(config.get_text_config(decoder=True)),
    }
    found = [part for part, has in parts.items() if has]
    if found:
        raise UserError(
            f"{what} has {found[0]}: placement.kind {kind} is for plain decoders, leave it at single"
        )


def load_part(name: str, what: str, dtype: str, revision: str | None) -> Any:
    """This process's part of a causal LM; all processes of the launch must call it."""
    device = f"cuda:{torch.cuda.current_device()}" if torch.cuda.is_available() else "cpu"
    model = loading.load_model(name, what, device, dtype, revision, place=load_sharded)
    # It says nothing about drafts made like the target
    vars(model.config).pop("distributed_config", None)
    return model


def load_over_devices(
    s: PlacementConfig, device: str, config: Any, what: str, folder: str, **settings: Any
) -> tuple[Any, dict[str, Any]]:
    """(a causal LM with layers where there is room, transformers' loading information). UserError if there is none."""
    room = {name: int(gib * 2**30) for name, gib in s.max_gib.items()} or default_room(device)
    for name in room:
        pick_device(name)  # UserError for one that is not there
    offload = s.offload_folder
    if not offload:
        offload = tempfile.mkdtemp(prefix="draftsmith-")
        atexit.register(shutil.rmtree, offload, ignore_errors=True)
    result: tuple[Any, dict[str, Any]] = AutoModelForCausalLM.from_pretrained(
        folder,
        config=config,
        device_map=device_map(config, settings["dtype"], room),
        offload_folder=offload,
        output_loading_info=True,
        **settings,
    )
    return result
