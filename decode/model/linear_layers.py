"""Linear layers with a copy of their weights that is packed for oneDNN's kernels, or with weights in eight bits."""

import logging
import math
import warnings
from dataclasses import dataclass
from typing import Any
from weakref import WeakSet

import psutil
import torch
import torch.nn.functional as F
from torch._inductor import config
from torch._inductor.lowering import fallback_handler, lowerings, register_lowering

from decode.common.errors import UserError

DTYPES = (torch.float32, torch.bfloat16)
BLOCK = 32
"""Outputs of a block of an fp32 weight: two AVX-512 registers."""
BLOCKED_ROWS = 32
"""Rows up to which compiled code multiplies fp32 numbers by such blocks."""
HAS_VECTORS = torch.backends.cpu.get_cpu_capability() in ("AVX2", "AVX512")
"""Whether inductor has a kernel of its own for such blocks; elsewhere compiled code multiplies as eager code does."""
SAMPLED = 64
"""Numbers of a weight that are compared with those that were packed, once a request."""


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
        for layer in list(LAYERS):
            if layer.can_pack():
                layer.has_blocks = layer.weight.dtype == torch.float32 and HAS_VECTORS
                layer.pack_if_changed()


@torch.library.custom_op("draftsmith::packed_linear", mutates_args=())
def packed_linear(x: torch.Tensor, packed: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """oneDNN's product of x [..., K] and a packed weight -> [..., N]: an operation that inductor does not look into.

    Of its own lowering of oneDNN's product inductor demands that weights are constants of the code.
    """
    return torch.ops.mkldnn._linear_pointwise(x, packed, bias, "none", [], "")


@packed_linear.register_fake
def _(x: torch.Tensor, packed: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    return x.new_empty(*x.shape[:-1], packed.shape[0])


@register_lowering(torch.ops.draftsmith.packed_linear, type_promotion_kind=None)
def _(x: Any, packed: Any, bias: Any) -> Any:
    """The call of oneDNN, without Python's way through the operation above."""
    product = fallback_handler(
        torch.ops.mkldnn._linear_pointwise.default, add_to_fallback_set=False
    )
    return product(x, packed, bias, "none", [], "")


@torch.library.custom_op("draftsmith::blocked_linear", mutates_args=())
def blocked_linear(x: torch.Tensor, blocks: torch.Tensor) -> torch.Tensor:
    """x [M, K] times each of the blocks [P, K, BLOCK] of a weight -> [P, M, BLOCK]."""
    return torch.bmm(x.expand(len(blocks), -1, -1), blocks)


@blocked_linear.register_fake
def _(x: torch.Tensor, blocks: torch.Tensor) -> torch.Tensor:
    return x.new_empty(len(blocks), len(x), blocks.shape[2])


@register_lowering(torch.ops.draftsmith.blocked_linear, type_promotion_kind=None)
def _(x: Any, blocks: Any) -> Any:
    """Inductor's own product, which reads each block once and in order. MKL is not timed against it: that takes longer
    than the rest of the compilation."""
    ops = torch.ops.aten
    rows = lowerings[ops.expand](x, [blocks.get_size()[0], *x.get_size()])
    with config.patch(max_autotune=True, max_autotune_gemm_backends="CPP"):
        return lowerings[ops.bmm](rows, blocks)


class PackedLinear(torch.nn.Linear):
    """A linear layer that multiplies by a packed copy of its weight while decoding runs.

    `torch.nn.functional.linear` arranges the weight anew at every call, or multiplies few rows with one thread; packed
    once, products of 2 to 512 rows take 0.3 to 0.85 of its time (docs/log.md). The copy is made at the first call and
    again at the first call of a request if the weight has changed. It is used in inference mode only, in which all
    decoding runs: training takes the usual product, whether or not the model has decoded in between. Compiled code
    multiplies by the same copy (`pack_for_compiled_code`).
    """

    def __init__(self, linear: torch.nn.Linear):
        """Takes the place of `linear`: shares its parameters, buffers and hooks."""
        torch.nn.Module.__init__(self)
        vars(self).update(vars(linear))
        self.packed: torch.Tensor | None = None
        self.blocks: torch.Tensor | None = None
        self.has_blocks = False  # since compiled code runs in this process
        self.packed_from: tuple[Any, ...] = ()
        self.sample = torch.empty(0)
        self.checked = -1  # the request at which the weight was compared
        LAYERS.add(self)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x [..., K] -> [..., N], equal to that of torch.nn.Linear but for rounding."""
        if torch.compiler.is_compiling():
            return self._compiled(x)
        if not torch.is_inference_mode_enabled():
            return super().forward(x)
        if x.device.type != "cpu" or not self.can_pack():
            return super().forward(x)
        if x.numel() == x.shape[-1] and self.weight.dtype == torch.float32:
            return self._multiply_one_row(x)
        if self.packed is None or self.checked != REQUESTS.count:
            self.pack_if_changed()
        return torch.ops.mkldnn._linear_pointwise(x, self.packed, self.bias, "none", [], "")

    def can_pack(self) -> bool:
        """Whether oneDNN has products for the device and the dtype of the weight."""
        return self.weight.device.type == "cpu" and self.weight.dtype in DTYPES

    def _compiled(self, x: torch.Tensor) -> torch.Tensor:
        """The same product as part of compiled code: the weight, packed or not, is an input of that code."""
        if self.packed is None or not self.can_pack():
            return super().forward(x)
        if x.numel() == x.shape[-1] and self.weight.dtype == torch.float32:
            out = (x.reshape(1, -1) * self.weight).sum(-1).view(*x.shape[:-1], -1)
            return out if self.bias is None else out + self.bias
        rows = x.reshape(-1, x.shape[-1])
        if self.blocks is None or len(rows) > BLOCKED_ROWS:
            return torch.ops.draftsmith.packed_linear(x, self.packed, self.bias)
        out = torch.ops.draftsmith.blocked_linear(rows, self.blocks).transpose(0, 1).flatten(1)
        out = out[:, : len(self.weight)].view(*x.shape[:-1], -1)
        return out if self.bias is None else out + self.bias

    def _multiply_one_row(self, x: torch.Tensor) -> torch.Tensor:
        """One matrix of the weight's rows for each thread: faster for one fp32 row than the packed weight."""
        outputs, width = self.weight.shape
        parts = math.gcd(outputs, torch.get_num_threads())
        pieces = self.weight.view(parts, -1, width).transpose(1, 2)
        out = torch.bmm(x.reshape(1, 1, width).expand(parts, 1, width), pieces)
        out = out.view(*x.shape[:-1], outputs)
        return out if self.bias is None else out + self.bias

    def pack_if_changed(self) -> None:
        """Packs the weight unless it is the one that was packed: by its identity, its version, which counts writes, and
        some of its numbers, since writes through `.data` are not counted."""
        weight = self.weight.detach()
        version = 0 if self.weight.is_inference() else self.weight._version
        state = id(self.weight), weight.data_ptr(), version
        sample = weight.flatten()[:: max(1, weight.numel() // SAMPLED)].clone()
        same = self.packed_from == state and torch.equal(sample, self.sample)
        if self.packed is None or not same:
            self.packed = torch.ops.mkldnn._reorder_linear_weight(weight, None)
            self.blocks = None
        if self.has_blocks and self.blocks is None:
            padded = F.pad(weight, (0, 0, 0, -len(weight) % BLOCK))
            self.blocks = padded.unflatten(0, (-1, BLOCK)).transpose(1, 2).contiguous()
        self.packed_from, self.sample, self.checked = state, sample, REQUESTS.count

    def __getstate__(self) -> dict[str, Any]:
        """Copies of the module pack for themselves."""
        return vars(self) | {"packed": None, "blocks": None}

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


def quantize_linear_layers(model: Any) -> None:
    """Turns the weights of the linear layers into int8 with one scale for each row; the LM head keeps its dtype.

    The LM head is left because drafts copy rows of it, and it often is the embedding too. Experts that a model holds
    as stacked tensors are no linear layers and stay as they are. UserError without torchao.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        logging.disable(
            logging.WARNING
        )  # torchao reports each kernel of other devices that it cannot load
        try:
            from torchao.quantization import Int8WeightOnlyConfig, quantize_
        except ImportError as error:
            raise UserError(
                "dtype int8 needs torchao: pip install torchao, or choose another dtype"
            ) from error
        finally:
            logging.disable(logging.NOTSET)
        head = model.get_output_embeddings()
        quantize_(
            model,
            Int8WeightOnlyConfig(),
            filter_fn=lambda module, _: isinstance(module, torch.nn.Linear) and module is not head,
        )
