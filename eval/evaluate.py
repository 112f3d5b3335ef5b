"""Measures everything that a report holds, in turn; each part is kept in the journal as soon as it is measured."""

from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from typing import Any

from rich.progress import Progress

from decode.common import provenance
from decode.common.errors import UserError
from decode.common.journal import Journal
from decode.common.progress import ProgressLog
from decode.common.settings import to_yaml
from decode.common.target_settings import QUANTIZED_DTYPES
from decode.constraints.grammar import build_matcher
from decode.distributed.placement import load_model, load_target
from decode.engine.modes import pick_mode
from decode.engine.records import DecodeRecord, read_record
from decode.model.loading import Target
from eval.benchmark import baselines, timing, untimed_passes
from eval.benchmark.config import earlier_targets
from eval.benchmark.methods import (
    PLAIN_DECODING,
    Method,
    describe_method,
    verification_name,
)
from eval.benchmark.timing import TimingContext, TimingResult
from eval.checks import answer_quality, greedy_equivalence, sampling_distribution
from eval.checks.target_drift import measure_target_drift
from eval.metrics.acceptance import Acceptance, match_prompts
from eval.metrics.bootstrap import ALL_TASKS, paired_difference
from eval.metrics.round_cost import StepCost, predict_speedup, with_batch_rounds
from eval.results.report import (
    SCHEMA,
    AlphaDifference,
    EvalReport,
    FailedPrompt,
    MethodResult,
    NotCompared,
    PhaseMs,
    PlainSpeed,
)
from eval.settings.evaluation import EvalConfig
from eval.tasks import loading
from eval.tasks.loading import TaskPrompt

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
    references: dict[tuple[str, str], list[int]] = field(default_factory=dict)
    """The greedy answers of transformers' `generate`, by (task, id)."""

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
    s: EvalConfig,
    target: Target,
    drafted: Sequence[Method],
    journal: Journal,
    progress: Progress | ProgressLog,
) -> tuple[EvalReport, list[tuple[str, float, DecodeRecord]]]:
    """(the report, the records that it was computed from, as (method, temperature, record)).

    `drafted` are the methods of the settings (`build_methods`), beside which plain decoding is measured.
    """
    items, undecodable = untimed_passes.load_eval_prompts(
        s.tasks, target, s.max_new_tokens, journal
    )
    if not items:
        first_bad = undecodable[0]
        raise UserError(f"no prompt can be decoded; the first {first_bad.id!r} {first_bad.error}")
    methods = [PLAIN_DECODING, *drafted]
    device = str(target.runner.device)
    model = load_model(s.placement, s.target, "target", device, s.dtype, s.revision)
    grammar = build_matcher(s.constraint, target)
    drafts = [method.draft for method in methods]
    picked: Any = pick_mode(s.mode, target, drafts, "grammars" if grammar else "")
    s = replace(s, mode=picked)
    context = TimingContext(
        target, items, s.max_new_tokens, s.top_k, s.top_p, s.mode, s.seed, grammar
    )
    work = EvalContext(s, model, methods, undecodable, context, journal, progress)
    if 0.0 in s.temperatures:
        _add_references(work)
    lines, entries = [], []
    results = {}
    for temperature in s.temperatures:
        result = results[temperature] = _time_all_methods(work, temperature)
        entries += _method_results(work, temperature, result)
        for method in methods:
            lines += [(method.name, temperature, record) for record in result.records[method]]
    drift = None
    if s.original:
        original = load_target(s.placement, s.original, s.device, s.dtype)
        drift = measure_target_drift(
            original, target, items, s.max_new_tokens, s.acceptance.rows, s.seed
        )
    of_tasks = [m for m in entries if m.domain is None]
    engines, rivals = baselines.compare_engines(
        s, target, methods, items,
        {t: result.records for t, result in results.items()},
        {t: result.answers for t, result in results.items()},
        journal,
    )  # fmt: skip
    report = EvalReport(
        schema=SCHEMA,
        target=target.describe(),
        earlier_targets=earlier_targets(journal),
        tasks=[loading.task_version(task) for task in s.tasks],
        image_prompts=sum(item.images is not None for item in items) or None,
        **vars(provenance.collect()),
        seed=s.seed,
        resumed=journal.num_resumed,
        baseline=PlainSpeed(of_tasks[0].tokens_per_second.value, of_tasks[0].ms_per_token),
        methods=of_tasks,
        domains=[m for m in entries if m.domain is not None],
        gpu_utilisation=_gpu_utilisation(work),
        comparisons=_compare_acceptance(work),
        engines=engines,
        rivals=rivals,
        law=sampling_distribution.check_sampling_distribution(
            s, target, model, methods, items, journal
        ),
        target_quality=drift,
        settings=to_yaml(s),
    )  # fmt: skip
    return report.with_models(), lines


def _add_references(work: EvalContext) -> None:
    bar = work.progress.add_task("references", total=len(work.items))
    for item in work.items:
        answer = partial(
            greedy_equivalence.reference_greedy_output,
            work.model, item.prompt_ids, work.s.max_new_tokens, work.target, item.stop,
            work.timing.grammar, item.images,
        )  # fmt: skip
        key = ["reference", item.task, item.id]
        work.references[item.task, item.id] = work.journal.get_or_measure(key, answer)
        work.progress.advance(bar)


def _time_all_methods(work: EvalContext, temperature: float) -> TimingResult:
    """UserError if a method failed on every prompt."""
    s = work.s
    batches = len(work.timing.batches(s.batch_size))
    bar = work.progress.add_task(f"temperature {temperature:g}", total=batches)
    context = max(len(item.prompt_ids) for item in work.items) + s.max_new_tokens
    sampling = work.timing.sampling(temperature)
    with ExitStack() as block:
        others = baselines.interleaved_baselines(
            s, work.target, work.model, work.methods[1:], sampling, context, block
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


def _method_results(
    work: EvalContext, temperature: float, result: TimingResult
) -> list[MethodResult]:
    """Of every method and group of prompts at this temperature."""
    s = work.s
    prompts = {(item.task, item.id): item for item in work.items}
    domains = {key: item.domain for key, item in prompts.items()}  # of what can be decoded
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
        m: StepCost(**cost) if (cost := steps.get(m.label, {}).get("cost")) else None
        for m in work.methods
    }
    plain = result.records[PLAIN_DECODING]
    plain_rounds = {(x.record.task, x.record.id): x for x in with_batch_rounds(plain)}
    found = []
    for method in work.methods:
        measured = steps.get(method.label, {})
        mismatches = leaves = None
        if temperature == 0:
            own_texts = result.records[method]
            if s.dtype in QUANTIZED_DTYPES:
                texts = {(r.task, r.id): r.output_ids for r in plain}
                # Where rounded weights leave is plain decoding's to say: no method is measured for it anew.
                leaves = _greedy_mismatches(work, method, own_texts, work.references, k=0)
                mismatches = _greedy_mismatches(work, method, own_texts, texts, method.k)
            else:
                mismatches = _greedy_mismatches(work, method, own_texts, work.references, method.k)
        rounds = with_batch_rounds(result.records[method])
        failed = [*work.undecodable, *result.failures[method]]
        failures = [(f, domains.get((f.task, f.id), "")) for f in failed]
        of_all = {
            **describe_method(s, method, measured.get("mirror")),
            "temperature": temperature,
            "top_k": s.top_k,
            "top_p": s.top_p,
            "batch_size": s.batch_size,
            "mode": s.mode,
            "dtype": s.dtype,
            "verification": verification_name(method, temperature),
            "repeated_turns": result.repeated_turns,
            "dropped_turns": result.dropped_turns,
        }
        for group in work.groups():
            own_rounds = [x for x in rounds if group.contains(x.record.task, x.record.domain)]
            own = [x.record for x in own_rounds]
            items = [prompts[r.task, r.id] for r in own]
            predicted, missing = predict_speedup(
                [plain_rounds[r.task, r.id] for r in own],
                own_rounds, costs[PLAIN_DECODING], costs[method],
            )  # fmt: skip
            if method.draft is None:
                predicted, missing = None, "speed-ups are relative to plain decoding"
            phases = measured.get("phases") if group == PromptGroup() else None
            found.append(
                MethodResult.measure(
                    own,
                    plain,
                    method.k,
                    s.seed,
                    **of_all,
                    task=group.task,
                    domain=group.domain or None,
                    tokens_after_eos=sum(
                        count_tokens_after_eos(r.output_ids, work.target.eos) for r in own
                    ),
                    failed=[f for f, domain in failures if group.contains(f.task, domain)],
                    quality=answer_quality.compare_answer_quality(
                        items, scores[method], scores[PLAIN_DECODING], s.seed
                    ),
                    predicted_speedup=predicted,
                    prediction_missing=missing,
                    phase_ms=PhaseMs(**phases) if phases else None,
                    lossless=NotCompared(None, len(own))
                    if mismatches is None
                    else greedy_equivalence.greedy_verdict(items, mismatches, leaves),
                )
            )
    return found


def _measure_steps(work: EvalContext, temperature: float) -> dict[str, dict[str, Any]]:
    """untimed_passes.measure_steps in batches of the run's size; {} if `phase_prompts` is 0.

    On the first prompts of each task, and on as many more as fill a batch.
    """
    s = work.s
    if s.phase_prompts == 0:
        return {}
    by_task = {task.name: [x for x in work.items if x.task == task.name] for task in s.tasks}
    wanted = [item for own in by_task.values() for item in own[: s.phase_prompts]]
    known = {(item.task, item.id) for item in wanted}
    more = [item for item in work.items if (item.task, item.id) not in known]
    chosen = wanted + more[: -len(wanted) % s.batch_size]
    batches = [chosen[at : at + s.batch_size] for at in range(0, len(chosen), s.batch_size)]
    sampling = work.timing.sampling(temperature)
    measure = partial(untimed_passes.measure_steps, work.timing, work.methods, batches, sampling)
    found: dict[str, dict[str, Any]] = work.journal.get_or_measure(["steps", temperature], measure)
    return found


def _gpu_utilisation(work: EvalContext) -> float | None:
    """Percent, of plain decoding at the first temperature; None where it cannot be measured."""
    s, items = work.s, work.items[:GPU_UTILISATION_PROMPTS]
    arguments = work.timing, items, work.timing.sampling(s.temperatures[0]), s.batch_size
    kept = work.journal.get_or_measure(
        ["gpu"], lambda: {"percent": untimed_passes.measure_gpu_utilisation(*arguments)}
    )
    percent: float | None = kept["percent"]
    return percent


def _greedy_mismatches(
    work: EvalContext,
    method: Method,
    records: Sequence[DecodeRecord],
    texts: Mapping[tuple[str, str], list[int]],
    k: int,
) -> list[greedy_equivalence.GreedyMismatch]:
    """Where the records leave these texts, judged by the rounding of rounds with `k` drafted tokens. A difference is
    measured once for all methods whose text has it: it takes up to half a minute."""
    prompts = {(item.task, item.id): item for item in work.items}
    references = [texts[r.task, r.id] for r in records]
    different = sum(r.output_ids != ids for r, ids in zip(records, references, strict=True))
    if different == 0:
        return []
    bar = work.progress.add_task(f"first differences of {method.name}", total=different)

    def measure(item: TaskPrompt, answer: list[int], pair: tuple[int, int]) -> Sequence[float]:
        key = ["difference", item.task, item.id, len(answer), *pair, k]
        found: Sequence[float] = work.journal.get_or_measure(
            key,
            lambda: greedy_equivalence.measure_pair(
                work.model, item.prompt_ids, answer, pair, k, item.images
            ),
        )
        work.progress.advance(bar)
        return found

    return greedy_equivalence.find_mismatches(
        [prompts[r.task, r.id] for r in records],
        references,
        [r.output_ids for r in records],
        measure,
    )


def _compare_acceptance(work: EvalContext) -> list[AlphaDifference]:
    """The difference of α of each pair in `acceptance.pairs`, on all tasks together and on each."""
    s, comparison = work.s, work.s.acceptance
    wanted = [m for m in work.methods if any(m.name in pair for pair in comparison.pairs)]
    if not wanted:
        return []
    tasks = [replace(task, limit=comparison.prompts) for task in s.tasks]
    items, _ = untimed_passes.load_eval_prompts(tasks, work.target, s.max_new_tokens, work.journal)
    bar = work.progress.add_task("comparisons", total=len(wanted) * len(items))
    advance = partial(work.progress.advance, bar)
    records = {m.name: _decode_for_acceptance(work, m, items, advance) for m in wanted}
    differences = []
    for a, b in comparison.pairs:
        for task in [ALL_TASKS, *(task.name for task in s.tasks)]:
            own, other = (
                [x for x in records[name] if task in (ALL_TASKS, x.task)] for name in (a, b)
            )
            # Over the positions of the shorter drafts.
            first, second = (Acceptance.of(x, s.k).alpha for x in (own, match_prompts(own, other)))
            difference = paired_difference(first, second, s.seed)
            differences.append(
                AlphaDifference(a, b, task, comparison.temperature, "alpha", difference, len(own))
            )
    return differences


def _decode_for_acceptance(
    work: EvalContext, method: Method, items: Sequence[TaskPrompt], progress: Any
) -> list[DecodeRecord]:
    comparison = work.s.acceptance
    sampling = work.timing.sampling(comparison.temperature)
    decode = partial(
        untimed_passes.decode_untimed, work.timing, method, items, sampling, comparison.rows
    )
    kept = work.journal.get_or_measure(
        ["acceptance", comparison.temperature, method.name],
        lambda: list(map(asdict, decode(progress))),
    )
    return [*map(read_record, kept)]


def count_tokens_after_eos(ids: Sequence[int], eos: frozenset[int]) -> int:
    """Tokens after the first EOS. There must be none: counted, they would make one method look faster."""
    ends = [i for i, token in enumerate(ids) if token in eos]
    return len(ids) - 1 - ends[0] if ends else 0
