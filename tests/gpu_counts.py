"""Operations of a round on a GPU that is not there, counted on fake tensors (tests/fake_gpu.py).

An operation that torch launches a kernel for counts once; views and new empty tensors do not.
"""

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from decode.drafts.base import Draft
from decode.engine.batch import ActiveRequest, DecodeRequests
from decode.engine.engine import SpeculativeEngine
from decode.engine.round import run_round
from decode.model import attention, linear
from decode.model.gpu import cuda_layers
from decode.model.gpu.cuda_operations import KERNELS
from decode.model.loading import Target
from decode.verification.sampling import SamplingParams
from tests.fake_gpu import fake_gpu
from tests.heads import random_draft
from tests.tiny import tiny_model, tiny_prompts, tiny_target

LAUNCHES_NOTHING = {
    "view", "_unsafe_view", "reshape", "transpose", "t", "permute", "expand", "unsqueeze", "squeeze", "select",
    "slice", "split", "split_with_sizes", "unbind", "alias", "detach", "as_strided", "unflatten", "chunk", "empty",
    "empty_like", "new_empty", "empty_strided", "narrow", "lift_fresh", "_reshape_alias", "diagonal", "flatten",
}  # fmt: skip
WINDOWED = ("gemma3_text", "gpt_oss")


class OperationCounter(TorchDispatchMode):
    """Counts by name what launches kernels."""

    def __init__(self) -> None:
        super().__init__()
        self.found: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        name = func.overloadpacket.__name__
        given = [x for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor)]
        same = isinstance(out, Tensor) and any(out is x for x in given)  # `to` its own dtype
        launches = func._schema.is_mutable or isinstance(out, Tensor | tuple | list)
        if name not in LAUNCHES_NOTHING and launches and (func._schema.is_mutable or not same):
            self.found[name] += 1
        return out


@contextmanager
def gpu_layers(own_kernels: bool) -> Iterator[None]:
    """While the block runs, layers are as they are on a GPU whose checks have passed; without `own_kernels` as torch's
    alone."""
    with (
        mock.patch.object(linear, "DTYPES", ()),  # nothing is packed for a CPU
        mock.patch.object(KERNELS, "own", own_kernels),
        mock.patch.object(attention.SETTINGS, "split_kv", own_kernels),
    ):
        yield


def depth(arch: str, layers: int) -> dict[str, Any]:
    """Changes of a tiny config to an even number of layers, those with a window and those without in turn."""
    kinds = ["sliding_attention", "full_attention"] * (layers // 2)
    return {"num_hidden_layers": layers} | ({"layer_types": kinds} if arch in WINDOWED else {})


def networks(target: Target, draft: Draft | None) -> list[Any]:
    return [target.runner.model, *([draft.net] if hasattr(draft, "net") else [])]


def count_round(
    arch: str, kind: str | None, k: int, layers: int, own_kernels: bool, **sampling: Any
) -> Counter[str]:
    """Operations by name of an eager or captured round of one row of a target of so many layers."""
    with gpu_layers(own_kernels):
        model = tiny_model(arch, dtype=torch.bfloat16, **depth(arch, layers))
        target = tiny_target(model, eos=(5,))
        draft = random_draft(kind, target) if kind else None
        if own_kernels:  # the trial on real numbers, before there are none
            for network in networks(target, draft):
                cuda_layers.use_own_kernels(network)
        prompts = tiny_prompts(13)[:1]
        request = {0: ActiveRequest(0, len(prompts[0]), 100)}
        with fake_gpu(target, draft):
            if own_kernels:
                for module in [m for n in networks(target, draft) for m in n.modules()]:
                    for layers_of_one in linear.layers_of_one_input(module, torch.nn.Linear):
                        cuda_layers.join(module, layers_of_one)
            engine = SpeculativeEngine(
                target, draft, k=max(k, 1), sampling=SamplingParams(**sampling), mode="captured"
            )
            size = engine.num_slots(prompts, 64, 1)
            state, config = engine._prepare_batch(1, size, size, None, 0)
            engine._prefill(state, DecodeRequests(prompts, [0], 64), request)
            run_round(target, draft, state, config)
            with OperationCounter() as counter:
                run_round(target, draft, state, config)
        return counter.found


def per_layer(
    arch: str, kind: str | None, k: int, own_kernels: bool, **sampling: Any
) -> tuple[Counter[str], Counter[str]]:
    """(operations of a layer of the target, those beside its layers) by name."""
    few, more = (count_round(arch, kind, k, n, own_kernels, **sampling) for n in (4, 6))
    layer = Counter(
        {name: (more[name] - few[name]) / 2 for name in more if more[name] != few[name]}
    )
    rest = Counter({name: few[name] - 4 * layer[name] for name in few})
    return layer, +rest
