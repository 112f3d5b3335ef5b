"""What is wrong with answers (cut off, loops, special tokens, cut by training), and with the chat template."""

from collections import Counter, defaultdict
from collections.abc import Sequence
from typing import Any

import numpy as np

from decode.common.chat.probe import TemplateProbe, user
from decode.common.chat.render import ChatTemplate
from decode.common.errors import UserError
from train.data.batching import count_labels
from train.data.conversations import Prompt
from train.doctor_checks.findings import Defect, Tally, count, percent
from train.doctor_checks.rows import SeenRow


class AnswerCheck:
    """Counts rows by what is wrong with their answers."""

    def __init__(
        self,
        tally: Tally,
        tokenizer: Any,
        eos: frozenset[int],
        vocab_size: int,
        max_length: int,
    ):
        self.tally, self.tokenizer, self.eos, self.vocab_size = tally, tokenizer, eos, vocab_size
        added = {i for i, token in tokenizer.added_tokens_decoder.items() if token.special}
        self.special = added | set(tokenizer.all_special_ids) | eos
        self.inside = Counter[int]()
        self.max_length = max_length
        self.ends = self.read = self.of_images = 0
        tally.said["max_length"] = max_length

    def add(self, row: SeenRow) -> None:
        tally = self.tally
        labels, left = map(int, count_labels(row.row, self.max_length))
        tally.looked["rows"] += 1
        tally.labels += labels
        text = row.text_ids()
        self.read += len(text)
        self.of_images += len(row.ids) - len(text)
        if text and not 0 <= min(text) <= max(text) < self.vocab_size:
            tally.add("tokens outside the vocabulary", row)
        if within := sum(int(row.is_image[start:end].sum()) for start, end in row.spans):
            tally.add("images are supervised", row, within)
        if left < labels:
            tally.add("rows longer than training reads", row, labels - left)
        if labels > 0 and not row.is_window:
            self._add_answers(row, labels)

    def _add_answers(self, row: SeenRow, labels: int) -> None:
        tally = self.tally
        tally.looked["answers"] += 1
        if row.row["finish_reason"] == "length":
            tally.add("answers cut off", row, labels)
        answers = [ids for start, end in row.spans if (ids := row.text_ids(start, end))]
        self.ends += sum(answer[-1] in self.eos for answer in answers)
        said = [answer[: len(answer) - (answer[-1] in self.eos)] for answer in answers]
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


def check_sources(
    tally: Tally, prompts: Sequence[tuple[SeenRow, Prompt]], template: TemplateProbe | None
) -> dict[str, str | int]:
    """How many prompts before sampling hold what; reports what of it the template drops."""
    found = defaultdict[str, Defect](Defect)
    for row, prompt in prompts:
        messages = prompt.messages or []
        held = {
            "system messages": any(m["role"] == "system" for m in messages),
            "tools": prompt.tools is not None,
            "tool calls": any(m.get("tool_calls") for m in messages),
            "tool results": any(m["role"] == "tool" for m in messages),
            "turns": any(m["role"] == "assistant" for m in messages),
            "images": len(prompt.images) > 0,
        }
        for what in (what for what, holds in held.items() if holds):
            found[what].add(row)
    if template is not None:
        keeps = (template.system, template.tools, template.tool_calls, template.tool_results)
        names = ("system messages", "tools", "tool calls", "tool results")
        for what in (what for what, kept in zip(names, keeps, strict=True) if kept == "dropped"):
            kind = "template drops {what}"
            tally.report(kind, found[what].rows, len(prompts), found[what], what=what)
    return {
        "with a system message": found["system messages"].rows,
        **{f"with {name}": found[name].rows for name in ("tools", "tool calls", "tool results")},
        "chats of several turns": found["turns"].rows,
        **({"with images": found["images"].rows} if "images" in found else {}),
    }


def check_template(tally: Tally, template: ChatTemplate, eos: frozenset[int]) -> None:
    """Reports what is wrong with the template."""
    found, tokenizer = template.probe, template.tokenizer
    if found is None and tokenizer.chat_template is not None:
        refusal = ""
        try:
            template.render([user("a")], True)
        except UserError as error:
            refusal = f" ({error})"
        tally.report("template refuses a simple chat", 1, 1, refusal=refusal)
    if found is not None and found.turn_end and found.turn_end[0] not in eos:
        known = ", ".join(repr(tokenizer.decode([i])) for i in sorted(eos)[:4])
        ends = tokenizer.decode(found.turn_end)
        tally.report("a turn's end is no EOS", 1, 1, ends=ends, known=known)
