"""/metrics dumps of servers: lines of Prometheus, name{labels} value, and counters of speculative decoding in them."""

import math
import re
from collections import defaultdict
from collections.abc import Callable, Collection
from functools import partial

from decode.common.errors import UserError
from decode.common.files import read_text
from decode.serving.log_counts import EngineLog, RequestCounts, checked

SAMPLE = re.compile(
    r"(?P<name>[a-zA-Z_:][\w:]*)(?:\{(?P<labels>.*)\})?\s+(?P<value>\S+)(?:\s+-?\d+)?"
)

Samples = dict[tuple[str, str], float]  # {(name without _total, labels as written): value}


def read_dump(path: str, before: str = "", gauges: Collection[str] = ()) -> Samples:
    """The samples in the file, less those of an earlier dump of the same server; `gauges` stay as they are."""
    samples = parse(read_text(path), path)
    earlier = parse(read_text(before), before) if before else {}
    for key in samples.keys() & earlier.keys():
        if key[0] not in gauges:
            samples[key] -= earlier[key]
    return samples


def parse(text: str, path: str) -> Samples:
    """UserError that names the first line that is none of a dump."""
    samples: Samples = {}
    for number, line in enumerate(text.split("\n"), start=1):
        if not line.strip() or line.startswith("#"):
            continue
        found = SAMPLE.fullmatch(line.strip())
        try:
            value = float(found["value"] if found else "no value")
        except ValueError:
            raise UserError(
                f"{path}:{number} is no line of a /metrics dump: give the text that the server sent"
            ) from None
        if found and math.isfinite(value):
            samples[found["name"].removesuffix("_total"), found["labels"] or ""] = value
    return samples


def total(samples: Samples, name: str, path: str) -> int:
    """The sum of a counter over all its labels. UserError if the dump has none, or if it is lower than before."""
    values = [value for (own, _), value in samples.items() if own == name]
    if not values:
        raise UserError(f"{path} has no {name}: speculative decoding was off, or the metrics were")
    if min(values) < 0:
        raise UserError(f"{name} is lower in {path} than in the dump before: give dumps of one run")
    return round(sum(values))


# ---- counters that engines have in common, each under its own prefix ----


def read_totals(engine: str, path: str, before: str = "") -> EngineLog:
    """The totals of a dump of `engine`, less those of an earlier one."""
    counts = sum_samples(engine, read_dump(path, before), path)
    notes = ("rounds are those with a draft",)
    return EngineLog(path, engine, [counts], per_request=False, notes=notes)


def sum_samples(engine: str, samples: Samples, path: str) -> RequestCounts:
    """The counts in the samples of a dump. Rounds are those with a draft; α is known if all drafted as many tokens."""
    prefix = f"{engine}:spec_decode_num_"
    rounds, drafted, accepted = (
        total(samples, prefix + name, path)
        for name in ("drafts", "draft_tokens", "accepted_tokens")
    )
    if drafted < rounds:
        raise UserError(
            f"{path}: {drafted} drafted tokens in {rounds} rounds with a draft: the log is damaged"
        )
    positions: dict[int, int] = defaultdict(int)
    for (name, labels), value in samples.items():
        position = re.search(r'\bposition="(\d+)"', labels)
        if name == f"{prefix}accepted_tokens_per_pos" and position:
            positions[int(position[1])] += round(value)
    accepted_at = tuple(positions[i] for i in sorted(positions))
    fixed = drafted == rounds * len(accepted_at)
    reached_at = (rounds, *accepted_at[:-1]) if fixed and accepted_at else ()
    return checked(RequestCounts(rounds, drafted, accepted, accepted_at, reached_at), path)


# ---- SGLang ----

GAUGES = ("sglang:spec_accept_length", "sglang:spec_accept_rate")
"""Of the last interval, not of the whole run; everything else that is read of a dump is a counter."""


def read_sglang(path: str, before: str = "") -> EngineLog:
    """The totals of a /metrics dump, less those of an earlier one; with its gauges. SGLang counts neither drafted nor
    accepted tokens there. Accepted ones follow from generated tokens: each request has one from prefill and each
    verification step one that the target adds."""
    samples = read_dump(path, before, GAUGES)
    rounds, generated, requests = (
        total(samples, f"sglang:{name}", path)
        for name in ("spec_verify_calls", "generation_tokens", "num_requests")
    )
    accepted = generated - requests - rounds
    if accepted < 0:
        raise UserError(
            f"{path}: {generated} tokens of {requests} requests in {rounds} steps: not all were speculated"
        )
    values = {name: [x for (own, _), x in samples.items() if own == name] for name in GAUGES}
    gauges = {name: sum(own) / len(own) for name, own in values.items() if own}
    notes = (
        "accepted tokens derived: generated − requests − verification steps",
        "SGLang's gauges are pooled over the last interval",
    )
    counts = [RequestCounts(rounds, 0, accepted)]
    return EngineLog(path, "sglang", counts, per_request=False, gauges=gauges, notes=notes)


DUMPS: dict[str, Callable[[str, str], EngineLog]] = {
    "vllm": partial(read_totals, "vllm"),
    "sglang": read_sglang,
    "llamacpp": partial(read_totals, "llamacpp"),
}
"""{what an engine's metrics are called by: (path, path of an earlier dump or empty) -> its totals}."""
