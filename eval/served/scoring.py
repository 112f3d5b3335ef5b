"""τ, α and acceptance rate of a log: pooled over all rounds, and as the mean of the requests' own figures."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from eval.engine_logs.counts import EngineLog, RequestCounts
from eval.metrics.bootstrap import Array, mean_of_ratios, ratio_interval, ratio_or_none

SEED = 0
DASHBOARDS = {
    "vllm": "vLLM's log line and /metrics give pooled figures (mean acceptance length = τ, draft acceptance rate); "
    "its responses one length a request, and averaging those gives the mean of requests.",
    "sglang": "SGLang's gauges are pooled over the last interval; spec_accept_length of a response counts prefill's "
    "token too, and so does the mean of requests that averaging those gives.",
    "llamacpp": "llama.cpp prints an acceptance rate and a mean length for each request, so averages of its lines are "
    "means of requests; its /metrics count rounds with a draft, over all requests.",
    "draftsmith": "report.json has τ cut at the end of answers, and α pooled.",
}
"""Which figure each engine reports."""


def ratios(requests: Sequence[RequestCounts]) -> dict[str, tuple[Array, Array]]:
    """{figure: (numerators, denominators) [n requests]}; a figure that the log does not give is left out.

    τ counts the token that the target adds: rounds + accepted ÷ rounds. α needs to know which positions were reached.
    """
    counts = np.array([(r.drafted, r.accepted) for r in requests], dtype=np.int64).reshape(-1, 2)
    drafted, accepted = counts.T
    found = {"acceptance_rate": (accepted, drafted)} if drafted.any() else {}
    rounds = known_rounds(requests)
    if rounds is None:
        return found
    found["tau"] = rounds + accepted, rounds
    reached = positions([r.reached_at for r in requests], rounds)
    if reached is not None:
        found["alpha"] = accepted, reached.sum(1)
    return found


def known_rounds(requests: Sequence[RequestCounts]) -> Array | None:
    """Rounds of the requests [n]; None if one of them does not say, or if there is no request."""
    rounds = [r.rounds for r in requests]
    return None if None in rounds or not rounds else np.array(rounds)


def positions(rows: Sequence[Sequence[int]], rounds: Array) -> Array | None:
    """The rows of counts by position as [n, K]; None if a request that has rounds does not give them."""
    depth = max(map(len, rows), default=0)
    missing = [len(row) == 0 and n > 0 for row, n in zip(rows, rounds, strict=True)]
    if depth == 0 or any(missing):
        return None
    return np.array([[*row, *[0] * (depth - len(row))] for row in rows], dtype=np.int64)


def score(log: EngineLog) -> dict[str, Any]:
    """The figures of one log, ready for JSON; None where it does not give them, and intervals only by request."""
    rounds = known_rounds(log.requests)
    figures: dict[str, dict[str, Any]] = {
        name: {"pooled": x, "ci": None, "mean_of_requests": None, "mean_of_requests_ci": None}
        for name, x in log.given.items()
    }
    for name, (top, bottom) in ratios(log.requests).items():
        mean, mean_ci = mean_of_ratios(top, bottom, SEED) if log.per_request else (None, None)
        figures[name] = {
            "pooled": ratio_or_none(top.sum(), bottom.sum()),
            "ci": ratio_interval(top, bottom, SEED),
            "mean_of_requests": mean,
            "mean_of_requests_ci": mean_ci,
        }
    lengths = [r.engine_length for r in log.requests if isinstance(r.engine_length, int | float)]
    return {
        "log": log.path,
        "engine": log.engine,
        "requests": len(log.requests) if log.per_request else None,
        "failed": [{"where": x.where, "reason": x.reason, "prompt": x.prompt} for x in log.failed],
        "counts": {
            "rounds": None if rounds is None else int(rounds.sum()),
            "drafted": sum(r.drafted for r in log.requests),
            "accepted": sum(r.accepted for r in log.requests),
        },
        **figures,
        "by_position": score_positions(log.requests),
        "engine_mean_length": ratio_or_none(sum(lengths), len(lengths)),
        "gauges": log.gauges,
        "gauges_of": log.gauges_of,
        "notes": [*log.notes, DASHBOARDS[log.engine]],
    }


def score_positions(requests: Sequence[RequestCounts]) -> list[dict[str, Any]]:
    """For each position its share of all rounds and α, with intervals; [] if the log has no positions."""
    rounds = known_rounds(requests)
    if rounds is None:
        return []
    accepted = positions([r.accepted_at for r in requests], rounds)
    reached = positions([r.reached_at for r in requests], rounds)
    if accepted is None:
        return []
    found = []
    for i in range(accepted.shape[1]):
        top, below = accepted[:, i], None if reached is None else reached[:, i]
        found.append(
            {
                "position": i + 1,
                "unconditional": ratio_or_none(top.sum(), rounds.sum()),
                "unconditional_ci": ratio_interval(top, rounds, SEED),
                "alpha": None if below is None else ratio_or_none(top.sum(), below.sum()),
                "alpha_ci": None if below is None else ratio_interval(top, below, SEED),
            }
        )
    return found
