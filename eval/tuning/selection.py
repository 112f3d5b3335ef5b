"""From the records of a sweep: each setting's speed-up, predictions of it, and the fastest setting."""

import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from decode.common.typed_json import Estimate
from decode.engine.records import DecodeRecord
from eval.benchmark.methods import PLAIN_DECODING, Method, describe_tree
from eval.benchmark.timing import TimingResult
from eval.metrics.acceptance import Acceptance
from eval.metrics.bootstrap import ALL_TASKS
from eval.metrics.latency import LatencyMs, Spread
from eval.metrics.round_cost import (
    is_precise,
    pooled_round_speedup,
    predict_round_speedups,
    recommended_k_range,
    round_speedup,
    seconds_of_rounds,
)
from eval.results.tuned import ChosenSetting, PredictedCell, Predictions, RoundMs, SweepCell
from eval.tuning.sweep import SweepStage

RecordsBySetting = Mapping[Method, Sequence[DecodeRecord]]


def filter_by_task(records: RecordsBySetting, task: str) -> dict[Method, list[DecodeRecord]]:
    return {
        setting: [x for x in own if task in (ALL_TASKS, x.task)] for setting, own in records.items()
    }


def records_by_task(records: RecordsBySetting) -> dict[str, dict[Method, list[DecodeRecord]]]:
    """Those of all prompts together, then of each domain, where there are several."""
    names = list(dict.fromkeys(record.task for record in records[PLAIN_DECODING]))
    tasks = [ALL_TASKS, *names] if len(names) > 1 else [ALL_TASKS]
    return {task: filter_by_task(records, task) for task in tasks}


def every_other_prompt(records: RecordsBySetting, odd: int) -> dict[Method, list[DecodeRecord]]:
    """Every other prompt: a prediction or choice from one half is measured on the other."""
    return {setting: list(own[odd::2]) for setting, own in records.items()}


def measured_fields(setting: Method, own: RecordsBySetting, seed: int) -> dict[str, Any]:
    """What a SweepCell and a ChosenSetting both say of a setting, whose plain rounds `own` has too."""
    records, plain = own[setting], own[PLAIN_DECODING]
    found = Acceptance.of(records, setting.depth)
    return {
        "method": setting.name,
        "setting": setting.description,
        "k": setting.depth,
        "layers": setting.layers,
        "tree": describe_tree(setting.shape),
        "prompts": len(records),
        "tau": found.tau.value,
        "alpha": found.alpha.value,
        "speedup": round_speedup(plain, records, seed),
        "speedup_of_sums": pooled_round_speedup(plain, records),
    }


def sweep_cells(stage: SweepStage, result: TimingResult, seed: int) -> list[SweepCell]:
    """One for each setting and domain, plain decoding included."""
    cells = []
    for task, own in records_by_task(result.records).items():
        for setting, records in own.items():
            latency, seconds = LatencyMs.measure(records), seconds_of_rounds(records).value
            fields = measured_fields(setting, own, seed) | {"void": result.void}
            if result.void:
                fields["speedup"], seconds = Estimate(), None
            cells.append(
                SweepCell(
                    **fields,
                    stage=stage.name,
                    temperature=stage.temperature,
                    batch_size=stage.batch_size,
                    task=task,
                    tokens_per_second=stage.batch_size / seconds if seconds else None,
                    round_ms=RoundMs(latency.mean, latency.p50, latency.p95, latency.variance),
                    token_ms=latency.token or Spread(),
                )
            )
    return cells


def cross_validated_predictions(
    records: Mapping[int, Sequence[DecodeRecord]],
    wanted: Sequence[int],
    seed: int = 0,
    **place: Any,
) -> list[PredictedCell]:
    """Speed-ups of rounds on one half of the prompts, predicted from the other; each half predicts once (`fold`).

    `records` are by draft length, 0 for plain decoding; `place` are the fields that say of what. A prediction uses only
    plain rounds and those of two draft lengths, on the half that calibrates. These two, and cells whose measured
    interval is too wide to judge by, are not `counted`. The two are the `wanted` ones, or else the second and the last;
    with fewer than three lengths there is no prediction.
    """
    lengths = sorted(k for k in records if k > 0)
    if len(lengths) < 3:
        return []
    two = wanted if {*wanted} <= {*lengths} else (lengths[1], lengths[-1])
    cells = []
    for fold in (0, 1):
        calibration = {k: records[k][fold::2] for k in (0, *two)}
        if any(Acceptance.of(own).rounds.sum() == 0 for own in calibration.values()):
            continue
        short, long = ((k, calibration[k]) for k in two)
        predictions = predict_round_speedups(calibration[0], short, long, lengths)
        plain = records[0][1 - fold :: 2]
        for k, predicted in predictions.items():
            measured = round_speedup(plain, records[k][1 - fold :: 2], seed)
            if measured.value is not None:
                error = abs(predicted / measured.value - 1)
                counted = is_precise(measured) and k not in two
                cells.append(
                    PredictedCell(
                        fold=fold, k=k, predicted=predicted, measured=measured, error=error, counted=counted, **place
                    )
                )  # fmt: skip
    return cells


def summarize_predictions(cells: Sequence[PredictedCell]) -> Predictions:
    errors = [cell.error for cell in cells if cell.counted]
    return Predictions(list(cells), len(errors), statistics.median(errors) if errors else None)


def select_fastest_settings(
    stages: Sequence[tuple[SweepStage, TimingResult]], seed: int
) -> list[ChosenSetting]:
    """The fastest setting of each method for each domain, temperature and batch size, over all stages but void ones."""
    places: dict[tuple[float, int], list[dict[str, dict[Method, list[DecodeRecord]]]]] = {}
    for stage, result in [x for x in stages if not x[1].void]:
        own = places.setdefault((stage.temperature, stage.batch_size), [])
        own.append(records_by_task(result.records))
    chosen = []
    for (temperature, batch), results in sorted(places.items(), key=lambda x: x[0]):
        for task in results[0]:
            of_task = [result[task] for result in results]
            names = dict.fromkeys(setting.name for own in of_task for setting in own)
            for name in names:
                best = fastest_setting(
                    of_task, name, seed, task=task, temperature=temperature, batch_size=batch
                )
                if name != PLAIN_DECODING.name and best is not None:
                    chosen.append(best)
    return chosen


def fastest_setting(
    results: Sequence[RecordsBySetting], name: str, seed: int, *, task: str, **place: Any
) -> ChosenSetting | None:
    """The method's fastest setting on the prompts of `task`, of which the records are; each is compared with the plain
    rounds that were interleaved with it."""
    options = []
    for own in results:
        for setting, records in own.items():
            speedup = pooled_round_speedup(own[PLAIN_DECODING], records)
            if setting.name == name and speedup is not None:
                options.append((speedup, setting, own))
    if not options:
        return None
    _, setting, own = max(options, key=lambda option: option[0])
    fields = measured_fields(setting, own, seed)
    return ChosenSetting(
        **fields,
        task=task,
        rule=setting.rule,
        held_out=held_out_speedup([(setting, own) for _, setting, own in options]),
        guide=recommended_k_range(task, fields["alpha"]),
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
