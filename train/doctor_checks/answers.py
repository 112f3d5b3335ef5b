"""What is wrong with answers, and what chats hold: thoughts, tools, system messages, several turns.

Answers teach little or nothing that are cut off, very short, loops, with special tokens, or cut by training. Of what
chats hold is told how often it occurs, and whether the template keeps it.
"""

from collections import Counter, defaultdict
from collections.abc import Sequence
from typing import Any

import numpy as np

from decode.common.chat_template import apply_template
from decode.common.errors import UserError
from eval.tasks.row_forms import message_text
from train.data.conversations import Prompt
from train.data.template_probe import ChatTemplate, user
from train.doctor_checks.findings import Defect, Tally, count, percent
from train.doctor_checks.rows import SeenRow
from train.settings.data import TurnSelection

OPEN, CLOSE = "<think>", "</think>"
TOOL_MARKS = ("<tool_call>", "<tool_response>", "<|python_tag|>", "[TOOL_CALLS]", "<|tool_call")
"""What models write around tool calls and their results."""


class AnswerCheck:
    """Counts rows by what is wrong with their answers."""

    def __init__(
        self,
        tally: Tally,
        tokenizer: Any,
        eos: frozenset[int],
        vocab_size: int,
        max_length: int,
        short: int,
    ):
        self.tally, self.tokenizer, self.eos, self.vocab_size = tally, tokenizer, eos, vocab_size
        added = {i for i, token in tokenizer.added_tokens_decoder.items() if token.special}
        self.special = added | set(tokenizer.all_special_ids) | eos
        self.inside = Counter[int]()
        self.max_length, self.short = max_length, short
        self.ends = self.read = 0
        tally.said |= {"max_length": max_length, "short": short}

    def add(self, row: SeenRow) -> None:
        tally, labels = self.tally, int(row.labels.sum())
        tally.looked["rows"] += 1
        tally.labels += labels
        self.read += len(row.ids)
        if row.ids and not 0 <= min(row.ids) <= max(row.ids) < self.vocab_size:
            tally.add("tokens outside the vocabulary", row)
        if lost := int(row.labels[self.max_length :].sum()):
            tally.add("rows longer than training reads", row, lost)
        if labels == 0:
            tally.add("rows without labels", row)
        elif not row.is_window:
            self._add_answers(row, labels)

    def _add_answers(self, row: SeenRow, labels: int) -> None:
        tally = self.tally
        tally.looked["answers"] += 1
        if row.row["finish_reason"] == "length":
            tally.add("answers cut off", row, labels)
        answers = [row.ids[start:end] for start, end in row.spans]
        self.ends += sum(answer[-1] in self.eos for answer in answers)
        said = [answer[: len(answer) - (answer[-1] in self.eos)] for answer in answers]
        if sum(map(len, said)) < self.short:
            tally.add("very short answers", row, labels)
        if looping := sum(map(loop_length, said)):
            tally.add("loops", row, looping)
        if inside := [token for ids in said for token in ids if token in self.special]:
            tally.add("special token inside a reply", row, len(inside))
            self.inside.update(inside)

    def finish(self) -> None:
        """Tells what the findings state of all answers; reports a set of few labels."""
        most = self.inside.most_common(3)
        self.tally.said |= {
            "specials": ", ".join(repr(self.tokenizer.decode([i])) for i, _ in most),
            "ends_in_words": count(self.ends, "end"),
        }
        rows, labels = self.tally.looked["rows"], self.tally.labels
        if labels < self.tally.worth * self.read:
            self.tally.report(
                "few supervised tokens", rows, rows,
                judged=float(labels == 0), labelled=percent(labels, self.read),
            )  # fmt: skip


def loop_length(ids: list[int]) -> int:
    """Tokens at the end of a reply that repeat one phrase, its first occurrence not counted; 0 if it is no loop."""
    tokens = np.asarray(ids)
    longest = 0
    for period in range(1, min(64, len(ids) - 1) + 1):  # tokens of the phrase
        differs = np.flatnonzero(tokens[period:] != tokens[:-period])
        repeated = len(ids) - period - (int(differs[-1]) + 1 if len(differs) else 0)
        if repeated >= max(24, 2 * period):
            longest = max(longest, repeated)
    return longest


class FeatureCheck:
    """Counts rows of a set by what their chats hold."""

    def __init__(self, tally: Tally, template: ChatTemplate | None):
        self.tally, self.template = tally, template
        self.counts: Counter[str] = Counter()
        self.drops_thoughts = self.loses_tools = False
        if template is not None:
            self.drops_thoughts = template.drops_thoughts
            self.loses_tools = "kept" not in (template.tool_calls, template.tool_results)
        self.several, self.thinking = Defect(), Defect()
        tally.said["template"] = template

    def add(self, row: SeenRow) -> None:
        if row.is_window or not row.spans:
            return
        turns = [m["role"] for m in row.messages or []]
        replies = max(turns.count("assistant"), len(row.spans))
        calls = any(mark in row.text for mark in TOOL_MARKS)
        self.counts.update(
            replies=replies, supervised=len(row.spans), system="system" in turns, tools=calls
        )
        if replies > 1:
            self.several.add(row)
        if calls and self.loses_tools:
            self.tally.add("template does not keep tools", row)
        if any(OPEN in text or CLOSE in text for text in row.replies):
            self.thinking.add(row)
            thoughts = list(map(thoughts_of, row.replies))
            self.counts["empty"] += not any(thoughts)
            if any(OPEN in text and CLOSE not in text for text in row.replies):
                self.tally.add("thoughts without an end", row, int(row.labels.sum()))
            if any(thoughts[:-1]) and self.drops_thoughts:
                self.tally.add("thoughts in earlier turns", row)

    def finish(self) -> None:
        """Reports replies without labels; and whether answers think, where the template has a switch for it or some
        do."""
        counts, rows = self.counts, self.tally.looked["replied"]
        if counts["supervised"] < counts["replies"]:
            self.tally.report(
                "turns that are not supervised", self.several.rows, rows, self.several,
                supervised=counts["supervised"], replies=counts["replies"],
            )  # fmt: skip
        switch = self.template is not None and self.template.has_thinking_switch
        if self.thinking.rows or switch:
            setting = ": --template '{enable_thinking: false}', or chat_template_kwargs of rows"
            self.tally.report(
                "thinking", self.thinking.rows or rows, rows, self.thinking,
                thinking=percent(self.thinking.rows - counts["empty"], rows),
                served="enable_thinking is a setting of the template" if switch else "no setting of it",
                setting=setting * switch,
            )  # fmt: skip

    def facts(self) -> dict[str, str | int]:
        counts, thinking = self.counts, self.thinking.rows
        return {
            "chats of several turns": f"{self.several.rows:,} of {self.tally.looked['replied']:,}",
            "supervised replies": f"{counts['supervised']:,} of {counts['replies']:,}",
            "with a system message": counts["system"],
            "with tool calls or results": counts["tools"],
            "with thinking": f"{thinking:,} ({counts['empty']:,} with empty thoughts)",
        }


def check_sources(
    tally: Tally,
    prompts: Sequence[tuple[SeenRow, Prompt]],
    template: ChatTemplate | None,
    turns: TurnSelection,
) -> dict[str, str | int]:
    """How many prompts before sampling hold what; reports what of it the template would lose."""
    found = defaultdict[str, Defect](Defect)
    for row, prompt in prompts:
        messages = prompt.messages or []
        replies = [m for m in messages if m["role"] == "assistant"]
        held = {
            "system messages": any(m["role"] == "system" for m in messages),
            "tools": prompt.tools is not None,
            "tool calls": any(m.get("tool_calls") for m in messages),
            "tool results": any(m["role"] == "tool" for m in messages),
            "turns": len(replies) > 0,
            "thoughts": any(thoughts_of(message_text(m)) for m in replies),
        }
        for what in (what for what, holds in held.items() if holds):
            found[what].add(row)
    if template is not None:
        keeps = (template.system, template.tools, template.tool_calls, template.tool_results)
        names = ("system messages", "tools", "tool calls", "tool results")
        for what, kept in zip(names, keeps, strict=True):
            refuses, drops = "template refuses {what}", "template drops {what}"
            if kept != "kept":
                kind = refuses if kept == "refused" else drops
                tally.report(kind, found[what].rows, len(prompts), found[what], what=what)
        if turns == "all" and (template.drops_thoughts or template.rewrites_history):
            several = found["turns"]
            tally.report("turns cannot be sampled", several.rows, len(prompts), several)
    return {
        "with a system message": found["system messages"].rows,
        **{f"with {name}": found[name].rows for name in ("tools", "tool calls", "tool results")},
        "chats of several turns": found["turns"].rows,
        "with thoughts in earlier replies": found["thoughts"].rows,
    }


def check_template(
    tally: Tally, tokenizer: Any, template: ChatTemplate | None, eos: frozenset[int]
) -> None:
    """Reports what is wrong with the tokenizer's template, of which `template` is what probing gave."""
    if template is None and tokenizer.chat_template is not None:
        refusal = ""
        try:
            apply_template(tokenizer, [user("a")], add_generation_prompt=True)
        except UserError as error:
            refusal = f" ({error})"
        tally.report("template refuses a simple chat", 1, 1, refusal=refusal)
    if template is not None and template.turn_end and template.turn_end[0] not in eos:
        known = ", ".join(repr(tokenizer.decode([i])) for i in sorted(eos)[:4])
        ends = tokenizer.decode(template.turn_end)
        tally.report("a turn's end is no EOS", 1, 1, ends=ends, known=known)
    if template is not None and template.doubles_bos:
        tally.report("template and tokenizer both add BOS", 1, 1)


def thoughts_of(text: str) -> str:
    if OPEN not in text and CLOSE not in text:
        return ""
    return text.partition(CLOSE)[0].rpartition(OPEN)[2].strip()
