"""What a sweep says: each setting's speed-up, what could be predicted of it, and which setting to take."""

import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from decode.verification.tree import StaticTree
from eval.benchmark.methods import describe_tree
from eval.metrics import acceptance
from eval.metrics.latency import latency_ms
from eval.metrics.records import DecodeRecord, ratio_or_none
from eval.metrics.speedup_model import (
    SpeedupModel,
    fit_speedup_model,
    pooled_round_speedup,
    prediction_record,
    recommended_k_range,
    round_speedup_with_interval,
)
from eval.tuning.sweep import PLAIN_DECODING, Setting, SweepResult, SweepStage

ALL_TASKS = "all"
SamplesBySetting = Mapping[Setting, Sequence[DecodeRecord]]


def task_names(samples: SamplesBySetting) -> list[str]:
    """All prompts together, then each domain, where there are several."""
    names = list(dict.fromkeys(sample.task for sample in samples[PLAIN_DECODING]))
    return [ALL_TASKS, *names] if len(names) > 1 else [ALL_TASKS]


def filter_by_task(samples: SamplesBySetting, task: str) -> dict[Setting, list[DecodeRecord]]:
    """Only the samples of that domain, or all."""
    return {arm: [x for x in own if task in (ALL_TASKS, x.task)] for arm, own in samples.items()}


def every_other_prompt(samples: SamplesBySetting, odd: int) -> dict[Setting, list[DecodeRecord]]:
    """Every other prompt: what is predicted or chosen on one half is measured on the other."""
    return {arm: list(own[odd::2]) for arm, own in samples.items()}


def sweep_cells(stage: SweepStage, swept: SweepResult, seed: int) -> list[dict[str, Any]]:
    """One for each arm and domain, plain decoding included, ready for JSON."""
    found = []
    for task in task_names(swept.samples):
        own = filter_by_task(swept.samples, task)
        for arm, samples in own.items():
            measured = round_speedup_with_interval(own[PLAIN_DECODING], samples, seed)
            spread = latency_ms(samples)
            rate = ratio_or_none(
                float(acceptance.emitted_tokens(samples).sum()), sum(x.seconds for x in samples)
            )
            found.append(
                {
                    "stage": stage.name,
                    "method": arm.method,
                    "setting": arm.setting,
                    "k": draft_depth(arm),
                    "tree": describe_tree(arm.shape),
                    "temperature": stage.temperature,
                    "batch_size": stage.batch_size,
                    "task": task,
                    "prompts": len(samples),
                    "tau": acceptance.tau(samples),
                    "alpha": acceptance.alpha(samples, draft_depth(arm)),
                    "speedup": None if measured is None else measured.speedup,
                    "ci": None if measured is None else measured.ci,
                    "tokens_per_second": None if rate is None else stage.batch_size * rate,
                    "round_ms": {key: spread[key] for key in ("mean", "p50", "p95", "variance")},
                    "token_ms": spread["token"],
                }
            )
    return found


def draft_depth(arm: Setting) -> int:
    """Positions that a round of the arm can accept: 0 for plain decoding."""
    if arm == PLAIN_DECODING:
        return 0
    return arm.shape.depth if isinstance(arm.shape, StaticTree) else arm.k


def calibration_lengths(ks: Sequence[int], wanted: Sequence[int]) -> tuple[int, int] | None:
    """The two draft lengths to predict from: the wanted ones, or else the second and the last; None below three."""
    have = sorted(set(ks))
    if len(have) < 3:
        return None
    few, many = wanted
    return (few, many) if {few, many} <= set(have) else (have[1], have[-1])


def cross_validated_predictions(
    samples: Mapping[int, Sequence[DecodeRecord]], wanted: Sequence[int], seed: int = 0
) -> list[dict[str, Any]]:
    """Speed-ups of rounds on one half of the prompts, predicted from the other; each half predicts once (`fold`).

    `samples` are by draft length, 0 for plain decoding. A prediction sees only plain rounds and those of two draft
    lengths, on the half that calibrates. These two, and cells whose measurement is too wide to judge by, are not
    `counted`.
    """
    two = calibration_lengths([k for k in samples if k > 0], wanted)
    if two is None:
        return []
    found = []
    for fold in (0, 1):
        seen = {k: own[fold::2] for k, own in samples.items()}
        test = {k: own[1 - fold :: 2] for k, own in samples.items()}
        model = fit_from_two_lengths(seen, two)
        for k in sorted(k for k in samples if k > 0):
            measured = round_speedup_with_interval(test[0], test[k], seed)
            if model is not None and measured is not None:
                cell = prediction_record(k, model.speedup(k), measured)
                cell["counted"] = cell["counted"] and k not in two
                found.append({"fold": fold, **cell})
    return found


def fit_from_two_lengths(
    seen: Mapping[int, Sequence[DecodeRecord]], two: tuple[int, int]
) -> SpeedupModel | None:
    """None where some arm ran no round."""
    few, many = two
    if any(acceptance.round_counts(seen[k]).sum() == 0 for k in (0, few, many)):
        return None
    return fit_speedup_model(seen[0], (few, seen[few]), (many, seen[many]))


def summarize_predictions(found: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """The cells with how many count and their median error."""
    errors = [cell["error"] for cell in found if cell["counted"]]
    median = statistics.median(errors) if errors else None
    return {"cells": list(found), "counted": len(errors), "median_error": median}


def select_fastest_settings(
    stages: Sequence[tuple[SweepStage, SweepResult]], seed: int
) -> list[dict[str, Any]]:
    """The fastest setting of each method for each domain, temperature and batch size, over all stages."""
    places = sorted({(stage.temperature, stage.batch_size) for stage, _ in stages})
    found = []
    for temperature, batch in places:
        here = [
            swept
            for stage, swept in stages
            if (stage.temperature, stage.batch_size) == (temperature, batch)
        ]
        for task in task_names(here[0].samples):
            for method in dict.fromkeys(arm.method for swept in here for arm in swept.samples):
                best = fastest_setting(here, method, task, seed)
                if method != PLAIN_DECODING.method and best is not None:
                    found.append({"temperature": temperature, "batch_size": batch, **best})
    return found


def fastest_setting(
    here: Sequence[SweepResult], method: str, task: str, seed: int
) -> dict[str, Any] | None:
    """The method's fastest arm; each is compared with the plain rounds that were interleaved with it."""
    options = []
    for swept in here:
        own = filter_by_task(swept.samples, task)
        for arm, samples in own.items():
            speedup = pooled_round_speedup(own[PLAIN_DECODING], samples)
            if arm.method == method and speedup is not None:
                options.append((speedup, arm, own))
    if not options:
        return None
    _, arm, own = max(options, key=lambda option: option[0])
    measured = round_speedup_with_interval(own[PLAIN_DECODING], own[arm], seed)
    assert measured is not None
    alpha = acceptance.alpha(own[arm], draft_depth(arm))
    return {
        "task": task,
        "method": method,
        "setting": arm.setting,
        "k": draft_depth(arm),
        "tree": describe_tree(arm.shape),
        "rule": arm.rule,
        "prompts": len(own[arm]),
        "speedup": measured.speedup,
        "ci": measured.ci,
        "held_out": held_out_speedup([(a, o) for _, a, o in options]),
        "tau": acceptance.tau(own[arm]),
        "alpha": alpha,
        "guide": recommended_k_range(task, alpha),
    }


def held_out_speedup(options: Sequence[tuple[Setting, SamplesBySetting]]) -> float | None:
    """Speed-up of the arm that is best on one half of the prompts, measured on the other; the mean of both ways.

    The best of many is lucky as well as good: its own figure is too high, this one is not.
    """
    results = []
    for odd in (0, 1):
        scored = []
        for arm, own in options:
            seen, test = every_other_prompt(own, odd), every_other_prompt(own, 1 - odd)
            here, there = (pooled_round_speedup(x[PLAIN_DECODING], x[arm]) for x in (seen, test))
            if here is None or there is None:
                return None
            scored.append((here, there))
        results.append(max(scored)[1])
    return statistics.fmean(results)


def fastest_chains(tuned: Mapping[str, Any], sha: str) -> list[dict[str, Any]]:
    """Of tuned.json: the fastest lossless chain of the draft with this checksum, by temperature and domain.

    At the smallest batch size, all domains together first. A tree that is faster still is left out, since serving
    engines draft chains. `tried` are the draft lengths that were compared.
    """
    lossy = {c["method"] for c in tuned["chosen"] if c["rule"] == "typical"}
    names = {name for name, own in tuned["drafts"].items() if own == sha} - lossy
    cells = [
        c
        for c in tuned["cells"]
        if c["method"] in names and c["tree"] is None and c["speedup"] is not None
    ]
    smallest = min((c["batch_size"] for c in cells), default=0)
    cells = [c for c in cells if c["batch_size"] == smallest]
    found = []
    for temperature in sorted({c["temperature"] for c in cells}):
        for task in dict.fromkeys(c["task"] for c in cells):
            own = [c for c in cells if (c["temperature"], c["task"]) == (temperature, task)]
            best = max(own, key=lambda c: c["speedup"])
            place = ("temperature", "batch_size", "task", "method", "k", "tree")
            chosen = [c for c in tuned["chosen"] if all(c[key] == best[key] for key in place)]
            kept = {key: best[key] for key in (*place[:-1], "prompts", "speedup", "ci")}
            held = chosen[0]["held_out"] if chosen else None
            found.append({**kept, "held_out": held, "tried": sorted({c["k"] for c in own})})
    return found
