"""What the other processes of a launch do: compute their parts of each pass of the target, as the leader says."""

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import torch
from transformers import DynamicCache

from decode.common.command import DeferredStop
from decode.common.errors import UserError
from decode.distributed import tensor_parallel
from decode.distributed.tensor_parallel import LeaderGoneError
from decode.model import attention
from decode.model.compatibility import cache_name, use_grouped_experts
from decode.model.kv_cache import StaticKVCache, TreeNodes
from decode.model.layer_stack import decoder_config

LoadModel = Callable[..., Any]


class FollowedModel:
    """This process's part of one model, and of its K/V caches by the leader's numbers."""

    def __init__(self, model: Any):
        self.model, self.config = model.eval(), decoder_config(model)
        self.device: torch.device = model.device
        self.cache_name = cache_name(model.base_model)
        self.caches: dict[int, Any] = {}

    def prepare(self) -> None:
        """Makes the model run with our attention, as a runner's does."""
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
        documents: torch.Tensor | None,
    ) -> None:
        """Runs the layers as the leader does; `number` is its cache, and only those in `alive` are still needed."""
        self.caches = {name: cache for name, cache in self.caches.items() if name in alive}
        context: Any = nullcontext()
        cache = None
        if number is not None and slots is not None:
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
        number: int,
        rows: int,
        size: int,
        shown: int,
        base: torch.Tensor,
        count: int,
        row: torch.Tensor | None,
        nodes: list[torch.Tensor] | None,
        is_prefill: bool,
    ) -> StaticKVCache:
        """The cache, ready for a pass with these slots; the arguments are those of `leader.slot_arguments`."""
        if number not in self.caches:
            layers = self.config.num_hidden_layers
            self.caches[number] = StaticKVCache(layers, rows, size, self.device)
        cache: StaticKVCache = self.caches[number]
        if cache.slots.size < size:
            cache.reserve(size)
        cache.slots.show(shown)
        base, row, nodes = to_device((base, row, nodes), self.device)
        tree = None if nodes is None else TreeNodes(*nodes)
        cache.slots.set_positions(base, count, row=row, nodes=tree, is_prefill=is_prefill)
        return cache

    @torch.inference_mode()
    def compact(self, number: int, base: torch.Tensor, path: torch.Tensor) -> None:
        """Moves the K/V of an accepted path to the front, as the leader does."""
        self.caches[number].compact_path(base.to(self.device), path.to(self.device))


def follow(load: LoadModel) -> None:
    """Does what the leader sends until it says "end". `load` loads a model with the arguments of its message.

    A signal ends this process with the leader, which the launcher signals too and which saves first. An error in
    loading is the leader's as well, which reports it and ends.
    """
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
    if isinstance(value, torch.Tensor):
        return value.detach().to(device)
    if isinstance(value, dict):
        return {key: to_device(inner, device) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(to_device(inner, device) for inner in value)
    return value
