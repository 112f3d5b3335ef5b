"""What a reduced draft vocabulary covers of the labels, measured on rows that did not choose it: low for small sets."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from train.data import vocab_mapping
from train.doctor_checks.findings import DataFinding
from train.doctor_checks.seen_rows import SeenRow


class CoverageCheck:
    """Counts supervised tokens, those of every second row apart."""

    def __init__(self, vocab_size: int, eos: frozenset[int]):
        self.eos = sorted(i for i in eos if i < vocab_size)
        self.counts = np.zeros((2, vocab_size), dtype=np.int64)
        """[2, V]: of even and of odd rows."""
        self.rows = 0

    def add(self, row: SeenRow) -> None:
        """Counts one row; ids outside the vocabulary are another check's."""
        tokens = np.asarray(row.ids, dtype=np.int64)[row.labels]
        tokens = tokens[(tokens >= 0) & (tokens < self.counts.shape[1])]
        np.add.at(self.counts[self.rows % 2], tokens, 1)
        self.rows += 1

    def shares(self, sizes: Sequence[int]) -> dict[int, float]:
        """{size: share of the odd rows' labels in the vocabulary of that size that the even rows choose}.

        Sizes that hold the whole vocabulary are left out; {} if a half has no labels.
        """
        even, odd = torch.from_numpy(self.counts[0]), torch.from_numpy(self.counts[1])
        if int(even.sum()) == 0 or int(odd.sum()) == 0:
            return {}
        built = {n: vocab_mapping.build(even, n, self.eos) for n in sizes if n > len(self.eos)}
        return {n: vocab_mapping.coverage(i, odd) for n, i in built.items() if i is not None}

    def facts(self, sizes: Sequence[int]) -> dict[str, Any]:
        """Different labels, and the coverage of each size."""
        used = int(np.count_nonzero(self.counts.sum(0)))
        covered = [f"{n:,}: {100 * share:.2f} %" for n, share in self.shares(sizes).items()]
        return {
            "different tokens supervised": f"{used:,} of {self.counts.shape[1]:,}",
            "labels covered by a draft vocabulary": ", ".join(covered) or "every size has all",
        }

    def findings(self, sizes: Sequence[int], worth: float) -> list[DataFinding]:
        """One note for each vocabulary that misses at least the share `worth` of the labels."""
        return [
            DataFinding(
                f"draft vocabulary of {size:,}", "note", self.rows, self.rows,
                f"{100 * (1 - share):.1f} % of the supervised tokens of rows that did not choose it are not in it: no "
                "acceptance there exceeds the rest",
                f"more answers, a --draft.vocab above {size:,}, or 0 for all tokens",
            )
            for size, share in self.shares(sizes).items()
            if 1 - share >= worth
        ]  # fmt: skip
