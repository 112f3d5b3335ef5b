"""Several sampled sets mixed by weight: which rows a step trains on, as a function of (seed, step) alone."""

from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path
from typing import Any, overload

import numpy as np

from decode.common import files
from decode.common.errors import UserError
from train.data import batching, sample_store
from train.data.sample_store import SampleRow


@dataclass
class MixturePart:
    """One sampled set of a mixture."""

    path: str
    """Its folder."""
    weight: float = 1.0
    """Its share of the rows that are trained on, beside the weights of the others."""


DataSpec = str | list[MixturePart]
"""One folder, or several with weights."""


def mixture_parts(data: DataSpec) -> list[MixturePart]:
    """The mixture that the setting names. UserError for none, or for weights that are no shares."""
    if isinstance(data, str) and data.startswith("["):  # a list that was not understood
        raise UserError(f"data {data}: no list of parts, write [{{path: folder, weight: 1}}, …]")
    parts = [MixturePart(data)] if isinstance(data, str) else data
    if len(parts) == 0:
        raise UserError("data names no folder: give one, or a list of {path, weight}")
    for part in parts:
        if not 0 < part.weight < float("inf"):
            raise UserError(f"data {part.path}: weight {part.weight} must be above 0")
    return parts


def source_at(shares: Sequence[Fraction], place: int) -> tuple[int, int]:
    """(source that stands at `place` of the endless order of rows, its rows before that one).

    Sources take turns as evenly as their shares allow: after any number of places a source has had its share of
    them to within the number of sources, and the pattern has no memory that a resumed run could lack.
    """
    left = sum(shares, Fraction(0))
    for source in range(
        len(shares) - 1, 0, -1
    ):  # the last takes its places, the others share the rest
        share = shares[source] / left
        before = place * share.numerator // share.denominator
        if (place + 1) * share.numerator // share.denominator > before:
            return source, before
        place -= before
        left -= shares[source]
    return 0, place


class Mixture(Sequence[SampleRow]):
    """The rows of all sources, one source behind the other, and the order in which steps take them.

    Each source is an endless run of fresh permutations. With several, ids begin with the number of their source, so
    that two answers to one prompt stay two.
    """

    def __init__(self, sources: Sequence[Sequence[SampleRow]], weights: Sequence[float]):
        self.sources = sources
        self.shares = [Fraction(str(weight)) for weight in weights]
        self.offsets = np.cumsum([0, *map(len, sources)])  # row number that each source begins with

    def __len__(self) -> int:
        return int(self.offsets[-1])

    @overload
    def __getitem__(self, index: int) -> SampleRow: ...
    @overload
    def __getitem__(self, index: slice) -> list[SampleRow]: ...
    def __getitem__(self, index: int | slice) -> SampleRow | list[SampleRow]:
        if isinstance(index, slice):
            return [self[i] for i in range(len(self))[index]]
        index = range(len(self))[index]
        source = int(np.searchsorted(self.offsets, index, side="right")) - 1
        row = self.sources[source][index - int(self.offsets[source])]
        return row if len(self.sources) == 1 else {**row, "id": f"{source}/{row['id']}"}

    def row_at(self, place: int, seed: int) -> SampleRow:
        """The row at `place` of the endless order."""
        source, number = source_at(self.shares, place)
        index = batching.shuffled_index(len(self.sources[source]), seed, number, source)
        return self[int(self.offsets[source]) + index]

    def global_batch(self, batch: int, seed: int, step: int) -> list[SampleRow]:
        """The global batch of `step` (from 0)."""
        return [self.row_at(place, seed) for place in range(step * batch, (step + 1) * batch)]


def load(
    data: DataSpec, max_length: int, tokenizer: str = "", target: str = ""
) -> tuple[Mixture, int]:
    """(the mixture cut to `max_length` tokens, number of rows dropped with nothing left to learn).

    UserError for a set that was made with another tokenizer than that of `target`, if one is given.
    """
    parts = mixture_parts(data)
    sources, dropped = [], 0
    for part in parts:
        manifest = sample_store.read_manifest(Path(part.path))
        if tokenizer and manifest.tokenizer_hash != tokenizer:
            raise UserError(
                f"samples in {part.path} were made with tokenizer {manifest.tokenizer_hash} (target "
                f"{manifest.target}), but {target} has {tokenizer}: sample this target"
            )
        rows, lost = batching.truncate_rows(sample_store.read_shards(Path(part.path)), max_length)
        sources.append(rows)
        dropped += lost
    return Mixture(sources, [part.weight for part in parts]), dropped


def data_manifests(data: DataSpec) -> Any:
    """How the data was made: the manifest of one folder, or [{path, weight, manifest}] of several."""
    if isinstance(data, str):
        return files.read_json(Path(data) / "manifest.json")
    return [
        {"path": part.path, "weight": part.weight, "manifest": data_manifests(part.path)}
        for part in mixture_parts(data)
    ]
