"""Everything that a report holds, measured in turn; each piece is kept in the journal as soon as it is there."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from rich.progress import Progress

from decode import runs
from decode.sampling import Sampling
from decode.settings import UserError, dump
from decode.target import Target, load_model, load_target
from eval import chats, engines, law, lossless, metrics, roofline, scoring, speed, tasks
from eval.entries import POOLED, Group, entry, of_group
from eval.journal import Journal
from eval.methods import build_methods, checksums, simulated, teach
from eval.options import MethodSettings, Settings
from eval.quality import compare_targets
from eval.samples import Sample
from eval.speed import Failure, Measured, Method, Run
from eval.tasks import Item

SCHEMA = 1


@dataclass
class Work:
    """What every step needs."""

    s: Settings
    target: Target
    model: Any  # the same weights as plain transformers runs them
    methods: list[Method]  # plain first
    items: list[Item]
    unfit: list[Failure]  # prompts that no method can decode
    journal: Journal
    progress: Progress

    def sampling(self, temperature: float) -> Sampling:
        return Sampling(temperature, self.s.top_k, self.s.top_p)

    def groups(self) -> list[Group]:
        return [Group(), *(Group(task.name) for task in self.s.tasks)]

    def domains(self) -> list[Group]:
        return [Group(domain=name) for name in sorted({item.domain for item in self.items})]


def evaluate(
    s: Settings, target: Target, journal: Journal, progress: Progress
) -> tuple[dict[str, Any], list[tuple[str, float, Run]]]:
    """(the report, the runs behind it as (method, temperature, run))."""
    items, unfit = chats.prompts_of(s.tasks, target, s.max_new_tokens, journal)
    if not items:
        raise UserError(f"no prompt can be decoded; the first {unfit[0].id!r} {unfit[0].error}")
    plain = Method("plain", None, 0, "exact", s.mode)
    methods = [plain, *build_methods(s, target)]
    teach(methods, target, items, s.max_new_tokens)
    model = load_model(s.target, "target", str(target.decoder.device), s.dtype, s.revision)
    work = Work(s, target, model, methods, items, unfit, journal, progress)
    references = _references(work) if 0.0 in s.temperatures else {}
    report: dict[str, Any] = {
        "schema": SCHEMA,
        "target": {
            "name": target.name,
            "revision": target.revision,
            "tokenizer": target.fingerprint,
        },
        "tasks": [tasks.version(task) for task in s.tasks],
        **runs.provenance(),
        "seed": s.seed,
        "resumed": journal.kept,
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
    use = partial(speed.gpu_utilisation, target, items[:8], greedy, s.max_new_tokens, s.batch_size)
    report["gpu_utilisation"] = journal.once(["gpu"], lambda: {"percent": use()})["percent"]
    report["comparisons"] = _comparisons(work)
    report["engines"] = engines.compare(
        s, target, methods, items,
        {t: found.runs["plain"] for t, found in measured.items()},
        {t: found.answers for t, found in measured.items()},
        journal,
    )  # fmt: skip
    report["law"] = law.check_methods(s, target, model, methods, items, journal)
    if s.original:
        original = load_target(s.original, s.device, s.dtype)
        report["target_quality"] = compare_targets(
            original, target, items, s.max_new_tokens, s.acceptance.rows, s.seed
        )
    report["settings"] = dump(s)
    return roofline.with_models(report), lines


def _references(work: Work) -> dict[tuple[str, str], list[int]]:
    """What transformers' greedy `generate` answers, by (task, id)."""
    bar = work.progress.add_task("references", total=len(work.items))
    found = {}
    for item in work.items:
        answer = partial(
            lossless.reference_greedy,
            work.model, item.prompt_ids, work.s.max_new_tokens, work.target, item.stop,
        )  # fmt: skip
        found[item.task, item.id] = work.journal.once(["reference", item.task, item.id], answer)
        work.progress.advance(bar)
    return found


def _measure(work: Work, temperature: float) -> Measured:
    s = work.s
    bar = work.progress.add_task(
        f"temperature {temperature:g}", total=-(-len(work.items) // s.batch_size)
    )
    sampling = work.sampling(temperature)
    found = speed.measure(
        work.target, work.methods[1:], work.items, sampling, s.max_new_tokens, s.batch_size, s.seed,
        work.journal, partial(work.progress.advance, bar),
        engines.arms(s, work.target, work.model, work.methods[1:], sampling),
    )  # fmt: skip
    for name, own in found.runs.items():
        if not own:
            error = found.failures[name][0].error
            raise UserError(f"method {name!r} failed on every prompt, first with {error}")
    return found


def _add_entries(
    work: Work,
    report: dict[str, Any],
    temperature: float,
    found: Measured,
    references: dict[tuple[str, str], list[int]],
) -> None:
    s = work.s
    paths = {m.name: m.draft for m in s.methods}
    domain = {(item.task, item.id): item.domain for item in work.items}
    domain |= {(failure.task, failure.id): "" for failure in work.unfit}
    scores = {
        id(run): scoring.score(run, work.target.tokenizer, s.run_code)
        for own in found.runs.values()
        for run in own
    }
    plain = found.runs["plain"]
    for method in work.methods:
        phases = _phases(work, method, temperature)
        failures = [*work.unfit, *found.failures[method.name]]
        for group in [*work.groups(), *work.domains()]:
            own = [run for run in found.runs[method.name] if group.has(run)]
            verdict = _verdict(work, own, references, method) if temperature == 0 else None
            made = entry(
                s, method, paths.get(method.name, ""), group, temperature, own, plain, scores,
                of_group(failures, group, domain), verdict, phases if group == Group() else None,
                work.target.eos,
            )  # fmt: skip
            report["domains" if group.domain else "methods"].append(made)


def _phases(work: Work, method: Method, temperature: float) -> dict[str, float] | None:
    timed = [
        item
        for task in work.s.tasks
        for item in [x for x in work.items if x.task == task.name][: work.s.phase_prompts]
    ]
    if not timed:
        return None
    return work.journal.once(
        ["phases", temperature, method.name],
        lambda: speed.phase_ms(
            work.target, method, timed, work.sampling(temperature), work.s.max_new_tokens, work.s.seed
        ),
    )  # fmt: skip


def _verdict(
    work: Work,
    own: Sequence[Run],
    references: dict[tuple[str, str], list[int]],
    method: Method,
) -> dict[str, Any] | None:
    """None for a simulated draft: that its output is right says nothing about a method."""
    if simulated(method) is not None:
        return None
    return lossless.judge(
        work.target,
        work.model,
        [run.item for run in own],
        [references[run.item.task, run.item.id] for run in own],
        [run.output.output_ids for run in own],
        method.k,
    )


def _comparisons(work: Work) -> list[dict[str, Any]]:
    """Each pair's difference of α, on all tasks together and on each."""
    s, asked = work.s, work.s.acceptance
    wanted = [m for m in work.methods if any(m.name in pair for pair in asked.pairs)]
    if not wanted:
        return []
    every = [replace(task, limit=asked.prompts) for task in s.tasks]
    items, _ = chats.prompts_of(every, work.target, s.max_new_tokens, work.journal)
    bar = work.progress.add_task("comparisons", total=len(wanted) * len(items))
    sampling = work.sampling(asked.temperature)
    samples: dict[str, list[Sample]] = {}
    for method in wanted:

        def all_samples(method: Method = method) -> list[dict[str, Any]]:
            return [
                vars(sample)
                for sample in speed.untimed(
                    work.target, method, items, sampling, s.max_new_tokens, asked.rows, s.seed,
                    partial(work.progress.advance, bar),
                )
            ]  # fmt: skip

        kept = work.journal.once(["acceptance", asked.temperature, method.name], all_samples)
        samples[method.name] = [Sample(**values) for values in kept]
    found = []
    for a, b in asked.pairs:
        for task in [POOLED, *(task.name for task in s.tasks)]:
            own, other = ([x for x in samples[name] if task in (POOLED, x.task)] for name in (a, b))
            difference = metrics.compare_alpha(own, other, s.k, s.seed)
            found.append(
                {"a": a, "b": b, "task": task, "temperature": asked.temperature, **difference}
            )
    return found


def open_journal(out: Path, methods: Sequence[MethodSettings]) -> Journal:
    """The journal of the run in this folder. UserError if a draft was trained anew since it began."""
    journal = Journal(out / "journal.jsonl", runs.hardware())
    now = checksums(methods)
    then = journal.once(["drafts"], lambda: now)
    changed = [name for name in now if then.get(name) != now[name]]
    if changed:
        raise UserError(
            f"{out} was measured with other weights of {', '.join(changed)}: --overwrite true begins anew, --out "
            "names another folder"
        )
    return journal
