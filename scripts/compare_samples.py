"""Tests whether two sampled sets of the same prompts follow one distribution: ours and a server's, say.

    python scripts/compare_samples.py outputs/samples_ours --b outputs/samples_served --out compared.json

Two engines with the same law give other texts, because their random numbers differ. Three things are compared over the
prompts that both sets answer: the distribution of answer lengths (largest distance of the two cumulative shares, as in
a Kolmogorov-Smirnov test), how often which token occurs (total variation of the unigram distributions), and the share
of answers that ended by themselves. The p-value of each is a permutation test's: if both sets follow one law, the two
answers to a prompt are exchangeable, so labels are swapped prompt by prompt. The last line is JSON.
"""

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

if not __package__:
    sys.path[0] = str(Path(__file__).resolve().parents[1])

import numpy as np
from rich.console import Console
from rich.table import Table

from decode.common import files, provenance
from decode.common.command import run_command
from decode.common.errors import UserError
from decode.common.ranges import Count, Seed
from decode.common.run_dir import check_file
from decode.common.typed_json import to_json
from eval.metrics.bootstrap import Array


@dataclass
class CompareSamplesConfig:
    a: str = ""
    """Folder of a finished sampled set; may stand first without --a."""
    b: str = ""
    """Folder of another one, of the same prompts and the same target."""
    permutations: Count = 2000
    seed: Seed = 0
    """Of the permutations."""
    out: str = ""
    """File for the JSON of the last line; empty: none."""


@dataclass(frozen=True)
class AnswerSet:
    """The answers of one set by the ids of their prompts."""

    tokens: dict[str, Array]
    """Token ids."""
    ended: dict[str, float]
    """1 where an answer ended by itself, 0 where it was cut."""

    def lengths(self, ids: Sequence[str]) -> Array:
        return np.array([len(self.tokens[key]) for key in ids])


def read_answers(folder: str) -> tuple[AnswerSet, dict[str, int]]:
    """The answers of a set and its counts. UserError for a set that is not finished or damaged."""
    from train.data.manifest import load_set  # loads torch: --help does without

    manifest, rows = load_set(Path(folder))
    tokens, ended = {}, {}
    for row in rows:
        if row["loss_spans"]:
            parts = [np.asarray(row["input_ids"][a:b]) for a, b in row["loss_spans"]]
            tokens[row["id"]] = np.concatenate(parts)
            ended[row["id"]] = float(row["finish_reason"] != "length")
    return AnswerSet(tokens, ended), manifest.counts


def largest_distance(a: Array, b: Array) -> float:
    """Largest distance of two cumulative distributions, from sums over n answers each."""
    return float(np.abs(a - b).max())


def total_variation(a: Array, b: Array) -> float:
    """Half the summed distance of two distributions of tokens, from counts."""
    return float(np.abs(a / a.sum() - b / b.sum()).sum() / 2)


def permutation_p_value(
    a: Array, b: Array, statistic: Callable[[Array, Array], float], count: int, seed: int
) -> tuple[float, float]:
    """(statistic of the column sums of `a` and `b` [n, F], P(at least as large | labels swapped by prompt))."""
    rng = np.random.default_rng(seed)
    total, observed = a.sum(0) + b.sum(0), statistic(a.sum(0), b.sum(0))
    at_least = 1
    for _ in range(count):
        chosen = rng.integers(0, 2, len(a)).astype(float)
        first = chosen @ a + (1 - chosen) @ b
        at_least += statistic(first, total - first) >= observed - 1e-12
    return observed, at_least / (count + 1)


def compare(a: AnswerSet, b: AnswerSet, permutations: int, seed: int) -> dict[str, Any]:
    """{lengths, tokens, ended: {distance, p_value}}, means of both, and how many prompts both answer."""
    ids = sorted(a.tokens.keys() & b.tokens.keys())
    n, lengths = len(ids), [x.lengths(ids) for x in (a, b)]
    vocabulary = np.unique(np.concatenate([x.tokens[key] for x in (a, b) for key in ids]))
    width = np.arange(max(map(np.max, lengths)) + 1)
    # Row i is 1 from the length of answer i on, so that a mean over rows is a cumulative distribution.
    cumulative = [(own[:, None] <= width).astype(float) / n for own in lengths]
    used = [np.zeros((n, len(vocabulary))) for _ in (a, b)]
    for side, counts in zip((a, b), used, strict=True):
        for row, key in zip(counts, ids, strict=True):
            np.add.at(row, np.searchsorted(vocabulary, side.tokens[key]), 1)
    ended = [np.array([[x.ended[key]] for key in ids]) for x in (a, b)]
    found: dict[str, Any] = {"prompts": n}
    for name, sides, statistic in (
        ("lengths", cumulative, largest_distance),
        ("tokens", used, total_variation),
        ("ended", [x / n for x in ended], largest_distance),
    ):
        distance, p_value = permutation_p_value(sides[0], sides[1], statistic, permutations, seed)
        found[name] = {"distance": round(distance, 5), "p_value": round(p_value, 5)}
    found["mean_length"] = [round(float(own.mean()), 3) for own in lengths]
    found["ended_share"] = [round(float(x.mean()), 4) for x in ended]
    return found


def main(s: CompareSamplesConfig) -> None:
    if not (s.a and s.b):
        raise UserError("give two folders of sampled sets: A --b B")
    check_file(s.out, [s.a, s.b])
    (a, counts_a), (b, counts_b) = read_answers(s.a), read_answers(s.b)
    if not a.tokens.keys() & b.tokens.keys():
        raise UserError(f"{s.a} and {s.b} answer no prompt in common: sample the same sources")
    found = compare(a, b, s.permutations, s.seed)
    table = Table("", "distance", "p")
    for name in ("lengths", "tokens", "ended"):
        table.add_row(name, f"{found[name]['distance']:.4f}", f"{found[name]['p_value']:.3f}")
    Console(stderr=True).print(table)
    only = [len(x.tokens) - found["prompts"] for x in (a, b)]
    facts = {"counts": [counts_a, counts_b], "only_in_one": only, **found}
    files.write_result(s.out, facts | to_json(provenance.collect()))


if __name__ == "__main__":
    run_command(main, CompareSamplesConfig, __doc__, first="a")
