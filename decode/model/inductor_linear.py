"""What inductor writes for products of linear layers, whose weights are inputs of the code.

Layers that share a product ask for it with the same arguments, each for its own outputs: `MergeEqualNodes` leaves one.

Importing this takes a second, for inductor: only what compiles does, inside a function.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch._functorch.compile_utils import fx_graph_cse
from torch._inductor import config
from torch._inductor.custom_graph_pass import CustomGraphPass
from torch._inductor.ir import ExternKernel
from torch._inductor.lowering import fallback_handler, lowerings, register_lowering

from decode.model.gpu.region_sums import hand_on_terms


def register_lowerings() -> None:
    """Tells inductor of the functions below. Twice is as once."""
    ops = torch.ops.draftsmith
    written: dict[Any, Callable[..., Any]] = {
        ops.packed_linear: packed_linear,
        ops.blocked_linear: blocked_linear,
        ops.int4_linear: int4_linear,
    }
    for operation, lowering in written.items():
        register_lowering(operation, type_promotion_kind=None)(lowering)


def call(operation: Any, *given: Any) -> Any:
    """The operation itself in the code that inductor writes, without Python's way through one of ours around it."""
    return fallback_handler(operation, add_to_fallback_set=False)(*given)


class MergeEqualNodes(CustomGraphPass):
    """A pass of inductor: operations with the same arguments become one."""

    def __call__(self, graph: torch.fx.Graph) -> None:
        assert graph.owning_module is not None
        graph.owning_module.graph = fx_graph_cse(graph)

    def uuid(self) -> str:
        """Inductor's cache keeps code by it: it changes with this pass."""
        return "draftsmith-merge-equal-nodes-1"


class HandOnTerms(CustomGraphPass):
    """A pass of inductor, `hand_on_terms`."""

    def __call__(self, graph: torch.fx.Graph) -> None:
        hand_on_terms(graph)

    def uuid(self) -> str:
        """As that of MergeEqualNodes."""
        return "draftsmith-hand-on-terms-1"


def packed_linear(x: Any, packed: Any, bias: Any) -> Any:
    product = torch.ops.mkldnn._linear_pointwise.default
    return call(product, x, packed, bias, "none", [], "")


def blocked_linear(x: Any, blocks: Any) -> Any:
    """Inductor's own product, which reads each block once and in order. MKL is not timed against it: that takes longer
    than the rest of the compilation."""
    ops = torch.ops.aten
    width = x.get_size()[-1]
    # It has no product for rows that are not contiguous, as those of the last token alone are.
    flat = ExternKernel.require_contiguous(lowerings[ops.reshape](x, [-1, width]))
    every = lowerings[ops.expand](flat, [blocks.get_size()[0], *flat.get_size()])
    with config.patch(max_autotune=True, max_autotune_gemm_backends="CPP"):
        return lowerings[ops.bmm](every, blocks)


def int4_linear(x: Any, packed: Any, group: int, scales: Any) -> Any:
    return call(torch.ops.aten._weight_int4pack_mm_for_cpu.default, x, packed, group, scales)
