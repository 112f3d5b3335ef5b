"""From the records of a sweep: each setting's speed-up, predictions of it, and the fastest setting."""

import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from decode.engine.records import DecodeRecord
from decode.verification.registry import find_rule
from eval.benchmark.methods import PLAIN_DECODING, Method, describe_tree
from eval.benchmark.timing import TimingResult
from eval.metrics import acceptance
from eval.metrics.bootstrap import ALL_TASKS, ratio_or_none
from eval.metrics.latency import latency_ms
from eval.metrics.speedup_model import (
    SpeedupModel,
    fit_speedup_model,
    pooled_round_speedup,
    prediction_record,
    recommended_k_range,
    round_speedup_with_interval,
)
from eval.tuning.sweep import SweepStage

RecordsBySetting = Mapping[Method, Sequence[DecodeRecord]]


def task_names(records: RecordsBySetting) -> list[str]:
    """All prompts together, then each domain, where there are several."""
    names = list(dict.fromkeys(record.task for record in records[PLAIN_DECODING]))
    return [ALL_TASKS, *names] if len(names) > 1 else [ALL_TASKS]


def filter_by_task(records: RecordsBySetting, task: str) -> dict[Method, list[DecodeRecord]]:
    """Only the records of that domain, or all."""
    return {
        setting: [x for x in own if task in (ALL_TASKS, x.task)] for setting, own in records.items()
    }


def every_other_prompt(records: RecordsBySetting, odd: int) -> dict[Method, list[DecodeRecord]]:
    """Every other prompt: a prediction or choice from one half is measured on the other."""
    return {setting: list(own[odd::2]) for setting, own in records.items()}


def sweep_cells(stage: SweepStage, result: TimingResult, seed: int) -> list[dict[str, Any]]:
    """One for each setting and domain, plain decoding included, ready for JSON."""
    cells = []
    for task in task_names(result.records):
        own = filter_by_task(result.records, task)
        for setting, records in own.items():
            measured = round_speedup_with_interval(own[PLAIN_DECODING], records, seed)
            latency = latency_ms(records)
            rate = ratio_or_none(
                float(acceptance.emitted_tokens(records).sum()), sum(x.seconds for x in records)
            )
            cells.append(
                {
                    "stage": stage.name,
                    "method": setting.name,
                    "setting": setting.description,
                    "k": setting.depth,
                    "layers": setting.layers,
                    "tree": describe_tree(setting.shape),
                    "temperature": stage.temperature,
                    "batch_size": stage.batch_size,
                    "task": task,
                    "prompts": len(records),
                    "tau": acceptance.tau(records),
                    "alpha": acceptance.alpha(records, setting.depth),
                    "speedup": None if measured is None else measured.speedup,
                    "ci": None if measured is None else measured.ci,
                    "speedup_of_sums": None if measured is None else measured.of_sums,
                    "tokens_per_second": None if rate is None else stage.batch_size * rate,
                    "round_ms": {key: latency[key] for key in ("mean", "p50", "p95", "variance")},
                    "token_ms": latency["token"],
                }
            )
    return cells


def calibration_lengths(ks: Sequence[int], wanted: Sequence[int]) -> tuple[int, int] | None:
    """The two draft lengths to predict from: the wanted ones, or else the second and the last; None below three."""
    measured = sorted(set(ks))
    if len(measured) < 3:
        return None
    short, long = wanted
    return (short, long) if {short, long} <= set(measured) else (measured[1], measured[-1])


def cross_validated_predictions(
    records: Mapping[int, Sequence[DecodeRecord]], wanted: Sequence[int], seed: int = 0
) -> list[dict[str, Any]]:
    """Speed-ups of rounds on one half of the prompts, predicted from the other; each half predicts once (`fold`).

    `records` are by draft length, 0 for plain decoding. A prediction uses only plain rounds and those of two draft
    lengths, on the half that calibrates. These two, and cells whose measured interval is too wide to judge by, are not
    `counted`.
    """
    two = calibration_lengths([k for k in records if k > 0], wanted)
    if two is None:
        return []
    cells = []
    for fold in (0, 1):
        calibration = {k: own[fold::2] for k, own in records.items()}
        test = {k: own[1 - fold :: 2] for k, own in records.items()}
        model = fit_from_two_lengths(calibration, two)
        for k in sorted(k for k in records if k > 0):
            measured = round_speedup_with_interval(test[0], test[k], seed)
            if model is not None and measured is not None:
                cell = prediction_record(k, model.speedup(k), measured)
                cell["counted"] = cell["counted"] and k not in two
                cells.append({"fold": fold, **cell})
    return cells


def fit_from_two_lengths(
    records: Mapping[int, Sequence[DecodeRecord]], two: tuple[int, int]
) -> SpeedupModel | None:
    """The model from plain rounds and those of two draft lengths; None where one of them ran no round."""
    short, long = two
    if any(acceptance.round_counts(records[k]).sum() == 0 for k in (0, short, long)):
        return None
    return fit_speedup_model(records[0], (short, records[short]), (long, records[long]))


def summarize_predictions(cells: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """{cells, counted: how many of them count, median_error: of those}."""
    errors = [cell["error"] for cell in cells if cell["counted"]]
    median = statistics.median(errors) if errors else None
    return {"cells": list(cells), "counted": len(errors), "median_error": median}


def select_fastest_settings(
    stages: Sequence[tuple[SweepStage, TimingResult]], seed: int
) -> list[dict[str, Any]]:
    """The fastest setting of each method for each domain, temperature and batch size, over all stages."""
    places = sorted({(stage.temperature, stage.batch_size) for stage, _ in stages})
    chosen = []
    for temperature, batch in places:
        results = [
            result
            for stage, result in stages
            if (stage.temperature, stage.batch_size) == (temperature, batch)
        ]
        for task in task_names(results[0].records):
            names = dict.fromkeys(setting.name for result in results for setting in result.records)
            for name in names:
                best = fastest_setting(results, name, task, seed)
                if name != PLAIN_DECODING.name and best is not None:
                    chosen.append({"temperature": temperature, "batch_size": batch, **best})
    return chosen


def fastest_setting(
    results: Sequence[TimingResult], name: str, task: str, seed: int
) -> dict[str, Any] | None:
    """The method's fastest setting; each is compared with the plain rounds that were interleaved with it."""
    options = []
    for result in results:
        own = filter_by_task(result.records, task)
        for setting, records in own.items():
            speedup = pooled_round_speedup(own[PLAIN_DECODING], records)
            if setting.name == name and speedup is not None:
                options.append((speedup, setting, own))
    if not options:
        return None
    _, setting, own = max(options, key=lambda option: option[0])
    measured = round_speedup_with_interval(own[PLAIN_DECODING], own[setting], seed)
    assert measured is not None
    alpha = acceptance.alpha(own[setting], setting.depth)
    return {
        "task": task,
        "method": name,
        "setting": setting.description,
        "k": setting.depth,
        "layers": setting.layers,
        "tree": describe_tree(setting.shape),
        "rule": setting.rule,
        "prompts": len(own[setting]),
        "speedup": measured.speedup,
        "ci": measured.ci,
        "speedup_of_sums": measured.of_sums,
        "held_out": held_out_speedup([(setting, own) for _, setting, own in options]),
        "tau": acceptance.tau(own[setting]),
        "alpha": alpha,
        "guide": recommended_k_range(task, alpha),
    }


def held_out_speedup(options: Sequence[tuple[Method, RecordsBySetting]]) -> float | None:
    """Speed-up of the setting that is best on one half of the prompts, measured on the other; the mean of both ways.

    The best of many settings is partly lucky, so its speed-up on the prompts that chose it is too high; this one is
    not.
    """
    speedups = []
    for odd in (0, 1):
        scored = []
        for setting, own in options:
            chosen_on, measured_on = (
                pooled_round_speedup(half[PLAIN_DECODING], half[setting])
                for half in (every_other_prompt(own, odd), every_other_prompt(own, 1 - odd))
            )
            if chosen_on is None or measured_on is None:
                return None
            scored.append((chosen_on, measured_on))
        speedups.append(max(scored)[1])
    return statistics.fmean(speedups)


def fastest_chains(tuned: Mapping[str, Any], sha: str) -> list[dict[str, Any]]:
    """From tuned.json: the fastest lossless chain of the draft with this sha256, by temperature and domain.

    At the smallest batch size, all domains together first. Faster trees are left out, since serving engines draft
    chains. `tried` are the draft lengths that were compared.
    """
    lossy = {c["method"] for c in tuned["chosen"] if not find_rule(c["rule"]).lossless}
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
