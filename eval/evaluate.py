"""Everything that a report holds, measured in turn; each piece is kept in the journal as soon as it is there."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from rich.progress import Progress

from decode.common import run_dir
from decode.common.cli import to_yaml
from decode.common.errors import UserError
from decode.model.loading import Target, load_model, load_target
from decode.verification.sampling import SamplingParams
from eval.benchmark import baselines, multi_turn, timing
from eval.benchmark.config import EvalConfig, MethodConfig
from eval.benchmark.journal import Journal
from eval.benchmark.methods import (
    build_methods,
    draft_checksums,
    fit_simulated_drafts,
    simulated_alpha,
)
from eval.benchmark.timing import FailedPrompt, Method, TimedOutput, TimingResult
from eval.checks import answer_quality, greedy_equivalence, sampling_distribution
from eval.checks.target_drift import measure_target_drift
from eval.metrics import acceptance as metrics_acceptance
from eval.metrics import roofline
from eval.metrics.records import ALL_TASKS, DecodeRecord
from eval.results import PromptGroup, filter_failures, method_entry
from eval.tasks import loading
from eval.tasks.loading import TaskPrompt

SCHEMA = 1


@dataclass
class EvalContext:
    """What every step needs."""

    s: EvalConfig
    target: Target
    model: Any  # the same weights as plain transformers runs them
    methods: list[Method]  # plain first
    items: list[TaskPrompt]
    undecodable: list[FailedPrompt]  # prompts that no method can decode
    journal: Journal
    progress: Progress

    def sampling(self, temperature: float) -> SamplingParams:
        return SamplingParams(temperature, self.s.top_k, self.s.top_p)

    def groups(self) -> list[PromptGroup]:
        return [PromptGroup(), *(PromptGroup(task.name) for task in self.s.tasks)]

    def domains(self) -> list[PromptGroup]:
        return [PromptGroup(domain=name) for name in sorted({item.domain for item in self.items})]


def evaluate(
    s: EvalConfig, target: Target, journal: Journal, progress: Progress
) -> tuple[dict[str, Any], list[tuple[str, float, TimedOutput]]]:
    """(the report, the runs behind it as (method, temperature, run))."""
    items, unfit = multi_turn.load_eval_prompts(s.tasks, target, s.max_new_tokens, journal)
    if not items:
        raise UserError(f"no prompt can be decoded; the first {unfit[0].id!r} {unfit[0].error}")
    plain = Method("plain", None, 0, "exact", s.mode)
    methods = [plain, *build_methods(s, target)]
    fit_simulated_drafts(methods, target, items, s.max_new_tokens)
    model = load_model(s.target, "target", str(target.decoder.device), s.dtype, s.revision)
    work = EvalContext(s, target, model, methods, items, unfit, journal, progress)
    references = _reference_outputs(work) if 0.0 in s.temperatures else {}
    report: dict[str, Any] = {
        "schema": SCHEMA,
        "target": {
            "name": target.name,
            "revision": target.revision,
            "tokenizer": target.fingerprint,
        },
        "tasks": [loading.task_version(task) for task in s.tasks],
        **run_dir.provenance(),
        "seed": s.seed,
        "resumed": journal.num_resumed,
        "baseline": {},
        "methods": [],
        "domains": [],
    }
    lines = []
    measured = {}
    for temperature in s.temperatures:
        found = measured[temperature] = _measure(work, temperature)
        _add_entries(work, report, temperature, found, references)
        for method in methods:
            lines += [(method.name, temperature, run) for run in found.runs[method.name]]
    first = report["methods"][0]
    report["baseline"] = {key: first[key] for key in ("tokens_per_second", "ms_per_token")}
    greedy = work.sampling(s.temperatures[0])
    use = partial(
        timing.measure_gpu_utilisation, target, items[:8], greedy, s.max_new_tokens, s.batch_size
    )
    report["gpu_utilisation"] = journal.once(["gpu"], lambda: {"percent": use()})["percent"]
    report["comparisons"] = _compare_acceptance(work)
    report["engines"] = baselines.compare_engines(
        s, target, methods, items,
        {t: found.runs["plain"] for t, found in measured.items()},
        {t: found.answers for t, found in measured.items()},
        journal,
    )  # fmt: skip
    report["law"] = sampling_distribution.check_sampling_distribution(
        s, target, model, methods, items, journal
    )
    if s.original:
        original = load_target(s.original, s.device, s.dtype)
        report["target_quality"] = measure_target_drift(
            original, target, items, s.max_new_tokens, s.acceptance.rows, s.seed
        )
    report["settings"] = to_yaml(s)
    return roofline.with_model_sizes(report), lines


def _reference_outputs(work: EvalContext) -> dict[tuple[str, str], list[int]]:
    """What transformers' greedy `generate` answers, by (task, id)."""
    bar = work.progress.add_task("references", total=len(work.items))
    found = {}
    for item in work.items:
        answer = partial(
            greedy_equivalence.reference_greedy_output,
            work.model, item.prompt_ids, work.s.max_new_tokens, work.target, item.stop,
        )  # fmt: skip
        found[item.task, item.id] = work.journal.once(["reference", item.task, item.id], answer)
        work.progress.advance(bar)
    return found


def _measure(work: EvalContext, temperature: float) -> TimingResult:
    s = work.s
    bar = work.progress.add_task(
        f"temperature {temperature:g}", total=-(-len(work.items) // s.batch_size)
    )
    sampling = work.sampling(temperature)
    found = timing.time_methods(
        work.target, work.methods[1:], work.items, sampling, s.max_new_tokens, s.batch_size, s.seed,
        work.journal, partial(work.progress.advance, bar),
        baselines.interleaved_baselines(s, work.target, work.model, work.methods[1:], sampling),
    )  # fmt: skip
    for name, own in found.runs.items():
        if not own:
            error = found.failures[name][0].error
            raise UserError(f"method {name!r} failed on every prompt, first with {error}")
    return found


def _add_entries(
    work: EvalContext,
    report: dict[str, Any],
    temperature: float,
    found: TimingResult,
    references: dict[tuple[str, str], list[int]],
) -> None:
    s = work.s
    paths = {m.name: m.draft for m in s.methods}
    domain = {(item.task, item.id): item.domain for item in work.items}
    domain |= {(failure.task, failure.id): "" for failure in work.undecodable}
    scores = {
        id(run): answer_quality.score_answer(run, work.target.tokenizer, s.run_code)
        for own in found.runs.values()
        for run in own
    }
    plain = found.runs["plain"]
    for method in work.methods:
        phases = _measure_phases(work, method, temperature)
        failures = [*work.undecodable, *found.failures[method.name]]
        for group in [*work.groups(), *work.domains()]:
            own = [run for run in found.runs[method.name] if group.contains(run)]
            verdict = (
                _greedy_equivalence(work, own, references, method) if temperature == 0 else None
            )
            made = method_entry(
                s, method, paths.get(method.name, ""), group, temperature, own, plain, scores,
                filter_failures(failures, group, domain), verdict, phases if group == PromptGroup() else None,
                work.target.eos,
            )  # fmt: skip
            report["domains" if group.domain else "methods"].append(made)


def _measure_phases(
    work: EvalContext, method: Method, temperature: float
) -> dict[str, float] | None:
    timed = [
        item
        for task in work.s.tasks
        for item in [x for x in work.items if x.task == task.name][: work.s.phase_prompts]
    ]
    if not timed:
        return None
    return work.journal.once(
        ["phases", temperature, method.name],
        lambda: timing.measure_phase_ms(
            work.target, method, timed, work.sampling(temperature), work.s.max_new_tokens, work.s.seed
        ),
    )  # fmt: skip


def _greedy_equivalence(
    work: EvalContext,
    own: Sequence[TimedOutput],
    references: dict[tuple[str, str], list[int]],
    method: Method,
) -> dict[str, Any] | None:
    """None for a simulated draft: that its output is right says nothing about a method."""
    if simulated_alpha(method) is not None:
        return None
    return greedy_equivalence.check_greedy_equivalence(
        work.target,
        work.model,
        [run.item for run in own],
        [references[run.item.task, run.item.id] for run in own],
        [run.output.output_ids for run in own],
        method.k,
    )


def _compare_acceptance(work: EvalContext) -> list[dict[str, Any]]:
    """Each pair's difference of α, on all tasks together and on each."""
    s, asked = work.s, work.s.acceptance
    wanted = [m for m in work.methods if any(m.name in pair for pair in asked.pairs)]
    if not wanted:
        return []
    every = [replace(task, limit=asked.prompts) for task in s.tasks]
    items, _ = multi_turn.load_eval_prompts(every, work.target, s.max_new_tokens, work.journal)
    bar = work.progress.add_task("comparisons", total=len(wanted) * len(items))
    sampling = work.sampling(asked.temperature)
    samples: dict[str, list[DecodeRecord]] = {}
    for method in wanted:

        def all_samples(method: Method = method) -> list[dict[str, Any]]:
            return [
                vars(sample)
                for sample in timing.decode_untimed(
                    work.target, method, items, sampling, s.max_new_tokens, asked.rows, s.seed,
                    partial(work.progress.advance, bar),
                )
            ]  # fmt: skip

        kept = work.journal.once(["acceptance", asked.temperature, method.name], all_samples)
        samples[method.name] = [DecodeRecord(**values) for values in kept]
    found = []
    for a, b in asked.pairs:
        for task in [ALL_TASKS, *(task.name for task in s.tasks)]:
            own, other = (
                [x for x in samples[name] if task in (ALL_TASKS, x.task)] for name in (a, b)
            )
            difference = metrics_acceptance.compare_alpha(own, other, s.k, s.seed)
            found.append(
                {"a": a, "b": b, "task": task, "temperature": asked.temperature, **difference}
            )
    return found


def open_journal(out: Path, methods: Sequence[MethodConfig]) -> Journal:
    """The journal of the run in this folder. UserError if a draft was trained anew since it began."""
    journal = Journal(out / "journal.jsonl", run_dir.hardware())
    now = draft_checksums(methods)
    then = journal.once(["drafts"], lambda: now)
    changed = [name for name in now if then.get(name) != now[name]]
    if changed:
        raise UserError(
            f"{out} was measured with other weights of {', '.join(changed)}: --overwrite true begins anew, --out "
            "names another folder"
        )
    return journal
