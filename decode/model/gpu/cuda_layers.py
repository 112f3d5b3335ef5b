"""Layers in fewer kernels on a GPU: one product for what reads one tensor, one kernel for a norm and for RoPE.

Nothing here changes a model on a CPU, nor training: outside inference mode every module computes as it was.
NO GPU HAS RUN THIS YET (docs/gpu_checks.md).
"""

import sys
from collections.abc import Callable, Sequence
from functools import cache, wraps
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from decode.model.gpu.cuda_operations import KERNELS, ROUNDINGS, rms_norm_formula, rotate_formula
from decode.model.linear import (
    REQUESTS,
    FusedProduct,
    layers_of_one_input,
    patch_linear_layers,
    share_product,
)


def patch_layers(model: Any) -> None:
    """Makes the layers of `model` fast on the device that it is on."""
    if any(weight.device.type == "cuda" for weight in model.parameters()):
        join_layers(model)
        if KERNELS.own:
            use_own_kernels(model)
    else:
        patch_linear_layers(model)


# ---- products ----


class JoinedLinear(torch.nn.Linear):
    """A linear layer whose weight is a part of the one weight of all layers that read the same tensor.

    In inference mode they are one product. The weights are parts of one memory, so nothing is there twice, and a
    weight that is changed in place is changed in the product. Where it is replaced, as by another dtype, the layer
    multiplies by itself from the next request on.
    """

    def __init__(self, linear: torch.nn.Linear, weight: Tensor, bias: Tensor | None, start: int):
        """Takes the place of `linear`; its parameters move into `weight` [N, K] and `bias` [N] from `start` on."""
        torch.nn.Module.__init__(self)
        vars(self).update(vars(linear))
        self.whole: Tensor | None = weight
        self.whole_bias, self.start = bias, start
        end = start + len(linear.weight)
        weight[start:end] = linear.weight.detach()
        linear.weight.data = weight[start:end]
        if bias is not None:
            bias[start:end] = 0 if linear.bias is None else linear.bias.detach()
            if linear.bias is not None:
                linear.bias.data = bias[start:end]
        self.fused: FusedProduct[JoinedLinear] | None = None
        self.place = 0
        self.checked = -1

    def forward(self, x: Tensor) -> Tensor:
        """x [..., K] -> [..., N], as torch.nn.Linear but for the rounding of another kernel."""
        if torch.compiler.is_compiling():  # equal products become one (`MergeEqualNodes`)
            end = self.start + self.out_features
            return self.product(x)[..., self.start : end] if self.is_whole() else self.alone(x)
        if not torch.is_inference_mode_enabled():
            return self.alone(x)
        if self.checked != REQUESTS.count:
            self.begin_request()
        fused = self.fused
        out = fused.output(self.place, x) if fused is not None and fused.is_shared else None
        return self.alone(x) if out is None else out

    def alone(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight, self.bias)

    def product(self, x: Tensor) -> Tensor:
        """x [..., K] times the weights of all layers, one after the other."""
        assert self.whole is not None
        return F.linear(x, self.whole, self.whole_bias)

    def is_whole(self) -> bool:
        return self.fused is not None and self.fused.is_shared

    def begin_request(self) -> None:
        """Ends the sharing if a parameter is not part of the whole any more."""
        self.checked = REQUESTS.count
        if self.whole is None:
            return
        pairs = [(self.weight, self.whole)]
        if self.bias is not None and self.whole_bias is not None:
            pairs.append((self.bias, self.whole_bias))
        same = all(
            part.untyped_storage()._cdata == whole.untyped_storage()._cdata
            and part.storage_offset() == self.start * whole.stride(0)
            for part, whole in pairs
        )
        if not same and self.fused is not None:
            self.fused.is_shared = False

    def _apply(self, *args: Any, **kwargs: Any) -> Any:
        self.checked = -1
        return super()._apply(*args, **kwargs)

    def __getstate__(self) -> dict[str, Any]:
        """Copies have weights of their own, and multiply by themselves."""
        return vars(self) | dict.fromkeys(("whole", "whole_bias", "fused"))


def join_layers(model: Any) -> None:
    """Makes the linear layers of `model` that read the same tensor one product each (linear.py's SAME_INPUT)."""
    for module in model.modules():
        for layers in layers_of_one_input(module, torch.nn.Linear):
            parts = list(layers.values())
            weights = [part.weight for part in parts]
            # Neither slices of them (DTensor) nor eight bits
            plain = all(w.is_cuda and not is_traceable_wrapper_subclass(w) for w in weights)
            hooked = any("forward" in vars(part) for part in parts)
            if not plain or hooked or len({(w.dtype, w.device, w.shape[1]) for w in weights}) > 1:
                continue
            join(module, layers)


@torch.no_grad()
def join(module: torch.nn.Module, layers: dict[str, torch.nn.Linear]) -> None:
    """Replaces these children of `module` by JoinedLinear of one product."""
    parts = list(layers.values())
    rows = sum(part.out_features for part in parts)
    weight = parts[0].weight.detach().new_empty(rows, parts[0].in_features)
    biased = any(part.bias is not None for part in parts)
    bias = weight.new_empty(rows) if biased else None
    joined, start = [], 0
    for name, part in layers.items():
        joined.append(JoinedLinear(part, weight, bias, start))
        setattr(module, name, joined[-1])
        start += part.out_features
    share_product(joined)


# ---- norms and RoPE ----


def runs_own_kernels(x: Tensor) -> bool:
    """Whether x is computed on by kernels of ours. Compiled code has inductor's, and training torch's."""
    if torch.compiler.is_compiling():
        return False
    return KERNELS.own and x.is_cuda and torch.is_inference_mode_enabled()


class OneKernelNorm(torch.nn.Module):
    """An RMSNorm of transformers, computed by one kernel in eager and captured decoding on a GPU."""

    weight: Tensor

    def __init__(self, norm: torch.nn.Module, eps: float, rounding: int):
        """Takes the place of `norm`: shares its parameters and hooks."""
        super().__init__()
        vars(self).update(vars(norm))
        self.eps, self.rounding = eps, rounding

    def forward(self, x: Tensor) -> Tensor:
        widens = self.rounding == 0 and self.weight.dtype != x.dtype
        if widens or not runs_own_kernels(x):
            return rms_norm_formula(x, self.weight, self.eps, self.rounding)
        # Of a norm over whole states there is one head
        states = x if x.ndim > 3 else x[..., None, :]
        out: Tensor = torch.ops.draftsmith.rms_norm(states, self.weight, self.eps, self.rounding)
        return out.view(x.shape)


@cache
def find_rounding(kind: Any, eps_name: str, dtype: torch.dtype) -> int | None:
    """Which of ROUNDINGS norms of this class have: that whose results on random numbers are the same bits.

    None: they compute something else.
    """
    trial: Any = torch.nn.Module.__new__(kind)
    torch.nn.Module.__init__(trial)
    random = torch.Generator().manual_seed(0)
    trial.weight = torch.nn.Parameter(torch.randn(96, generator=random).to(dtype))
    setattr(trial, eps_name, 1e-3)
    x = torch.randn(5, 7, 96, generator=random).to(dtype)
    with torch.no_grad():
        try:
            found = kind.forward(trial, x)
        except (AttributeError, TypeError, RuntimeError):  # it reads more than weight and eps
            return None
        formulas = [rms_norm_formula(x, trial.weight, 1e-3, n) for n in range(len(ROUNDINGS))]
    same = [n for n, out in enumerate(formulas) if torch.equal(out, found)]
    return same[0] if same else None


def use_own_kernels(model: Any) -> None:
    """Norms of `model` that are RMSNorms become OneKernelNorm, and its RoPE one kernel where it is Llama's."""
    for module in list(model.modules()):
        for name, child in list(module.named_children()):
            eps = {n: vars(child)[n] for n in ("variance_epsilon", "eps") if n in vars(child)}
            if len(eps) != 1 or list(child._parameters) != ["weight"] or "forward" in vars(child):
                continue
            [(eps_name, value)] = eps.items()
            kind: Any = type(child)
            rounding = find_rounding(kind, eps_name, child._parameters["weight"].dtype)
            if rounding is not None:
                setattr(module, name, OneKernelNorm(child, value, rounding))
    for source in {type(part).__module__ for part in model.modules()}:
        code = vars(sys.modules[source])
        given = code.get("apply_rotary_pos_emb")
        if given is not None and rotates_as_llama(given):
            code["apply_rotary_pos_emb"] = in_one_kernel(given)


ROTATIONS: set[Callable[..., Any]] = set()
"""What `in_one_kernel` has made."""


def in_one_kernel(given: Callable[..., Any]) -> Callable[..., Any]:
    """A function of transformers that rotates queries and keys, as one kernel in eager decoding on a GPU."""

    @wraps(given)
    def rotate(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, *args: Any, **kwargs: Any) -> Any:
        fits = cos.ndim == 3 and cos.shape[-1] in (q.shape[-1], q.shape[-1] // 2)
        if args or kwargs or not fits or not runs_own_kernels(q):
            return given(q, k, cos, sin, *args, **kwargs)
        return torch.ops.draftsmith.rotate(q, k, cos, sin)

    ROTATIONS.add(rotate)
    return rotate


@cache
def rotates_as_llama(given: Callable[..., Any]) -> bool:
    """Whether `given` is `rotate_formula` to the bit, for angles of the whole width or of half of it."""
    if given in ROTATIONS:
        return False
    random = torch.Generator().manual_seed(0)
    q, k = (torch.randn(2, n, 3, 16, generator=random).bfloat16() for n in (4, 2))
    angles = torch.randn(2, 3, 8, generator=random)
    for parts in (1, 2):
        every = torch.cat([angles] * parts, -1)
        cos, sin = every.cos().bfloat16(), every.sin().bfloat16()
        try:
            found: Sequence[Tensor] = given(q, k, cos, sin)
        except (RuntimeError, TypeError, ValueError):
            continue
        if all(map(torch.equal, found, (rotate_formula(x, cos, sin) for x in (q, k)))):
            return True
    return False
