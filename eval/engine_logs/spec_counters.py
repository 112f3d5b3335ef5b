"""The counters of speculative decoding that vLLM's and llama.cpp's /metrics have in common, under one prefix each.

Both count a round where something was drafted, so steps without a draft are in no figure.
"""

from decode.common.errors import UserError
from eval.engine_logs import prometheus
from eval.engine_logs.counts import EngineLog, RequestCounts, checked


def read_totals(engine: str, path: str, before: str = "") -> EngineLog:
    """The totals of a /metrics dump of `engine`, less those of an earlier one."""
    samples = prometheus.read_dump(path, before)
    return EngineLog(path, engine, [sum_samples(engine, samples, path)], per_request=False)


def sum_samples(engine: str, samples: prometheus.Samples, path: str) -> RequestCounts:
    """The counts in the samples of a dump. α is known if all rounds drafted the same number of tokens."""
    prefix = f"{engine}:spec_decode_num_"
    rounds, drafted, accepted = (
        prometheus.total(samples, prefix + name, path)
        for name in ("drafts", "draft_tokens", "accepted_tokens")
    )
    if drafted < rounds:
        raise UserError(
            f"{path}: {drafted} drafted tokens in {rounds} rounds with a draft: the log is damaged"
        )
    positions = prometheus.totals_by(samples, f"{prefix}accepted_tokens_per_pos", "position")
    accepted_at = tuple(positions[i] for i in sorted(positions))
    fixed = drafted == rounds * len(accepted_at)
    reached_at = (rounds, *accepted_at[:-1]) if fixed and accepted_at else ()
    return checked(RequestCounts(rounds, drafted, accepted, accepted_at, reached_at), path)
