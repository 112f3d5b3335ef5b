"""Decoder layers as regions of compiled code, which is traced and generated once for all layers that are alike.

A layer that shares tensors with others, gives more than one tensor, or uses its index for more than to find its K/V
(gpt2) is traced by itself. Whatever a layer leaves for the next one beside its result would be lost: so masks are made
in each region.
"""

import ast
import inspect
import sys
import textwrap
from collections import Counter
from collections.abc import Hashable
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor

from decode.model import attention
from decode.model.gpu.cuda_layers import JoinedLinear
from decode.model.kv_cache import LayerCache, StaticKVCache
from decode.model.layer_stack import decoder_config, layer_stack
from decode.model.linear import PackedLinear
from decode.model.quantized.layers import FusedPart

# ---- which layers are alike ----

VALUES = (bool, int, float, str, torch.dtype, torch.device, torch.Size, type(None))
"""Types whose objects are described by their value; other objects by their identity."""
TENSORS = (Tensor, torch.nn.Parameter)
AROUND = {
    "forward",
    "_forward_hooks",
    "_forward_hooks_with_kwargs",
    "_forward_hooks_always_called",
    "_forward_pre_hooks",
    "_forward_pre_hooks_with_kwargs",
}
"""Attributes of a module that change what a call of it runs beside the forward of its class."""
UNREAD = {"packed_from", "checked", "fused"}
"""What layers that share a product keep for eager decoding: compiled code does not read it."""


def describe_layer(layer: torch.nn.Module, index: int) -> Hashable:
    """Equal for two layers of one model only if the same code runs for both, on the tensors of each.

    It holds the class of every module in the layer, its attributes, hooks and changed forwards, and of its tensors the
    shape and which of them are the same. The layer's own hooks and `forward` run around it and are left out, and so is
    its `index` in `layer_idx`, unless more than the search for its K/V may depend on it.
    """
    inside = [vars(part) for part in layer.modules() if part is not layer]
    changed = any(fields.get(name) for fields in inside for name in AROUND)
    left_out = {"layer_idx"} if not changed and index_finds_kv(layer) else set()
    numbers: dict[int, int] = {}
    described: list[Hashable] = []
    for name, part in layer.named_modules(remove_duplicate=False):
        fields = vars(part) | {"_modules": list(part._modules)}
        skipped = left_out if fields.get("layer_idx") == index else set()
        if part is layer:
            skipped = skipped | AROUND
        if isinstance(part, PackedLinear | JoinedLinear | FusedPart):
            skipped = skipped | UNREAD
        fields = {key: value for key, value in fields.items() if key not in skipped}
        described.append((name, type(part), describe(fields, numbers)))
    return tuple(described)


def describe(value: Any, numbers: dict[int, int]) -> Hashable:
    """`value` as something hashable; `numbers`, which is extended, counts the tensors by their ids."""
    kind = type(value)
    if kind in VALUES:
        return kind, value
    if kind in TENSORS:
        strides = value.stride() if value.layout == torch.strided else None
        number = numbers.setdefault(id(value), len(numbers))
        return kind, number, value.shape, strides, value.dtype, value.device, value.requires_grad
    if isinstance(value, dict):
        return kind, *(
            (describe(key, numbers), describe(each, numbers)) for key, each in value.items()
        )
    if kind in (tuple, list):
        return kind, *(describe(each, numbers) for each in value)
    if kind is partial:
        return kind, id(value.func), describe([value.args, value.keywords], numbers)
    if kind is set:
        return kind, frozenset(describe(each, numbers) for each in value)
    return kind, id(value)


def index_finds_kv(layer: torch.nn.Module) -> bool:
    """Whether the code of the modules in `layer` uses `layer_idx` to find the layer's K/V and for nothing else."""
    code = {each for kind in {type(part) for part in layer.modules()} for each in code_of(kind)}
    return all(map(only_finds_kv, code))


def code_of(module_class: type) -> list[Any]:
    """The file of `module_class` and the classes that it is derived from, without those of torch and Python."""
    foreign = ("torch", "builtins")
    classes = [one for one in module_class.__mro__ if one.__module__.split(".")[0] not in foreign]
    return [sys.modules.get(one.__module__) for one in classes[:1]] + classes[1:]


@cache
def only_finds_kv(code: Any) -> bool:
    """Whether all that the `code` of a file or a class does with `layer_idx` of a module is to pass it to `update` of a
    cache, apart from constructors, and caches get no other index. False if there is no code to read."""
    try:
        text = textwrap.dedent(inspect.getsource(code))
    except (OSError, TypeError):
        return False
    if "layer_idx" not in text:
        return True
    nodes = list(ast.walk(ast.parse(text)))
    made = [n for n in nodes if isinstance(n, ast.FunctionDef) and n.name == "__init__"]
    allowed = {id(each) for function in made for each in ast.walk(function)}
    for node in nodes:
        if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Attribute):
            continue
        if node.func.attr == "update" and len(node.args) > 2:
            index = [each for each in node.args if is_index(each)]
            if not index:
                return False
            allowed |= {id(each) for each in index}
    return all(id(node) in allowed for node in nodes if is_index(node))


def is_index(node: ast.AST) -> bool:
    """Whether `node` reads an attribute `layer_idx`, or names it in a string."""
    return (isinstance(node, ast.Attribute) and node.attr == "layer_idx") or (
        isinstance(node, ast.Constant) and node.value == "layer_idx"
    )


@cache
def gives_one_tensor(forward: Any) -> bool:
    """Whether a layer's `forward` returns its hidden states and nothing else, as its source says."""
    try:
        text = textwrap.dedent(inspect.getsource(inspect.unwrap(forward)))
    except (OSError, TypeError):
        return False
    found = [node for node in ast.walk(ast.parse(text)) if isinstance(node, ast.Return)]
    return {node.value and ast.unparse(node.value) for node in found} == {"hidden_states"}


# ---- regions ----

CAN_SKIP_TRACES = (
    "reuse_hash_fn" in inspect.signature(torch.compiler.nested_compile_region).parameters
)
"""Whether torch can run a region again without tracing it: from 2.13 on."""
LEAVES = (Tensor, bool, int, float, str, type(None))
"""What the arguments of a layer may hold beside the cache, if `find_region` shall take them apart."""
NUMBERS: dict[Hashable, int] = {}
"""The number of each description that `number_region` has met."""


def mark_regions(model: Any) -> bool:
    """Makes each decoder layer of `model` a region of compiled code: what is generated for one layer runs for all that
    are like it. Eager decoding and training do not see it.

    Returns whether every layer is a region that need not be traced. Of others torch compares the traces, and takes none
    for another's where a size is dynamic. Layers that read the K/V of other layers (gemma4) stay as they are: regions
    hand on nothing but their result.
    """
    if decoder_config(model).to_dict().get("num_kv_shared_layers"):
        return False
    everywhere = Counter(map(id, tensors_of(model)))
    layers: list[Any] = list(layer_stack(model))
    skips = 0
    for layer in layers:
        if "forward" in vars(layer):  # where hooks of a placement exchange the weights
            continue
        layer.forward = partial(run_apart, layer)
        inside = Counter(map(id, tensors_of(layer)))
        own = all(everywhere[one] == count for one, count in inside.items())
        indices = {
            name: vars(part)["layer_idx"]
            for name, part in layer.named_modules()
            if "layer_idx" in vars(part)
        }
        holder = [".", *indices][-1]
        is_plain = len(set(indices.values())) == 1 and index_finds_kv(layer) and "." not in holder
        if CAN_SKIP_TRACES and own and is_plain and gives_one_tensor(type(layer).forward):
            layer.forward = partial(find_region, layer, holder)
            skips += 1
    return skips == len(layers)


def tensors_of(module: torch.nn.Module) -> list[Tensor]:
    """All tensors that are attributes of the modules in `module`, each as often as it has a name."""
    return [
        value
        for _, part in module.named_modules(remove_duplicate=False)
        for value in (*part._parameters.values(), *part._buffers.values(), *vars(part).values())
        if isinstance(value, Tensor)
    ]


@torch.compiler.nested_compile_region
def run_layer(layer: torch.nn.Module, *args: Any, **kwargs: Any) -> Any:
    """The forward of `layer`, which compiled code calls as a function with the layer's weights as arguments."""
    return type(layer).forward(layer, *args, **kwargs)


def run_apart(layer: torch.nn.Module, *args: Any, **kwargs: Any) -> Any:
    """`run_layer` for copies of the tensors in tuples: a region may not read two views of one tensor, as the sines and
    cosines of GPT-J are."""
    if not torch.compiler.is_compiling():
        return type(layer).forward(layer, *args, **kwargs)
    for name, value in kwargs.items():
        if type(value) is tuple:
            kwargs[name] = tuple(x.clone() if isinstance(x, Tensor) else x for x in value)
    return run_layer(layer, *args, **kwargs)


def find_region(layer: Any, holder: str, *args: Any, **kwargs: Any) -> Any:
    """`run_apart` that does not trace a layer that is like an earlier one. The module `holder` has the layer's index.

    All tensors that the layer reads beside its weights are arguments of the region, one by one.
    """
    if not torch.compiler.is_compiling():
        return type(layer).forward(layer, *args, **kwargs)
    cache = None
    flat: list[Any] = []  # a name, a kind and a number of parts before the parts of each argument
    for name, value in zip([""] * len(args) + list(kwargs), [*args, *kwargs.values()], strict=True):
        if type(value) is StaticKVCache and cache is None:
            cache = value
            flat += [name, "cache", 0]
            continue
        parts = list(value) if type(value) is tuple else [value]
        for part in parts:
            if not isinstance(part, LEAVES):
                return run_apart(layer, *args, **kwargs)
        flat += [name, "tuple" if type(value) is tuple else "one", len(parts), *parts]
    if cache is None or cache.slots.is_prefill:
        return run_apart(layer, *args, **kwargs)
    index = (getattr(layer, holder) if holder else layer).layer_idx
    kv, slots, layers = cache.kv_layers[index], cache.slots, len(cache.kv_layers)
    read = slots.tensors() + (slots.live_slots() if attention.SETTINGS.split_kv else [])
    return run_like_layer(layer, index, layers, kv.keys, kv.values, len(read), *read, *flat)


def rebuild_and_run(
    layer: torch.nn.Module,
    index: int,
    layers: int,
    keys: Tensor,
    values: Tensor,
    count: int,
    *rest: Any,
) -> Tensor:
    """The hidden states that `layer` gives for the arguments that `find_region` took apart."""
    slots = attention.current_forward().slots
    assert slots is not None
    cache = LayerCache(slots, keys, values, index, layers)
    args, kwargs, at = [], {}, count
    while at < len(rest):
        name, kind, size = rest[at : at + 3]
        parts = rest[at + 3 : at + 3 + size]
        value = cache if kind == "cache" else tuple(parts) if kind == "tuple" else parts[0]
        if name:
            kwargs[name] = value
        else:
            args.append(value)
        at += 3 + size
    return type(layer).forward(layer, *args, **kwargs)


def region_key(layer: torch.nn.Module, index: int, *arguments: Any) -> int:
    """The same number only for regions that run the same code on their arguments, in dynamo's trace.

    K/V and slots are described without their shapes, which may be dynamic: all layers have the same number of slots,
    and the rest of a layer's shapes follows from its weights.
    """
    layers, keys, values, count, all_rows, row, slot, *_ = arguments
    seen: dict[Tensor, int] = {}
    described: list[Any] = []
    for each in arguments:
        if isinstance(each, Tensor):
            number = seen.setdefault(each, len(seen))
            described.append((number, each.dtype, each.device))
            if each is not keys and each is not values and each is not slot:
                described += [tuple(each.shape), each.stride()]
        else:
            described.append(each)
    return number_region(layer, index, tuple(described))


@torch.compiler.assume_constant_result
def number_region(layer: torch.nn.Module, index: int, arguments: tuple[Any, ...]) -> int:
    """A number for what the code of a region depends on."""
    description = describe_layer(layer, index), repr(arguments)
    return NUMBERS.setdefault(description, len(NUMBERS))


REUSE: dict[str, Any] = {"reuse_hash_fn": region_key, "max_reuse_entries": 1 << 20}
run_like_layer = torch.compiler.nested_compile_region(
    rebuild_and_run, **(REUSE if CAN_SKIP_TRACES else {})
)
"""`rebuild_and_run` as a region that is traced once for each `region_key`, if CAN_SKIP_TRACES."""
