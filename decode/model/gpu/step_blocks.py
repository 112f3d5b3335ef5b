"""How much of the keys and queries one program of split_kv_attention.py holds, by the shared memory of the card."""

from dataclasses import dataclass

import torch

CHOICES = ((64, 3), (64, 2), (32, 3), (32, 2), (16, 2), (16, 1))
"""Keys that a program loads at once, and loads that are under way at once, best first."""
TILE = 64
"""Queries of one program at most, for heads of up to 128 numbers: more do not fit into shared memory."""
SHARED_KIB = {
    70: 96,
    75: 64,
    80: 163,
    86: 99,
    87: 163,
    89: 99,
    90: 227,
    100: 227,
    103: 227,
    120: 99,
    121: 99,
}
"""Shared memory that one program may have, by compute capability (CUDA C++ Programming Guide)."""


def shared_memory(device: torch.device) -> int:
    """Bytes of shared memory that a program may have on this device; on one that is not known, the least of all."""
    if device.type != "cuda":
        return 1024 * max(SHARED_KIB.values())
    major, minor = torch.cuda.get_device_capability(device)
    return 1024 * SHARED_KIB.get(10 * major + minor, min(SHARED_KIB.values()))


def power_of_two(number: int) -> int:
    """The least one that is not smaller, and at least the 16 of a product."""
    return max(16, 1 << (number - 1).bit_length())


@dataclass(frozen=True)
class Blocks:
    """How much one program holds: keys that it loads at once, its queries, and loads that are under way at once."""

    keys: int
    queries: int
    stages: int

    def shared_bytes(self, width: int, out_width: int, itemsize: int) -> int:
        """Shared memory of a program at most, for heads of this width."""
        # Hopper's products of 64 queries read operands from there that others have in registers
        stages = self.stages if self.queries >= 64 else max(1, self.stages - 1)
        return itemsize * (
            stages * self.keys * (width + out_width) + self.queries * (width + self.keys)
        )


def pick_blocks(queries: int, width: int, out_width: int, itemsize: int, limit: int) -> Blocks:
    """The first of the choices that fits into `limit` bytes of shared memory a program; the smallest if none does."""
    width, out_width = power_of_two(width), power_of_two(out_width)
    largest = max(16, TILE * 128 // max(128, width, out_width))  # of more the registers spill
    tile = min(largest, power_of_two(queries))
    choices = [Blocks(keys, each, stages) for each in (tile, 16) for keys, stages in CHOICES]
    fits = (each for each in choices if each.shared_bytes(width, out_width, itemsize) <= limit)
    return next(fits, choices[-1])
