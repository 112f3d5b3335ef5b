"""What the code of a decoder layer depends on, as a value that can be compared with that of another layer."""

import ast
import inspect
import sys
import textwrap
from collections.abc import Hashable
from functools import cache, partial
from typing import Any

import torch

from decode.model.linear.packed_linear import PackedLinear

VALUES = (bool, int, float, str, torch.dtype, torch.device, torch.Size, type(None))
"""Types whose objects are described by their value; other objects by their identity."""
TENSORS = (torch.Tensor, torch.nn.Parameter)
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
"""What a PackedLinear keeps for eager decoding: compiled code does not read it."""


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
        if isinstance(part, PackedLinear):
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
