"""Two logs of the same prompts: are their figures apart, and which difference could so many prompts have shown?"""

import math
from typing import Any

import numpy as np

from decode.common.errors import UserError
from eval.engine_logs.counts import EngineLog, RequestCounts
from eval.metrics.bootstrap import Array, Ratio, paired_difference
from eval.metrics.distribution_tests import POWER, run_permutation_test
from eval.served.scoring import SEED, ratios

LEVEL = 0.05
"""Two numbers are apart if p is below it and their interval, of 1 − LEVEL, does not hold 0."""

Pairs = tuple[list[RequestCounts], list[RequestCounts]]


def match_prompts(a: EngineLog, b: EngineLog) -> Pairs:
    """The requests of both logs, prompt by prompt. UserError if they are not of the same prompts.

    By the names of the prompts if both logs have them, else by their order; then the lengths of the prompts have to
    agree where both logs have them. A prompt whose request failed in one log is left out.
    """
    for log in (a, b):
        if not log.per_request:
            raise UserError(
                f"{log.path} holds totals of a server: two logs are compared by request, give responses"
            )
    names = [x.prompt for log in (a, b) for x in log.requests]
    names += [x.prompt for log in (a, b) for x in log.failed]
    if all(names):
        return _match_by_name(a, b)
    slots = _in_order(a), _in_order(b)
    if len(slots[0]) != len(slots[1]):
        raise UserError(
            f"{a.path} has {len(slots[0])} requests and {b.path} {len(slots[1])}: give logs of the same prompts"
        )
    pairs: Pairs = ([], [])
    for number, (one, other) in enumerate(zip(*slots, strict=True), start=1):
        if one is None or other is None:  # failed in one of them
            continue
        lengths = (one.prompt_tokens, other.prompt_tokens)
        if None not in lengths and lengths[0] != lengths[1]:
            raise UserError(
                f"request {number} has {lengths[0]} prompt tokens in {a.path} and {lengths[1]} in {b.path}: "
                "give logs of the same prompts in the same order"
            )
        pairs[0].append(one)
        pairs[1].append(other)
    return _any_left(pairs, a, b)


def _in_order(log: EngineLog) -> list[RequestCounts | None]:
    """The requests as they were asked, None in place of each that failed."""
    slots: list[RequestCounts | None] = list(log.requests)
    for failed in log.failed:  # ascending, so that each finds its place
        slots.insert(failed.index, None)
    return slots


def _any_left(pairs: Pairs, a: EngineLog, b: EngineLog) -> Pairs:
    if not pairs[0]:
        raise UserError(f"no prompt was answered in both {a.path} and {b.path}: ask again")
    return pairs


def _match_by_name(a: EngineLog, b: EngineLog) -> Pairs:
    named = []
    for log in (a, b):
        by_name = {r.prompt: r for r in log.requests}
        if len(by_name) < len(log.requests):
            raise UserError(f"{log.path} has a prompt twice: give one response for each prompt")
        named.append(by_name)
    failed = {x.prompt for log in (a, b) for x in log.failed}
    alone = sorted((named[0].keys() ^ named[1].keys()) - failed)
    if alone:
        raise UserError(
            f"{len(alone)} prompts are in one of {a.path} and {b.path} alone, the first is {alone[0][:40]!r}: "
            "give logs of the same prompts"
        )
    both = [name for name in named[0] if name in named[1]]
    return _any_left(([named[0][x] for x in both], [named[1][x] for x in both]), a, b)


def compare(a: EngineLog, b: EngineLog) -> dict[str, Any]:
    """What the logs show of their difference a − b in τ, with the power of the test, and the same figures' others."""
    pair = match_prompts(a, b)
    first, second = (ratios(requests) for requests in pair)
    for log, found_in in ((a, first), (b, second)):
        if "tau" not in found_in:
            raise UserError(
                f"{log.path} does not tell the rounds, so τ cannot be compared: give responses"
            )
    differences: dict[str, dict[str, Any]] = {}
    for name in sorted(first.keys() & second.keys()):
        found_apart = paired_difference(Ratio(*first[name]), Ratio(*second[name]), SEED)
        differences[name] = {"difference": found_apart.value, "ci": found_apart.ci}
    counts = [np.array([(r.rounds, r.accepted) for r in requests]) for requests in pair]
    found = power_of_tau(counts[0], counts[1], differences["tau"]["difference"])
    result = {"prompts": len(pair[0]), "differences": differences, **found}
    return {**result, "verdict": verdict(result)}


def power_of_tau(a: Array, b: Array, difference: float | None) -> dict[str, Any]:
    """p-value of τ, the difference that so many prompts show with a probability of POWER, and the prompts that this
    difference needs. From counts [n, 2] of rounds and accepted drafts; None where no number of swaps can give LEVEL.
    """
    n = len(a)
    if min(a[:, 0].sum(), b[:, 0].sum()) == 0:
        raise UserError("one of the logs has no round: there is nothing to compare")
    part = run_permutation_test(a, b, level=LEVEL, seed=SEED).parts[-1]
    detects = part.detects if 2.0 ** (1 - n) < LEVEL and part.error > 0 else None
    needed = None
    if detects is not None and difference:
        needed = math.ceil(n * (detects / abs(difference)) ** 2)
    return {
        "p_value": part.p_value,
        "power": POWER,
        "detectable_difference": detects,
        "prompts_needed": needed,
    }


def verdict(found: dict[str, Any]) -> str:
    """One sentence on the two values of τ."""
    tau, n, detects = found["differences"]["tau"], found["prompts"], found["detectable_difference"]
    difference, interval = tau["difference"], tau["ci"]
    if interval is None or detects is None:
        if difference == 0:
            return "these two numbers are the same: the difference is 0"
        return f"{n} prompts are too few to tell these two numbers apart: the difference is {difference:.3f}"
    low, high = interval
    where = f"[{low:.3f}, {high:.3f}]"
    if found["p_value"] < LEVEL and not low <= 0 <= high:
        text = f"these two numbers are apart: the difference {difference:.3f} has the interval"
        return f"{text} {where}, p = {found['p_value']:.2g}"
    text = f"these two numbers are not apart: the difference {difference:.3f} is within {where}"
    needed = found["prompts_needed"]
    more = "" if needed is None else f"{needed:,} prompts would show it; "
    return f"{text}, p = {found['p_value']:.2g}; {more}these {n} would show one of {detects:.3f}"
