"""Tests whether two sampled sets of the same prompts follow one distribution: ours and a server's, say.

    python scripts/compare_samples.py outputs/samples_ours --b outputs/samples_served --out compared.json

Two engines with the same law give other texts, because their random numbers differ. Three things are compared over the
prompts that both sets answer: the distribution of answer lengths (largest distance of the two cumulative shares, as in
a Kolmogorov-Smirnov test), how often which token occurs (total variation of the unigram distributions), and the share
of answers that ended by themselves. The p-value of each is a permutation test's: if both sets follow one law, the two
answers to a prompt are exchangeable, so labels are swapped prompt by prompt. The last line is JSON.
"""

import json
import sys
from collections.abc import Callable
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
from train.data.manifest import load_set

COMMAND = "scripts/compare_samples.py"


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
    """The answers of one set to n prompts, in the order of their ids."""

    ids: list[str]
    lengths: Array
    """[n] tokens of each answer."""
    ended: Array
    """[n] 1 where the answer ended by itself, 0 where it was cut."""
    tokens: list[Array]
    """n arrays of token ids."""


def read_answers(folder: str) -> tuple[AnswerSet, dict[str, int]]:
    """The answers of a set and its counts. UserError for a set that is not finished or damaged."""
    manifest, rows = load_set(Path(folder))
    by_id = {
        row["id"]: (
            np.concatenate([np.asarray(row["input_ids"][a:b]) for a, b in row["loss_spans"]]),
            row["finish_reason"] != "length",
        )
        for row in rows
        if row["loss_spans"]
    }
    ids = sorted(by_id)
    tokens = [by_id[key][0] for key in ids]
    ended = np.array([by_id[key][1] for key in ids], dtype=float)
    return AnswerSet(ids, np.array([len(x) for x in tokens]), ended, tokens), manifest.counts


def select(answers: AnswerSet, ids: set[str]) -> AnswerSet:
    """The answers to these prompts alone."""
    keep = [i for i, key in enumerate(answers.ids) if key in ids]
    return AnswerSet(
        [answers.ids[i] for i in keep],
        answers.lengths[keep],
        answers.ended[keep],
        [answers.tokens[i] for i in keep],
    )


def length_counts(answers: AnswerSet, width: int) -> Array:
    """[n, width]: row i is 1 from the length of answer i on, so that a mean over rows is a cumulative distribution."""
    found: Array = (answers.lengths[:, None] <= np.arange(width)).astype(float)
    return found


def token_counts(answers: AnswerSet, ids: Array) -> Array:
    """[n, len(ids)] how often each of the token `ids`, in rising order, occurs in each answer."""
    found = np.zeros((len(answers.ids), len(ids)))
    for row, tokens in zip(found, answers.tokens, strict=True):
        np.add.at(row, np.searchsorted(ids, tokens), 1)
    return found


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
    """{lengths, tokens, ended: {distance, p_value}}, means of both, and prompts. The sets answer the same prompts."""
    n, width = len(a.ids), int(max(a.lengths.max(), b.lengths.max())) + 1
    ids = np.unique(np.concatenate([*a.tokens, *b.tokens]))
    tests = {
        "lengths": (length_counts(a, width) / n, length_counts(b, width) / n, largest_distance),
        "tokens": (token_counts(a, ids), token_counts(b, ids), total_variation),
        "ended": (a.ended[:, None] / n, b.ended[:, None] / n, largest_distance),
    }
    found: dict[str, Any] = {"prompts": n}
    for name, (of_a, of_b, statistic) in tests.items():
        distance, p_value = permutation_p_value(of_a, of_b, statistic, permutations, seed)
        found[name] = {"distance": round(distance, 5), "p_value": round(p_value, 5)}
    found["mean_length"] = [round(float(x.lengths.mean()), 3) for x in (a, b)]
    found["ended_share"] = [round(float(x.ended.mean()), 4) for x in (a, b)]
    return found


def main(s: CompareSamplesConfig) -> None:
    if not (s.a and s.b):
        raise UserError("give two folders of sampled sets: A --b B")
    check_file(s.out, [s.a, s.b])
    (a, counts_a), (b, counts_b) = read_answers(s.a), read_answers(s.b)
    shared = set(a.ids) & set(b.ids)
    if not shared:
        raise UserError(f"{s.a} and {s.b} answer no prompt in common: sample the same sources")
    found = compare(select(a, shared), select(b, shared), s.permutations, s.seed)
    table = Table("", "distance", "p")
    for name in ("lengths", "tokens", "ended"):
        table.add_row(name, f"{found[name]['distance']:.4f}", f"{found[name]['p_value']:.3f}")
    Console(stderr=True).print(table)
    facts = {
        "counts": [counts_a, counts_b],
        "only_in_one": [len(a.ids) - len(shared), len(b.ids) - len(shared)],
        **found,
    }
    line = json.dumps(facts | to_json(provenance.collect()))
    if s.out:
        files.write_atomically(Path(s.out), line + "\n")
    print(line)


if __name__ == "__main__":
    run_command(main, CompareSamplesConfig, __doc__, first="a")
