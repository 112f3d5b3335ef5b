"""Constrained decoding on a JSON task: what a grammar, its forced tokens and a draft each do to speed and validity.

    python scripts/experiments/constrained.py --target outputs/smollm2/SmolLM2-135M-Instruct.Q4_1.gguf \\
      --draft assets/eagle3-smollm2 --draft_dtype bfloat16

Every prompt is answered greedily by each arm in turn, one at a time, after a warm-up:

  plain, draft                 without a grammar
  grammar                      plain constrained decoding
  grammar + forced             only forced tokens are drafted: those about which the grammar leaves no choice
  grammar + forced + draft     the draft's tokens are restricted to the grammar, and forced ones follow them

An answer is valid if it ends and is JSON of the schema, with any white space. α leaves out forced tokens, τ counts
them. The last line is JSON. Needs llguidance. Run it on an idle machine.
"""

import json
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

if not __package__:
    sys.path[0] = str(Path(__file__).resolve().parents[2])

from rich.console import Console
from rich.table import Table

from decode.common import files, provenance
from decode.common.cli import to_yaml
from decode.common.command import run_command
from decode.common.errors import UserError
from decode.common.ranges import Count, CountOrZero, DraftLength
from decode.common.run_dir import check_file
from decode.constraints.grammar import ConstraintConfig, build_matcher
from decode.constraints.matcher import Matcher
from decode.drafts.base import Draft
from decode.drafts.lookups.grammar import GrammarDraft
from decode.drafts.registry import load_draft
from decode.engine.engine import SpeculativeEngine
from decode.engine.records import DecodeRecord, add_record
from decode.model.loading import Target, load_target
from eval.metrics import acceptance
from eval.metrics.bootstrap import paired_ratio_interval
from eval.tasks.loading import Task, TaskPrompt, load_task_prompts

WARM_UP_TOKENS = 12
SHOWN = ("tau", "alpha", "tokens_per_second", "speedup")


@dataclass
class ConstrainedConfig:
    target: str = "assets/target"
    draft: str = "assets/draft"
    """Folder or Hub name of a draft of chains."""
    dtype: str = "float32"
    draft_dtype: str = ""
    """Number type of the draft; empty: the target's."""
    k: DraftLength = 3
    """Tokens drafted per round, forced ones behind them not counted."""
    max_new_tokens: Count = 96
    prompts: str = "assets/json/people.jsonl"
    json_schema: str = "assets/json/person.schema.json"
    limit: CountOrZero = 0
    """Number of prompts from the start; 0 takes all."""
    device: str = "auto"
    out: str = ""
    """File for the JSON of the last line; empty: none."""


@dataclass(frozen=True)
class Arm:
    """A way of decoding."""

    name: str
    engine: SpeculativeEngine
    matcher: Matcher | None

    def answer(self, item: TaskPrompt, max_new_tokens: int) -> DecodeRecord:
        """The record of one prompt; `seconds` is the wall clock of the whole request."""
        record = DecodeRecord(item.prompt_ids, task=item.task, id=item.id, domain=item.domain)
        given = None if self.matcher is None else [self.matcher]
        start = time.perf_counter()
        for found in self.engine.speculate(
            [item.prompt_ids], max_new_tokens=max_new_tokens, matchers=given
        ):
            add_record(record, found)
        record.seconds = time.perf_counter() - start
        return record


def build_arms(s: ConstrainedConfig, target: Target, draft: Draft, matcher: Matcher) -> list[Arm]:
    """All arms, plain constrained decoding third: the baseline of speed-ups."""
    return [
        Arm("plain", SpeculativeEngine(target), None),
        Arm("draft", SpeculativeEngine(target, draft, k=s.k), None),
        Arm("grammar", SpeculativeEngine(target), matcher),
        Arm("grammar + forced", SpeculativeEngine(target, GrammarDraft(), k=s.k), matcher),
        Arm("grammar + forced + draft", SpeculativeEngine(target, draft, k=s.k), matcher),
    ]


def is_valid(record: DecodeRecord, checker: Matcher, eos: frozenset[int]) -> bool:
    """Whether the answer has ended and `checker`, a grammar with any white space, accepts it."""
    if record.finish_reason != "eos":
        return False
    text, place = record.output_ids[:-1], checker.copy()
    taken = place.advance(text)
    return taken == len(text) and bool(place.allowed()[sorted(eos)].any())


def with_any_whitespace(schema: str) -> str:
    """The schema in a file without its settings of llguidance."""
    content = json.loads(files.read_text(schema))
    content.pop("x-guidance", None)
    return json.dumps(content)


def measure(
    s: ConstrainedConfig, arms: Sequence[Arm], items: Sequence[TaskPrompt]
) -> dict[str, list[DecodeRecord]]:
    """{arm: a record for each prompt}; every prompt is answered by all arms before the next."""
    for arm in arms:
        arm.answer(items[0], WARM_UP_TOKENS)
    records: dict[str, list[DecodeRecord]] = {arm.name: [] for arm in arms}
    for number, item in enumerate(items):
        order = arms if number % 2 == 0 else arms[::-1]
        for arm in order:
            records[arm.name].append(arm.answer(item, s.max_new_tokens))
    return records


def describe(
    records: dict[str, list[DecodeRecord]], k: int, checker: Matcher, target: Target
) -> list[dict[str, Any]]:
    """An element for each arm. `speedup` is seconds a token of constrained plain decoding ÷ those of the arm, and
    `answer_speedup` seconds an answer of the unconstrained draft ÷ those of the arm; `text` is the first answer."""
    base, free, found = records["grammar"], records["draft"], []
    for name, own in records.items():
        summary = acceptance.summarize(own, base, k if "draft" in name else 0, 0)
        valid = [is_valid(record, checker, target.eos) for record in own]
        seconds = [record.seconds for record in own]
        found.append(
            {
                "arm": name,
                **{key: summary[key] for key in SHOWN},
                "speedup_ci": summary["speedup_ci"],
                "alpha_ci": summary["alpha_ci"],
                "counts": summary["counts"],
                "forced_share": summary["counts"]["forced"] / max(1, summary["counts"]["emitted"]),
                "valid": sum(valid) / len(own),
                "ended": sum(record.finish_reason == "eos" for record in own) / len(own),
                "seconds_per_answer": sum(seconds) / len(own),
                "answer_speedup": sum(record.seconds for record in free) / sum(seconds),
                "answer_speedup_ci": paired_ratio_interval(
                    [record.seconds for record in free], [1.0] * len(own), seconds, [1.0] * len(own), 0
                ),
                "same_as_grammar": sum(
                    a.output_ids == b.output_ids for a, b in zip(own, base, strict=True)
                ),
                "text": target.tokenizer.decode(own[0].output_ids, skip_special_tokens=True),
            }
        )  # fmt: skip
    return found


def table(arms: Sequence[dict[str, Any]]) -> Table:
    """A line for each arm."""
    grid = Table("arm", "τ", "α", "tokens/s", "speed-up", "s/answer", "valid", "forced")
    for arm in arms:
        alpha = "–" if arm["alpha"] is None else f"{arm['alpha']:.3f}"
        grid.add_row(
            arm["arm"], f"{arm['tau']:.2f}", alpha, f"{arm['tokens_per_second']:.1f}",
            f"{arm['speedup']:.2f}×", f"{arm['seconds_per_answer']:.2f}", f"{arm['valid']:.0%}",
            f"{arm['forced_share']:.0%}",
        )  # fmt: skip
    return grid


def main(s: ConstrainedConfig) -> None:
    """UserError for a missing llguidance, a bad schema, and an `out` that cannot be written."""
    check_file(s.out)
    target = load_target(s.target, s.device, s.dtype)
    matcher = build_matcher(ConstraintConfig(json_schema=s.json_schema), target)
    checker = build_matcher(
        ConstraintConfig(json_schema=with_any_whitespace(s.json_schema)), target
    )
    if matcher is None or checker is None:
        raise UserError("give --json_schema, the file of a JSON schema")
    draft = load_draft(s.draft, target, dtype=s.draft_dtype or s.dtype)
    items = load_task_prompts(Task("json", path=s.prompts, limit=s.limit), target)
    records = measure(s, build_arms(s, target, draft, matcher), items)
    arms = describe(records, s.k, checker, target)
    report = {
        **provenance.collect(),
        "llguidance": version("llguidance"),
        "prompts": len(items),
        "settings": to_yaml(s),
        "arms": arms,
    }
    Console().print(table(arms))
    if s.out:
        files.write_atomically(Path(s.out), json.dumps(report, indent=1) + "\n")
    print(json.dumps(report))


if __name__ == "__main__":
    run_command(main, ConstrainedConfig, __doc__)
