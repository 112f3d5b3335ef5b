"""Linear layers that multiply by copies of their weights while decoding runs on a CPU.

Layers that read the same tensor, such as the query, key and value projections, are multiplied as one: products of few
rows with one large weight take 0.8 to 0.95 of the time of those with its parts (docs/log).
"""

import math
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cache
from typing import Any, Generic, Literal, Protocol, TypeVar
from weakref import WeakSet

import numpy as np
import psutil
import torch
import torch.nn.functional as F
import xxhash
from torch import Tensor
from torch.distributed.tensor import DTensor

# ---- layers that read the same tensor ----

SAME_INPUT = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))
"""Names of layers in one module that read the same tensor in most models, in the order of their calls."""


class HasProduct(Protocol):
    """A layer that can multiply for all that share its product."""

    out_features: int

    def product(self, x: Tensor) -> Tensor:
        """x [..., K] -> [..., N], the outputs of all layers one after the other."""


L = TypeVar("L", bound=HasProduct)
M = TypeVar("M", bound=torch.nn.Module)


class FusedProduct(Generic[L]):
    """The product of one input [..., K] with the weights of several layers, which take their outputs in turn.

    The first layer that is called computes it. Only layers that are given the very same tensor take part of it: where
    one is given another tensor, or is called before the first, `is_shared` is False from then on.
    """

    def __init__(self, layers: Sequence[L]):
        self.layers = layers
        self.is_shared = True
        self.held: tuple[Tensor, Sequence[Tensor]] | None = None

    def output(self, place: int, x: Tensor) -> Tensor | None:
        """[..., N] the output of layer number `place` for x, or None if that layer has to multiply by itself."""
        if place == 0:
            sizes = [layer.out_features for layer in self.layers]
            self.held = x, self.layers[0].product(x).split(sizes, -1)
        held = self.held  # read once: a pass in another thread may replace it
        if held is None or held[0] is not x:
            self.is_shared, self.held = False, None
            return None
        part = held[1][place]
        if place == len(self.layers) - 1:
            self.held = None
        return part


# ---- products in compiled code ----

HAS_VECTORS = torch.backends.cpu.get_cpu_capability() in ("AVX2", "AVX512")
"""Whether inductor has a kernel of its own for such blocks; elsewhere compiled code multiplies as eager code does."""


def block_outputs() -> int:
    """Outputs of a block of an fp32 weight: of inductor's kernels the one for several threads reads 16 in order, an
    AVX-512 register, and that for one thread 32."""
    return 32 if torch.get_num_threads() == 1 else 16


@torch.library.custom_op("draftsmith::packed_linear", mutates_args=())
def packed_linear(x: Tensor, packed: Tensor, bias: Tensor | None) -> Tensor:
    """oneDNN's product of x [..., K] and a packed weight -> [..., N]: an operation that inductor does not look into.

    Of its own lowering of oneDNN's product inductor demands that weights are constants of the code; what it writes for
    this one and the next is in decode/model/inductor_linear.py.
    """
    return torch.ops.mkldnn._linear_pointwise(x, packed, bias, "none", [], "")


@packed_linear.register_fake
def _(x: Tensor, packed: Tensor, bias: Tensor | None) -> Tensor:
    return x.new_empty(*x.shape[:-1], packed.shape[0])


@torch.library.custom_op("draftsmith::blocked_linear", mutates_args=())
def blocked_linear(x: Tensor, blocks: Tensor) -> Tensor:
    """x [..., K], which has M rows, times each of the blocks [P, K, B] of a weight -> [P, M, B]."""
    return torch.bmm(x.reshape(1, -1, x.shape[-1]).expand(len(blocks), -1, -1), blocks)


@blocked_linear.register_fake
def _(x: Tensor, blocks: Tensor) -> Tensor:
    return x.new_empty(len(blocks), x.shape[:-1].numel(), blocks.shape[2])


# ---- packed weights ----

DTYPES = (torch.float32, torch.bfloat16)
PACKED_BFLOAT16 = torch.backends.mkldnn.is_available() and bool(
    torch.ops.mkldnn._is_mkldnn_bf16_supported()
)
"""Whether oneDNN has products of bf16 numbers here: on x86 those of AVX-512 or of AVX-NE-CONVERT."""
EAGER_ROWS = 2
"""Rows up to which eager code multiplies fp32 numbers as `product_of_few_rows` says."""
TIMED_FROM, TIMED_WIDTH, TIMES = 1 << 20, 4096, 3
"""Bytes from which a weight is multiplied as was timed; inputs and outputs of the weight that is; how often it is."""
COMPILED_ROWS = 6
"""Rows up to which compiled code multiplies fp32 numbers by blocks of the weight (`block_outputs`).

24 rows take four times as long by them."""


THREADS_FROM = 1 << 20
"""Bytes from which threads share the hash of a weight, which lets go of Python's lock."""


@dataclass
class Requests:
    """Counts the requests of all engines: `REQUESTS`, the only instance."""

    count: int = 0


REQUESTS = Requests()


def begin_request() -> None:
    """Makes every PackedLinear look whether its weight has changed, before its next product."""
    REQUESTS.count += 1


def pack_for_compiled_code() -> None:
    """Packs the weights of all PackedLinear of this process that are not packed or have changed.

    Compiled code takes the packed copies as they are, so this is called when a request begins.
    """
    with torch.inference_mode():
        layers = [layer for layer in LAYERS if layer.can_pack()]
        for layer in layers:
            layer.has_blocks = layer.weight.dtype == torch.float32 and HAS_VECTORS
            layer.drop_old_copies()  # those that others share, too
        for layer in layers:
            layer.pack()


def digest(tensor: Tensor) -> tuple[int, ...]:
    """Hashes of the bytes of a tensor on a CPU, one for the part of each of torch's threads; () for one elsewhere, of
    which no copies are made."""
    if tensor.device.type != "cpu":
        return ()
    content = tensor.contiguous().view(-1).view(torch.uint8).numpy()
    threads = torch.get_num_threads()
    if threads == 1 or len(content) < THREADS_FROM:
        return (xxhash.xxh3_64_intdigest(content.data),)
    return tuple(pool(threads).map(xxhash.xxh3_64_intdigest, np.array_split(content, threads)))


@cache
def pool(threads: int) -> ThreadPoolExecutor:
    return ThreadPoolExecutor(threads)


@cache
def product_of_few_rows(threads: int) -> Literal["parts", "weight", "packed"]:
    """What multiplies one fp32 row fastest on this machine by so many threads, timed once in a process: parts of the
    weight that threads share, the weight as it is, or the packed one.

    On an AMD EPYC with two threads parts take 0.8 of the time of the packed weight, on an Intel Xeon with AMX and one
    thread 1.7 (docs/log).
    """
    weight = torch.ones(TIMED_WIDTH, TIMED_WIDTH)
    row = torch.ones(1, TIMED_WIDTH)
    packed = torch.ops.mkldnn._reorder_linear_weight(weight, None)
    parts = split_weight(weight, threads)
    products: dict[Literal["parts", "weight", "packed"], Callable[[], Tensor]] = {
        "parts": lambda: multiply_parts(row, parts),
        "weight": lambda: F.linear(row, weight),
        "packed": lambda: torch.ops.mkldnn._linear_pointwise(row, packed, None, "none", [], ""),
    }
    seconds = dict.fromkeys(products, math.inf)
    for _ in range(1 + TIMES):
        for name, multiply in products.items():
            start = time.perf_counter()
            multiply()
            seconds[name] = min(seconds[name], time.perf_counter() - start)
    return min(products, key=lambda name: seconds[name])


def split_weight(weight: Tensor, threads: int) -> Tensor:
    """The weight [N, K] as it is, in parts that threads share -> [P, N / P, K]."""
    return weight.view(math.gcd(len(weight), 2 * threads), -1, weight.shape[1])


def multiply_parts(x: Tensor, parts: Tensor) -> Tensor:
    """x [..., K], of one or two rows, times the parts [P, N / P, K] of a weight -> [..., N].

    The weight is on the left: with one row on the left the product takes up to twice as long (docs/log).
    """
    width = x.shape[-1]
    rows, shape = x.numel() // width, (*x.shape[:-1], parts.shape[0] * parts.shape[1])
    columns = x.contiguous().as_strided((parts.shape[0], width, rows), (0, 1, width))
    out = torch.bmm(parts, columns)
    if rows > 1:
        out = out.view(-1, rows).t().contiguous()
    return out.view(shape)


class PackedLinear(torch.nn.Linear):
    """A linear layer that multiplies by a packed copy of its weight while decoding runs.

    `torch.nn.functional.linear` arranges the weight anew at every call, or multiplies few rows with one thread; packed
    once, products of 3 to 512 rows take 0.3 to 0.85 of its time (docs/log), and those of layers that read the same
    tensor are one product (`FusedProduct`), in compiled code as well. One or two fp32 rows are multiplied by what is
    fastest on this machine (`product_of_few_rows`).

    Copies are made at the first call and again at the first call of a request if the weight has changed. They are used
    in inference mode only, in which all decoding runs: training takes the usual product, whether or not the model has
    decoded in between. Compiled code multiplies by copies of its own (`pack_for_compiled_code`).
    """

    def __init__(self, linear: torch.nn.Linear):
        """Takes the place of `linear`: shares its parameters, buffers and hooks."""
        torch.nn.Module.__init__(self)
        vars(self).update(vars(linear))
        # Of the weights of all layers of `fused` while that is whole.
        self.packed: Tensor | None = None
        self.packed_bias: Tensor | None = None
        self.blocks: Tensor | None = None
        self.start = 0
        """The first of this layer's outputs in the product with its copies."""
        self.few_rows: Literal["parts", "weight", "packed"] = "packed"
        self.parts: Tensor | None = None  # of `split_weight`, where few rows are multiplied by them
        self.fused: FusedProduct[PackedLinear] | None = None
        """The product that this layer shares with others."""
        self.place = 0  # among the layers of `fused`
        self.has_blocks = False  # since compiled code runs in this process
        self.packable = False  # by oneDNN
        self.packed_from: tuple[Any, ...] = ()
        self.checked = -1  # the request at which the weight was compared
        LAYERS.add(self)

    def forward(self, x: Tensor) -> Tensor:
        """x [..., K] -> [..., N], equal to that of torch.nn.Linear but for rounding."""
        if torch.compiler.is_compiling():
            return self._compiled(x)
        if not torch.is_inference_mode_enabled():
            return super().forward(x)
        if self.checked != REQUESTS.count:
            self.begin_request()
        if not self.packable:
            return super().forward(x)
        if self.few_rows != "packed" and x.numel() <= EAGER_ROWS * x.shape[-1]:
            if self.parts is None:
                return super().forward(x)
            few = multiply_parts(x, self.parts)
            return few if self.bias is None else few + self.bias
        if self.packed is None:
            self.pack()
        if self.fused is not None and self.fused.is_shared:
            out = self.fused.output(self.place, x)
            if out is not None:
                return out
            self.drop_copies()
            self.pack()
        return self.product(x)

    def product(self, x: Tensor) -> Tensor:
        """x [..., K] times the packed weights -> [..., N], with the outputs of all layers that share them."""
        packed, bias = self.packed, self.packed_bias
        return torch.ops.mkldnn._linear_pointwise(x, packed, bias, "none", [], "")

    def can_pack(self) -> bool:
        """Whether oneDNN has products for the device and the dtype of the weight, of which no part is elsewhere."""
        if isinstance(self.weight, DTensor):  # sharded for training
            return False
        dtype = self.weight.dtype
        known = dtype == torch.float32 or (dtype == torch.bfloat16 and PACKED_BFLOAT16)
        return known and self.weight.device.type == "cpu"

    def _compiled(self, x: Tensor) -> Tensor:
        """The same product as part of compiled code: the weight, packed or not, is an input of that code."""
        if self.packed is None or not self.can_pack():
            return super().forward(x)
        if x.numel() == x.shape[-1] and self.weight.dtype == torch.float32:
            out = (x.reshape(1, -1) * self.weight).sum(-1).view(*x.shape[:-1], -1)
            return out if self.bias is None else out + self.bias
        end = self.start + len(self.weight)
        if self.blocks is None or x.numel() > COMPILED_ROWS * x.shape[-1]:
            out = torch.ops.draftsmith.packed_linear(x, self.packed, self.packed_bias)
            return out[..., self.start : end]
        out = torch.ops.draftsmith.blocked_linear(x, self.blocks).transpose(0, 1).flatten(1)
        out = out[:, self.start : end].view(*x.shape[:-1], -1)
        return out if self.bias is None else out + self.bias

    def begin_request(self) -> None:
        """Drops copies of weights that have changed since: of this layer and of those that share its product."""
        for layer in self.sharing():
            layer.drop_old_copies()

    def sharing(self) -> "Sequence[PackedLinear]":
        """This layer and those of its FusedProduct, in order."""
        return [self] if self.fused is None else self.fused.layers

    def drop_copies(self) -> None:
        """Drops the copies of this layer's weight and of those that it shares a product with."""
        for layer in self.sharing():
            layer.packed = layer.packed_bias = layer.blocks = None

    def drop_old_copies(self) -> None:
        """Drops the copies if the weight or the bias are not those that were copied: by all their numbers, since writes
        through `.data` are counted nowhere. One read of a weight a request takes as long as a token."""
        weight = self.weight.detach()
        bias = () if self.bias is None else digest(self.bias.detach())
        state = weight.data_ptr(), weight.dtype, digest(weight), bias
        if self.packed_from != state:
            self.drop_copies()
        self.packed_from, self.checked = state, REQUESTS.count
        self.packable, self.parts, self.few_rows = self.can_pack(), None, "packed"
        if self.packable and weight.dtype == torch.float32:
            threads = torch.get_num_threads()
            timed = weight.nbytes >= TIMED_FROM
            self.few_rows = product_of_few_rows(threads) if timed else "parts"
            if self.few_rows == "parts":
                self.parts = split_weight(weight, threads)

    def pack(self) -> None:
        """Makes the copies that are missing, for all layers of a whole `fused`: for oneDNN, and in blocks where
        compiled code runs."""
        shared = self.fused is not None and self.fused.is_shared
        layers = self.sharing() if shared else [self]
        if self.packed is not None and (self.blocks is not None or not self.has_blocks):
            return
        weight = torch.cat([layer.weight.detach() for layer in layers])
        if self.packed is None:
            self.packed = torch.ops.mkldnn._reorder_linear_weight(weight, None)
            if any(layer.bias is not None for layer in layers):
                biases = [
                    layer.weight.new_zeros(len(layer.weight))
                    if layer.bias is None
                    else layer.bias.detach()
                    for layer in layers
                ]
                self.packed_bias = torch.cat(biases)
        if self.has_blocks and self.blocks is None:
            outputs = block_outputs()
            padded = F.pad(weight, (0, 0, 0, -len(weight) % outputs))
            self.blocks = padded.unflatten(0, (-1, outputs)).transpose(1, 2).contiguous()
        start = 0
        for layer in layers:
            layer.packed, layer.packed_bias = self.packed, self.packed_bias
            layer.blocks, layer.start = self.blocks, start
            start += len(layer.weight)

    def _apply(self, *args: Any, **kwargs: Any) -> Any:
        """Another dtype or device, as `to` gives it, is seen at the next call."""
        self.checked = -1
        return super()._apply(*args, **kwargs)

    def __getstate__(self) -> dict[str, Any]:
        """Copies of the module pack for themselves."""
        copies = dict.fromkeys(("packed", "packed_bias", "blocks", "parts", "fused"))
        return vars(self) | copies | {"start": 0, "checked": -1}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        LAYERS.add(self)


LAYERS: WeakSet[PackedLinear] = WeakSet()
"""Every PackedLinear of this process."""


def patch_linear_layers(model: Any, recurse: bool = True) -> None:
    """Replaces the linear layers of `model` by `PackedLinear`: on a CPU with oneDNN and memory for the copies.

    Without `recurse` only those that are its children.
    """
    layers = [
        (module, name, child)
        for module in (model.modules() if recurse else [model])
        for name, child in module.named_children()
        if type(child) is torch.nn.Linear
        and type(child.weight) is torch.nn.Parameter  # not one in eight bits
        and child.weight.device.type == "cpu"
        and child.weight.dtype in DTYPES
        and "forward" not in vars(child)  # nor one whose weights a hook fetches or exchanges
    ]
    size = sum(child.weight.nbytes for _, _, child in layers)
    if torch.backends.mkldnn.is_available() and size < psutil.virtual_memory().available / 2:
        for module, name, child in layers:
            setattr(module, name, PackedLinear(child))
        for module in model.modules() if recurse else [model]:
            fuse_products(module)


def fuse_products(module: torch.nn.Module) -> None:
    """Lets children of `module` that have the names of SAME_INPUT share a product."""
    for layers in layers_of_one_input(module, PackedLinear):
        new = any(layer.fused is None for layer in layers.values())
        if new and len({layer.weight.dtype for layer in layers.values()}) == 1:
            share_product(list(layers.values()))


def layers_of_one_input(module: torch.nn.Module, kind: type[M]) -> list[dict[str, M]]:
    """{name: child} of each group of SAME_INPUT that `module` has whole, all of this very class."""
    children = dict(module.named_children())
    groups = []
    for names in SAME_INPUT:
        found = {name: child for name in names if type(child := children.get(name)) is kind}
        if len(found) == len(names):
            groups.append(found)
    return groups


def share_product(layers: Sequence[Any]) -> None:
    """Gives the layers one FusedProduct, and each its place in it."""
    fused = FusedProduct(layers)
    for place, layer in enumerate(layers):
        layer.fused, layer.place = fused, place
