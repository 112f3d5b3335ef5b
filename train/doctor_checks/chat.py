"""Thoughts, tools, system messages and several turns: how often they occur, and whether the template keeps them."""

from collections import Counter
from collections.abc import Sequence
from typing import Any

from decode.common.chat_template import apply_template
from decode.common.errors import UserError
from eval.tasks.row_forms import message_text
from train.data.prompts import Prompt
from train.data.template_probe import ChatTemplate, user
from train.doctor_checks.findings import Defect, Tally, percent
from train.doctor_checks.rows import SeenRow
from train.settings.data import TurnSelection

OPEN, CLOSE = "<think>", "</think>"
TOOL_MARKS = ("<tool_call>", "<tool_response>", "<|python_tag|>", "[TOOL_CALLS]", "<|tool_call")
"""What models write around tool calls and their results."""


class FeatureCheck:
    """Counts rows of a set by what their chats hold."""

    def __init__(self, tally: Tally, template: ChatTemplate | None):
        self.tally, self.template = tally, template
        self.counts: Counter[str] = Counter()
        self.drops_thoughts = template is not None and template.drops_thoughts
        self.loses_tools = template is not None and "kept" not in (
            template.tool_calls,
            template.tool_results,
        )
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
        """How often each occurs, in rows."""
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
    found = {name: Defect() for name in ("system messages", "tools", "tool calls", "tool results")}
    several, thoughts = Defect(), Defect()
    for row, prompt in prompts:
        messages = prompt.messages or []
        replies = [m for m in messages if m["role"] == "assistant"]
        for defect, holds in (
            (found["system messages"], any(m["role"] == "system" for m in messages)),
            (found["tools"], prompt.tools is not None),
            (found["tool calls"], any(m.get("tool_calls") for m in messages)),
            (found["tool results"], any(m["role"] == "tool" for m in messages)),
            (several, len(replies) > 0),
            (thoughts, any(thoughts_of(message_text(m)) for m in replies)),
        ):
            if holds:
                defect.add(row)
    if template is not None:
        keeps = (template.system, template.tools, template.tool_calls, template.tool_results)
        for (what, defect), kept in zip(found.items(), keeps, strict=True):
            if kept != "kept":
                refuses, drops = "template refuses {what}", "template drops {what}"
                kind = refuses if kept == "refused" else drops
                tally.report(kind, defect.rows, len(prompts), defect, what=what)
        if turns == "all" and (template.drops_thoughts or template.rewrites_history):
            tally.report("turns cannot be sampled", several.rows, len(prompts), several)
    return {
        "with a system message": found["system messages"].rows,
        **{f"with {name}": found[name].rows for name in ("tools", "tool calls", "tool results")},
        "chats of several turns": several.rows,
        "with thoughts in earlier replies": thoughts.rows,
    }


def check_template(
    tally: Tally, tokenizer: Any, template: ChatTemplate | None, eos: frozenset[int]
) -> None:
    """Reports what is wrong with the tokenizer's template, of which `template` is what probing gave."""
    if template is None:
        if tokenizer.chat_template is not None:
            refusal = ""
            try:
                apply_template(tokenizer, [user("a")], add_generation_prompt=True)
            except UserError as error:
                refusal = f" ({error})"
            tally.report("template refuses a simple chat", 1, 1, refusal=refusal)
        return
    if template.turn_end and template.turn_end[0] not in eos:
        known = ", ".join(repr(tokenizer.decode([i])) for i in sorted(eos)[:4])
        ends = tokenizer.decode(template.turn_end)
        tally.report("a turn's end is no EOS", 1, 1, ends=ends, known=known)
    if template.doubles_bos:
        tally.report("template and tokenizer both add BOS", 1, 1)


def thoughts_of(text: str) -> str:
    """What a reply thinks, without white space around it."""
    if OPEN not in text and CLOSE not in text:
        return ""
    return text.partition(CLOSE)[0].rpartition(OPEN)[2].strip()
