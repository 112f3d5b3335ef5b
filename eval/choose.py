"""What a sweep says: each setting's speed-up, what could be predicted of it, and which setting to take."""

import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from decode.tree import StaticTree
from eval import metrics
from eval.checklist import guide
from eval.cost import Calibration, calibrate, prediction, round_ratio, round_speedup
from eval.latency import latency_ms
from eval.samples import Sample, ratio
from eval.shapes import described
from eval.sweep import PLAIN, Arm, Stage, Swept

ALL = "all"
Samples = Mapping[Arm, Sequence[Sample]]


def tasks_of(samples: Samples) -> list[str]:
    """All prompts together, then each domain, where there are several."""
    names = list(dict.fromkeys(sample.task for sample in samples[PLAIN]))
    return [ALL, *names] if len(names) > 1 else [ALL]


def of_task(samples: Samples, task: str) -> dict[Arm, list[Sample]]:
    """Only the samples of that domain, or all."""
    return {arm: [x for x in own if task in (ALL, x.task)] for arm, own in samples.items()}


def half(samples: Samples, odd: int) -> dict[Arm, list[Sample]]:
    """Every other prompt: what is predicted or chosen on one half is measured on the other."""
    return {arm: list(own[odd::2]) for arm, own in samples.items()}


def cells(stage: Stage, swept: Swept, seed: int) -> list[dict[str, Any]]:
    """One for each arm and domain, plain decoding included, ready for JSON."""
    found = []
    for task in tasks_of(swept.samples):
        own = of_task(swept.samples, task)
        for arm, samples in own.items():
            measured = round_speedup(own[PLAIN], samples, seed)
            spread = latency_ms(samples)
            rate = ratio(float(metrics.emitted(samples).sum()), sum(x.seconds for x in samples))
            found.append(
                {
                    "stage": stage.name,
                    "method": arm.method,
                    "setting": arm.setting,
                    "k": depth(arm),
                    "tree": described(arm.shape),
                    "temperature": stage.temperature,
                    "batch_size": stage.batch_size,
                    "task": task,
                    "prompts": len(samples),
                    "tau": metrics.tau(samples),
                    "alpha": metrics.alpha(samples, depth(arm)),
                    "speedup": None if measured is None else measured.speedup,
                    "ci": None if measured is None else measured.ci,
                    "tokens_per_second": None if rate is None else stage.batch_size * rate,
                    "round_ms": {key: spread[key] for key in ("mean", "p50", "p95", "variance")},
                    "token_ms": spread["token"],
                }
            )
    return found


def depth(arm: Arm) -> int:
    """Positions that a round of the arm can accept: 0 for plain decoding."""
    if arm == PLAIN:
        return 0
    return arm.shape.depth if isinstance(arm.shape, StaticTree) else arm.k


def ends(ks: Sequence[int], wanted: Sequence[int]) -> tuple[int, int] | None:
    """The two draft lengths to predict from: the wanted ones, or else the second and the last; None below three."""
    have = sorted(set(ks))
    if len(have) < 3:
        return None
    few, many = wanted
    return (few, many) if {few, many} <= set(have) else (have[1], have[-1])


def predictions(
    samples: Mapping[int, Sequence[Sample]], wanted: Sequence[int], seed: int = 0
) -> list[dict[str, Any]]:
    """Speed-ups of rounds on one half of the prompts, predicted from the other; each half predicts once (`fold`).

    `samples` are by draft length, 0 for plain decoding. A prediction sees only plain rounds and those of two draft
    lengths, on the half that calibrates. These two, and cells whose measurement is too wide to judge by, are not
    `counted`.
    """
    two = ends([k for k in samples if k > 0], wanted)
    if two is None:
        return []
    found = []
    for fold in (0, 1):
        seen = {k: own[fold::2] for k, own in samples.items()}
        test = {k: own[1 - fold :: 2] for k, own in samples.items()}
        model = calibration(seen, two)
        for k in sorted(k for k in samples if k > 0):
            measured = round_speedup(test[0], test[k], seed)
            if model is not None and measured is not None:
                cell = prediction(k, model.speedup(k), measured)
                cell["counted"] = cell["counted"] and k not in two
                found.append({"fold": fold, **cell})
    return found


def calibration(seen: Mapping[int, Sequence[Sample]], two: tuple[int, int]) -> Calibration | None:
    """None where some arm ran no round."""
    few, many = two
    if any(metrics.rounds(seen[k]).sum() == 0 for k in (0, few, many)):
        return None
    return calibrate(seen[0], (few, seen[few]), (many, seen[many]))


def summary(found: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """The cells with how many count and their median error."""
    errors = [cell["error"] for cell in found if cell["counted"]]
    median = statistics.median(errors) if errors else None
    return {"cells": list(found), "counted": len(errors), "median_error": median}


def chosen(stages: Sequence[tuple[Stage, Swept]], seed: int) -> list[dict[str, Any]]:
    """The fastest setting of each method for each domain, temperature and batch size, over all stages."""
    places = sorted({(stage.temperature, stage.batch_size) for stage, _ in stages})
    found = []
    for temperature, batch in places:
        here = [
            swept
            for stage, swept in stages
            if (stage.temperature, stage.batch_size) == (temperature, batch)
        ]
        for task in tasks_of(here[0].samples):
            for method in dict.fromkeys(arm.method for swept in here for arm in swept.samples):
                best = best_of(here, method, task, seed)
                if method != PLAIN.method and best is not None:
                    found.append({"temperature": temperature, "batch_size": batch, **best})
    return found


def best_of(here: Sequence[Swept], method: str, task: str, seed: int) -> dict[str, Any] | None:
    """The method's fastest arm; each is compared with the plain rounds that were interleaved with it."""
    options = []
    for swept in here:
        own = of_task(swept.samples, task)
        for arm, samples in own.items():
            speedup = round_ratio(own[PLAIN], samples)
            if arm.method == method and speedup is not None:
                options.append((speedup, arm, own))
    if not options:
        return None
    _, arm, own = max(options, key=lambda option: option[0])
    measured = round_speedup(own[PLAIN], own[arm], seed)
    assert measured is not None
    alpha = metrics.alpha(own[arm], depth(arm))
    return {
        "task": task,
        "method": method,
        "setting": arm.setting,
        "k": depth(arm),
        "tree": described(arm.shape),
        "rule": arm.rule,
        "prompts": len(own[arm]),
        "speedup": measured.speedup,
        "ci": measured.ci,
        "held_out": held_out([(a, o) for _, a, o in options]),
        "tau": metrics.tau(own[arm]),
        "alpha": alpha,
        "guide": guide(task, alpha),
    }


def held_out(options: Sequence[tuple[Arm, Samples]]) -> float | None:
    """Speed-up of the arm that is best on one half of the prompts, measured on the other; the mean of both ways.

    The best of many is lucky as well as good: its own figure is too high, this one is not.
    """
    results = []
    for odd in (0, 1):
        scored = []
        for arm, own in options:
            seen, test = half(own, odd), half(own, 1 - odd)
            here, there = (round_ratio(x[PLAIN], x[arm]) for x in (seen, test))
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
