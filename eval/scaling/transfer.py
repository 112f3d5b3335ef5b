"""What eval/transfer.py does: a draft decodes with several targets, and what it loses is judged."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table

from decode.common import files, provenance
from decode.common.errors import UserError, first_line
from decode.common.run_dir import check_file
from decode.common.typed_json import Estimate, Omitted, to_json
from decode.drafts.base import Draft, check_request
from decode.drafts.registry import load_draft
from decode.engine.active_request import check_draft_length
from decode.engine.engine import decode
from decode.engine.trained_template import use_template
from decode.model.loading import Target, find_dtype, load_config, load_target
from decode.verification.sampling import SamplingParams
from eval.metrics.acceptance import Acceptance
from eval.metrics.bootstrap import Array, Interval, Ratio, paired_difference, paired_ratio
from eval.reporting.formatting import format_estimate, format_number
from eval.scaling.data_curve import missing_tokens, read_data_curve
from eval.settings.evaluation import TransferConfig
from eval.tasks.loading import TaskPrompt, load_fitting_prompts

KEEP, FINE_TUNE, RETRAIN, NOT_CLEAR, REFUSED = (
    "keep", "fine-tune", "retrain", "not clear", "refused",
)  # fmt: skip


def count_acceptance(
    target: Target,
    draft: Draft,
    prompts: Sequence[TaskPrompt],
    temperatures: Sequence[float],
    k: int,
    max_new_tokens: int,
) -> dict[str, list[list[int]]]:
    """{temperature: [emitted, rounds, accepted, reached] of each prompt}, decoded with the same seeds every time."""
    counts = {}
    texts = [item.prompt_ids for item in prompts]
    for temperature in temperatures:
        sampling = SamplingParams(temperature)
        settings = {"k": k, "max_new_tokens": max_new_tokens, "rows": 16, "seed": 0}
        found = Acceptance.of(decode(target, draft, texts, sampling=sampling, **settings), k)
        counts[str(temperature)] = np.stack([*found.tau, *found.alpha], 1).tolist()
    return counts


@dataclass(frozen=True, kw_only=True)
class TransferEntry:
    """What the draft does with a target at one temperature; `why` it cannot be used with it."""

    target: str
    weights: Omitted[str] = None
    dtype: str
    temperature: float
    prompts: Omitted[int] = None
    tau: Omitted[float] = None
    alpha: Omitted[float] = None
    alpha_difference_ci: Omitted[Interval] = None
    share: Estimate = Estimate()
    """Accepted tokens a round ÷ those with the first target."""
    verdict: str
    why: Omitted[str] = None
    missing_tokens: Omitted[float] = None


def compare(
    counts: Array, others: Array, keep: float, retrain: float, **names: Any
) -> TransferEntry:
    """What the draft loses from one target, `counts`, to another, `others`: both [n prompts, 4] of count_acceptance.

    `names` are the fields that say which target it is.
    """
    first, second = (Ratio(x[:, 0] - x[:, 1], x[:, 1]) for x in (counts, others))
    alpha, other_alpha = (Ratio(x[:, 2], x[:, 3]) for x in (counts, others))
    share, after = paired_ratio(second, first, 0), second.value
    return TransferEntry(
        tau=None if after is None else 1 + after,
        alpha=other_alpha.value,
        alpha_difference_ci=paired_difference(other_alpha, alpha, 0).ci,
        share=share,
        verdict=judge(share.ci, keep, retrain),
        prompts=len(counts),
        **names,
    )


def judge(share: Interval | None, keep: float, retrain: float) -> str:
    """KEEP if the whole interval of the share of accepted tokens that is left is at least `keep`, RETRAIN if all of it
    is below `retrain`, FINE_TUNE if it is all below `keep`, else NOT_CLEAR."""
    if share is None:
        return NOT_CLEAR
    if share[0] >= keep:
        return KEEP
    if share[1] < retrain:
        return RETRAIN
    return FINE_TUNE if share[1] < keep else NOT_CLEAR


def check(s: TransferConfig) -> None:
    """UserError for settings that would fail only after a target was loaded."""
    check_file(s.out, [s.draft, s.data_curve, *s.targets])
    dtypes = target_dtypes(s)
    pairs = list(zip(s.targets, dtypes, strict=False))
    if len(s.targets) < 2 or len(set(pairs)) < len(s.targets):
        raise UserError("targets: name the target of the draft's training first, and then others")
    if len(dtypes) != len(s.targets):
        raise UserError(f"dtype: give one, or one for each of the {len(s.targets)} targets")
    for dtype in dtypes:
        find_dtype(dtype)
    for name in ("tasks", "temperatures"):
        if not vars(s)[name]:
            raise UserError(f"{name} is empty: give at least one")
    for name in s.targets:
        load_config(name, "target")
    if s.retrain > s.keep:
        raise UserError(f"retrain {s.retrain} is above keep {s.keep}: give a smaller one")


def target_dtypes(s: TransferConfig) -> list[str]:
    return [s.dtype] * len(s.targets) if isinstance(s.dtype, str) else s.dtype


def compare_targets(s: TransferConfig, console: Console) -> list[TransferEntry]:
    """One entry for each target and temperature. UserError if the draft does not fit the first target."""
    curve = read_data_curve(s.data_curve) if s.data_curve else None
    laws = {f.temperature: f.law for f in curve.forecasts if f.metric == "tau"} if curve else {}
    first: dict[str, dict[str, list[int]]] = {}
    entries: list[TransferEntry] = []
    for name, dtype in zip(s.targets, target_dtypes(s), strict=True):
        target = load_target(name, s.device, dtype)
        try:
            target = use_template(target, s.template, [s.draft])
            draft = load_draft(s.draft, target)
            check_draft_length(target, s.k)
            for t in s.temperatures:
                check_request(draft, s.k, SamplingParams(t))
        except UserError as error:
            if not first:
                raise
            entries += [
                TransferEntry(
                    target=name, dtype=dtype, temperature=t, verdict=REFUSED, why=first_line(error)
                )
                for t in s.temperatures
            ]
            continue
        prompts = load_fitting_prompts(s.tasks, target)
        found = count_acceptance(target, draft, prompts, s.temperatures, s.k, s.max_new_tokens)
        ids = [f"{item.task}/{item.id}" for item in prompts]
        counts = {t: dict(zip(ids, rows, strict=True)) for t, rows in found.items()}
        console.print(f"decoded {len(ids)} prompts with {name} in {dtype}", highlight=False)
        first = first or counts
        for t in s.temperatures:
            own, now = first[str(t)], counts[str(t)]
            pairs = [(own[key], now[key]) for key in own if key in now]
            names = {"target": name, "weights": target.identity.weights, "dtype": dtype}
            a, b = (np.array(side) for side in zip(*pairs, strict=True))
            entry = compare(a, b, s.keep, s.retrain, temperature=t, **names)
            if t in laws and entry.share.value is not None:
                entry = replace(entry, missing_tokens=missing_tokens(laws[t], entry.share.value))
            entries.append(entry)
    return entries


def transfer(s: TransferConfig) -> None:
    """Prints what the draft loses with each target, a table and its JSON."""
    check(s)
    console = Console(stderr=True)
    entries = compare_targets(s, console)
    table = Table("target", "dtype", "T", "τ", "α", "share left [95 %]", "verdict", "worth, tokens")
    for x in entries:
        verdict = x.verdict + (f": {x.why}" if x.why else "")
        table.add_row(
            x.target, x.dtype, f"{x.temperature:g}", format_number(x.tau, 3), format_number(x.alpha, 3),
            format_estimate(x.share, 3), verdict, format_number(x.missing_tokens, 0),
        )  # fmt: skip
    console.print(table)
    facts = {"draft": s.draft, "k": s.k, "keep": s.keep, "retrain": s.retrain}
    facts |= {"targets": to_json(entries), **to_json(provenance.collect())}
    files.write_result(s.out, facts)
