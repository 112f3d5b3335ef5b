"""Triton's kernels compiled to machine code for GPUs that are not there, by the compiler in Triton's wheel.

Skipped where Triton is not installed; the `kernels` extra brings it on Linux.
"""

import re
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor

from decode.model.kv_cache import SlotMapping, TreeNodes
from tests.params import slow_except

pytest.importorskip("triton", reason="needs Triton, which has wheels for Linux")

import triton
import triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.backends.nvidia.compiler import get_ptxas
from triton.compiler import ASTSource
from triton.compiler.errors import CompilationError

from decode.model.gpu import split_kv_attention
from decode.model.gpu.step_blocks import SHARED_KIB, Blocks

CAPABILITIES = (80, 86, 89, 90, 100, 120)
"""Cards that Triton compiles for; of 75 its code fails in the assembler."""
MAX_SPILLED = 64
"""Bytes a thread may store in memory for lack of registers."""
TYPES = {
    torch.bfloat16: "bf16",
    torch.float16: "fp16",
    torch.float32: "fp32",
    torch.int64: "i64",
    torch.int32: "i32",
}


@dataclass(frozen=True)
class Launch:
    """One launch of a kernel: its arguments by name, numbers and tensors."""

    kernel: Any
    arguments: dict[str, Any]


@dataclass(frozen=True)
class Compiled:
    """What the compiler says of a kernel."""

    cubin: int  # bytes of machine code
    shared: int  # bytes a program
    spilled: int  # bytes a thread


@contextmanager
def recorded_launches() -> Iterator[list[Launch]]:
    """While the block runs, kernels of split_kv_attention.py are not run but listed."""
    launches: list[Launch] = []

    def recorder(kernel: Any) -> mock.MagicMock:
        def launch(*args: Any, **constants: Any) -> None:
            named = dict(zip(kernel.arg_names, args, strict=False))
            launches.append(Launch(kernel, named | constants))

        stand_in = mock.MagicMock()
        stand_in.__getitem__.return_value = launch
        return stand_in

    stand_in = recorder(split_kv_attention._attend_kernel)
    with mock.patch.object(split_kv_attention, "_attend_kernel", stand_in):
        yield launches


def compile_launch(launch: Launch, capability: int) -> Compiled:
    """What the compiler says of the kernel for these arguments."""
    made = build(launch, capability)
    return Compiled(
        len(made.asm["cubin"]), made.metadata.shared, spilled_bytes(made.asm["ptx"], capability)
    )


def build(launch: Launch, capability: int) -> Any:
    """The kernel compiled for these arguments, as its launch would do on such a GPU."""
    constants = {p.name for p in launch.kernel.params if p.is_constexpr}
    signature, values, attributes = {}, {}, {}
    for at, name in enumerate(launch.kernel.arg_names):
        value = launch.arguments[name]
        if name in constants:
            signature[name], values[at,] = "constexpr", value
        elif isinstance(value, Tensor):
            signature[name], attributes[at,] = f"*{TYPES[value.dtype]}", [["tt.divisibility", 16]]
        else:
            signature[name] = "fp32" if isinstance(value, float) else "i32"
            if isinstance(value, int) and value % 16 == 0:
                attributes[at,] = [["tt.divisibility", 16]]
    source = ASTSource(launch.kernel, signature, values, attributes)
    options = {name: value for name, value in launch.arguments.items() if name == "num_stages"}
    return triton.compile(source, target=GPUTarget("cuda", capability, 32), options=options)


def spilled_bytes(ptx: str, capability: int) -> int:
    """Bytes a thread that NVIDIA's assembler stores in memory for lack of registers."""
    arch = re.search(r"^\.target (\w+)", ptx, re.M)
    assert arch is not None
    command = [get_ptxas(capability).path, "-v", f"--gpu-name={arch[1]}", "-", "-o", "/dev/null"]
    said = subprocess.run(command, input=ptx, capture_output=True, text=True, check=True).stderr
    stores = re.search(r"(\d+) bytes spill stores", said)
    assert stores is not None, said
    return int(stores[1])


@dataclass(frozen=True)
class Shape:
    """Attention of one model, in bfloat16, over 1,024 slots a row."""

    heads: int  # K/V heads
    groups: int
    width: int
    value_width: int = 0
    nodes: int = 0  # of a tree; 0: a chain of 5 tokens
    window: int | None = None
    softcap: float | None = None
    sink: bool = False


SHAPES = {
    "llama-8b chain": Shape(8, 4, 128),
    "llama-8b tree of 64": Shape(8, 4, 128, nodes=65),
    "qwen3-32b tree of 16": Shape(8, 8, 128, nodes=17),
    "gemma2 chain": Shape(8, 2, 256, window=512, softcap=50.0),
    "gemma3 tree of 16": Shape(8, 2, 256, nodes=17, window=512),
    "gpt-oss chain": Shape(8, 8, 64, window=128, sink=True),
    "deepseek tree of 16": Shape(16, 1, 192, 128, nodes=17),
}


def launches_of(shape: Shape, capability: int = 90) -> list[Launch]:
    """What one step of two rows launches for a layer on such a GPU."""
    slots = SlotMapping(2, 1024, torch.device("cpu"))
    tree, count = None, 5
    if shape.nodes:
        count = shape.nodes
        every = torch.arange(count)[None]
        tree = TreeNodes(every, every, torch.eye(count, dtype=torch.bool)[None])
    slots.set_positions(torch.tensor([700, 90]), count, nodes=tree)
    query = torch.zeros(2, shape.heads, shape.groups * count, shape.width, dtype=torch.bfloat16)
    keys = query.new_zeros(2, shape.heads, 1024, shape.width)
    values = query.new_zeros(2, shape.heads, 1024, shape.value_width or shape.width)
    sink = query.new_zeros(shape.heads * shape.groups) if shape.sink else None
    live = slots.split_kv_metadata(shape.window)
    limit = 1024 * SHARED_KIB[capability]
    fits = mock.patch.object(split_kv_attention, "shared_memory", return_value=limit)
    with fits, recorded_launches() as launches:
        given = (
            query, keys, values, live.first, live.live, live.seen, live.position, live.base, live.tail, live.window
        )  # fmt: skip
        split_kv_attention.split_kv_attention(*given, 0.1, shape.softcap, sink)
    return launches


def check(compiled: Compiled, capability: int) -> None:
    """AssertionError unless a GPU of that capability runs this code, and without the detour through memory."""
    assert compiled.cubin > 0
    assert compiled.shared <= 1024 * SHARED_KIB[capability]
    assert compiled.spilled <= MAX_SPILLED


CASES = [f"{name}, sm_{capability}" for name in SHAPES for capability in CAPABILITIES]


@pytest.mark.parametrize("case", slow_except(CASES, ["llama-8b chain, sm_90"]))
def test_kernels_compile_and_fit(case: str) -> None:
    """Catches a kernel that does not compile for a GPU, needs more shared memory than it has, or spills."""
    name, _, capability = case.partition(", sm_")
    launches = launches_of(SHAPES[name], int(capability))
    assert len(launches) == 1
    for launch in launches:
        check(compile_launch(launch, int(capability)), int(capability))


@triton.jit
def _broken_kernel(query, out, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    """Adds blocks of two sizes."""
    one, two = tl.arange(0, BLOCK), tl.arange(0, 2 * BLOCK)
    tl.store(out + one, tl.load(query + one) + two)


def test_a_kernel_that_does_not_compile_is_found() -> None:
    """Planted: shapes that do not fit, which Python does not see."""
    values = torch.zeros(64)
    launch = Launch(_broken_kernel, {"query": values, "out": values, "BLOCK": 16})
    with pytest.raises(CompilationError, match=r"(?i)incompatible|broadcast"):
        compile_launch(launch, 90)


def test_a_kernel_that_does_not_fit_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """Planted: blocks of twice as many keys, of heads as wide as Gemma's."""
    monkeypatch.setattr(split_kv_attention, "pick_blocks", lambda *_: Blocks(128, 16, 3))
    [attend] = launches_of(SHAPES["gemma2 chain"])
    with pytest.raises(AssertionError, match="shared"):
        check(compile_launch(attend, 90), 90)


def test_spills_are_found() -> None:
    """Planted: assembly that keeps 200 numbers at once where a thread may have few registers."""
    [attend] = launches_of(SHAPES["llama-8b chain"])
    ptx = build(attend, 90).asm["ptx"]
    assert spilled_bytes(ptx, 90) <= MAX_SPILLED
    fewer = ptx.replace(".reqntid", ".maxnreg 32\n.reqntid")
    assert spilled_bytes(fewer, 90) > MAX_SPILLED
