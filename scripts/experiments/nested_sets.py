"""Nested parts of a sampled set: a larger part contains every row of a smaller one."""

import shutil
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np

from decode.common.errors import UserError
from eval.metrics.bootstrap import Array
from train.data import sample_store
from train.data.manifest import MANIFEST_FILE, read_manifest, write_manifest
from train.data.sample_store import SampleRow

SHARD_ROWS = 1024


def geometric_sizes(total: int, count: int, span: float) -> list[int]:
    """`count` sizes from total ÷ span to `total`, each the same factor above the one before it."""
    return [round(size) for size in np.geomspace(total / span, total, count)]


def nested_rows(tokens: Sequence[int], sizes: Sequence[int], seed: int) -> list[Array]:
    """For each of the ascending `sizes` the indices, ascending, of the rows that make it up.

    `tokens` are the supervised tokens of each row. Rows are taken in a permutation that `seed` determines until they
    have at least `size` tokens together. UserError for a size above the sum of `tokens`, and for two sizes with the
    same rows.
    """
    order = np.random.default_rng(seed).permutation(len(tokens))
    sums = np.cumsum(np.asarray(tokens)[order])
    if sizes[-1] > sums[-1]:
        raise UserError(
            f"sizes holds {sizes[-1]:,}, and the data have {sums[-1]:,} supervised tokens: give at most that"
        )
    counts = [int(np.searchsorted(sums, size)) + 1 for size in sizes]
    for i in range(1, len(sizes)):
        if counts[i] == counts[i - 1]:
            raise UserError(
                f"sizes {sizes[i - 1]:,} and {sizes[i]:,} are the same {counts[i]} rows: give fewer sizes, further "
                "apart, or sample more"
            )
    return [np.sort(order[:count]) for count in counts]


def write_part(folder: Path, source: Path, rows: Sequence[SampleRow], indices: Array) -> None:
    """Writes the sampled set of `rows` at `indices`, whose manifest is that of the set in `source`, into `folder`.

    A complete one is kept: the manifest is written last.
    """
    if (folder / MANIFEST_FILE).is_file():
        return
    shutil.rmtree(folder, ignore_errors=True)
    for at in range(0, len(indices), SHARD_ROWS):
        part = [rows[int(i)] for i in indices[at : at + SHARD_ROWS]]
        sample_store.write_shard(folder, part, f"{at // SHARD_ROWS:06d}")
    counts = {"asked": len(indices), "answered": len(indices)}
    write_manifest(folder, replace(read_manifest(source), counts=counts))
