"""The sizes of nested parts of a sampled set: a larger part contains every row of a smaller one."""

from collections.abc import Sequence

import numpy as np

from decode.common.errors import UserError
from eval.metrics.bootstrap import Array
from train.data import mixture


def geometric_sizes(total: int, count: int, span: float) -> list[int]:
    """`count` sizes from total ÷ span to `total`, each the same factor above the one before it."""
    return [round(size) for size in np.geomspace(total / span, total, count)]


def nested_rows(tokens: Sequence[int], sizes: Sequence[int], seed: int) -> list[Array]:
    """For each of the ascending `sizes` the indices, ascending, of the rows that make it up.

    `tokens` are the supervised tokens of each row. Rows are those of a `limit` (train/data/mixture.py) that is just
    high enough for `size` tokens. UserError for a size above the sum of `tokens`, and for two sizes with the same rows.
    """
    order = mixture.shuffled(len(tokens), seed)
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
