"""Inductor's code for an H100 that is not there: generated from fake tensors, and read as Python.

Inductor asks the device for its properties, and Triton for its driver; both answers are given here. Nothing is run.
"""

import ast
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from math import prod
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
import torch.nn.functional as F
from torch._dynamo.device_interface import CudaInterface
from torch._inductor import compile_fx, config, scheduler
from torch._inductor.codecache import PyCodeCache
from torch._inductor.graph import GraphLowering
from torch._inductor.runtime import triton_helpers
from torch._inductor.runtime.triton_heuristics import StaticTritonCompileResult
from torch.utils import _triton

H100 = SimpleNamespace(
    name="NVIDIA H100",
    major=9,
    minor=0,
    multi_processor_count=132,
    regs_per_multiprocessor=65536,
    max_threads_per_multi_processor=2048,
    max_threads_per_block=1024,
    warp_size=32,
    gcnArchName="",  # of GPUs of another kind
)
SDPA = F.scaled_dot_product_attention
CONFIG = {
    "force_disable_caches": True,
    "joint_graph_constant_folding": False,  # it computes on the device
    "max_autotune_gemm_backends": "ATEN",  # kernels of several kinds are timed against each other
}
ON_HOST = (
    "empty_strided_cpu(", "cpp_fused", ".item()", "_local_scalar_dense", ".cpu()", "device='cpu'",
)  # fmt: skip
"""What stands in generated code that reads on the host or has tensors there."""


@dataclass(frozen=True)
class Buffer:
    """A tensor that generated code allocates, or gets from a kernel that is not its own."""

    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def count(self) -> int:
        """Its numbers."""
        return prod(self.shape)

    @property
    def bytes(self) -> int:
        return self.count * self.dtype.itemsize


@dataclass(frozen=True)
class Block:
    """One function of the generated code: the round itself, or one region."""

    buffers: tuple[Buffer, ...]
    launches: Counter[str]
    """Kernels by name: generated ones, `extern_kernels.…` and `aten.…`."""
    regions: Counter[str]
    """The regions that it calls, by name."""
    peak: int
    """The most bytes of buffers whose numbers are a multiple of `wide` that are alive at once."""


@dataclass(frozen=True)
class GeneratedCode:
    """What inductor made of one function."""

    text: str
    devices: frozenset[str]
    """Types of the devices that any tensor in it is on."""
    main: Block
    regions: dict[str, Block]


class CodeGenerated(BaseException):
    """Ends a compilation whose code has been generated, past every handler of errors."""


def attention_of_a_gpu(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor,
    attn_mask: torch.Tensor | None = None, is_causal: bool = False, scale: float | None = None,
    enable_gqa: bool = False,
) -> torch.Tensor:  # fmt: skip
    """What scaled_dot_product_attention does on a GPU under a mask: one kernel, which takes the mask as numbers.

    Without a GPU torch writes attention out as products, with copies of the K/V buffers in fp32."""
    if attn_mask is None:
        return SDPA(query, key, value, is_causal=is_causal, scale=scale, enable_gqa=enable_gqa)
    shape = (*query.shape[:3], key.shape[2])
    bias = torch.where(attn_mask, 0.0, float("-inf")).to(query.dtype).expand(shape)
    kernel = torch.ops.aten._scaled_dot_product_efficient_attention
    return kernel(query, key, value, bias, False, scale=scale)[0]


@contextmanager
def inductor_for_h100(done: Callable[[GraphLowering], None]) -> Iterator[None]:
    """While the block runs, inductor generates CUDA code and gives each graph with its code to `done`, instead of
    loading it."""

    def h100(*args: Any, **kwargs: Any) -> Any:
        return H100

    def yes(*args: Any, **kwargs: Any) -> bool:
        return True

    with ExitStack() as stack:
        for where, name, value in (
            (CudaInterface, "get_device_properties", h100),
            (CudaInterface.Worker, "get_device_properties", h100),
            (CudaInterface, "is_available", yes),
            (CudaInterface, "is_bf16_supported", yes),
            (torch.cuda, "get_device_properties", h100),
            (torch.cuda, "get_device_capability", lambda *args: (H100.major, H100.minor)),
            (torch.cuda, "current_device", lambda: 0),
            (scheduler, "has_triton", yes),
            (_triton, "triton_hash_with_backend", lambda: "no driver"),
            (GraphLowering, "compile_to_module", done),
        ):
            stack.enter_context(mock.patch.object(where, name, value))
        stack.enter_context(config.patch(CONFIG))
        yield


def generate(function: Callable[..., Any], args: Sequence[Any], wide: int) -> GeneratedCode:
    """The code of `function`, which torch.compile has made for "cuda", for these arguments on a fake GPU.

    `wide` says which buffers `Block.peak` counts: a vocabulary's tokens count what is as wide as the vocabulary."""
    found: list[GeneratedCode] = []

    def done(graph: GraphLowering) -> None:
        text = graph.codegen()[0].value
        buffers = {
            name: Buffer(tuple(map(int, buffer.get_size())), buffer.get_dtype())
            for name, buffer in graph.name_to_buffer.items()
            if buffer.maybe_get_layout() is not None and buffer.has_tensor_output()
        }
        found.append(read_code(text, frozenset(graph.device_types), buffers, wide))
        raise CodeGenerated

    inductor = compile_fx.compile_fx

    def compile_for_h100(*args: Any, **kwargs: Any) -> Any:
        with inductor_for_h100(done):
            return inductor(*args, **kwargs)

    torch._dynamo.reset()
    with (
        mock.patch.object(compile_fx, "compile_fx", compile_for_h100),
        mock.patch.object(F, "scaled_dot_product_attention", attention_of_a_gpu),
        torch.inference_mode(),
        suppress(CodeGenerated),
    ):
        function(*args)
    [code] = found
    return code


def read_code(
    text: str, devices: frozenset[str], known: dict[str, Buffer], wide: int
) -> GeneratedCode:
    """The parts of the generated Python `text`; `known` are buffers by name that are not allocated in it."""
    functions = {
        node.name: node
        for node in ast.walk(ast.parse(text))
        if isinstance(node, ast.FunctionDef) and node.args.args and node.args.args[-1].arg == "args"
    }
    main = functions.pop("call")
    regions = {name: read_block(node, known, functions, wide) for name, node in functions.items()}
    return GeneratedCode(text, devices, read_block(main, known, functions, wide), regions)


def read_block(
    function: ast.FunctionDef, known: dict[str, Buffer], regions: Any, wide: int
) -> Block:
    """Goes through the statements of a generated function in order."""
    buffers: list[Buffer] = []
    launches: Counter[str] = Counter()
    called: Counter[str] = Counter()
    root: dict[str, int] = {}  # variables of a buffer, by its number
    alive: Counter[int] = Counter()  # its variables
    peak = 0
    for node in statements(function):
        for call in [x for x in ast.walk(node) if isinstance(x, ast.Call)]:
            name = ast.unparse(call.func)
            if name in regions:
                called[name] += 1
            elif is_kernel(name):
                launches[name.removesuffix(".run")] += 1
        if isinstance(node, ast.Delete):
            for target in node.targets:
                if (number := root.pop(ast.unparse(target), None)) is not None:
                    alive[number] -= 1
        elif isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
            name = node.targets[0].id
            if (number := root.pop(name, None)) is not None:
                alive[number] -= 1
            made = allocated(node.value) or (
                known.get(name) if isinstance(node.value, ast.Subscript) else None
            )
            if made is not None:
                root[name] = len(buffers)
                buffers.append(made)
            elif (source := aliased(node.value)) in root:
                root[name] = root[source]
            if name in root:
                alive[root[name]] += 1
        here = [buffers[number] for number, count in alive.items() if count > 0]
        peak = max(peak, sum(b.bytes for b in here if b.count % wide == 0))
    return Block(tuple(buffers), launches, called, peak)


def statements(node: ast.AST) -> Iterator[ast.stmt]:
    """The simple statements of a function in order, those of `with` blocks included."""
    for child in getattr(node, "body", []):
        if hasattr(child, "body"):
            yield from statements(child)
        else:
            yield child


def is_kernel(name: str) -> bool:
    """Whether a call of this name runs a kernel on the device."""
    return name.endswith(".run") or name.startswith(("extern_kernels.", "aten.", "torch.ops."))


def allocated(value: ast.expr) -> Buffer | None:
    """The buffer of `empty_strided_…(shape, stride, dtype)`; None for other expressions."""
    if not isinstance(value, ast.Call) or not ast.unparse(value.func).startswith("empty_strided_"):
        return None
    shape = ast.literal_eval(value.args[0])
    return Buffer(shape, getattr(torch, ast.unparse(value.args[2]).removeprefix("torch.")))


def aliased(value: ast.expr) -> str:
    """The variable whose memory an expression shares; empty if it is not a plain one."""
    if isinstance(value, ast.Call) and ast.unparse(value.func) == "reinterpret_tensor":
        value = value.args[0]
    return value.id if isinstance(value, ast.Name) else ""


def compile_kernels(code: GeneratedCode) -> dict[str, list[Any]]:
    """Triton's machine code of each kernel, by its name: one for each setting that would be timed on a GPU."""
    found = {}
    with (
        mock.patch.object(triton_helpers, "set_driver_to_gpu"),
        mock.patch.object(StaticTritonCompileResult, "can_statically_launch", return_value=None),
    ):
        for node in ast.walk(ast.parse(code.text)):
            if isinstance(node, ast.Call) and ast.unparse(node.func) == "async_compile.triton":
                name, source = map(ast.literal_eval, node.args[:2])
                kernel = getattr(PyCodeCache.load(source), name)
                results = [kernel._precompile_config(setting) for setting in kernel.configs]
                found[name] = [result.kernel for result in results]
    return found
