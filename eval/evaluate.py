"""Measures everything that a report holds, in turn; each part is kept in the journal as soon as it is measured."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import Any

from rich.progress import Progress

from decode.common import provenance
from decode.common.errors import UserError
from decode.common.journal import Journal
from decode.common.progress import ProgressLog
from decode.common.settings import to_yaml
from decode.common.typed_json import to_json
from decode.constraints.grammar import build_matcher
from decode.distributed.placement import load_model, load_target
from decode.drafts.base import draft_sha256, is_altered, trained_for
from decode.drafts.registry import DRAFT_FAMILIES, find_family
from decode.engine.records import DecodeRecord
from decode.model.loading import Target
from decode.verification.registry import find_rule
from eval.benchmark import baselines, multi_turn, timing, untimed_passes
from eval.benchmark.config import EvalConfig
from eval.benchmark.journal import earlier_targets
from eval.benchmark.methods import (
    PLAIN_DECODING,
    Method,
    build_methods,
    describe_adaptive,
    describe_lookup,
    describe_mirror,
    describe_tree,
    fit_simulated_drafts,
    simulated_alpha,
    verification_name,
)
from eval.benchmark.timing import FailedPrompt, TimingContext, TimingResult
from eval.checks import answer_quality, greedy_equivalence, sampling_distribution
from eval.checks.target_drift import measure_target_drift
from eval.metrics import acceptance, roofline
from eval.metrics.bootstrap import ALL_TASKS
from eval.metrics.speedup_model import StepCost, predict_speedup, with_batch_rounds
from eval.tasks import loading
from eval.tasks.loading import TaskPrompt

SCHEMA = 1
GPU_UTILISATION_PROMPTS = 8


@dataclass(frozen=True)
class PromptGroup:
    """Prompts that share an element: those of a task, of a domain, or all."""

    task: str = ALL_TASKS
    domain: str = ""

    def contains(self, task: str, domain: str) -> bool:
        return self.task in (ALL_TASKS, task) and self.domain in ("", domain)


@dataclass
class EvalContext:
    """What every step of an evaluation needs."""

    s: EvalConfig
    model: Any  # the target's weights in plain transformers, for references and checks
    methods: list[Method]  # plain decoding first
    undecodable: list[FailedPrompt]  # prompts that no method can decode
    timing: TimingContext  # target and prompts
    journal: Journal
    progress: Progress | ProgressLog

    @property
    def target(self) -> Target:
        return self.timing.target

    @property
    def items(self) -> Sequence[TaskPrompt]:
        return self.timing.items

    def groups(self) -> list[PromptGroup]:
        """All prompts, each task, and each domain."""
        tasks = [PromptGroup(task.name) for task in self.s.tasks]
        domains = sorted({item.domain for item in self.items})
        return [PromptGroup(), *tasks, *(PromptGroup(domain=name) for name in domains)]


def evaluate(
    s: EvalConfig, target: Target, journal: Journal, progress: Progress | ProgressLog
) -> tuple[dict[str, Any], list[tuple[str, float, DecodeRecord]]]:
    """(the report, the records that it was computed from, as (method, temperature, record))."""
    items, undecodable = multi_turn.load_eval_prompts(s.tasks, target, s.max_new_tokens, journal)
    if not items:
        first_bad = undecodable[0]
        raise UserError(f"no prompt can be decoded; the first {first_bad.id!r} {first_bad.error}")
    methods = [PLAIN_DECODING, *build_methods(s, target)]
    fit_simulated_drafts(methods, target, items, s.max_new_tokens)
    device = str(target.runner.device)
    model = load_model(s.placement, s.target, "target", device, s.dtype, s.revision)
    grammar = build_matcher(s.constraint, target)
    context = TimingContext(
        target, items, s.max_new_tokens, s.top_k, s.top_p, s.mode, s.seed, grammar
    )
    work = EvalContext(s, model, methods, undecodable, context, journal, progress)
    references = _reference_outputs(work) if 0.0 in s.temperatures else {}
    report: dict[str, Any] = {
        "schema": SCHEMA,
        "target": to_json(target.describe()),
        "earlier_targets": earlier_targets(journal),
        "tasks": [loading.task_version(task) for task in s.tasks],
        **to_json(provenance.collect()),
        "seed": s.seed,
        "resumed": journal.num_resumed,
        "baseline": {},
        "methods": [],
        "domains": [],
    }
    lines = []
    results = {}
    for temperature in s.temperatures:
        result = results[temperature] = _time_all_methods(work, temperature)
        _add_entries(work, report, temperature, result, references)
        for method in methods:
            lines += [(method.name, temperature, record) for record in result.records[method]]
    first = report["methods"][0]
    report["baseline"] = {key: first[key] for key in ("tokens_per_second", "ms_per_token")}
    report["gpu_utilisation"] = _gpu_utilisation(work)
    report["comparisons"] = _compare_acceptance(work)
    report["engines"] = baselines.compare_engines(
        s, target, methods, items,
        {t: result.records[PLAIN_DECODING] for t, result in results.items()},
        {t: result.answers for t, result in results.items()},
        journal,
    )  # fmt: skip
    report["law"] = sampling_distribution.check_sampling_distribution(
        s, target, model, methods, items, journal
    )
    if s.original:
        original = load_target(s.placement, s.original, s.device, s.dtype)
        report["target_quality"] = measure_target_drift(
            original, target, items, s.max_new_tokens, s.acceptance.rows, s.seed
        )
    report["settings"] = to_yaml(s)
    return roofline.with_model_sizes(report), lines


def _reference_outputs(work: EvalContext) -> dict[tuple[str, str], list[int]]:
    """The greedy answers of transformers' `generate`, by (task, id)."""
    bar = work.progress.add_task("references", total=len(work.items))
    references = {}
    for item in work.items:
        answer = partial(
            greedy_equivalence.reference_greedy_output,
            work.model, item.prompt_ids, work.s.max_new_tokens, work.target, item.stop,
            work.timing.grammar,
        )  # fmt: skip
        key = ["reference", item.task, item.id]
        references[item.task, item.id] = work.journal.get_or_measure(key, answer)
        work.progress.advance(bar)
    return references


def _time_all_methods(work: EvalContext, temperature: float) -> TimingResult:
    """UserError if a method failed on every prompt."""
    s = work.s
    batches = len(work.timing.batches(s.batch_size))
    bar = work.progress.add_task(f"temperature {temperature:g}", total=batches)
    others = baselines.interleaved_baselines(
        s, work.target, work.model, work.methods[1:], work.timing.sampling(temperature)
    )
    result = timing.time_methods(
        work.timing, work.methods[1:], temperature, s.batch_size, work.journal,
        partial(work.progress.advance, bar), others,
    )  # fmt: skip
    for method, records in result.records.items():
        if not records:
            error = result.failures[method][0].error
            raise UserError(f"method {method.name!r} failed on every prompt, first with {error}")
    return result


def _add_entries(
    work: EvalContext,
    report: dict[str, Any],
    temperature: float,
    result: TimingResult,
    references: dict[tuple[str, str], list[int]],
) -> None:
    """Adds the elements of this temperature to report["methods"] and report["domains"]."""
    s = work.s
    paths = {m.name: m.draft for m in s.methods}
    prompts = {(item.task, item.id): item for item in work.items}
    domains = {key: item.domain for key, item in prompts.items()}
    domains |= {(failure.task, failure.id): "" for failure in work.undecodable}
    scores = {
        method: {
            (r.task, r.id): answer_quality.score_answer(
                prompts[r.task, r.id], r.output_ids, work.target.tokenizer, s.run_code
            )
            for r in records
        }
        for method, records in result.records.items()
    }
    steps = _measure_steps(work, temperature)
    costs = {
        m: StepCost(**steps[m.label]["cost"])
        for m in work.methods
        if m.label in steps and steps[m.label]["cost"] is not None
    }
    rounds = {m: with_batch_rounds(records) for m, records in result.records.items()}
    plain_rounds = {(x.record.task, x.record.id): x for x in rounds[PLAIN_DECODING]}
    for method in work.methods:
        measured = steps.get(method.label, {})
        phases, mirror = measured.get("phases"), measured.get("mirror")
        failures = [*work.undecodable, *result.failures[method]]
        mismatches = _greedy_mismatches(work, method, temperature, result, references)
        for group in work.groups():
            own = [r for r in result.records[method] if group.contains(r.task, r.domain)]
            items = [prompts[r.task, r.id] for r in own]
            quality = answer_quality.compare_answer_quality(
                items, scores[method], scores[PLAIN_DECODING], s.seed
            )
            verdict = None
            if mismatches is not None:
                verdict = greedy_equivalence.greedy_verdict(items, mismatches)
            own_rounds = [
                x for x in rounds[method] if group.contains(x.record.task, x.record.domain)
            ]
            prediction = predict_speedup(
                [plain_rounds[x.record.task, x.record.id] for x in own_rounds],
                own_rounds, costs.get(PLAIN_DECODING), costs.get(method),
            )  # fmt: skip
            entry = method_entry(
                s, method, paths.get(method.name, ""), group, temperature, own,
                result.records[PLAIN_DECODING], quality, filter_failures(failures, group, domains),
                verdict, phases if group == PromptGroup() else None, mirror, prediction, work.target.eos,
            )  # fmt: skip
            entry["repeated_turns"] = result.repeated_turns
            report["domains" if group.domain else "methods"].append(entry)


def _measure_steps(work: EvalContext, temperature: float) -> dict[str, dict[str, Any]]:
    """untimed_passes.measure_steps in batches of the run's size; {} if `phase_prompts` is 0.

    On the first prompts of each task, and on as many more as fill a batch.
    """
    s, items = work.s, work.items
    if s.phase_prompts == 0:
        return {}
    wanted = [
        item
        for task in s.tasks
        for item in [x for x in items if x.task == task.name][: s.phase_prompts]
    ]
    known = {(item.task, item.id) for item in wanted}
    more = [item for item in items if (item.task, item.id) not in known]
    chosen = wanted + more[: -len(wanted) % s.batch_size]
    batches = [chosen[at : at + s.batch_size] for at in range(0, len(chosen), s.batch_size)]
    sampling = work.timing.sampling(temperature)
    found: dict[str, dict[str, Any]] = work.journal.get_or_measure(
        ["steps", temperature],
        lambda: untimed_passes.measure_steps(work.timing, work.methods, batches, sampling),
    )
    return found


def _gpu_utilisation(work: EvalContext) -> float | None:
    """Percent, of plain decoding at the first temperature; None where it cannot be measured."""
    s, items = work.s, work.items[:GPU_UTILISATION_PROMPTS]
    sampling = work.timing.sampling(s.temperatures[0])
    kept = work.journal.get_or_measure(
        ["gpu"],
        lambda: {
            "percent": untimed_passes.measure_gpu_utilisation(
                work.timing, items, sampling, s.batch_size
            )
        },
    )
    percent: float | None = kept["percent"]
    return percent


def _greedy_mismatches(
    work: EvalContext,
    method: Method,
    temperature: float,
    result: TimingResult,
    references: dict[tuple[str, str], list[int]],
) -> list[greedy_equivalence.GreedyMismatch] | None:
    """None above temperature 0, and for a simulated draft: that its output is right proves nothing about a method."""
    if temperature > 0 or simulated_alpha(method) is not None:
        return None
    prompts = {(item.task, item.id): item for item in work.items}
    records = result.records[method]
    return greedy_equivalence.find_mismatches(
        work.model,
        [prompts[r.task, r.id] for r in records],
        [references[r.task, r.id] for r in records],
        [r.output_ids for r in records],
        method.k,
    )


def _compare_acceptance(work: EvalContext) -> list[dict[str, Any]]:
    """The difference of α of each pair in `acceptance.pairs`, on all tasks together and on each."""
    s, comparison = work.s, work.s.acceptance
    wanted = [m for m in work.methods if any(m.name in pair for pair in comparison.pairs)]
    if not wanted:
        return []
    tasks = [replace(task, limit=comparison.prompts) for task in s.tasks]
    items, _ = multi_turn.load_eval_prompts(tasks, work.target, s.max_new_tokens, work.journal)
    bar = work.progress.add_task("comparisons", total=len(wanted) * len(items))
    records = {
        method.name: _decode_for_acceptance(
            work, method, items, partial(work.progress.advance, bar)
        )
        for method in wanted
    }
    differences = []
    for a, b in comparison.pairs:
        for task in [ALL_TASKS, *(task.name for task in s.tasks)]:
            own, other = (
                [x for x in records[name] if task in (ALL_TASKS, x.task)] for name in (a, b)
            )
            place = {"a": a, "b": b, "task": task, "temperature": comparison.temperature}
            differences.append({**place, **acceptance.compare_alpha(own, other, s.k, s.seed)})
    return differences


def _decode_for_acceptance(
    work: EvalContext, method: Method, items: Sequence[TaskPrompt], progress: Any
) -> list[DecodeRecord]:
    comparison = work.s.acceptance
    kept = work.journal.get_or_measure(
        ["acceptance", comparison.temperature, method.name],
        lambda: [
            asdict(record)
            for record in untimed_passes.decode_untimed(
                work.timing, method, items, work.timing.sampling(comparison.temperature),
                comparison.rows, progress,
            )
        ],
    )  # fmt: skip
    return [DecodeRecord(**values) for values in kept]


def method_entry(
    s: EvalConfig,
    method: Method,
    path: str,
    group: PromptGroup,
    temperature: float,
    records: Sequence[DecodeRecord],
    plain: Sequence[DecodeRecord],
    quality: list[dict[str, Any]],
    failures: Sequence[FailedPrompt],
    verdict: dict[str, Any] | None,
    phases: dict[str, float] | None,
    mirror: dict[str, float | None] | None,
    prediction: tuple[float | None, str | None],
    eos: frozenset[int],
) -> dict[str, Any]:
    """One element of report["methods"] or report["domains"].

    `records` are the method's on the prompts of `group`, `plain` those of plain decoding on (at least) these prompts.
    `prediction` is that of `predict_speedup`; plain decoding gets none.
    """
    predicted, missing = prediction
    if method.draft is None:
        predicted, missing = None, "speed-ups are relative to plain decoding"
    sha256 = draft_sha256(path) if path else None
    return {
        "name": method.name,
        "draft": path or None,
        "family": draft_family_name(method, path),
        "k": method.k,
        "tree": describe_tree(method.shape),
        "lookup": describe_lookup(s.methods, method.name),
        "adaptive": describe_adaptive(s.methods, method.name),
        "mirror": describe_mirror(method, mirror),
        "temperature": temperature,
        "top_k": s.top_k,
        "top_p": s.top_p,
        "batch_size": s.batch_size,
        "task": group.task,
        "domain": group.domain or None,
        **acceptance.summarize(records, plain, method.k, s.seed),
        "finish": dict(sorted(Counter(r.finish_reason for r in records).items())),
        "tokens_after_eos": sum(count_tokens_after_eos(r.output_ids, eos) for r in records),
        "failed": [asdict(failure) for failure in failures],
        "quality": quality,
        "draft_sha256": sha256,
        "draft_altered": is_altered(path, sha256),
        "trained_for": trained_for(path) if path else None,
        "mode": s.mode,
        "dtype": s.dtype,
        "draft_dtype": next((m.dtype for m in s.methods if m.name == method.name), "") or s.dtype,
        "verification": verification_name(method, temperature),
        "lossy": not find_rule(method.rule).lossless,
        "simulated": simulated_alpha(method),
        "predicted_speedup": predicted,
        "prediction_missing": missing,
        "phase_ms": phases,
        "lossless": verdict or {"greedy_identical": None, "prompts": len(records)},
    }


def draft_family_name(method: Method, path: str) -> str | None:
    """The family of a method's draft; None for plain decoding, and for a simulated draft."""
    if simulated_alpha(method) is not None:
        return None
    if path:
        return find_family(path).name
    return method.name if method.name in DRAFT_FAMILIES else None


def count_tokens_after_eos(ids: Sequence[int], eos: frozenset[int]) -> int:
    """Tokens after the first EOS. There must be none: counted, they would make one method look faster."""
    ends = [i for i, token in enumerate(ids) if token in eos]
    return len(ids) - 1 - ends[0] if ends else 0


def filter_failures(
    failures: Sequence[FailedPrompt], group: PromptGroup, domains: dict[tuple[str, str], str]
) -> list[FailedPrompt]:
    """The failures on prompts of the group; `domains` are by (task, id)."""
    return [f for f in failures if group.contains(f.task, domains[f.task, f.id])]
