"""The passes of a model whose layers are sliced over the processes of a launch: a leader and its followers.

The leader runs a command as if it were alone: it alone reads prompts, has the draft, draws random numbers and writes
files. Before each pass of the target a hook tells the followers its inputs and which K/V slots it writes, and they
compute their parts. Processes can therefore never decide differently. What is told is a few kilobytes of token ids and
positions for each pass.
"""

import weakref
from collections.abc import Callable
from contextlib import nullcontext, suppress
from datetime import timedelta
from typing import Any, TypeVar

import torch
from torch import Tensor
from transformers import Cache, DynamicCache

from decode.common.command import DeferredStop
from decode.common.errors import UserError
from decode.distributed import tensor_parallel
from decode.distributed.tensor_parallel import LeaderGoneError, send
from decode.model import attention
from decode.model.attention import DocumentMask
from decode.model.compatibility import cache_name, use_grouped_experts
from decode.model.kv_cache import StaticKVCache, TreeNodes
from decode.model.layer_stack import decoder_config
from decode.model.runner import ModelRunner

T = TypeVar("T")

# ---- followers ----

LoadModel = Callable[..., Any]


class FollowedModel:
    """This process's part of one model, and of its K/V caches by the leader's numbers."""

    def __init__(self, model: Any):
        self.model, self.config = model.eval(), decoder_config(model)
        self.device: torch.device = model.device
        self.cache_name = cache_name(model.base_model)
        self.caches: dict[int | None, Any] = {}

    def prepare(self) -> None:
        self.model.set_attn_implementation(attention.ATTENTION_NAME)
        use_grouped_experts(self.model)

    @torch.inference_mode()
    def run_pass(
        self,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        number: int | None,
        slots: dict[str, Any] | None,
        alive: list[int],
        documents: Tensor | None,
    ) -> None:
        """Runs the layers as the leader does; `number` is its cache, and only those in `alive` are still needed."""
        self.caches = {name: cache for name, cache in self.caches.items() if name in alive}
        context: Any = nullcontext()
        cache = None
        if slots is not None:
            cache = self.slot_cache(number, **slots)
            context = attention.forward_context(cache.slots)
        elif number is not None:
            cache = self.caches.setdefault(number, DynamicCache(config=self.config))
        if documents is not None:
            context = attention.packed_documents(documents.to(self.device))
        args, kwargs = to_device((args, kwargs), self.device)
        with context:
            self.model.base_model(*args, **kwargs, **{self.cache_name: cache})

    def slot_cache(
        self,
        number: int | None,
        rows: int,
        size: int,
        visible: int,
        nodes: list[Tensor] | None,
        **positions: Any,
    ) -> StaticKVCache:
        """The cache, ready for a pass with these slots; the arguments are those of `slot_arguments`."""
        if number not in self.caches:
            layers = self.config.num_hidden_layers
            self.caches[number] = StaticKVCache(layers, rows, size, self.device)
        cache: StaticKVCache = self.caches[number]
        if cache.slots.size < size:
            cache.reserve(size)
        cache.slots.limit_to(visible)
        positions, nodes = to_device((positions, nodes), self.device)
        tree = None if nodes is None else TreeNodes(*nodes)
        cache.slots.set_positions(**positions, nodes=tree)
        return cache

    @torch.inference_mode()
    def compact(self, number: int, base: Tensor, path: Tensor) -> None:
        self.caches[number].compact_path(base.to(self.device), path.to(self.device))


def follow(load: LoadModel) -> None:
    """Does what the leader sends until it says "end". `load` loads a model with the arguments of its message. A signal
    ends this process with the leader, which the launcher signals too and which saves first. An error in loading is the
    leader's as well, which reports it and ends."""
    models: list[FollowedModel] = []
    with DeferredStop() as signals:
        while True:
            try:
                kind, *content = tensor_parallel.receive()
                if kind == "end":
                    return
                if kind == "load":
                    models.append(FollowedModel(load(**content[0])))
                else:
                    number, *arguments = content
                    part = models[number]
                    calls = {
                        "prepare": part.prepare,
                        "pass": part.run_pass,
                        "compact": part.compact,
                    }
                    calls[kind](*arguments)
            except (UserError, RuntimeError) as error:
                if signals.received:
                    return
                if isinstance(error, LeaderGoneError) or not isinstance(error, UserError):
                    raise


def to_device(value: Any, device: torch.device) -> Any:
    """`value`, nested in tuples, lists and dictionaries as it is, with all tensors on `device`."""
    if isinstance(value, Tensor):
        return value.detach().to(device)
    if isinstance(value, dict):
        return {key: to_device(inner, device) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(to_device(inner, device) for inner in value)
    return value


# ---- leader ----

CPU = torch.device("cpu")


def lead(run: Callable[[], T], load: LoadModel) -> T | None:
    """What `run` returns in the first process of the launch; the others follow it, with models that `load` loads, and
    return None. UserError unless a launcher started several processes."""
    if tensor_parallel.join_launch() > 0:
        follow(load)
        return None
    failure, result = None, None
    try:
        with tensor_parallel.alone():
            result = run()
    # Not a signal, which may come in the middle of a pass; then the launcher ends the others.
    except Exception as error:
        failure = error
    with suppress(RuntimeError):  # they are gone, or wait for a part of a pass that failed here
        send(("end",), timedelta(seconds=10))
    if failure is not None:
        raise failure
    return result


class PassSender:
    """A hook on the layers of `model` that tells the followers about each pass before it begins."""

    def __init__(self, model: Any, number: int):
        """`number` is what the followers know the model by."""
        self.number, self.layers, self.config = number, model.base_model, decoder_config(model)
        self.cache_name = cache_name(self.layers)
        self.caches: weakref.WeakKeyDictionary[Cache, int] = weakref.WeakKeyDictionary()
        self.made = 0  # caches so far
        self.layers.register_forward_pre_hook(self.send_pass, with_kwargs=True)

    def cache_number(self, cache: Cache) -> int:
        if cache not in self.caches:
            self.caches[cache] = self.made
            self.made += 1
        return self.caches[cache]

    def send_pass(
        self, module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Sends the inputs of a pass and returns them, with a cache where the pass fills one. UserError for a pass of
        which the followers cannot compute their parts."""
        if module is not self.layers or torch.is_grad_enabled():
            raise UserError(
                "placement.kind tensor_parallel: this draft needs a part of the target's layers or gradients, but "
                "the processes compute whole passes together: choose another draft or placement"
            )
        inputs = dict(kwargs)
        cache: Cache | None = inputs.pop(self.cache_name, None)
        if cache is None and inputs.get("use_cache") is not False:
            # Or the layers would make one without a number
            cache = DynamicCache(config=self.config)
        number = None if cache is None else self.cache_number(cache)
        slots = slot_arguments(cache) if isinstance(cache, StaticKVCache) else None
        mask = attention.current_forward().mask
        documents = mask.numbers.cpu() if isinstance(mask, DocumentMask) else None
        alive = sorted(self.caches.values())
        told = to_device((args, inputs), CPU)
        send(("pass", self.number, *told, number, slots, alive, documents))
        return args, {**inputs, self.cache_name: cache}


class LeadingRunner(ModelRunner):
    """The runner of a target whose other parts the followers hold."""

    can_compile = False

    def __init__(self, model: Any, sender: PassSender):
        self.sender = sender
        super().__init__(model)

    def prepare_model(self) -> None:
        super().prepare_model()
        send(("prepare", self.sender.number))

    def compact_kv_cache(self, base: Tensor, path: Tensor) -> None:
        cache = self.sender.cache_number(self.cache)
        send(("compact", self.sender.number, cache, base.cpu(), path.cpu()))
        super().compact_kv_cache(base, path)


def slot_arguments(cache: StaticKVCache) -> dict[str, Any]:
    """What a follower needs to write the same slots of its own cache and to attend to the same ones."""
    slots = cache.slots
    return {
        "rows": slots.rows,
        "size": slots.size,
        "visible": len(slots.slot),
        "base": slots.base.cpu(),
        "count": slots.write_slots.shape[1],
        "row": to_device(slots.row, CPU),
        "nodes": slots.nodes and [slots.nodes.index.cpu(), slots.nodes.depth.cpu(), slots.nodes.ancestor_mask.cpu()],
        "is_prefill": slots.is_prefill,
    }  # fmt: skip
