"""Limits by memory bandwidth and memory size: fastest decoding, largest useful batch, memory of target and draft.

A decoding step reads every weight once, whatever it computes, so bandwidth ÷ bytes is an upper bound of steps per
second. Sizes come from config.json and the headers of the weight files; no weight is loaded.
"""

import time
from dataclasses import dataclass
from functools import partial
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING

from safetensors import SafetensorError, safe_open

from decode.common.errors import UserError
from decode.common.files import read_json_object

if TYPE_CHECKING:
    import torch

DTYPE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}


@dataclass(frozen=True)
class GpuSpec:
    """Peak figures of a GPU from its vendor's data sheet."""

    bandwidth: float
    """Bytes a second."""
    memory: float
    """Bytes."""
    bf16: float
    """Dense operations a second, fp32 accumulation; those of fp16 as well."""
    fp32: float
    """The same without tensor cores: torch's default for fp32, which does not use TF32."""

    def flops(self, dtype: str) -> float:
        """Peak operations per second in a dtype of DTYPE_BYTES."""
        return self.fp32 if dtype == "float32" else self.bf16


GPU_SPECS = {
    # NVIDIA's data sheets of each product (SXM, PCIe and NVL differ), of tensor cores half of a figure "with sparsity";
    # B200: the HGX sheet; GeForce: the Ada and Ampere GA102 white papers. Names are those that CUDA reports.
    "NVIDIA B200": GpuSpec(7.7e12, 180e9, 2250e12, 75e12),
    "NVIDIA GH200 480GB": GpuSpec(4.0e12, 96e9, 989e12, 67e12),
    "NVIDIA H200": GpuSpec(4.8e12, 141e9, 989e12, 67e12),
    "NVIDIA H200 NVL": GpuSpec(4.8e12, 141e9, 835e12, 60e12),
    "NVIDIA H100 80GB HBM3": GpuSpec(3.35e12, 80e9, 989e12, 67e12),
    "NVIDIA H100 NVL": GpuSpec(3.9e12, 94e9, 835e12, 60e12),
    "NVIDIA H100 PCIe": GpuSpec(2.0e12, 80e9, 756e12, 51e12),
    "NVIDIA A100-SXM4-80GB": GpuSpec(2.039e12, 80e9, 312e12, 19.5e12),
    "NVIDIA A100 80GB PCIe": GpuSpec(1.935e12, 80e9, 312e12, 19.5e12),
    "NVIDIA A100-SXM4-40GB": GpuSpec(1.555e12, 40e9, 312e12, 19.5e12),
    "NVIDIA A100-PCIE-40GB": GpuSpec(1.555e12, 40e9, 312e12, 19.5e12),
    "NVIDIA L40S": GpuSpec(0.864e12, 48e9, 362e12, 91.6e12),
    "NVIDIA L40": GpuSpec(0.864e12, 48e9, 181e12, 90.5e12),
    "NVIDIA L4": GpuSpec(0.3e12, 24e9, 121e12, 30.3e12),
    "NVIDIA A10G": GpuSpec(0.6e12, 24e9, 70e12, 35e12),
    "NVIDIA A10": GpuSpec(0.6e12, 24e9, 125e12, 31.2e12),
    "NVIDIA GeForce RTX 4090": GpuSpec(1.008e12, 24e9, 165e12, 82.6e12),
    "NVIDIA GeForce RTX 3090": GpuSpec(0.936e12, 24e9, 71e12, 35.6e12),
}


@dataclass(frozen=True)
class ModelSize:
    """Number of parameters and of K/V values per token, from a model's files."""

    parameters: int
    kv_values: int  # numbers that the K/V cache holds for one token; 0 for a draft without a cache
    experts: bool = False
    """A mixture of experts, or an encoder and a decoder: one token reads only part of the weights, so the bounds here
    are too low."""


def read_model_size(folder: str | Path) -> ModelSize | None:
    """Size of a model folder with safetensors; None for anything else: a Hub name, a draft without weights, and
    damaged files."""
    path = Path(folder)
    files = sorted(set(path.glob("*.safetensors")) - set(path.glob("adapter_*")))
    if not (path / "config.json").is_file() or not files:
        return None
    try:
        config = read_json_object(path / "config.json", "the config of a model")
        parameters = sum(map(_count_parameters, files))
    except (UserError, OSError, SafetensorError):
        return None
    config = config.get("text_config", config)
    layers = config.get("num_hidden_layers", config.get("n_layer", 0))  # the older names: GPT-2's
    heads = config.get("num_attention_heads", config.get("n_head", 0))
    hidden = config.get("hidden_size", config.get("n_embd", 0))
    kv_heads = config.get("num_key_value_heads") or heads
    width = config.get("head_dim") or (hidden // heads if heads else 0)
    if "d_kv" in config:
        # T5: a prompt's token has keys in cross-attention, an answer's in self-attention.
        layers, kv_heads = config["num_decoder_layers"], config["num_heads"]
        width = config["d_kv"]
    partly = ("num_experts", "num_local_experts", "n_routed_experts", "is_encoder_decoder")
    return ModelSize(parameters, 2 * layers * kv_heads * width, any(map(config.get, partly)))


def _count_parameters(file: Path) -> int:
    """Floating-point numbers in one safetensors file, from its header."""
    with safe_open(file, "pt") as tensors:
        parts = list(map(tensors.get_slice, tensors.keys()))
        return sum(prod(x.get_shape()) for x in parts if x.get_dtype().startswith(("F", "BF")))


def ridge_point(gpu: GpuSpec, bytes_a_weight: float) -> float:
    """Tokens per pass at which bf16 arithmetic takes as long as reading the weights: 2 operations per weight and token.

    Drafted tokens are almost free while batch × (K + 1) stays well below it; above it, each costs its arithmetic.
    """
    return gpu.bf16 * bytes_a_weight / (2 * gpu.bandwidth)


def memory_breakdown(
    target: ModelSize, draft: ModelSize | None, rows: int, length: int, bytes_a_value: int
) -> dict[str, int]:
    """{part: bytes} for `rows` texts of `length` tokens; activations are not included."""
    tokens = rows * length * bytes_a_value
    parts = {
        "target": target.parameters * bytes_a_value,
        "target's K/V cache": target.kv_values * tokens,
    }
    if draft is not None:
        parts["draft"] = draft.parameters * bytes_a_value
        parts["draft's K/V cache"] = draft.kv_values * tokens
    return parts


def measure_bandwidth(device: "torch.device", size: int = 2**28, repeats: int = 5) -> float:
    """Bytes per second read of `size` bytes on `device`, by their sum or by products of one row with matrices of them,
    which on some CPUs read faster: the best of `repeats` runs of each after a warm-up. `size` is a multiple of 2^16."""
    import torch  # the rest of this module does without

    block = torch.ones(size // 4, device=device)
    matrices = block.view(-1, 512, 32)
    row = torch.ones(1, 512, device=device).expand(len(matrices), -1, -1)
    best = float("inf")
    for read in (block.sum, partial(torch.bmm, row, matrices)):
        for _ in range(repeats + 1):
            start = time.perf_counter()
            read().flatten()[0].item()  # waits for the device
            best = min(best, time.perf_counter() - start)
    return size / best
