"""Checks whether a draft still fits a changed target: fine-tuned, merged, quantised. Keep, fine-tune or retrain it?

    python eval/transfer.py outputs/draft --targets '[org/model, org/model-finetuned]'
    python eval/transfer.py outputs/draft --targets '[T, T]' --dtype '[float32, int8]'
    python eval/transfer.py outputs/draft --targets '[T, T.Q4_1.gguf]' --data_curve outputs/data_curve/data_curve.json

The first target is the one that the draft was trained for. The draft decodes the same prompts with each; τ, α and the
share of accepted tokens that is left are compared prompt by prompt. With the data curve of that draft
(scripts/lab/data_curve.py) it also says how many supervised tokens the loss is worth, a guide to how many are
needed to fine-tune. Decoding stays lossless in any case: a draft that does not fit is slow, not wrong.
The last line is JSON.
"""

import json
import sys
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

if not __package__:
    sys.path[0] = str(Path(__file__).resolve().parents[1])

from collections.abc import Sequence

import numpy as np
from rich.console import Console
from rich.table import Table

from decode.common import files, provenance
from decode.common.command import run_command
from decode.common.errors import UserError, first_line
from decode.common.ranges import Count, DraftLength, Share, Temperature
from decode.common.run_dir import check_file
from decode.common.template_choice import TemplateSetting
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
from eval.tasks.loading import Task, TaskPrompt, load_fitting_prompts

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


@dataclass
class TransferConfig:
    draft: str = ""
    """A saved draft's folder; may stand first without --draft."""
    targets: list[str] = field(default_factory=list)
    """Folders, GGUF files or Hub names; the first is the target that the draft was trained for."""
    tasks: list[Task] = field(
        default_factory=lambda: [Task("code", limit=16), Task("prose", limit=16), Task("arithmetic", limit=16)]
    )  # fmt: skip
    """The prompts; of chats the first turn, each with the target's own chat template."""
    template: TemplateSetting | None = None
    """How the chat template renders prompts, as in train/sample.py: its arguments, such as '{enable_thinking: false}',
    or the name of one of several. null: as in the training of the draft; '{}': the tokenizer's own."""
    k: DraftLength = 4
    """Tokens drafted per round."""
    temperatures: list[Temperature] = field(default_factory=lambda: [0.0, 1.0])
    max_new_tokens: Count = 64
    """Longest answer, in tokens."""
    keep: Share = 0.95
    """Share of accepted tokens from which on the draft may stay as it is."""
    retrain: Share = 0.5
    """Share of accepted tokens below which a new draft is better than a fine-tuned one."""
    data_curve: str = ""
    """data_curve.json of this draft's training."""
    device: str = "auto"
    dtype: str | list[str] = "float32"
    """float32, bfloat16, float16, w8a8, or int8 or int8_bfloat16 (weights in eight bits, by torchao); a list has one
    for each target, so that a target can be compared with itself in another one."""
    out: str = ""
    """File for the JSON of the last line; empty: none."""


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


def main(s: TransferConfig) -> None:
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
    line = json.dumps(facts | {"targets": to_json(entries)} | to_json(provenance.collect()))
    if s.out:
        files.write_atomically(Path(s.out), line + "\n")
    print(line)


if __name__ == "__main__":
    run_command(main, TransferConfig, __doc__, first="draft")
