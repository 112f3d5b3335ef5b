"""Products of few rows with weights of eight and four bits, and attention of few queries, on CPUs with AVX512-VNNI.

torch.ops.draftsmith.int8_product(x, weight, scale, offset): x [M, K] in uint8, 128 more than the numbers; weight and
offset as from `pack_int8`; scale [N] -> [M, N] in fp32, exact sums times the scale. int4_product(x, weight, N): x
[M, K] in fp32, rounded to eight bits in groups of 32 inputs; weight as from `pack_int4` -> [M, N] in fp32.
few_queries_attention(query, key, value, allowed, scale), by attention.cpp: query [B, H, G * T, D], of which number q is
of token q % T, over key and value [B, H, S, D] where allowed [B, T, S] -> [B, H, G * T, D], all in fp32, D a multiple
of 16. A query's result does not depend on the others, nor on slots that it does not attend to.

Against oneDNN's and torch's products of the same weights: docs/families.md. They are built by the C++ compiler that
torch.compile uses on a CPU as well, in a few seconds, and kept where torch keeps its extensions.
"""

import hashlib
import os
import subprocess
import tempfile
from functools import cache
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

from decode.common.errors import one_line
from decode.common.machine import cache_folder

SOURCES = [Path(__file__).with_name(name) for name in ("vnni.cpp", "attention.cpp")]
FLAGS = ["-O3", "-std=c++20", "-shared", "-fPIC", "-fopenmp", "-mfma", "-mbmi2"]
FLAGS += ["-mavx512f", "-mavx512bw", "-mavx512dq", "-mavx512vl", "-mavx512vnni"]
LANES = 16
"""Outputs that are multiplied together: weights are filled up to a multiple."""
INPUTS = 4
"""The number of inputs is a multiple of it."""
ZERO_POINT = 128
"""The instruction multiplies unsigned activations: 0 is 128 there."""
MOST_INPUTS = 1 << 16
"""Up to so many sums of eight bits stay below 2^31."""


def is_available() -> bool:
    """Whether this CPU has the instructions and the products could be built and loaded."""
    return not what_is_missing()


@cache
def what_is_missing() -> str:
    """Why the products are not there, in a few words; "" where they are, and loaded."""
    if not torch.cpu._is_vnni_supported():
        return "this CPU has no AVX512-VNNI"
    try:
        torch.ops.load_library(str(build()))
    except subprocess.CalledProcessError as error:
        said = [line.strip() for line in error.stderr.splitlines() if line.strip()]
        cause = next((line for line in said if "error" in line), said[-1] if said else "no message")
        return f"the C++ compiler {error.cmd[0]} fails: {cause}"
    except OSError as error:
        if error.filename == os.environ.get("CXX", "c++"):
            return f"there is no C++ compiler {error.filename} (CXX names another one)"
        return f"they could not be built or loaded: {one_line(error)}"
    torch.library.register_fake("draftsmith::int8_product", _fake_int8)
    torch.library.register_fake("draftsmith::int4_product", _fake_int4)
    torch.library.register_fake("draftsmith::few_queries_attention", _fake_attention)
    return ""


def build() -> Path:
    """The library's file; compiles it where it is not there yet for this source and this torch."""
    torch_folder = Path(torch.__file__).parent
    text = f"{torch.__version__} {FLAGS} {[source.read_text() for source in SOURCES]}"
    name = f"draftsmith-vnni-{hashlib.sha256(text.encode()).hexdigest()[:16]}.so"
    kept = os.environ.get("TORCH_EXTENSIONS_DIR") or cache_folder()[0] / "torch_extensions"
    library = Path(kept) / name
    if not library.is_file():
        library.parent.mkdir(parents=True, exist_ok=True)
        include = torch_folder / "include"
        abi = f"-D_GLIBCXX_USE_CXX11_ABI={int(torch.compiled_with_cxx11_abi())}"
        places = [f"-I{include}", f"-I{include}/torch/csrc/api/include", f"-L{torch_folder}/lib"]
        with tempfile.TemporaryDirectory(dir=library.parent) as folder:
            made = Path(folder) / name
            words = [os.environ.get("CXX", "c++"), *FLAGS, abi, *places, *map(str, SOURCES)]
            words += ["-ltorch_cpu", "-lc10", "-o", str(made)]
            subprocess.run(
                words, check=True, capture_output=True, encoding="utf-8", errors="replace"
            )
            made.replace(library)  # another process finds all of it or nothing
    return library


def _fake_int8(x: Tensor, weight: Tensor, scale: Tensor, offset: Tensor) -> Tensor:
    return scale.new_empty(len(x), len(scale))


def _fake_int4(x: Tensor, weight: Tensor, outputs: int) -> Tensor:
    return x.new_empty(len(x), outputs)


def _fake_attention(
    query: Tensor, key: Tensor, value: Tensor, allowed: Tensor, scale: float
) -> Tensor:
    return query.new_empty(query.shape)


# ---- weights ----


def fits(shape: torch.Size) -> bool:
    """Whether a weight of this shape [N, K] can be packed in eight bits."""
    return is_available() and shape[1] % INPUTS == 0 and shape[1] < MOST_INPUTS


def pack_int8(values: Tensor) -> tuple[Tensor, Tensor]:
    """(weight [N / 16, K / 4, 16, 4], offset [N] in int32) of int8 `values` [N, K]."""
    outputs, inputs = values.shape
    padded = F.pad(values, (0, 0, 0, -outputs % LANES))
    blocks = padded.view(-1, LANES, inputs // INPUTS, INPUTS).transpose(1, 2).contiguous()
    return blocks, values.sum(1, dtype=torch.int32) * ZERO_POINT


def unpack_int8(weight: Tensor, outputs: int) -> Tensor:
    """The int8 values [N, K] of `pack_int8`."""
    return weight.transpose(1, 2).reshape(len(weight) * LANES, -1)[:outputs]


def pack_int4(numbers: Tensor, scale: Tensor, added: Tensor) -> Tensor:
    """[N / 16, K / 32, 320] bytes of `numbers` 0 … 15 [N, K] that stand for number * scale + added
    [N, K / 32], of which fp16 is kept; N is a multiple of 16. Of each group 16 scales and what is added, then 8 inputs
    of each of 16 outputs at a time, those of the second half in the high bits."""
    # [N / 16, 16, groups, parts, halves, inputs]
    halves = numbers.view(-1, LANES, scale.shape[1], 4, 2, INPUTS)
    both = halves[..., 0, :] | (halves[..., 1, :] << 4)
    both = both.permute(0, 2, 3, 1, 4).flatten(2)
    floats = torch.stack([part.view(-1, LANES, part.shape[1]) for part in (scale, added)], 1)
    floats = floats.half().permute(0, 3, 1, 2).flatten(2).contiguous().view(torch.uint8)
    return torch.cat([floats, both], 2)
