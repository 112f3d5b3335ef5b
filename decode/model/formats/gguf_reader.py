"""The content of GGUF files: keys and tensors of a header, parts of a split file, and the weights as safetensors."""

import json
import math
import mmap
import os
import re
import struct
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType

from decode.common.errors import UserError

NUMBERS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}  # fmt: skip
"""`struct` formats of GGUF's types of values."""
STRING, ARRAY = 8, 9
SAFETENSORS_TYPES = {torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16"}
CHUNK = 1 << 18
"""Weights that are dequantised at a time: what is made on the way stays in a core's cache."""
PART = re.compile(r"(?P<stem>.+)-(?P<number>\d{5})-of-(?P<count>\d{5})\.gguf")
"""The name of a part of a split file."""


@dataclass(frozen=True)
class StoredTensor:
    """Where a tensor lies."""

    name: str
    shape: tuple[int, ...]
    """As in torch: the last dimension is contiguous."""
    kind: GGMLQuantizationType
    file: Path
    offset: int

    @property
    def row_bytes(self) -> int:
        """Bytes of one row, the last dimension."""
        block, size = GGML_QUANT_SIZES[self.kind]
        return self.shape[-1] // block * size

    def rows(self, start: int, end: int) -> np.ndarray[Any, Any]:
        """Rows `start` to `end`, where all dimensions but the last count as one: [rows, columns] in float32."""
        with self.file.open("rb") as file:
            file.seek(self.offset + start * self.row_bytes)
            stored = np.fromfile(file, np.uint8, (end - start) * self.row_bytes)
        values = gguf.dequantize(stored.reshape(end - start, self.row_bytes), self.kind)
        return np.asarray(values, dtype=np.float32).reshape(end - start, self.shape[-1])


@dataclass(frozen=True)
class GgufContent:
    """The keys and tensors of a GGUF, of all its parts where it is split."""

    keys: dict[str, Any]
    tensors: dict[str, StoredTensor]


def read_gguf(parts: Sequence[Path]) -> GgufContent:
    """The content of a file or of all `parts` of one. UserError for parts that do not belong together."""
    first = read_file(parts[0])
    tensors = dict(first.tensors)
    for number, part in enumerate(parts):
        content = first if number == 0 else read_file(part)
        said = (content.keys.get("split.no", 0), content.keys.get("split.count", 1))
        names = {"general.architecture", "general.name"} & content.keys.keys()
        other = any(content.keys[key] != first.keys.get(key) for key in names)
        if said != (number, len(parts)) or other:
            what = f"part {said[0] + 1} of {said[1]}{' of another model' if other else ''}"
            raise UserError(
                f"{part} says that it is {what}, and was taken for part {number + 1} of {len(parts)} of "
                f"{parts[0].name}: restore the parts' names and files"
            )
        twice = tensors.keys() & content.tensors.keys() if number else set()
        if twice:
            raise UserError(
                f"{part} holds {min(twice)} once more: it is no part of {parts[0].name}"
            )
        tensors |= content.tensors
    wanted = first.keys.get("split.tensors.count", len(tensors))
    if wanted != len(tensors):
        raise UserError(
            f"{parts[0]} belongs to a file of {wanted} tensors, and its {len(parts)} parts hold {len(tensors)}: they "
            "do not belong together: get all of them from one place"
        )
    return GgufContent(first.keys, tensors)


def part_names(name: str) -> list[str]:
    """The names of all parts of the split file of which `name` is one; `name` alone where it is no part."""
    match = PART.fullmatch(name)
    if match is None:
        return [name]
    count = int(match["count"])
    return [f"{match['stem']}-{number:05d}-of-{count:05d}.gguf" for number in range(1, count + 1)]


def read_file(path: Path) -> GgufContent:
    """The header of one file. ValueError or struct.error where it is no GGUF, or is cut off."""
    size = path.stat().st_size
    if size < 24:
        raise ValueError("it is too short for a GGUF")
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
        header = _Header(data)
        magic, version = header.number("I"), header.number("I")
        if magic != gguf.GGUF_MAGIC or version not in (2, 3):
            raise ValueError("it is no GGUF of version 2 or 3 with little-endian numbers")
        tensor_count, key_count = header.number("Q"), header.number("Q")
        keys = {}
        for _ in range(key_count):
            key = header.text()
            keys[key] = header.value(header.number("I"))
        found = []
        for _ in range(tensor_count):
            name = header.text()
            shape = tuple(reversed([header.number("Q") for _ in range(header.number("I"))]))
            found.append((name, shape, header.number("I"), header.number("Q")))
        alignment = keys.get("general.alignment", gguf.GGUF_DEFAULT_ALIGNMENT)
        start = -(-header.at // alignment) * alignment
    tensors = {
        name: StoredTensor(name, shape, GGMLQuantizationType(kind), path, start + offset)
        for name, shape, kind, offset in found
    }
    for tensor in tensors.values():
        block = GGML_QUANT_SIZES[tensor.kind][0]
        if not tensor.shape or tensor.shape[-1] % block:
            raise ValueError(f"{tensor.name} has the shape {list(tensor.shape)}")
        if tensor.offset + math.prod(tensor.shape[:-1]) * tensor.row_bytes > size:
            raise ValueError(f"it ends before its tensor {tensor.name} does")
    return GgufContent(keys, tensors)


class _Header:
    """A place in the bytes of a header, which moves on with everything that is read."""

    def __init__(self, data: mmap.mmap) -> None:
        self.data, self.at = data, 0

    def number(self, kind: str) -> Any:
        (value,) = struct.unpack_from(f"<{kind}", self.data, self.at)
        self.at += struct.calcsize(f"<{kind}")
        return value

    def text(self) -> str:
        length = self.number("Q")
        start, self.at = self.at, self.at + length
        if self.at > len(self.data):
            raise ValueError("it ends within its header")
        return self.data[start : self.at].decode("utf-8", errors="replace")

    def value(self, kind: int) -> Any:
        """A value of this type. Floats are the shortest decimals that mean them: 1e-06, not 9.99999997e-07."""
        if kind == STRING:
            return self.text()
        if kind == ARRAY:
            inner, count = self.number("I"), self.number("Q")
            if inner not in NUMBERS:
                return [self.value(inner) for _ in range(count)]
            form = f"<{count}{NUMBERS[inner]}"
            values = list(struct.unpack_from(form, self.data, self.at))
            self.at += struct.calcsize(form)
            return values
        value = self.number(NUMBERS[kind])
        return float(str(np.float32(value))) if NUMBERS[kind] == "f" else value


@dataclass(frozen=True)
class Weight:
    """A parameter of the model and what it is made from."""

    name: str
    stored: StoredTensor
    change: Callable[[np.ndarray[Any, Any]], np.ndarray[Any, Any]] | None = None
    """What is done to chunks of rows [rows, columns], whose number divides by `multiple`."""
    multiple: int = 1


def write_safetensors(weights: Sequence[Weight], path: Path, dtype: torch.dtype) -> None:
    """Writes the weights in `dtype`, a few chunks at a time: each is dequantised to float32 and rounded once.

    As many threads work as torch uses. UserError for a tensor with numbers that are not finite; OSError when the disk
    does not take them.
    """
    places, header, end = {}, {}, 0
    for weight in weights:
        places[weight.name] = end
        size = math.prod(weight.stored.shape) * dtype.itemsize
        header[weight.name] = {
            "dtype": SAFETENSORS_TYPES[dtype],
            "shape": list(weight.stored.shape),
            "data_offsets": [end, end + size],
        }
        end += size
    content = json.dumps({"__metadata__": {"format": "pt"}, **header}).encode()
    content += b" " * (-len(content) % 8)
    with path.open("wb") as out, ThreadPoolExecutor(torch.get_num_threads()) as pool:
        out.write(struct.pack("<Q", len(content)) + content)
        out.flush()
        begin = 8 + len(content)
        for weight in weights:
            job = partial(_write_rows, weight, dtype, out.fileno(), begin + places[weight.name])
            for _ in pool.map(job, _row_chunks(weight)):
                pass


def _row_chunks(weight: Weight) -> list[tuple[int, int]]:
    rows, columns = math.prod(weight.stored.shape[:-1]), weight.stored.shape[-1]
    step = max(CHUNK // columns // weight.multiple, 1) * weight.multiple
    return [(start, min(start + step, rows)) for start in range(0, rows, step)]


def _write_rows(
    weight: Weight, dtype: torch.dtype, out: int, begin: int, rows: tuple[int, int]
) -> None:
    values = weight.stored.rows(*rows)
    if not (math.isfinite(values.sum()) or np.isfinite(values).all()):
        raise UserError(
            f"{weight.stored.file}: its tensor {weight.stored.name} holds numbers that are not finite: "
            "download it again"
        )
    if weight.change is not None:
        values = weight.change(values)
    cast = torch.from_numpy(np.ascontiguousarray(values)).to(dtype)
    data = memoryview(cast.flatten().view(torch.uint8).numpy().data)
    at = begin + rows[0] * weight.stored.shape[-1] * dtype.itemsize
    while data:
        written = os.pwrite(out, data, at)
        data, at = data[written:], at + written
