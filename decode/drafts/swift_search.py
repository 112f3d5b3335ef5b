"""The search for the sub-layers to skip (SWIFT, Xia et al. 2024): random sets, and now and then one by Bayesian
optimisation.

A set's score is its matchness: the share of an answer's tokens that the model without these sub-layers predicts.
"""

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from decode.common.errors import UserError
from decode.common.files import read_json_object, write_atomically
from decode.common.ranges import check_ranges
from decode.drafts.settings import SwiftConfig

POOL = 256
"""Random sets among which a Bayesian step chooses."""
KAPPA, NOISE = 2.5, 1e-2
"""Weight of the uncertainty in a Bayesian step; variance of a score's noise."""


@dataclass
class SearchState:
    """What a search has found. Sets are texts of 2 (L - 2) digits, as in `sublayers.from_bits`."""

    best: str
    score: float = -1.0
    """Of `best`; negative while it has not been tried."""
    unimproved: int = 0
    """Sets tried since `best` was found."""
    tried: dict[str, float] = field(default_factory=dict)
    """The scores of all sets, which Bayesian steps are fitted to."""
    history: list[float] = field(default_factory=list)
    """The score of each try, in their order."""


class SkipSearch:
    """One search, which goes on from prompt to prompt, and where it was saved as if it had not been interrupted."""

    def __init__(self, layers: int, config: SwiftConfig, state: SearchState | None = None):
        """UserError for settings out of range and for a `state` of a target with another number of `layers`."""
        check_ranges(config, "swift.")
        self.config, self.size = config, 2 * (layers - 2)
        most = min(self.size, 2 * max(0, layers - config.min_layers))
        self.count = min(max(1, int(self.size * config.ratio)), most)
        self.state = state or SearchState(every_other(self.size, self.count))
        if len(self.state.best) != self.size:
            raise UserError(
                f"its sub-layers are those of {len(self.state.best) // 2 + 2} layers, and the target has {layers}"
            )

    @property
    def finished(self) -> bool:
        s, state = self.config, self.state
        out = len(state.tried) >= s.max_iterations or state.unimproved >= s.tolerance
        return not s.adaptive or out or state.score >= s.max_score

    def candidate(self) -> str:
        """The set to try next: first the one at hand, then random ones, every `bayes_every`-th by `best_in_pool`."""
        tried = self.state.tried
        if not tried:
            return self.state.best
        generator = torch.Generator().manual_seed(self.config.seed + len(self.state.history))
        pool = [random_set(self.size, self.count, generator) for _ in range(POOL)]
        new = [bits for bits in pool if bits not in tried] or pool
        return best_in_pool(tried, new) if len(tried) % self.config.bayes_every == 0 else new[0]

    def record(self, bits: str, score: float) -> bool:
        """Keeps the score of a set; returns whether the set is the best from now on."""
        state = self.state
        state.tried[bits] = score
        state.history.append(score)
        better = score > state.score
        if better:
            state.best, state.score, state.unimproved = bits, score, 0
        else:
            state.unimproved += 1
        return better

    def save(self, file: Path) -> None:
        content = {"config": asdict(self.config), "state": asdict(self.state)}
        write_atomically(file, json.dumps(content, indent=1) + "\n")


def load_search(file: Path, layers: int) -> SkipSearch:
    """The search that `SkipSearch.save` wrote. UserError if the file is damaged or for another number of layers."""
    content = read_json_object(file, "what a SWIFT draft saves", ["config", "state"])
    try:
        config, state = SwiftConfig(**content["config"]), SearchState(**content["state"])
        check_sets(state)
        state.history = state.history or list(state.tried.values())
    except (TypeError, AttributeError) as error:
        raise UserError(f"{file} is damaged: remove it, and the search starts anew") from error
    return SkipSearch(layers, config, state)


def check_sets(state: SearchState) -> None:
    """TypeError unless all sets are texts of as many digits 0 and 1, with numbers as scores."""
    for bits, score in [(state.best, state.score), *state.tried.items()]:
        if (
            set(bits) - {"0", "1"}
            or len(bits) != len(state.best)
            or not isinstance(score, float | int)
        ):
            raise TypeError(f"{bits!r} is no set with a score")
    if not all(isinstance(score, float | int) for score in state.history):
        raise TypeError("the history does not consist of scores")


def every_other(size: int, count: int) -> str:
    """The set that a search starts from: `count` of `size` sub-layers at even distances."""
    chosen = {(2 * i + 1) * size // (2 * count) for i in range(count)} if count else set()
    return "".join("1" if i in chosen else "0" for i in range(size))


def random_set(size: int, count: int, generator: torch.Generator) -> str:
    """`count` of `size` sub-layers."""
    chosen = set(torch.randperm(size, generator=generator)[:count].tolist())
    return "".join("1" if i in chosen else "0" for i in range(size))


def best_in_pool(tried: dict[str, float], pool: Sequence[str]) -> str:
    """The set of `pool` with the highest upper confidence bound of a Gaussian process through the scores `tried`.

    The kernel is exp(-d / l) of the number d of sub-layers in which two sets differ, l a quarter of all.
    """
    seen, wanted = _as_numbers(list(tried)), _as_numbers(pool)
    scores = torch.tensor(list(tried.values()), dtype=torch.float64)
    mean, spread = scores.mean(), scores.std(correction=0).clamp_min(1e-6)
    length = max(1.0, seen.shape[1] / 4)
    covariance = torch.exp(-torch.cdist(seen, seen, p=1) / length)
    across = torch.exp(-torch.cdist(wanted, seen, p=1) / length)  # [pool, tried]
    factor = torch.linalg.cholesky(covariance + NOISE * torch.eye(len(seen), dtype=torch.float64))
    weights = torch.cholesky_solve(((scores - mean) / spread)[:, None], factor)[:, 0]
    explained = torch.linalg.solve_triangular(factor, across.T, upper=False).square().sum(0)
    bound = across @ weights + KAPPA * (1 - explained).clamp_min(0).sqrt()
    return pool[int(bound.argmax())]


def _as_numbers(sets: Sequence[str]) -> Tensor:
    """[n, size] float64 of sets."""
    rows: list[list[Any]] = [[int(digit) for digit in bits] for bits in sets]
    return torch.tensor(rows, dtype=torch.float64)
