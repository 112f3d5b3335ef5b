"""Linear layers packed as quantised checkpoints hold them, number by number, and what each packed weight is worth."""

import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

Tensors = dict[str, torch.Tensor]
AWQ_COLUMN_OF_NIBBLE = [0, 2, 4, 6, 1, 3, 5, 7]
FP8 = torch.float8_e4m3fn


@dataclass(frozen=True)
class Packed:
    """A layer's tensors by the last part of their names, and its weight [out, in]."""

    tensors: Tensors
    weight: torch.Tensor


def word(numbers: list[int], bits: int) -> int:
    """The int32 that holds the numbers, the first in its lowest bits."""
    value = sum(number << (bits * i) for i, number in enumerate(numbers))
    return value - (1 << 32) if value >= 1 << 31 else value


def random_numbers(rows: int, columns: int, limit: int, seed: int) -> list[list[int]]:
    rng = random.Random(seed)
    return [[rng.randrange(limit) for _ in range(columns)] for _ in range(rows)]


def random_scales(groups: int, outputs: int, bits: int, seed: int) -> torch.Tensor:
    """[G, out] in fp16, so wide that weights have about the spread of `std` 0.25."""
    generator = torch.Generator().manual_seed(seed)
    return ((0.5 + torch.rand(groups, outputs, generator=generator)) / 2**bits).half()


def pack_gptq(
    inputs: int,
    outputs: int,
    seed: int,
    bits: int,
    version: int,
    act_order: bool,
    borrow: bool = False,
    size: int = 8,
) -> Packed:
    """GPTQ with groups of `size` inputs, the last of which may be smaller; with `act_order` the inputs of a group do
    not follow each other, else no groups are stored. Zero points are 0 to 2**bits - 1; version 1 stores them less 1,
    number by number or, with `borrow`, word by word as GPTQModel does."""
    groups, per = -(-inputs // size), 32 // bits
    numbers = random_numbers(inputs, outputs, 2**bits, seed)
    zeros = random_numbers(groups, outputs, 2**bits, seed + 1)
    zeros[0][:3] = [0, 2**bits - 1, 0]
    less = 1 if version == 1 and not borrow else 0
    scales = random_scales(groups, outputs, bits, seed + 2)
    g_idx = [i // size for i in range(inputs)]
    if act_order:
        random.Random(seed + 3).shuffle(g_idx)
    weight = torch.empty(outputs, inputs)
    for i in range(inputs):
        for o in range(outputs):
            g = g_idx[i]
            weight[o, i] = (numbers[i][o] - zeros[g][o]) * float(scales[g, o])
    qweight = [
        [word([numbers[at + j][o] for j in range(per)], bits) for o in range(outputs)]
        for at in range(0, inputs, per)
    ]
    qzeros = [
        [
            word([(z - less) % 2**bits for z in row[at : at + per]], bits)
            for at in range(0, outputs, per)
        ]
        for row in zeros
    ]
    words = torch.tensor(qzeros, dtype=torch.int32)
    if borrow:
        words -= word([1] * per, bits)
    tensors = {
        "qweight": torch.tensor(qweight, dtype=torch.int32), "qzeros": words, "scales": scales
    }  # fmt: skip
    if act_order:
        tensors["g_idx"] = torch.tensor(g_idx, dtype=torch.int32)
    return Packed(tensors, weight)


def pack_awq(inputs: int, outputs: int, seed: int) -> Packed:
    """AWQ in the order of its GEMM kernel, with groups of 8 inputs."""
    groups = inputs // 8
    numbers = random_numbers(inputs, outputs, 16, seed)
    zeros = random_numbers(groups, outputs, 16, seed + 1)
    scales = random_scales(groups, outputs, 4, seed + 2)
    weight = torch.empty(outputs, inputs)
    for i in range(inputs):
        for o in range(outputs):
            weight[o, i] = (numbers[i][o] - zeros[i // 8][o]) * float(scales[i // 8, o])

    def words(rows: list[list[int]]) -> torch.Tensor:
        packed = [
            [word([row[at + c] for c in AWQ_COLUMN_OF_NIBBLE], 4) for at in range(0, outputs, 8)]
            for row in rows
        ]
        return torch.tensor(packed, dtype=torch.int32)

    return Packed({"qweight": words(numbers), "qzeros": words(zeros), "scales": scales}, weight)


def pack_fp8(
    inputs: int, outputs: int, seed: int, name: str = "weight_scale_inv", ones: bool = False
) -> Packed:
    """FP8 with a scale for each block of 12 rows and 20 columns, the last ones smaller; `ones`: as [rows, 1, columns,
    1]."""
    generator = torch.Generator().manual_seed(seed)
    raw = torch.randn(outputs, inputs, generator=generator).to(FP8)
    scale = 0.1 + 0.4 * torch.rand(-(-outputs // 12), -(-inputs // 20), generator=generator)
    weight = torch.empty(outputs, inputs)
    for o in range(outputs):
        for i in range(inputs):
            weight[o, i] = float(raw[o, i]) * scale[o // 12, i // 20]
    return Packed({"weight": raw, name: scale[:, None, :, None] if ones else scale}, weight)


def pack_fp8_tensor(inputs: int, outputs: int, seed: int) -> Packed:
    """FP8 with one scale for the tensor, one for static activations, and scales of K and V."""
    raw = torch.randn(outputs, inputs, generator=torch.Generator().manual_seed(seed)).to(FP8)
    scale = torch.tensor([0.25 + 0.01 * seed])
    others = {name: torch.tensor([0.5]) for name in ("input_scale", "k_scale", "v_scale")}
    return Packed({"weight": raw, "weight_scale": scale} | others, raw.float() * scale)


def pack_channels(inputs: int, outputs: int, seed: int, dtype: torch.dtype) -> Packed:
    """compressed-tensors with a scale for each row, int8 or FP8, and a scale of the activations."""
    generator = torch.Generator().manual_seed(seed)
    raw = (30 * torch.randn(outputs, inputs, generator=generator)).round().clamp(-127, 127)
    raw = raw.to(dtype)
    scale = (0.005 + 0.01 * torch.rand(outputs, 1, generator=generator)).bfloat16()
    weight = raw.float() * scale.float()
    return Packed({"weight": raw, "weight_scale": scale, "input_scale": torch.ones(1)}, weight)


def pack_int8_groups(inputs: int, outputs: int, seed: int) -> Packed:
    """compressed-tensors in int8 with a scale and a zero point for each row's groups of 8 inputs, in act-order."""
    groups = inputs // 8
    raw = torch.tensor(random_numbers(outputs, inputs, 256, seed)) - 128
    zeros = torch.tensor(random_numbers(outputs, groups, 9, seed + 1)) - 4
    scales = random_scales(groups, outputs, 8, seed + 2).T.contiguous()
    order = [i // 8 for i in range(inputs)]
    random.Random(seed + 3).shuffle(order)
    weight = torch.empty(outputs, inputs)
    for o in range(outputs):
        for i, g in enumerate(order):
            weight[o, i] = float(raw[o, i] - zeros[o, g]) * float(scales[o, g])
    tensors = {"weight": raw.to(torch.int8), "weight_zero_point": zeros.to(torch.int8)}
    return Packed(tensors | {"weight_scale": scales, "weight_g_idx": torch.tensor(order)}, weight)


def pack_words(
    inputs: int, outputs: int, seed: int, bits: int, symmetric: bool, act_order: bool = False
) -> Packed:
    """compressed-tensors in words of 32 bits, with groups of 8 inputs; numbers and zero points are stored plus half
    their range, the last word of a row or a column filled up."""
    groups, per, middle = inputs // 8, 32 // bits, 2 ** (bits - 1)
    numbers = random_numbers(outputs, inputs, 2**bits, seed)
    zeros = [[middle] * groups for _ in range(outputs)]
    if not symmetric:
        zeros = random_numbers(outputs, groups, 2**bits, seed + 1)
    scales = random_scales(groups, outputs, bits, seed + 2).T.contiguous()
    order = [i // 8 for i in range(inputs)]
    if act_order:
        random.Random(seed + 3).shuffle(order)
    weight = torch.empty(outputs, inputs)
    for o in range(outputs):
        for i, g in enumerate(order):
            weight[o, i] = (numbers[o][i] - zeros[o][g]) * float(scales[o, g])
    tensors = {
        "weight_packed": torch.tensor(
            [[word(row[at : at + per], bits) for at in range(0, inputs, per)] for row in numbers],
            dtype=torch.int32,
        ),
        "weight_scale": scales,
        "weight_shape": torch.tensor([outputs, inputs]),
    }
    if not symmetric:
        columns = list(zip(*zeros, strict=True))
        packed = [
            [word(list(column[at : at + per]), bits) for column in columns]
            for at in range(0, outputs, per)
        ]
        tensors["weight_zero_point"] = torch.tensor(packed, dtype=torch.int32)
    if act_order:
        tensors["weight_g_idx"] = torch.tensor(order, dtype=torch.int32)
    return Packed(tensors, weight)


Pack = Callable[[int, int, int], Packed]


def gptq(
    bits: int, version: int, act_order: bool, borrow: bool = False, size: int = 8
) -> tuple[dict[str, Any], Pack]:
    """(quantization_config, packer) of a form of GPTQ."""
    form: dict[str, Any] = {"checkpoint_format": "gptq_v2"} if version == 2 else {}
    if borrow:
        form = {"meta": {"quantizer": ["gptqmodel:5.6.0"]}}
    config = {"quant_method": "gptq", "bits": bits, "group_size": size, "desc_act": act_order}
    return config | form, lambda i, o, seed: pack_gptq(
        i, o, seed, bits, version, act_order, borrow, size
    )


def mixed_gptq(inputs: int, outputs: int, seed: int) -> Packed:
    """Eight bits in groups of 12 for the layers that `down_proj` of MIXED names, else four in groups of 8."""
    down = inputs == 48  # of tests/tiny.py
    return pack_gptq(inputs, outputs, seed, 8 if down else 4, 1, False, size=12 if down else 8)


MIXED = {"-:.*no_such": {}, "+:.*mlp.down_proj": {"bits": 8, "group_size": 12}}
COMPRESSED = {"quant_method": "compressed-tensors", "config_groups": {}}
BLOCKS = {"weights": {"strategy": "block", "block_structure": [12, 20]}}
FORMS: dict[str, tuple[dict[str, Any], Pack]] = {
    "gptq4": gptq(4, 1, False),
    "gptq4-act-order": gptq(4, 1, True),
    "gptq4-v2": gptq(4, 2, True),
    "gptq8": gptq(8, 1, False),
    "gptq2": gptq(2, 1, True),
    "gptq4-borrow": gptq(4, 1, True, borrow=True),
    "gptq8-borrow": gptq(8, 1, False, borrow=True),
    "gptq4-last-group-smaller": gptq(4, 1, False, size=20),
    "gptq-dynamic": (gptq(4, 1, False)[0] | {"dynamic": MIXED}, mixed_gptq),
    "awq": (
        {"quant_method": "awq", "bits": 4, "group_size": 8, "version": "gemm", "zero_point": True},
        pack_awq,
    ),
    "fp8": ({"quant_method": "fp8", "weight_block_size": [12, 20]}, pack_fp8),
    "fp8-tensor": ({"quant_method": "fp8", "activation_scheme": "static"}, pack_fp8_tensor),
    "fp8-rows": (
        {"quant_method": "fp8", "activation_scheme": "dynamic"},
        lambda i, o, seed: pack_channels(i, o, seed, FP8),
    ),
    "modelopt-tensor": (
        {"quant_method": "modelopt", "quant_algo": "FP8", "kv_cache_quant_algo": "FP8"},
        pack_fp8_tensor,
    ),
    "modelopt-nested": (
        {"quant_method": "modelopt", "quantization": {"quant_algo": "FP8"}},
        pack_fp8_tensor,
    ),
    "modelopt-blocks": (
        {"quant_method": "modelopt", "quant_algo": "FP8_PB_WO", "weight_block_size": [12, 20]},
        lambda i, o, seed: pack_fp8(i, o, seed, "weight_scale", ones=True),
    ),
    "fp8-compressed-blocks": (
        COMPRESSED | {"format": "float-quantized", "config_groups": {"group_0": BLOCKS}},
        lambda i, o, seed: pack_fp8(i, o, seed, "weight_scale"),
    ),
    "int8-groups": (COMPRESSED | {"format": "int-quantized"}, pack_int8_groups),
    "int8-channels": (
        COMPRESSED | {"format": "int-quantized"},
        lambda i, o, seed: pack_channels(i, o, seed, torch.int8),
    ),
    "int4-words": (
        COMPRESSED | {"format": "pack-quantized"},
        lambda i, o, seed: pack_words(i, o, seed, 4, symmetric=True),
    ),
    "int4-words-zero-points": (
        COMPRESSED | {"format": "pack-quantized"},
        lambda i, o, seed: pack_words(i, o, seed, 4, symmetric=False),
    ),
    "int4-words-act-order": (
        COMPRESSED | {"format": "pack-quantized"},
        lambda i, o, seed: pack_words(i, o, seed, 4, symmetric=True, act_order=True),
    ),
    "int8-words-act-order": (
        COMPRESSED | {"format": "pack-quantized"},
        lambda i, o, seed: pack_words(i, o, seed, 8, symmetric=False, act_order=True),
    ),
    "fp8-channels": (
        COMPRESSED | {"format": "float-quantized"},
        lambda i, o, seed: pack_channels(i, o, seed, FP8),
    ),
}
