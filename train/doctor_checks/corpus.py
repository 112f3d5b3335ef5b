"""What the texts of all rows are together: repeated, evaluated on, in which scripts, and within which vocabulary."""

import hashlib
import unicodedata
from collections import Counter
from collections.abc import Sequence
from functools import lru_cache

import numpy as np
import torch

from train.data import vocab_mapping
from train.data.filters import EvaluationOverlap, NearDuplicates
from train.doctor_checks.findings import Tally, percent
from train.doctor_checks.rows import SeenRow

FENCE = "```"
LEAST_SHARE = 0.01
"""Scripts with a smaller share of the letters are not listed."""


class OverlapCheck:
    """Compares what users asked with each other and with evaluation prompts; answers to one prompt (ids with one
    beginning) are no repetition. Rows of the chosen sample are compared in pairs, from `similarity` on: the share of
    5-word shingles in common; 0: they are not."""

    def __init__(self, tally: Tally, evaluation_texts: list[str], similarity: float):
        self.tally, self.similarity = tally, similarity
        self.evaluation = EvaluationOverlap(evaluation_texts)
        self.seen: dict[bytes, bytes] = {}
        """{digest of what was asked: digest of the id of the content}, some 200 bytes for each prompt."""
        self.unlike = NearDuplicates(similarity)
        self.compared: set[str] = set()
        """The different texts of the chosen sample."""
        tally.said |= {"similarity": similarity, "alike": percent(similarity, 1)}

    def add(self, row: SeenRow) -> None:
        content = _digest(row.row["id"].rpartition("#")[0] or row.row["id"])
        if self.seen.setdefault(_digest(row.asked), content) != content:
            self.tally.add("repeated prompts", row)
        if self.evaluation.overlaps(row.asked):
            self.tally.add("evaluation prompt in the data", row)
        if row.chosen and row.asked and row.asked not in self.compared:
            self.compared.add(row.asked)
            if self.similarity > 0 and not self.unlike.add(row.asked):
                self.tally.add("nearly repeated prompts", row)

    def finish(self) -> None:
        self.tally.looked["different"] = len(self.compared)


def _digest(text: str) -> bytes:
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).digest()[:8]


class MixCheck:
    """Sums over rows. Characters and scripts are those of the replies, of prompts where there is no reply."""

    def __init__(self, tally: Tally) -> None:
        self.tally = tally
        self.lengths: Counter[int] = Counter()
        """{least power of two that is not below a row's tokens: rows}."""
        self.sources: Counter[str] = Counter()
        self.scripts: Counter[str] = Counter()
        self.characters = self.digits = self.code = self.fenced = 0

    def add(self, row: SeenRow) -> None:
        """Counts one row; its characters only if it is in the chosen sample."""
        self.lengths[1 << max(0, len(row.ids) - 1).bit_length()] += 1
        self.sources[row.row["source"]] += 1
        if not row.chosen:
            return
        said = "\n".join(row.replies) if row.replies else row.asked
        scripts = scripts_of(said)
        self.scripts += scripts
        self.characters += len(said)
        self.digits += sum(character.isdigit() for character in said)
        self.code += sum(map(len, said.split(FENCE)[1::2]))
        self.fenced += FENCE in said
        asked = scripts_of(row.asked)
        if (
            row.replies
            and scripts
            and asked
            and scripts.most_common(1)[0][0] != asked.most_common(1)[0][0]
        ):
            self.tally.add("answer in another script", row)

    def facts(self) -> dict[str, str | int]:
        letters, rows = self.scripts.total(), self.sources.total()
        listed = [(s, n) for s, n in self.scripts.most_common() if n >= LEAST_SHARE * letters]
        sources = self.sources.most_common(8)
        return {
            "scripts": ", ".join(f"{s} {percent(n, letters)}" for s, n in listed) or "none",
            "characters in code fences": percent(self.code, self.characters),
            "rows with a code fence": self.fenced,
            "digits": percent(self.digits, self.characters),
            "sources": ", ".join(f"{name} {percent(n, rows)}" for name, n in sources),
            "tokens of a row": ", ".join(f"≤{k}: {n:,}" for k, n in sorted(self.lengths.items())),
        }


def scripts_of(text: str) -> Counter[str]:
    """{script: letters of it}."""
    found: Counter[str] = Counter()
    for character, number in Counter(text).items():
        if character.isalpha():
            found[script_of(character)] += number
    return found


@lru_cache(maxsize=100_000)
def script_of(letter: str) -> str:
    """The first word of the letter's Unicode name, such as "Latin"; Chinese and Japanese characters are "Cjk"."""
    name = unicodedata.name(letter, "Unknown").split()[0].split("-")[0]
    return "Cjk" if name in ("CJK", "HIRAGANA", "KATAKANA") else name.capitalize()


class CoverageCheck:
    """What a reduced draft vocabulary of each size covers of the labels, measured on rows that did not choose it: those
    of every second row apart."""

    def __init__(self, tally: Tally, vocab_size: int, eos: frozenset[int], sizes: Sequence[int]):
        self.tally, self.sizes = tally, sizes
        self.eos = sorted(i for i in eos if i < vocab_size)
        self.counts = np.zeros((2, vocab_size), dtype=np.int64)
        """[2, V]: supervised tokens of even and of odd rows."""
        self.rows = 0

    def add(self, row: SeenRow) -> None:
        """Counts one row, whose ids lie in the vocabulary."""
        np.add.at(self.counts[self.rows % 2], np.asarray(row.ids, dtype=np.int64)[row.labels], 1)
        self.rows += 1

    def finish(self) -> None:
        """Reports each vocabulary that misses at least the share `worth` of the labels."""
        self.shares = self._measure_shares()
        for size, share in self.shares.items():
            if 1 - share >= self.tally.worth:
                self.tally.report(
                    "draft vocabulary of {size:,}", self.rows, self.rows,
                    size=size, missed=100 * (1 - share),
                )  # fmt: skip

    def _measure_shares(self) -> dict[int, float]:
        """{size: share of the odd rows' labels in the vocabulary of that size that the even rows choose}.

        Sizes that hold the whole vocabulary are left out; {} if a half has no labels.
        """
        even, odd = torch.from_numpy(self.counts[0]), torch.from_numpy(self.counts[1])
        if int(even.sum()) == 0 or int(odd.sum()) == 0:
            return {}
        sizes = [size for size in self.sizes if size > len(self.eos)]
        built = {size: vocab_mapping.build(even, size, self.eos) for size in sizes}
        return {n: vocab_mapping.coverage(ids, odd) for n, ids in built.items() if ids is not None}

    def facts(self) -> dict[str, str | int]:
        used = int(np.count_nonzero(self.counts.sum(0)))
        covered = [f"{n:,}: {100 * share:.2f} %" for n, share in self.shares.items()]
        return {
            "different tokens supervised": f"{used:,} of {self.counts.shape[1]:,}",
            "labels covered by a draft vocabulary": ", ".join(covered) or "every size has all",
        }
