"""What the numbers in a quantised linear layer's tensors mean: functions from them to its weight [out, in] in float32.

GPTQ: Frantar et al., arXiv 2210.17323. AWQ: Lin et al., arXiv 2306.00978.
"""

import torch

AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)
"""The column, of eight, whose number is in each four bits of an AWQ word, from the lowest bits up."""


def unpack(words: torch.Tensor, bits: int) -> torch.Tensor:
    """[..., W * 32 / bits] the numbers in int32 `words` [..., W], from the lowest bits up, each 0 … 2**bits - 1."""
    shifts = torch.arange(0, 32, bits, device=words.device)
    numbers = (words.long()[..., None] >> shifts) & (2**bits - 1)
    return numbers.flatten(-2)


def gptq_weight(
    qweight: torch.Tensor,
    qzeros: torch.Tensor,
    scales: torch.Tensor,
    group: torch.Tensor,
    bits: int,
    offset: int,
) -> torch.Tensor:
    """The weight of GPTQ's qweight [in * bits / 32, out], qzeros [G, out * bits / 32] and scales [G, out].

    `group` [in] is each input's group (g_idx). `offset` is added to zero points: checkpoints of format gptq store them
    less 1, those of gptq_v2 as they are.
    """
    numbers = unpack(qweight.T, bits)  # [out, in]
    zeros = unpack(qzeros, bits) + offset  # [G, out]
    return (numbers - zeros[group].T).float() * scales.float()[group].T


def awq_weight(qweight: torch.Tensor, qzeros: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """The weight of AWQ's qweight [in, out / 8], qzeros [G, out / 8] (both in the order of its GEMM kernel) and scales
    [G, out], for groups of in / G inputs that follow each other."""
    numbers, zeros = (_in_order(unpack(words, 4)) for words in (qweight, qzeros))
    size = len(numbers) // len(scales)
    group = torch.arange(len(numbers), device=numbers.device) // size
    return ((numbers - zeros[group]).float() * scales.float()[group]).T.contiguous()


def _in_order(columns: torch.Tensor) -> torch.Tensor:
    """The columns [N, out] of unpacked AWQ words, each at its own place."""
    at = torch.tensor(AWQ_ORDER, device=columns.device).argsort()
    return columns.unflatten(-1, (-1, 8))[..., at].flatten(-2)


def scaled_weight(weight: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """weight [out, in] in eight bits times a `scale` of one number, or [out, 1], or [out, G] for groups of inputs.

    ValueError for a scale of another shape.
    """
    if scale.numel() == 1:
        return weight.float() * scale.float().reshape(1, 1)
    if len(scale) != len(weight):
        raise ValueError(f"a scale of shape {list(scale.shape)} is not one for each row")
    scale = scale.float().reshape(len(weight), -1)
    return weight.float() * scale.repeat_interleave(weight.shape[1] // scale.shape[1], 1)


def block_scaled_weight(
    weight: torch.Tensor, scale: torch.Tensor, block: tuple[int, int]
) -> torch.Tensor:
    """weight [out, in] in eight bits times `scale`, one number for each block of `block` rows and columns.

    The last blocks of rows and columns may be smaller. ValueError for a scale that has not one number for each block.
    """
    rows, columns = weight.shape
    if tuple(scale.shape) != (-(-rows // block[0]), -(-columns // block[1])):
        raise ValueError(f"a scale of shape {list(scale.shape)} is not one for each block")
    full = scale.float().repeat_interleave(block[0], 0).repeat_interleave(block[1], 1)
    return weight.float() * full[:rows, :columns]
