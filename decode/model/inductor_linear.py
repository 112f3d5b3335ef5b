"""Products of linear layers as operations of compiled code, whose weights are inputs of that code."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch._inductor import config
from torch._inductor.ir import ExternKernel
from torch._inductor.lowering import fallback_handler, lowerings, register_lowering
from torch._inductor.virtualized import V

HAS_VECTORS = torch.backends.cpu.get_cpu_capability() in ("AVX2", "AVX512")
"""Whether inductor has a kernel of its own for such blocks; elsewhere compiled code multiplies as eager code does."""


def block_outputs() -> int:
    """Outputs of a block of an fp32 weight: of inductor's kernels the one for several threads reads 16 in order, an
    AVX-512 register, and that for one thread 32."""
    return 32 if torch.get_num_threads() == 1 else 16


@torch.library.custom_op("draftsmith::packed_linear", mutates_args=())
def packed_linear(x: Tensor, packed: Tensor, bias: Tensor | None) -> Tensor:
    """oneDNN's product of x [..., K] and a packed weight -> [..., N]: an operation that inductor does not look into.

    Of its own lowering of oneDNN's product inductor demands that weights are constants of the code.
    """
    return torch.ops.mkldnn._linear_pointwise(x, packed, bias, "none", [], "")


@packed_linear.register_fake
def _(x: Tensor, packed: Tensor, bias: Tensor | None) -> Tensor:
    return x.new_empty(*x.shape[:-1], packed.shape[0])


@register_lowering(torch.ops.draftsmith.packed_linear, type_promotion_kind=None)
def _(x: Any, packed: Any, bias: Any) -> Any:
    product = torch.ops.mkldnn._linear_pointwise.default
    return once(lambda: call(product, x, packed, bias, "none", [], ""))


def call(operation: Any, *given: Any) -> Any:
    """The operation itself in the code that inductor writes, without Python's way through one of ours around it."""
    return fallback_handler(operation, add_to_fallback_set=False)(*given)


def once(multiply: Callable[[], Any]) -> Any:
    """The product of the node that inductor lowers: layers that share a product call it with the same arguments, and
    `multiply` is called for the first of them."""
    products = vars(V.graph).setdefault("draftsmith_products", {})
    node = V.graph.current_node
    key = node.target, node.args
    if key not in products:
        products[key] = multiply()
    return products[key]


@torch.library.custom_op("draftsmith::blocked_linear", mutates_args=())
def blocked_linear(x: Tensor, blocks: Tensor) -> Tensor:
    """x [..., K], which has M rows, times each of the blocks [P, K, B] of a weight -> [P, M, B]."""
    return torch.bmm(x.reshape(1, -1, x.shape[-1]).expand(len(blocks), -1, -1), blocks)


@blocked_linear.register_fake
def _(x: Tensor, blocks: Tensor) -> Tensor:
    return x.new_empty(len(blocks), x.shape[:-1].numel(), blocks.shape[2])


@register_lowering(torch.ops.draftsmith.blocked_linear, type_promotion_kind=None)
def _(x: Any, blocks: Any) -> Any:
    """Inductor's own product, which reads each block once and in order. MKL is not timed against it: that takes longer
    than the rest of the compilation."""
    ops = torch.ops.aten

    def multiply() -> Any:
        width = x.get_size()[-1]
        # It has no product for rows that are not contiguous, as those of the last token alone are.
        flat = ExternKernel.require_contiguous(lowerings[ops.reshape](x, [-1, width]))
        every = lowerings[ops.expand](flat, [blocks.get_size()[0], *flat.get_size()])
        with config.patch(max_autotune=True, max_autotune_gemm_backends="CPP"):
            return lowerings[ops.bmm](every, blocks)

    return once(multiply)
