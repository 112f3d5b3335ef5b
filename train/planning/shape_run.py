"""A training step on tensors that have shapes and no data: the memory it holds and the operations it takes.

The step is the family's own code, forward and backward, for a target that is built from its config alone. Tensors of
floating-point numbers are on "meta"; whole numbers and masks are computed, since shapes depend on them (which positions
are labels, which slots a block has), but for large ones, which only say what attends to what. So a step of a large
target takes seconds, and needs neither weights nor samples.
"""

import math
import weakref
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from itertools import zip_longest
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode, sdpa_backward_flop_count, sdpa_flop_count

from decode.model import attention
from decode.model.loading import Target, auto_class, build_runner, find_dtype, load_config
from train.data import batching
from train.data.sample_store import SampleRow
from train.families.base import FamilyContext
from train.families.builders import build_trainable
from train.families.settings.base import FamilySettings
from train.trainer.loop import build_optimizers
from train.trainer.settings import DistillConfig

aten = torch.ops.aten
FUSED = aten._scaled_dot_product_flash_attention_for_cpu
LIKE = {
    *(aten.zeros_like, aten.ones_like, aten.full_like, aten.empty_like, aten.rand_like),
    *(aten.randn_like, aten.new_zeros, aten.new_ones, aten.new_full, aten.new_empty),
}
"""Operations that make a tensor from the shape of another."""
LARGE = 1 << 20
"""Whole numbers and masks with more elements have no data either: [T, T] of a text, on which no shape depends."""
READING = {aten._local_scalar_dense, aten.item, aten.is_nonzero}
INDEXING = {aten.index, aten.index_put, aten.index_put_, aten._index_put_impl_, aten._unsafe_index}
"""Operations of floating-point tensors that take indices and masks with data."""
PRODUCTS = {
    *(F.linear, F.conv1d, F.conv2d, F.scaled_dot_product_attention, torch.einsum),
    *(torch.matmul, torch.mm, torch.bmm, torch.addmm, torch.baddbmm),
    *(Tensor.matmul, Tensor.mm, Tensor.bmm, Tensor.__matmul__, Tensor.__rmatmul__),
}
"""What autocast computes in bf16."""


class FloatsWithoutData(TorchDispatchMode):
    """Whole numbers and masks are computed, floating-point and large tensors have shapes only, on "meta"."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs, name = dict(kwargs or {}), func.overloadpacket
        args, kwargs = _map(_floats_to_meta, (args, kwargs))
        tensors = _tensors((args, kwargs))
        if name in READING and tensors[0].is_meta:
            return True if tensors[0].dtype == torch.bool else 1.0  # as finite numbers have it
        if name is aten._to_copy:
            dtype = kwargs.get("dtype") or tensors[0].dtype
            kwargs["device"] = "meta" if tensors[0].is_meta or dtype.is_floating_point else "cpu"
        elif name in LIKE or (not tensors and "device" in {x.name for x in func._schema.arguments}):
            plain = {"generator": None} if "generator" in kwargs else {}
            made = func(*args, **{**kwargs, "device": "meta"} | plain)
            if made.is_floating_point() or made.is_complex() or made.numel() > LARGE:
                return made
            kwargs["device"] = "cpu"
        elif _is_large(func, tensors) or (
            any(x.is_meta for x in tensors)
            and not (
                name in INDEXING
                and tensors[0].is_meta
                and not any(x.is_meta for x in args[1] if x is not None)
            )
        ):
            args, kwargs = _map(lambda x: x.to("meta"), (args, kwargs))
        return _map(_floats_to_meta, func(*args, **kwargs))


def _is_large(func: Any, tensors: list[Tensor]) -> bool:
    """Whether the operation makes one number for each combination of very many."""
    if torch.Tag.pointwise not in func.tags:
        return False
    sizes = zip_longest(*(reversed(x.shape) for x in tensors), fillvalue=1)
    return math.prod(map(max, sizes)) > LARGE


def _floats_to_meta(x: Tensor) -> Tensor:
    return x.to("meta") if x.is_floating_point() else x


def _map(function: Callable[[Tensor], Tensor], x: Any) -> Any:
    """`x` with `function` of each tensor in its tuples, lists and dicts; quicker than tree_map of torch."""
    if isinstance(x, Tensor):
        return function(x)
    if isinstance(x, tuple | list):
        return type(x)([_map(function, y) for y in x])
    return {key: _map(function, y) for key, y in x.items()} if isinstance(x, dict) else x


def _tensors(x: Any) -> list[Tensor]:
    """All tensors in tuples, lists and dicts."""
    if isinstance(x, Tensor):
        return [x]
    if isinstance(x, dict):
        x = x.values()
    elif not isinstance(x, tuple | list):
        return []
    return [tensor for y in x for tensor in _tensors(y)]


class Kernels(TorchFunctionMode):
    """Fused attention and autocast of tensors without data, for which torch has neither.

    Where autocast is on for the CPU, matrix products are in bf16. While `casts` is a dict, a weight is cast once.
    """

    def __init__(self, phase: Callable[[str], Any]):
        super().__init__()
        self.phase = phase
        self.casts: dict[int, Tensor] | None = None

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in PRODUCTS and torch.is_autocast_enabled("cpu"):
            args, kwargs = _map(self.cast, (args, kwargs))
        if func is F.scaled_dot_product_attention and args[0].is_meta:
            return fused_attention(*args, **kwargs)
        # Each row is multiplied by one expert, whichever it is.
        if func is torch._grouped_mm and args[0].is_meta:
            return args[0] @ args[1][0]
        return func(*args, **kwargs)

    def cast(self, x: Tensor) -> Tensor:
        """`x` in bf16 if it is in fp32."""
        if x.dtype != torch.float32:
            return x
        if self.casts is None or not (x.is_leaf and x.requires_grad):
            return x.to(torch.bfloat16)
        if id(x) not in self.casts:
            with self.phase(WEIGHTS_IN_BF16):
                self.casts[id(x)] = x.to(torch.bfloat16)
        return self.casts[id(x)]


def fused_attention(
    query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None = None, dropout_p: float = 0.0,
    is_causal: bool = False, scale: float | None = None, enable_gqa: bool = False,
) -> Tensor:  # fmt: skip
    """scaled_dot_product_attention by a kernel that keeps no scores, as those of a CPU and of CUDA do."""
    if attn_mask is not None and attn_mask.requires_grad:  # no such kernel has gradients of a bias
        return F.scaled_dot_product_attention(
            query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa
        )
    if attn_mask is not None and attn_mask.dtype == torch.bool:
        attn_mask = torch.zeros(attn_mask.shape, dtype=query.dtype)
    width = value.shape[-1]
    value = F.pad(value, (0, query.shape[-1] - width))
    out = FUSED(query, key, value, dropout_p, is_causal, attn_mask=attn_mask, scale=scale)[0]
    narrow: Tensor = out[..., :width]
    return narrow


TARGET, DRAFT, GRADIENTS = "target's weights", "draft's weights, fp32", "gradients, fp32"
STATES, WEIGHTS_IN_BF16 = "optimiser's states, fp32", "weights in bf16"
TEACHER, ACTIVATIONS, LOGITS = "states of the target", "activations of the draft", "logits"
PIECES = "gradients before they are added"
PURPOSES = TARGET, DRAFT, GRADIENTS, STATES, WEIGHTS_IN_BF16, TEACHER, ACTIVATIONS, LOGITS, PIECES
"""What a step's bytes are for, as estimates name it."""


class LiveBytes(TorchDispatchMode):
    """Counts the bytes of all storages that operations return, from then until they are freed, by what they are for.

    A view holds no bytes of its own. What autograd keeps lives as long as autograd keeps it.
    """

    def __init__(self) -> None:
        super().__init__()
        self.purpose = ACTIVATIONS
        self.widths: set[int] = set()
        """Sizes of vocabularies: what a step makes as wide as these are logits."""
        self.weights: set[torch.Size] = set()
        """Shapes of matrices in training: what a step makes in these shapes are their gradients."""
        self.alive: dict[int, tuple[str, int, Any]] = {}
        self.now: Counter[str] = Counter()
        self.peak: Counter[str] = Counter()
        """The bytes of each purpose when most were alive."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        inputs = {_address(x) for x in _stored((args, kwargs))}
        out = func(*args, **(kwargs or {}))
        for x in _stored(out):
            if _address(x) not in inputs and _address(x) not in self.alive:
                purpose = self.purpose
                if purpose == ACTIVATIONS and x.shape in self.weights:
                    purpose = PIECES
                elif purpose == ACTIVATIONS and x.ndim > 0 and x.shape[-1] in self.widths:
                    purpose = LOGITS
                self.hold(x, purpose)
        return out

    def hold(self, tensor: Tensor, purpose: str) -> None:
        """Counts the storage of `tensor` for `purpose` from now on."""
        storage, at = tensor.untyped_storage(), _address(tensor)
        self.free(at)
        # The callback goes with the reference: one that is dropped is never called.
        self.alive[at] = purpose, storage.nbytes(), weakref.ref(storage, lambda _: self.free(at))
        self.now[purpose] += storage.nbytes()
        if self.now.total() > self.peak.total():
            self.peak = self.now.copy()

    def free(self, address: int) -> None:
        purpose, size, _ = self.alive.pop(address, ("", 0, None))
        self.now[purpose] -= size

    @contextmanager
    def phase(self, purpose: str) -> Iterator[None]:
        """What is made in the block is for `purpose`."""
        before, self.purpose = self.purpose, purpose
        try:
            yield
        finally:
            self.purpose = before


def _stored(values: Any) -> list[Tensor]:
    """Those with a storage; oneDNN's packed weights have none."""
    return [x for x in _tensors(values) if x.layout == torch.strided]


def _address(tensor: Tensor) -> int:
    return tensor.untyped_storage()._cdata


class _NoModules(nullcontext[None]):
    """In place of a ModuleTracker, whose hooks torch.autograd.grad does not allow."""

    parents = frozenset({"Global"})


def count_flops() -> FlopCounterMode:
    """Counts operations as torch does, those of a CPU's fused attention too, which torch leaves out."""

    def per_head(query: Any, *shapes: Any) -> Iterator[Any]:
        """The shapes of keys and values if each query head had its own."""
        return ((shape[0], query[1], *shape[2:]) for shape in shapes)

    def forward(query: Any, key: Any, value: Any, *args: Any, **kwargs: Any) -> int:
        return sdpa_flop_count(query, *per_head(query, key, value))

    def backward(gradient: Any, query: Any, key: Any, value: Any, *args: Any, **kwargs: Any) -> int:
        return sdpa_backward_flop_count(gradient, query, *per_head(query, key, value))

    own = {FUSED: forward, aten._scaled_dot_product_flash_attention_for_cpu_backward: backward}
    counter = FlopCounterMode(display=False, custom_mapping=own)
    counter.mod_tracker = _NoModules()  # type: ignore[assignment]
    return counter


@dataclass(frozen=True)
class StepWorkload:
    """What one optimiser step reads."""

    samples: int
    tokens: float
    """Tokens of a sample, on average."""
    supervised_tokens: float
    """Supervised tokens of a sample, on average."""
    max_tokens: int
    """Tokens of the longest sample."""
    max_supervised_tokens: int
    """Supervised tokens of a sample, at most."""
    micro_batch: int
    """Samples per forward pass of each process."""
    processes: int = 1


@dataclass(frozen=True)
class TrainingCost:
    """What one micro-batch takes, forward and backward."""

    memory: dict[str, int]
    """Bytes that are alive at the worst moment, by what they are for; weights and the optimiser's states included."""
    flops: int
    """Operations of target and draft, what is computed a second time in backward included."""
    target_flops: int
    """Those of them in the layers of a target that is not trained."""


class ShapeRun:
    """A target and a draft in training that have shapes and no data."""

    def __init__(self, s: DistillConfig, config: Any):
        """`s` are the settings of train/distill.py, `config` is the target's; of draft.init only sizes are read."""
        layers = config.get_text_config(decoder=True).num_hidden_layers
        draft: FamilySettings = s.draft.planned(layers)
        shape = load_config(draft.continues, "draft") if draft.continues else None
        memory = self.memory = LiveBytes()
        self.kernels = Kernels(memory.phase)
        with self.without_data():
            with memory.phase(TARGET):
                model = auto_class(config).from_config(config, dtype=find_dtype(s.target_dtype))
                self.target = Target(build_runner(model), None, s.target, None, "", frozenset())
            self.vocab = self.target.runner.vocab_size
            with memory.phase(DRAFT):
                rows = made_up_rows(1, 64, 32, self.vocab)
                self.trainable = build_trainable(
                    draft, FamilyContext(s, self.target, rows, init_shape=shape)
                )
            trained = [p for p in self.trainable.model.parameters() if p.requires_grad]
            self.parameters = trained
            self._set_gradients(True)
            with memory.phase(STATES):
                self.optimizers = build_optimizers(self.trainable, s.loop)
                for optimizer in self.optimizers:
                    optimizer.step()
            self._set_gradients(False)
        for parameter in trained:
            parameter.register_post_accumulate_grad_hook(lambda p: memory.hold(p.grad, GRADIENTS))
        own = list(self.trainable.model.parameters())
        ids = {id(p) for p in own}
        self.trained = sum(p.numel() for p in trained)
        self.frozen = sum(p.numel() for p in own) - self.trained
        self.target_parameters = sum(p.numel() for p in model.parameters() if id(p) not in ids)
        self.state_bytes = memory.now[STATES]
        self.trains_target = draft.trains_target
        self.fused = s.loop.fused_adamw
        self.saved_in_float32 = draft.is_language_model and not draft.trains_target
        vocabulary = self.trainable.metadata.get("vocabulary")
        memory.widths = {self.vocab, self.vocab if vocabulary is None else vocabulary.size}
        memory.weights = {p.shape for p in trained if p.ndim > 1}

    @contextmanager
    def without_data(self) -> Iterator[None]:
        """In the block floating-point tensors have no data, and what is alive is counted."""
        method = attention.SETTINGS.method
        # flex_attention runs compiled, on CUDA alone. It holds as little as blocks do, and computes as much.
        method = "blockwise" if method == "flex" else method
        with attention.training_attention(method), FloatsWithoutData(), self.memory, self.kernels:
            yield

    def _set_gradients(self, there: bool) -> None:
        with self.memory.phase(GRADIENTS):
            for parameter in self.parameters:
                parameter.grad = torch.zeros_like(parameter) if there else None

    def step(self, rows: list[SampleRow], mixed: bool, accumulates: bool = False) -> TrainingCost:
        """The cost of a step on these rows. `mixed`: the draft computes in bf16. `accumulates`: the gradients of an
        earlier micro-batch are there."""
        memory, trainable = self.memory, self.trainable
        teacher: Any = trainable.teacher
        target_flops = 0

        def run_model(*inputs: Any) -> Any:
            with torch.autocast("cpu", torch.bfloat16, enabled=mixed):
                self.kernels.casts = {}
                sums = trainable.model(*inputs)
            self.kernels.casts = None  # backward casts again what it computes again
            return sums

        def run_target(batch: batching.Batch) -> Any:
            nonlocal target_flops
            with memory.phase(TEACHER):
                before = flops.get_total_flops()
                output = type(teacher).get_output(teacher, batch)
                target_flops += flops.get_total_flops() - before
            return output

        with self.without_data(), count_flops() as flops:
            self._set_gradients(accumulates)
            memory.peak = memory.now.copy()
            if teacher is not None:
                teacher.get_output = run_target
            run_backward(trainable.loss(cast(Any, run_model), batching.collate(rows, 0))["loss"])
            self._set_gradients(False)
        peak = {name: memory.peak[name] for name in PURPOSES}
        return TrainingCost(peak, flops.get_total_flops(), target_flops)


def run_backward(loss: Tensor) -> None:
    """`loss.backward()`, in which a TorchFunctionMode sees what is computed again; within that method it would not."""
    engine = torch.autograd.Variable._execution_engine  # type: ignore[attr-defined]
    ones = torch.ones_like(loss)
    engine.run_backward(
        (loss,), (ones,), False, False, (), allow_unreachable=True, accumulate_grad=True
    )


def made_up_rows(count: int, tokens: int, supervised: int, vocab: int) -> list[SampleRow]:
    """`count` samples of `tokens` tokens, of which the last `supervised` are labels, but for the first token."""
    span = [max(1, tokens - supervised), tokens]
    return [
        SampleRow(
            id=str(i), source="", origin="target", input_ids=[j % vocab for j in range(tokens)],
            loss_spans=[span], finish_reason="eos",
        )
        for i in range(count)
    ]  # fmt: skip
