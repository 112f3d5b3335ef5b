"""What eval/fidelity.py does: it compares a target in several dtypes with itself in another one, token by token."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from rich.console import Console
from rich.table import Table

from decode.common import files, provenance
from decode.common.errors import UserError
from decode.common.progress import ProgressBars, progress_bars
from decode.common.run_dir import check_file
from decode.common.target_record import TargetRecord
from decode.common.typed_json import Estimate, to_json
from decode.engine.engine import speculate
from decode.engine.records import DecodeRecord, RoundRecord, collect_outputs
from decode.model.loading import Target, find_dtype, load_config, load_target
from decode.model.quantized.conversion import INT4_TARGET
from decode.model.vocabularies import check_embedded
from decode.verification.sampling import SamplingParams
from eval.checks.answer_quality import compare_answer_quality, score_answer
from eval.checks.target_drift import TokenDrift, compare_on_text
from eval.metrics.bootstrap import Array, Ratio, paired_difference
from eval.reporting.formatting import format_estimate, format_number
from eval.results.report import QualityScore
from eval.settings.evaluation import FidelityConfig
from eval.tasks.loading import TaskPrompt, load_fitting_prompts
from eval.tasks.row_files import parquet_rows

FIRST = 4
"""Positions at the start of a text that are reported apart."""
QUANTILES = (0.5, 0.9, 0.99, 0.999)


@dataclass(frozen=True)
class AnsweredText:
    """A prompt with its answer, as token ids."""

    ids: list[int]
    labels: Array
    """[n] the places in `ids` of the tokens that were answered, rising and above 0."""


@dataclass(frozen=True, kw_only=True)
class FidelityEntry:
    """A dtype against the reference, over the tokens of all answers."""

    dtype: str
    weights: str | None
    tv: Estimate
    same_top1: Estimate
    kl: Estimate
    kl_quantiles: dict[str, float]
    perplexity: float
    reference_perplexity: float
    log_perplexity_change: Estimate
    tv_difference: Estimate
    """TV minus that of the first dtype."""
    first_positions: dict[str, float]
    """tv, same_top1 and kl at the first positions of the texts."""
    scores: list[QualityScore]
    """Of its greedy answers to the tasks `scored`; `plain` and `difference` are those of the reference."""


def check(s: FidelityConfig) -> None:
    """UserError for settings that would fail only after a target was loaded."""
    check_file(s.out, [s.target, s.samples])
    if not s.dtypes or len({*s.dtypes, s.reference}) <= len(s.dtypes):
        raise UserError(f"dtypes {s.dtypes}: name each once, and not the reference {s.reference}")
    for dtype in (*s.dtypes, s.reference):
        find_dtype(dtype)
        if dtype == "int4":
            raise UserError(INT4_TARGET)
    if not s.tasks and not s.samples:
        raise UserError("tasks is empty: give at least one, or samples")
    if load_config(s.target, "target", s.revision).is_encoder_decoder:
        raise UserError(f"target {s.target!r} is an encoder-decoder: give a causal one")
    if s.samples and not shard_files(s.samples):
        raise UserError(f"samples {s.samples!r} holds no shards: give a folder of train/sample.py")


# ---- texts ----


def answered_texts(s: FidelityConfig, target: Target) -> list[AnsweredText]:
    """The texts that are compared: of a sampled set, or the target's own answers to the tasks' prompts."""
    if s.samples:
        return list(sampled_texts(s, target))
    items = load_fitting_prompts(s.tasks, target)
    records = answer_prompts(s, target, items, SamplingParams(1.0))
    texts = [(x.prompt_ids, x.output_ids) for x in records]
    return [
        AnsweredText([*prompt, *answer], np.arange(len(prompt), len(prompt) + len(answer)))
        for prompt, answer in texts
        if answer
    ]


def answer_prompts(
    s: FidelityConfig, target: Target, items: Sequence[TaskPrompt], sampling: SamplingParams
) -> list[DecodeRecord]:
    """The target's answers to these prompts, counted on the screen."""
    prompts = [item.prompt_ids for item in items]

    def rounds(bars: ProgressBars) -> Iterator[RoundRecord]:
        bar = bars.add_task(f"answering in {target.identity.dtype}", total=len(prompts))
        for record in speculate(
            target, None, prompts, rows=s.rows, max_new_tokens=s.max_new_tokens, seed=s.seed, sampling=sampling
        ):  # fmt: skip
            bars.advance(bar, int(record.finished is not None))
            yield record

    with progress_bars() as bars:
        return collect_outputs(prompts, rounds(bars))


def shard_files(samples: str) -> list[Path]:
    return sorted(Path(samples, "shards").glob("*.parquet"))


def sampled_texts(s: FidelityConfig, target: Target) -> Iterator[AnsweredText]:
    """Those of a sampled set that fit the context. UserError for another tokenizer's, and for damaged shards."""
    taken = 0
    for shard in shard_files(s.samples):
        for row in parquet_rows(shard, ["input_ids", "loss_spans"]):
            ids = row.fields["input_ids"]
            spans = [np.arange(max(1, start), end) for start, end in row.fields["loss_spans"]]
            labels = np.concatenate(spans) if spans else np.arange(0)
            if len(labels) == 0 or len(ids) > target.runner.context:
                continue
            check_embedded(target.tokenizer, ids, target.runner.embedding_rows)
            yield AnsweredText(ids, labels)
            taken += 1
            if taken == s.limit:
                return


# ---- comparison ----


@dataclass(frozen=True)
class DtypeScores:
    """A dtype's drift from the reference: of each text the tokens of its answer, and its first positions."""

    answers: list[TokenDrift]
    first: list[TokenDrift]

    def ratio(self, name: str) -> Ratio:
        """The mean of a number of TokenDrift over all tokens of answers, by text."""
        parts = [vars(x)[name] for x in self.answers]
        return Ratio([float(x.sum()) for x in parts], [float(len(x)) for x in parts])


def score(old: Target, new: Target, texts: Sequence[AnsweredText]) -> DtypeScores:
    """The two targets on these texts."""
    answers, first = [], []
    with progress_bars() as bars:
        bar = bars.add_task(f"comparing {new.identity.dtype}", total=len(texts))
        for text in texts:
            drift = compare_on_text(old, new, text.ids)
            answers.append(at(drift, text.labels - 1))
            first.append(at(drift, np.arange(min(FIRST, len(drift.kl)))))
            bars.advance(bar)
    return DtypeScores(answers, first)


def at(drift: TokenDrift, places: Array) -> TokenDrift:
    return TokenDrift(*(column[places] for column in vars(drift).values()))


Marks = dict[tuple[str, str], float | None]
"""Scores of answers by (task, id) of their prompts."""


def scored_prompts(s: FidelityConfig, target: Target) -> list[TaskPrompt]:
    """Those of the tasks `scored`. UserError for a task of code unless code may be run."""
    items = load_fitting_prompts(s.scored, target) if s.scored else []
    code = [item.task for item in items if item.metric == "code"]
    if code and not s.run_code:
        raise UserError(
            f"scored: answers to {code[0]} are scored by running them: give --run_code true if you trust the model, "
            "or leave it out"
        )
    return items


def mark_answers(s: FidelityConfig, target: Target, items: Sequence[TaskPrompt]) -> Marks:
    """The scores of the target's greedy answers to these prompts."""
    answers = answer_prompts(s, target, items, SamplingParams()) if items else []
    return {
        (item.task, item.id): score_answer(item, x.output_ids, target.tokenizer, s.run_code)
        for item, x in zip(items, answers, strict=True)
    }


def entry(
    record: TargetRecord,
    dtype: str,
    scores: DtypeScores,
    other: DtypeScores,
    quality: list[QualityScore],
) -> FidelityEntry:
    """What the scores of a dtype say; `other` are those of the first one."""
    old, new = scores.ratio("nll_old"), scores.ratio("nll_new")
    assert old.value is not None
    assert new.value is not None
    kl = np.concatenate([x.kl for x in scores.answers])
    first = {"tv": "tv", "same_top1": "same", "kl": "kl"}
    return FidelityEntry(
        dtype=dtype,
        weights=record.weights,
        tv=scores.ratio("tv").estimate(0),
        same_top1=scores.ratio("same").estimate(0),
        kl=scores.ratio("kl").estimate(0),
        kl_quantiles={f"{q:g}": float(np.quantile(kl, q)) for q in QUANTILES},
        perplexity=float(np.exp(new.value)),
        reference_perplexity=float(np.exp(old.value)),
        log_perplexity_change=paired_difference(new, old, 0),
        tv_difference=paired_difference(scores.ratio("tv"), other.ratio("tv"), 0),
        first_positions={
            name: float(np.concatenate([vars(x)[column] for x in scores.first]).mean())
            for name, column in first.items()
        },
        scores=quality,
    )


def compare_dtypes(s: FidelityConfig, console: Console) -> tuple[list[FidelityEntry], int, int]:
    """(an entry for each dtype, texts, tokens of their answers)."""
    old = load_target(s.target, s.device, s.reference, s.revision).with_template(s.template)
    items = scored_prompts(s, old)
    texts = answered_texts(s, old)
    if not texts:
        raise UserError("no text has an answer: give other tasks or samples")
    tokens = sum(len(x.labels) for x in texts)
    console.print(f"{len(texts)} texts with {tokens:,} tokens of answers", highlight=False)
    wanted = mark_answers(s, old, items)
    found: list[DtypeScores] = []
    entries = []
    for dtype in s.dtypes:
        new = load_target(s.target, s.device, dtype, s.revision)
        found.append(score(old, new, texts))
        quality = compare_answer_quality(items, mark_answers(s, new, items), wanted, 0)
        entries.append(entry(new.describe(), dtype, found[-1], found[0], quality))
    return entries, len(texts), tokens


def report_fidelity(s: FidelityConfig) -> None:
    """Prints what each dtype changes, a table and its JSON."""
    check(s)
    console = Console(stderr=True)
    entries, texts, tokens = compare_dtypes(s, console)
    table = Table(f"against {s.reference}", *(x.dtype for x in entries))
    rows: dict[str, Callable[[FidelityEntry], str]] = {
        "TV [95 %]": lambda x: format_estimate(x.tv, 4),
        "TV − the first's": lambda x: format_estimate(x.tv_difference, 4),
        "equal argmax": lambda x: format_estimate(x.same_top1, 4),
        "KL": lambda x: format_estimate(x.kl, 5),
        "KL, median": lambda x: format_number(x.kl_quantiles["0.5"], 5),
        "KL, 99 %": lambda x: format_number(x.kl_quantiles["0.99"], 5),
        "perplexity": lambda x: f"{x.perplexity:.4f} (reference {x.reference_perplexity:.4f})",
        "change of its log": lambda x: format_estimate(x.log_perplexity_change, 4),
        f"first {FIRST} positions: TV": lambda x: format_number(x.first_positions["tv"], 4),
        f"first {FIRST} positions: KL": lambda x: format_number(x.first_positions["kl"], 4),
    }
    for name, cell in rows.items():
        table.add_row(name, *map(cell, entries))
    for line in zip(*(x.scores for x in entries), strict=True):
        name = f"{line[0].metric}, {line[0].prompts} prompts (reference {line[0].plain:.3f})"
        table.add_row(name, *(format_estimate(x.value, 3) for x in line))
        table.add_row("its difference", *(format_estimate(x.difference, 3) for x in line))
    console.print(table)
    facts = {"target": s.target, "reference": s.reference, "texts": texts, "tokens": tokens}
    facts |= {"dtypes": to_json(entries), **to_json(provenance.collect())}
    files.write_result(s.out, facts)
