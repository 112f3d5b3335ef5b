"""From the records of a sweep: each setting's speed-up, predictions of it, and the fastest setting."""

import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from decode.engine.records import DecodeRecord
from eval.benchmark.methods import PLAIN_DECODING, Method, describe_tree
from eval.benchmark.timing import TimingResult
from eval.metrics.acceptance import Acceptance, as_measured
from eval.metrics.bootstrap import ALL_TASKS
from eval.metrics.latency import LatencyMs, Spread
from eval.metrics.speedup_model import (
    SpeedupModel,
    fit_speedup_model,
    is_precise,
    pooled_round_speedup,
    recommended_k_range,
    round_speedup,
    seconds_of_rounds,
)
from eval.results.tuned import ChosenSetting, PredictedCell, Predictions, RoundMs, SweepCell
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


def sweep_cells(stage: SweepStage, result: TimingResult, seed: int) -> list[SweepCell]:
    """One for each setting and domain, plain decoding included."""
    cells = []
    for task in task_names(result.records):
        own = filter_by_task(result.records, task)
        for setting, records in own.items():
            found = Acceptance.of(records, setting.depth)
            latency, seconds = LatencyMs.measure(records), seconds_of_rounds(records).value
            cells.append(
                SweepCell(
                    stage=stage.name,
                    method=setting.name,
                    setting=setting.description,
                    k=setting.depth,
                    layers=setting.layers,
                    tree=describe_tree(setting.shape),
                    temperature=stage.temperature,
                    batch_size=stage.batch_size,
                    task=task,
                    prompts=len(records),
                    tau=found.tau.value,
                    alpha=found.alpha.value,
                    speedup=round_speedup(own[PLAIN_DECODING], records, seed),
                    speedup_of_sums=speedup_of_sums(own[PLAIN_DECODING], records),
                    tokens_per_second=stage.batch_size / seconds if seconds else None,
                    round_ms=RoundMs(latency.mean, latency.p50, latency.p95, latency.variance),
                    token_ms=latency.token or Spread(),
                )
            )
    return cells


def speedup_of_sums(plain: Sequence[DecodeRecord], records: Sequence[DecodeRecord]) -> float | None:
    """The speed-up of rounds by the clock, with what the machine stalled."""
    return pooled_round_speedup([*map(as_measured, plain)], [*map(as_measured, records)])


def calibration_lengths(ks: Sequence[int], wanted: Sequence[int]) -> tuple[int, int] | None:
    """The two draft lengths to predict from: the wanted ones, or else the second and the last; None below three."""
    measured = sorted(set(ks))
    if len(measured) < 3:
        return None
    short, long = wanted
    return (short, long) if {short, long} <= set(measured) else (measured[1], measured[-1])


def cross_validated_predictions(
    records: Mapping[int, Sequence[DecodeRecord]],
    wanted: Sequence[int],
    seed: int = 0,
    **place: Any,
) -> list[PredictedCell]:
    """Speed-ups of rounds on one half of the prompts, predicted from the other; each half predicts once (`fold`).

    `records` are by draft length, 0 for plain decoding; `place` are the fields that say of what. A prediction uses only
    plain rounds and those of two draft lengths, on the half that calibrates. These two, and cells whose measured
    interval is too wide to judge by, are not `counted`.
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
            measured = round_speedup(test[0], test[k], seed)
            if model is not None and measured.value is not None:
                predicted = model.speedup(k)
                error = abs(predicted / measured.value - 1)
                counted = is_precise(measured) and k not in two
                cells.append(
                    PredictedCell(
                        fold=fold, k=k, predicted=predicted, measured=measured, error=error, counted=counted, **place
                    )
                )  # fmt: skip
    return cells


def fit_from_two_lengths(
    records: Mapping[int, Sequence[DecodeRecord]], two: tuple[int, int]
) -> SpeedupModel | None:
    """The model from plain rounds and those of two draft lengths; None where one of them ran no round."""
    short, long = two
    if any(Acceptance.of(records[k]).rounds.sum() == 0 for k in (0, short, long)):
        return None
    return fit_speedup_model(records[0], (short, records[short]), (long, records[long]))


def summarize_predictions(cells: Sequence[PredictedCell]) -> Predictions:
    errors = [cell.error for cell in cells if cell.counted]
    return Predictions(list(cells), len(errors), statistics.median(errors) if errors else None)


def select_fastest_settings(
    stages: Sequence[tuple[SweepStage, TimingResult]], seed: int
) -> list[ChosenSetting]:
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
                best = fastest_setting(
                    results, name, task, seed, temperature=temperature, batch_size=batch
                )
                if name != PLAIN_DECODING.name and best is not None:
                    chosen.append(best)
    return chosen


def fastest_setting(
    results: Sequence[TimingResult], name: str, task: str, seed: int, **place: Any
) -> ChosenSetting | None:
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
    found = Acceptance.of(own[setting], setting.depth)
    return ChosenSetting(
        task=task,
        method=name,
        setting=setting.description,
        k=setting.depth,
        layers=setting.layers,
        tree=describe_tree(setting.shape),
        rule=setting.rule,
        prompts=len(own[setting]),
        speedup=round_speedup(own[PLAIN_DECODING], own[setting], seed),
        speedup_of_sums=speedup_of_sums(own[PLAIN_DECODING], own[setting]),
        held_out=held_out_speedup([(setting, own) for _, setting, own in options]),
        tau=found.tau.value,
        alpha=found.alpha.value,
        guide=recommended_k_range(task, found.alpha.value),
        **place,
    )


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
