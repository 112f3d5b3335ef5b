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
        self.lengths[1 << max(0, len(row.ids) - 1).bit_length()] += 1
        self.sources[row.row["source"]] += 1
        if not row.chosen:
            return
        said = "\n".join(row.replies) if row.replies else row.asked
        scripts, asked = scripts_of(said), scripts_of(row.asked)
        self.scripts += scripts
        self.characters += len(said)
        self.digits += sum(character.isdigit() for character in said)
        self.code += sum(map(len, said.split(FENCE)[1::2]))
        self.fenced += FENCE in said
        main, other = ({name for name, _ in found.most_common(1)} for found in (scripts, asked))
        if row.replies and main and other and main != other:
            self.tally.add("answer in another script", row)

    def facts(self) -> dict[str, str | int]:
        letters, rows = self.scripts.total(), self.sources.total()
        listed = [(s, n) for s, n in self.scripts.most_common() if n >= 0.01 * letters]
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
    return Counter(script_of(character) for character in text if character.isalpha())


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
        self.shares: dict[int, float] = {}
        """{size: share of the odd rows' labels in the vocabulary of that size that the even rows choose}."""

    def add(self, row: SeenRow) -> None:
        np.add.at(self.counts[self.rows % 2], np.asarray(row.ids, dtype=np.int64)[row.labels], 1)
        self.rows += 1

    def finish(self) -> None:
        """Measures `shares`, and reports each vocabulary that misses at least the share `worth` of the labels."""
        even, odd = torch.from_numpy(self.counts)
        both = even.any() and odd.any()
        for size in [size for size in self.sizes if both and size > len(self.eos)]:
            ids = vocab_mapping.build(even, size, self.eos)
            if ids is None:  # all tokens
                continue
            self.shares[size] = vocab_mapping.coverage(ids, odd)
            missed = 1 - self.shares[size]
            if missed >= self.tally.worth:
                kind = "draft vocabulary of {size:,}"
                self.tally.report(kind, self.rows, self.rows, size=size, missed=100 * missed)

    def facts(self) -> dict[str, str | int]:
        used = int(np.count_nonzero(self.counts.sum(0)))
        covered = [f"{n:,}: {100 * share:.2f} %" for n, share in self.shares.items()]
        return {
            "different tokens supervised": f"{used:,} of {self.counts.shape[1]:,}",
            "labels covered by a draft vocabulary": ", ".join(covered) or "every size has all",
        }
