"""Thoughts, tools, system messages and several turns: how often they occur, and whether the template keeps them."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from decode.common.chat_template import apply_template
from decode.common.errors import UserError
from eval.tasks.row_forms import message_text
from train.data.conversations import TurnSelection
from train.data.prompts import Prompt
from train.doctor_checks.findings import DataFinding, Defect, cost_or_note, percent
from train.doctor_checks.seen_rows import SeenRow
from train.doctor_checks.template import ChatTemplate, Kept

OPEN, CLOSE = "<think>", "</think>"
TOOL_MARKS = ("<tool_call>", "<tool_response>", "<|python_tag|>", "[TOOL_CALLS]", "<|tool_call")
"""What models write around tool calls and their results."""


@dataclass
class FeatureCheck:
    """Counts rows of a set by what their chats hold."""

    template: ChatTemplate | None
    rows: int = 0
    replies: int = 0
    supervised: int = 0
    system: int = 0
    several: Defect = field(default_factory=Defect)
    tools: Defect = field(default_factory=Defect)
    thinking: Defect = field(default_factory=Defect)
    empty_thoughts: int = 0
    unclosed: Defect = field(default_factory=Defect)
    earlier_thoughts: Defect = field(default_factory=Defect)

    def add(self, row: SeenRow) -> None:
        """Counts one row."""
        if row.is_window or not row.spans:
            return
        self.rows += 1
        turns = [m["role"] for m in row.messages or []]
        replies = max(turns.count("assistant"), len(row.spans))
        self.replies += replies
        self.supervised += len(row.spans)
        self.system += "system" in turns
        if replies > 1:
            self.several.add(row)
        if any(mark in row.text for mark in TOOL_MARKS):
            self.tools.add(row)
        if any(OPEN in text or CLOSE in text for text in row.replies):
            self.thinking.add(row)
            thoughts = [_thoughts(text) for text in row.replies]
            self.empty_thoughts += not any(thoughts)
            if any(OPEN in text and CLOSE not in text for text in row.replies):
                self.unclosed.add(row, int(row.labels.sum()))
            if any(thoughts[:-1]):
                self.earlier_thoughts.add(row)

    def facts(self) -> dict[str, Any]:
        """How often each occurs, in rows."""
        return {
            "chats of several turns": f"{self.several.rows:,} of {self.rows:,}",
            "supervised replies": f"{self.supervised:,} of {self.replies:,}",
            "with a system message": self.system,
            "with tool calls or results": self.tools.rows,
            "with thinking": f"{self.thinking.rows:,} ({self.empty_thoughts:,} with empty thoughts)",
        }

    def findings(self, labels: int, worth: float) -> list[DataFinding]:
        """The findings; `labels` supervised tokens in all, shares from `worth` on cost something."""
        rows, template = self.rows, self.template
        drops = template is not None and template.drops_thoughts
        found = [
            self.unclosed.finding(
                "thoughts without an end", cost_or_note(self.unclosed.rows, rows, worth), rows,
                f"{percent(self.unclosed.rows, rows)} of the answers, with {percent(self.unclosed.tokens, labels)} of "
                "the supervised tokens, were cut while thinking: the draft learns no answer from them",
                "raise --max_new_tokens",
            ),
            self.several.finding(
                "turns that are not supervised", "note",
                rows, f"{self.supervised:,} of {self.replies:,} replies are supervised; of chats of several turns "
                f"({percent(self.several.rows, rows)} of the rows) the others are only read",
                "--turns all, if the template keeps earlier turns",
            ) if self.supervised < self.replies else None,
            self.earlier_thoughts.finding(
                "thoughts in earlier turns", "costs", rows,
                f"{percent(self.earlier_thoughts.rows, rows)} of the rows hold thoughts of earlier replies, which the "
                "template drops: later replies are learned in contexts that are never served", "--turns last",
            ) if drops else None,
            self._mode_finding(),
            self.tools.finding(
                "template does not keep tools", "costs", rows,
                f"{percent(self.tools.rows, rows)} of the rows hold tool calls or results, but the template "
                f"has tools {template.tools}, calls {template.tool_calls}, results {template.tool_results}: "
                "served chats differ",
                "a template with tools (chat_template.jinja of the target)",
            ) if template is not None and "kept" not in (template.tool_calls, template.tool_results) else None,
        ]  # fmt: skip
        return [finding for finding in found if finding is not None and finding.rows > 0]

    def _mode_finding(self) -> DataFinding | None:
        """Whether answers think, where the template has a switch for it or only some do."""
        thinking, rows = self.thinking.rows - self.empty_thoughts, self.rows
        switch = self.template is not None and self.template.has_thinking_switch
        if self.thinking.rows == 0 and not switch:
            return None
        setting = (
            ": --template '{enable_thinking: false}', or chat_template_kwargs of rows" * switch
        )
        served = "enable_thinking is a setting of the template" if switch else "no setting of it"
        return DataFinding(
            "thinking", "note", self.thinking.rows or rows, rows,
            f"{percent(thinking, rows)} of the answers think ({served}): acceptance measured here holds for serving "
            "in the same mode", "sample both modes, in the shares in which they are served" + setting,
            tuple(self.thinking.examples),
        )  # fmt: skip


def source_findings(
    prompts: Sequence[tuple[SeenRow, Prompt]], template: ChatTemplate | None, turns: TurnSelection
) -> tuple[dict[str, Any], list[DataFinding]]:
    """(counts, findings) of prompts before sampling: what of their messages the template would lose."""
    system, tools, calls, results, several, thoughts = (Defect() for _ in range(6))
    for row, prompt in prompts:
        messages = prompt.messages or []
        replies = [m for m in messages if m["role"] == "assistant"]
        holds = {
            "system": any(m["role"] == "system" for m in messages),
            "tools": prompt.tools is not None,
            "calls": any(m.get("tool_calls") for m in messages),
            "results": any(m["role"] == "tool" for m in messages),
            "several": len(replies) > 0,
            "thoughts": any(_thoughts(message_text(m)) for m in replies),
        }
        counted = (system, tools, calls, results, several, thoughts)
        for name, defect in zip(holds, counted, strict=True):
            if holds[name]:
                defect.add(row)
    facts = {
        "with a system message": system.rows,
        "with tools": tools.rows,
        "with tool calls": calls.rows,
        "with tool results": results.rows,
        "chats of several turns": several.rows,
        "with thoughts in earlier replies": thoughts.rows,
    }
    if template is None:
        return facts, []
    total = len(prompts)
    found = [
        _lost("system messages", system, template.system, total),
        _lost("tools", tools, template.tools, total),
        _lost("tool calls", calls, template.tool_calls, total),
        _lost("tool results", results, template.tool_results, total),
    ]
    rewrites = template.drops_thoughts or template.rewrites_history
    if rewrites and turns == "all" and several.rows:
        found.append(
            several.finding(
                "template rewrites history", "stops", total,
                f"{percent(several.rows, total)} of the prompts are chats of several turns, and the template changes "
                "earlier replies: with --turns all sampling refuses them", "--turns last",
            )
        )  # fmt: skip
    return facts, [finding for finding in found if finding is not None and finding.rows > 0]


def template_findings(
    tokenizer: Any, template: ChatTemplate | None, eos: frozenset[int]
) -> list[DataFinding]:
    """What is wrong with the tokenizer's template, whatever the rows are; `template` is what probing it gave."""
    found = []
    if template is None:
        if tokenizer.chat_template is None:
            return []
        return [
            DataFinding(
                "template refuses a simple chat", "stops", 1, 1,
                "the target's chat template renders no message of a user: no prompt reaches the target as served"
                + _refusal(tokenizer),
                "give its arguments (--template), or mend chat_template.jinja of the target",
            )
        ]  # fmt: skip
    if template.turn_end and template.turn_end[0] not in eos:
        ends = tokenizer.decode(template.turn_end)
        known = ", ".join(repr(tokenizer.decode([i])) for i in sorted(eos)[:4])
        found.append(
            DataFinding(
                "a turn's end is no EOS", "stops", 1, 1,
                f"the template ends replies with {ends!r}, but generation ends at {known}: answers run on to the limit",
                "add its id to eos_token_id in the target's generation_config.json, and sample again",
            )
        )  # fmt: skip
    if template.doubles_bos:
        found.append(
            DataFinding(
                "template and tokenizer both add BOS", "note", 1, 1,
                "an engine that tokenises the rendered chat as text gives the target two BOS tokens",
                "serve through the chat API, or tokenise with add_special_tokens false",
            )
        )  # fmt: skip
    return found


def _refusal(tokenizer: Any) -> str:
    """Why the template renders no chat, in brackets; "" if it drops what the user says."""
    try:
        apply_template(tokenizer, [{"role": "user", "content": "a"}], add_generation_prompt=True)
    except UserError as error:
        return f" ({error})"
    return ""


def _lost(what: str, defect: Defect, kept: Kept, total: int) -> DataFinding | None:
    """The finding about messages that the template does not keep."""
    if kept == "kept":
        return None
    verb = "refuses" if kept == "refused" else "drops"
    return defect.finding(
        f"template {verb} {what}", "stops" if kept == "refused" else "costs", total,
        f"{percent(defect.rows, total)} of the prompts have {what}, which the template {verb}"
        + (": sampling ends there" if kept == "refused" else ": the target answers without them"),
        f"remove them from the prompts, or give the target a template that keeps {what}",
    )  # fmt: skip


def _thoughts(text: str) -> str:
    """What a reply thinks, without white space around it."""
    if OPEN not in text and CLOSE not in text:
        return ""
    return text.partition(CLOSE)[0].rpartition(OPEN)[2].strip()
