"""Where each reply's mask begins and ends, and rows that the target's template would write otherwise.

A mask is right if it begins with the first token that the target would generate, directly behind the generation
prompt, and ends with the EOS that ends a turn.
"""

from collections import Counter
from collections.abc import Mapping
from typing import Any

from decode.common.chat.choice import Messages
from decode.common.chat.probe import TemplateProbe, user
from decode.common.chat.render import ChatTemplate
from decode.common.errors import UserError
from train.data.conversations import Prompt
from train.doctor_checks.findings import Tally
from train.doctor_checks.rows import SeenRow, decode

FARTHEST = 8
"""Tokens around the beginning of a mask in which the generation prompt's end is looked for."""


class BoundaryCheck:
    """Compares rows with the chat template's rendering; `prompts` are the prompts of some rows by id, if known."""

    def __init__(
        self,
        tally: Tally,
        template: TemplateProbe | None,
        eos: frozenset[int],
        prompts: Mapping[str, Prompt],
    ):
        self.tally, self.eos, self.prompts = tally, eos, prompts
        self.offsets: Counter[int] = Counter()
        tally.said["opening"] = template.opening if template else ""

    def add(self, row: SeenRow) -> None:
        """Checks one row; pieces of plain text have no boundary."""
        bos = row.chat.tokenizer.bos_token_id
        doubled = bos is not None and row.ids[:2] == [bos, bos]
        if doubled:
            self.tally.add("BOS twice", row)
        if row.is_window or not row.spans:
            return
        self.tally.looked["replied"] += 1
        is_right = self._check_begin(row)
        self._check_end(row)
        goes_on = row.spans[0][0] == row.row.get("shared_prefix")
        if row.chosen and is_right and not doubled and not goes_on:
            self._check_prompt(row)
            self._check_rendering(row)

    def finish(self) -> None:
        late = sum(number for offset, number in self.offsets.items() if offset > 0)
        self.tally.said |= {
            "by": ", ".join(f"{offset:+d}" for offset in sorted(self.offsets)[:6]),
            "late": late,
            "early": self.offsets.total() - late,
        }

    def _check_begin(self, row: SeenRow) -> bool:
        """Counts a row whose mask begins elsewhere; True if all its replies begin where the target would."""
        offsets = [self._offset(row, start) for start, _ in row.spans]
        wrong = [offset for offset in offsets if offset]
        if None in offsets:
            self.tally.add("reply without generation prompt", row)
            return False
        if wrong:
            self.offsets.update(wrong)
            self.tally.add("mask begins at the wrong token", row, sum(map(abs, wrong)))
        return not wrong

    def _offset(self, row: SeenRow, start: int) -> int | None:
        """Tokens by which a mask that begins at `start` begins too late (negative: too early); None if unknown. Where
        another row has the labels before it, it goes on with a reply."""
        if start == row.row.get("shared_prefix"):
            return 0
        prompt = self.prompts.get(row.row["id"])
        if prompt is not None and start == row.spans[0][0]:
            golden = golden_ids(row.chat, prompt.asked, prompt.given)
            by = start - len(golden)
            if golden and abs(by) <= FARTHEST and row.ids[: len(golden)] == golden:
                return by
        opening = row.template.opening_ids if row.template else []
        if row.template is None or (opening and row.ids[:start][-len(opening) :] == opening):
            return 0
        return opening_offset(row.template, row.ids, start)

    def _check_end(self, row: SeenRow) -> None:
        """Counts a row with a reply that ended, but whose EOS is not its last label."""
        expected = missing = 0
        for i, (_, end) in enumerate(row.spans):
            is_last = i == len(row.spans) - 1
            follows = end < len(row.ids) and row.ids[end] in self.eos
            if is_last and row.row["finish_reason"] not in ("eos", "text", "") and not follows:
                continue  # cut off at the limit
            expected += 1
            missing += row.ids[end - 1] not in self.eos
        self.tally.looked["ended"] += expected > 0
        if missing:
            self.tally.add("EOS is not supervised", row, missing)

    def _check_prompt(self, row: SeenRow) -> None:
        """Counts a row whose tokens before the first reply are not those that the target would be given."""
        self.tally.looked["compared"] += 1
        prompt = self.prompts.get(row.row["id"])
        before: str | Messages | None = messages_before_reply(row)
        beside: dict[str, Any] = {}
        if prompt is not None and len(row.spans) == 1:
            before, beside = prompt.asked, prompt.given
        given = row.ids[: row.spans[0][0]]
        if before is None or golden_ids(row.chat, before, beside) == given:
            return
        modes = []
        if row.template is not None and row.template.has_thinking_switch:
            messages = [user(before)] if isinstance(before, str) else before
            modes = [
                row.chat.try_to_render(
                    messages, True, **beside | {"arguments": {"enable_thinking": on}}
                )
                for on in (True, False)
            ]
        if decode(row.chat.tokenizer, given) not in modes:
            self.tally.add("prompt is rendered otherwise", row)

    def _check_rendering(self, row: SeenRow) -> None:
        """Counts a row whose earlier replies the template renders otherwise, now that others follow."""
        messages = row.messages or []
        roles = [message["role"] for message in messages]
        if row.template is None or roles[-1:] != ["assistant"] or roles.count("assistant") == 1:
            return
        self.tally.looked["rendered"] += 1
        whole = row.chat.try_to_render(messages) or ""
        if common_prefix(whole, row.text) < row.text.rindex(messages[-1]["content"]):
            self.tally.add("template rewrites history", row, int(row.labels.sum()))


def opening_offset(template: TemplateProbe, ids: list[int], start: int) -> int | None:
    """Tokens by which `start` lies behind the end of a generation prompt; the nearest one counts, None if none is."""
    longest = max(map(len, (template.opening, *template.other_openings)))
    reach = longest + FARTHEST  # tokens; the text of each has a character at least
    for distance in range(FARTHEST + 1):
        for offset in sorted({distance, -distance}, reverse=True):
            end = start - offset
            if not 0 < end <= len(ids):
                continue
            text = decode(template.tokenizer, ids[max(0, end - reach) : end])
            others = template.other_openings if offset == 0 else ()
            if text.endswith((template.opening, *others)):
                return offset
    return None


def golden_ids(template: ChatTemplate, prompt: str | Messages, beside: dict[str, Any]) -> list[int]:
    """The tokens that the target continues, `beside` the prompt being its tools and arguments; none if the template
    refuses it."""
    try:
        return template.encode(prompt, **beside)
    except UserError:
        return []


def messages_before_reply(row: SeenRow) -> Messages | None:
    """The messages before the first span's reply; None if the row's text is not read back as messages."""
    if row.messages is None:
        return None
    replies = [i for i, m in enumerate(row.messages) if m["role"] == "assistant"]
    back = len(row.spans)  # from the last reply, since earlier ones may have no span
    return row.messages[: replies[-back]] if back <= len(replies) else None


def common_prefix(a: Any, b: Any) -> int:
    differing = (i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y)
    return next(differing, min(len(a), len(b)))
