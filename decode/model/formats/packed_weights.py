"""Weights of few bits, as GPTQ, AWQ, FP8, ModelOpt and compressed-tensors hold them, and the numbers that they mean.

Bits and groups are told by the shapes of a layer's tensors, and have to be what config.json says of that layer. A
number in eight bits or fewer is read with its scale or refused. GPTQ: Frantar et al., arXiv 2210.17323. AWQ: Lin et
al., arXiv 2306.00978.
"""

import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from decode.common.errors import UserError

Config = dict[str, Any]
"""quantization_config of a config.json."""
Read = Callable[[str], Tensor | None]
"""A tensor of the checkpoint by its name, None if it has none of that name."""
AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)
"""The column, of eight, whose number is in each four bits of an AWQ word, from the lowest bits up."""
WORD_BITS = 32
BLOCK = (128, 128)
"""Rows and columns that share a scale where config.json names no others."""
UNUSED = tuple(
    f".{what}{end}"
    for what in ("input", "output", "activation", "k", "v", "q", "kv", "prob")
    for end in ("_scale", "_zero_point")
)
"""Tensors for activations and K/V in eight bits; here both keep the dtype that is computed in."""
SCALED = (torch.float8_e4m3fn, torch.float8_e5m2)
"""Dtypes of scales that are times another one."""
CODES = (torch.uint8, torch.bool, torch.float8_e8m0fnu)
"""Dtypes of one byte that are no numbers of a weight: two numbers a byte, masks, exponents."""
COMPRESSED_FORMS = ("int-quantized", "float-quantized", "naive-quantized", "pack-quantized")
MODELOPT_FORMS = ("FP8", "FP8_PER_CHANNEL_PER_TOKEN", "FP8_PB_WO")


@dataclass(frozen=True)
class PackedForm:
    """A quant_method of config.json that is read."""

    refusal: Callable[[Config], str]
    """Why a config of it is not read; "" where it is."""
    weight: Callable[[str, Read, Config], Tensor | None]
    """The weight [out, in] of the layer of that name in float32; None if parts of it are missing."""
    endings: tuple[str, ...]
    """What the names of a layer's tensors end in: a layer with one of them is quantised."""


# ---- numbers, scales and groups ----


def unpack(words: Tensor, bits: int) -> Tensor:
    """[..., W * 32 / bits] the numbers in int32 `words` [..., W], from the lowest bits up, each 0 … 2**bits - 1."""
    shifts = torch.arange(0, WORD_BITS, bits, device=words.device)
    numbers = (words.long()[..., None] >> shifts) & (2**bits - 1)
    return numbers.flatten(-2)


def group_of_inputs(stored: Tensor | None, inputs: int, groups: int, stated: Any = None) -> Tensor:
    """[in] the group of each input: what is `stored` of it, else `stated` inputs in turn, or as many for each group.

    UserError where neither gives this number of groups.
    """
    if stored is not None and bool((stored >= 0).all()):  # -1: not in act-order
        if len(stored) != inputs or int(stored.max()) >= groups:
            raise UserError(f"groups of {len(stored)} inputs are stored for {inputs}")
        return stored.long()
    if isinstance(stated, int) and stated > 0 and -(-inputs // stated) == groups:
        return torch.arange(inputs) // stated
    if inputs % groups:
        raise UserError(f"there are {groups} groups of unequal size for {inputs} inputs")
    return torch.arange(inputs) // (inputs // groups)


def scaled_weight(
    numbers: Tensor,
    scale: Tensor,
    zero: Tensor | None = None,
    block: tuple[int, int] = BLOCK,
    group: Tensor | None = None,
) -> Tensor:
    """[out, in] in float32: `numbers` less the zero points of the scale's shape, if there are any, times a `scale` of
    one number, or [out], or [out, G] for groups of inputs (`group` [in] says which, else they follow each other), or
    one number for each block of `block` rows and columns, of which the last may be smaller. UserError for a scale of
    another shape."""
    rows, columns = numbers.shape

    def of_each(parts: Tensor) -> Tensor:
        if parts.ndim == 4:  # ModelOpt: [rows, 1, columns, 1]
            parts = parts[:, 0, :, 0]
        if parts.numel() == 1:
            return parts.reshape(1, 1)
        if len(parts) == rows and parts.ndim <= 2:
            parts = parts.reshape(rows, -1)
            return parts[:, group_of_inputs(group, columns, parts.shape[1])]
        if tuple(parts.shape) == (-(-rows // block[0]), -(-columns // block[1])):
            full = parts.repeat_interleave(block[0], 0).repeat_interleave(block[1], 1)
            return full[:rows, :columns]
        raise UserError(
            f"a scale of shape {list(parts.shape)} is not one for each row of {rows} x {columns}, and is not one for "
            f"each block of {block[0]} x {block[1]}"
        )

    own = numbers.float() if zero is None else numbers.float() - of_each(zero.float())
    return own * of_each(scale.float())


# ---- GPTQ and AWQ ----


def stated_of_layer(name: str, q: Config) -> Config:
    """What the config says of one layer. GPTQModel's `dynamic` has other settings for layers whose name a pattern
    matches from its beginning; the first that does counts."""
    for pattern, changes in (q.get("dynamic") or {}).items():
        if re.match(re.sub(r"^[+-]:", "", pattern), name):
            return q | (changes or {})
    return q


def _layer_bits(words: Tensor, count: int, q: Config) -> int:
    """Bits of `count` numbers in a row of `words` [N, W]. UserError if config.json says another number of bits."""
    bits, rest = divmod(words.shape[1] * WORD_BITS, count)
    stated = q.get("bits", bits)
    if rest or bits != stated or bits not in (2, 4, 8):
        held = f"numbers of {bits} bits" if not rest else "words for no whole number of bits"
        raise UserError(
            f"it has {held}, and config.json says {stated}; those of 2, 4 and 8 are read"
        )
    return bits


def _check_gptq(q: Config) -> str:
    if q.get("bits") not in (2, 4, 8):
        return f"has GPTQ weights of {q.get('bits')} bits; those of 2, 4 and 8 are read"
    kind = _gptq_form(q)
    return "" if kind in ("gptq", "gptq_v2") else f"has GPTQ weights in the form {kind!r}"


def _gptq_form(q: Config) -> Any:
    return q.get("checkpoint_format") or q.get("format") or "gptq"


def _gptq_zeros(words: Tensor, bits: int, q: Config) -> Tensor:
    """[G, out] the zero points of `words` [G, out * bits / 32].

    Format gptq stores them less 1, modulo 2**bits. GPTQModel subtracts from whole words, so that a zero point of 0
    borrows from its neighbour; everybody else from each number. Format gptq_v2 stores them as they are.
    """
    if _gptq_form(q) == "gptq_v2":
        return unpack(words, bits)
    if "gptqmodel" in str((q.get("meta") or {}).get("quantizer")):
        return unpack(words.long() + sum(1 << at for at in range(0, WORD_BITS, bits)), bits)
    return (unpack(words, bits) + 1) & (2**bits - 1)


def _gptq(name: str, read: Read, q: Config) -> Tensor | None:
    """From qweight [in * bits / 32, out], qzeros [G, out * bits / 32], scales [G, out] and each input's group [in]."""
    qweight, qzeros, scales, group = (
        read(f"{name}.{part}") for part in ("qweight", "qzeros", "scales", "g_idx")
    )
    if qweight is None or qzeros is None or scales is None:
        return None
    q = stated_of_layer(name, q)
    bits = _layer_bits(qzeros, scales.shape[1], q)
    numbers = unpack(qweight.T, bits)  # [out, in]
    group = group_of_inputs(group, numbers.shape[1], len(scales), q.get("group_size"))
    return scaled_weight(numbers, scales.T, _gptq_zeros(qzeros, bits, q).T, group=group)


def _check_awq(q: Config) -> str:
    version = str(q.get("version") or q.get("format") or "gemm").lower()
    if q.get("bits", 4) != 4 or version != "gemm" or not q.get("zero_point", True):
        return "has AWQ weights other than those of version gemm with 4 bits and zero points"
    return ""


def _in_order(columns: Tensor) -> Tensor:
    """The columns [N, out] of unpacked AWQ words, each at its own place."""
    at = torch.tensor(AWQ_ORDER, device=columns.device).argsort()
    return columns.unflatten(-1, (-1, 8))[..., at].flatten(-2)


def _awq(name: str, read: Read, q: Config) -> Tensor | None:
    """From qweight [in, out / 8], qzeros [G, out / 8], both in the order of AWQ's GEMM kernel, and scales [G, out], for
    groups of inputs that follow each other."""
    qweight, qzeros, scales = (read(f"{name}.{part}") for part in ("qweight", "qzeros", "scales"))
    if qweight is None or qzeros is None or scales is None:
        return None
    _layer_bits(qweight, scales.shape[1], {"bits": 4})
    numbers, zeros = (_in_order(unpack(words, 4)).T for words in (qweight, qzeros))
    stated = q.get("group_size", q.get("q_group_size"))
    group = group_of_inputs(None, numbers.shape[1], len(scales), stated)
    return scaled_weight(numbers, scales.T, zeros, group=group)


# ---- eight bits with a scale, and compressed-tensors ----


def _parts(q: Config) -> list[Config]:
    """What compressed-tensors states of the weights of each group of layers."""
    return [group.get("weights") or {} for group in (q.get("config_groups") or {}).values()]


def _block(q: Config) -> tuple[int, int]:
    """Rows and columns of a block of one scale, as config.json states them in either place."""
    stated = [q.get("weight_block_size"), *(part.get("block_structure") for part in _parts(q))]
    rows, columns = next((block for block in stated if block), BLOCK)
    return int(rows), int(columns)


def _eight_bits(name: str, read: Read, q: Config) -> Tensor | None:
    """From a weight [out, in] in FP8 or int8, or its numbers in words; its scale; and zero points and each input's
    group [in], if it has any."""
    weight, scale, inverse, zero, group, words, shape = (
        read(f"{name}.weight{end}")
        for end in ("", "_scale", "_scale_inv", "_zero_point", "_g_idx", "_packed", "_shape")
    )
    scale = inverse if scale is None else scale
    if words is not None and shape is not None:
        weight, zero = _numbers(words, shape.tolist(), zero, q)
    elif weight is not None and (weight.itemsize > 1 or weight.dtype in CODES):
        raise _no_scale("weight", weight)
    if weight is None or scale is None:
        return None
    if not scale.is_floating_point() or scale.dtype in SCALED:
        raise _no_scale("weight_scale", scale)
    return scaled_weight(weight, scale, zero, _block(q), group)


def _no_scale(name: str, tensor: Tensor) -> UserError:
    kind = str(tensor.dtype).removeprefix("torch.")
    return UserError(f"{name} is {kind}, and no scale of it is known")


def _numbers(
    words: Tensor, shape: list[int], zero: Tensor | None, q: Config
) -> tuple[Tensor, Tensor | None]:
    """(numbers [out, in], zero points) of compressed-tensors' `words` [out, in * bits / 32]. Numbers, and zero points
    where they are in words [out * bits / 32, G], are stored plus half their range."""
    outputs, inputs = shape
    bits = {-(-inputs * b // WORD_BITS): b for b in (8, 4)}.get(words.shape[1])
    stated = {part.get("num_bits", bits) for part in _parts(q)} or {bits}
    if bits is None or bits not in stated:
        raise UserError(
            f"it has {words.shape[1]} words for {inputs} numbers of {sorted(stated, key=str)} bits; those of 4 "
            "and 8 are read"
        )
    middle = 2 ** (bits - 1)
    if zero is not None and zero.dtype == torch.int32:
        zero = unpack(zero.T, bits).T[:outputs] - middle
    return unpack(words, bits)[:, :inputs] - middle, zero


def _check_fp8(q: Config) -> str:
    return "" if q.get("expert_dtype", "fp8") == "fp8" else "has experts in four bits"


def _check_modelopt(q: Config) -> str:
    form = q.get("quant_algo")
    if str(form).upper() in MODELOPT_FORMS:
        return ""
    return f"has ModelOpt weights in the form {form!r}; {', '.join(MODELOPT_FORMS)} are read"


def _check_compressed(q: Config) -> str:
    groups = (q.get("config_groups") or {}).values()
    forms = {group.get("format") or q.get("format") for group in groups} or {q.get("format")}
    forms |= {(q.get("sparsity_config") or {}).get("format", "dense")} - {"dense"}
    strange = sorted(str(form) for form in forms if form not in COMPRESSED_FORMS)
    if strange:
        return f"has compressed tensors in the form {strange[0]!r}; {', '.join(COMPRESSED_FORMS)} are read"
    turned = (q.get("transform_config") or {}).get("config_groups") or {}
    places = {part.get("location") for group in turned.values() for part in group.get("apply", ())}
    if places - {"weight_input", "weight_output"}:
        return "has activations that are rotated while it runs (transform_config)"
    return ""


METHODS = {
    "gptq": PackedForm(_check_gptq, _gptq, (".qweight", ".qzeros", ".scales", ".g_idx")),
    "awq": PackedForm(_check_awq, _awq, (".qweight", ".qzeros", ".scales")),
    "fp8": PackedForm(_check_fp8, _eight_bits, (".weight_scale_inv", ".weight_scale")),
    "modelopt": PackedForm(_check_modelopt, _eight_bits, (".weight_scale",)),
    "compressed-tensors": PackedForm(
        _check_compressed, _eight_bits, (".weight_packed", ".weight_scale", ".weight_zero_point")
    ),
}
"""By quant_method."""


# ---- a checkpoint ----


def is_few_bits(kind: str) -> bool:
    """Whether safetensors' name of a dtype means numbers of eight bits or fewer that are no weights by themselves."""
    return kind.startswith(("F8", "F6", "F4")) or kind in ("I8", "U8")


def is_act_order(name: str, read: Read) -> bool:
    """Whether the inputs of a layer's groups do not follow each other."""
    stored = [read(f"{name}.{part}") for part in ("g_idx", "weight_g_idx")]
    return any(part is not None and bool((part.diff() < 0).any()) for part in stored)


def quantised_layers(names: Iterable[str], q: Config) -> set[str]:
    """The layers that have one of the tensors that a method's layers have."""
    endings = METHODS[q["quant_method"]].endings
    return {name.removesuffix(end) for name in names for end in endings if name.endswith(end)}


def plain_weights(tensors: Mapping[str, Tensor], q: Config) -> Iterator[tuple[str, Tensor]]:
    """(name, tensor in float32) of every weight among the tensors of a checkpoint with the config `q`.

    UserError for a layer that lacks a tensor, and for numbers in few bits without a scale.
    """
    layers = quantised_layers(tensors, q)
    for layer in sorted(layers):
        try:
            weight = METHODS[q["quant_method"]].weight(layer, tensors.get, q)
        except UserError as error:
            raise UserError(f"{layer}: {error}") from error
        if weight is None:
            raise UserError(f"{layer} lacks some of its quantised tensors: restore its files")
        yield f"{layer}.weight", weight
    for name in sorted(tensors):
        quantized = name.rpartition(".")[0] in layers and not name.endswith(".bias")
        if quantized or name.endswith(UNUSED):
            continue
        tensor = tensors[name]
        if tensor.is_floating_point() and tensor.element_size() > 1:
            yield name, tensor.float()
        elif tensor.dtype in (torch.int64, torch.bool) or (
            tensor.dtype == torch.uint8 and not bool((tensor > 1).any())
        ):  # a buffer, such as a mask
            yield name, tensor
        else:
            raise _no_scale(name, tensor)
