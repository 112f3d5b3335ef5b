"""Where each reply's mask begins and ends, and rows that the target's template or tokenizer would write otherwise.

A mask is right if it begins with the first token that the target would generate, directly behind the generation
prompt, and ends with the EOS that ends a turn.
"""

from collections import Counter
from collections.abc import Mapping
from typing import Any

from decode.common.chat_template import Arguments, Messages, Tools, encode_prompt
from decode.common.errors import UserError
from train.data.prompts import Prompt
from train.doctor_checks.findings import DataFinding, Defect, cost_or_note, percent, stop_or_cost
from train.doctor_checks.seen_rows import SeenRow, decode
from train.doctor_checks.template import ChatTemplate, render, user

FARTHEST = 8
"""Tokens around the beginning of a mask in which the generation prompt's end is looked for."""
REMAKE = "make the set again with train/sample.py, which stores where the target began and ended"


class BoundaryCheck:
    """Compares rows with the chat template's rendering; `prompts` are the prompts of some rows by id, if known."""

    def __init__(
        self, template: ChatTemplate | None, eos: frozenset[int], prompts: Mapping[str, Prompt]
    ):
        self.template, self.eos, self.prompts = template, eos, prompts
        self.rows = self.replied = self.endable = 0
        self.compared = self.rendered = self.tokenized = 0
        self.offsets: Counter[int] = Counter()
        self.moved, self.unopened, self.lost_end, self.two_bos = (Defect() for _ in range(4))
        self.other_prompt, self.rewritten, self.changed_reply = (Defect() for _ in range(3))
        self.unread, self.trailing, self.merged, self.other_tokens = (Defect() for _ in range(4))

    def add(self, row: SeenRow) -> None:
        """Checks one row; pieces of plain text have no boundary."""
        self.rows += 1
        bos = row.tokenizer.bos_token_id
        doubled = bos is not None and row.ids[:2] == [bos, bos]
        if doubled:
            self.two_bos.add(row)
        if row.is_window or not row.spans:
            return
        self.replied += 1
        is_right = self._check_begin(row)
        self._check_end(row)
        if row.chosen:
            if is_right and not doubled:
                self._check_prompt(row)
                self._check_rendering(row)
            self._check_tokens(row)

    def _check_begin(self, row: SeenRow) -> bool:
        """Counts a row whose mask begins elsewhere; True if all its replies begin where the target would."""
        offsets = [self._offset(row, start) for start, _ in row.spans]
        if all(offset == 0 for offset in offsets):
            return True
        known = [offset for offset in offsets if offset is not None]
        if len(known) < len(offsets):
            self.unopened.add(row)
            return False
        self.offsets.update(offset for offset in known if offset != 0)
        self.moved.add(row, sum(abs(offset) for offset in known))
        return False

    def _offset(self, row: SeenRow, start: int) -> int | None:
        """Tokens by which a mask that begins at `start` begins too late (negative: too early); None if unknown."""
        prompt = self.prompts.get(row.row["id"])
        if prompt is not None and start == row.spans[0][0]:
            golden = golden_ids(
                row.tokenizer, prompt.messages or prompt.text or "", prompt.tools, prompt.arguments
            )
            near = abs(start - len(golden)) <= FARTHEST
            if near and golden and row.ids[: len(golden)] == golden:
                return start - len(golden)
        if row.template is None:
            return 0
        opening = row.template.opening_ids
        if opening and row.ids[max(0, start - len(opening)) : start] == opening:
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
        self.endable += expected > 0
        if missing:
            self.lost_end.add(row, missing)

    def _check_prompt(self, row: SeenRow) -> None:
        """Counts a row whose tokens before the first reply are not those that the target would be given."""
        self.compared += 1
        prompt = self.prompts.get(row.row["id"])
        before: str | Messages | None = messages_before(row, 0)
        tools = arguments = None
        if prompt is not None and len(row.spans) == 1:
            before, tools = prompt.messages or prompt.text, prompt.tools
            arguments = prompt.arguments
        if before is None:
            if row.template is not None:
                self.unread.add(row)
            return
        given = row.ids[: row.spans[0][0]]
        same = golden_ids(row.tokenizer, before, tools, arguments) == given
        if not same and not self._is_switched(row, before, tools):
            self.other_prompt.add(row)

    def _is_switched(self, row: SeenRow, before: str | Messages, tools: Tools | None) -> bool:
        """Whether the template gives the row's prompt with enable_thinking true or false."""
        if row.template is None or not row.template.has_thinking_switch:
            return False
        messages = [user(before)] if isinstance(before, str) else before
        text = decode(row.tokenizer, row.ids[: row.spans[0][0]])
        modes = ({"enable_thinking": on} for on in (True, False))
        return text in [
            render(row.tokenizer, messages, True, tools=tools, arguments=mode) for mode in modes
        ]

    def _check_rendering(self, row: SeenRow) -> None:
        """Counts a row whose whole chat, rendered by the template, is another text."""
        if row.template is None or row.messages is None or row.messages[-1]["role"] != "assistant":
            return
        self.rendered += 1
        whole = render(row.tokenizer, row.messages) or ""
        if whole.startswith(row.text):
            if whole != row.text and whole[len(row.text) :].strip() == "":
                self.trailing.add(row)
            return
        same = common_prefix(whole, row.text)
        several = sum(m["role"] == "assistant" for m in row.messages) > 1
        if several and same < row.text.rindex(row.messages[-1]["content"]):
            self.rewritten.add(row, int(row.labels.sum()))
        else:
            self.changed_reply.add(row)

    def _check_tokens(self, row: SeenRow) -> None:
        """Counts a row whose text is tokenised otherwise; text that is cut within a character is left out."""
        if "\ufffd" in row.text:
            return
        self.tokenized += 1
        again = list(row.tokenizer(row.text, add_special_tokens=False)["input_ids"])
        if again == row.ids:
            return
        place = common_prefix(again, row.ids)
        if any(place == start - 1 for start, _ in row.spans):
            self.merged.add(row)
        else:
            self.other_tokens.add(row)

    def findings(self, labels: int, worth: float) -> list[DataFinding]:
        """The findings; `labels` supervised tokens in all."""
        found = [*self._mask_findings(worth), *self._rendering_findings(labels, worth)]
        return [finding for finding in found if finding.rows > 0]

    def _mask_findings(self, worth: float) -> list[DataFinding]:
        late = sum(number for offset, number in self.offsets.items() if offset > 0)
        by = ", ".join(f"{offset:+d}" for offset in sorted(self.offsets)[:6])
        of = self.replied
        return [
            self.moved.finding(
                "mask begins at the wrong token", stop_or_cost(self.moved.rows, of, worth), of,
                f"{percent(self.moved.rows, of)} of the rows are masked from another token than the first generated "
                f"one (by {by}; {late} too late, {self.offsets.total() - late} too early): {self.moved.tokens} labels "
                "are missing or are the template's", REMAKE,
            ),
            self.unopened.finding(
                "reply without generation prompt", stop_or_cost(self.unopened.rows, of, worth), of,
                f"{percent(self.unopened.rows, of)} of the rows have a reply that does not follow "
                f"{self.template.opening if self.template else ''!r}: the draft learns contexts that are never served",
                "sample this target again with its own chat template",
            ),
            self.lost_end.finding(
                "EOS is not supervised", stop_or_cost(self.lost_end.rows, self.endable, worth), self.endable,
                f"{percent(self.lost_end.rows, self.endable)} of the rows that ended have a reply without EOS as its "
                f"last label: {self.lost_end.tokens} ends are not learned, and drafts run on past them", REMAKE,
            ),
            self.two_bos.finding(
                "BOS twice", stop_or_cost(self.two_bos.rows, self.rows, worth), self.rows,
                f"{percent(self.two_bos.rows, self.rows)} of the rows begin with two BOS tokens, which the target is "
                "not served with: its distributions in them are others",
                "drop the BOS of the text (train/sample.py does) and make the set again",
            ),
        ]  # fmt: skip

    def _rendering_findings(self, labels: int, worth: float) -> list[DataFinding]:
        compared, rendered, of = self.compared, self.rendered, self.tokenized
        return [
            self.other_prompt.finding(
                "prompt is rendered otherwise", "costs", compared,
                f"{percent(self.other_prompt.rows, compared)} of the rows looked at begin with other tokens than the "
                "template gives today: the draft learns contexts that are never served",
                "sample again with the template that is served",
            ),
            self.rewritten.finding(
                "template rewrites history", "costs", rendered,
                f"{percent(self.rewritten.rows, rendered)} of the rows looked at hold earlier replies that the "
                f"template renders otherwise ({percent(self.rewritten.tokens, labels)} of all labels): these contexts "
                "are never served", "sample with --turns last",
            ),
            self.changed_reply.finding(
                "template changes the reply", "note", rendered,
                f"{percent(self.changed_reply.rows, rendered)} of the rows looked at hold a last reply that the "
                "template trims or rearranges when it renders the whole chat; while it is generated nothing changes",
                "nothing, for answers of the target itself",
            ),
            self.unread.finding(
                "chat cannot be read back", "note", compared,
                f"{percent(self.unread.rows, compared)} of the rows looked at are no rendering of the target's "
                "template, or one with the date of that day: whether they are what is served is not known",
                "compare with the prompts: give --sources too, or sample again",
            ),
            self.trailing.finding(
                "text behind the last EOS", "note", rendered,
                f"{percent(self.trailing.rows, rendered)} of the rows looked at lack the white space that the template "
                "puts behind the end of a turn: the target never generates it, and it is no label", "nothing",
            ),
            self.merged.finding(
                "tokens merge across the boundary", cost_or_note(self.merged.rows, of, worth), of,
                f"{percent(self.merged.rows, of)} of the rows looked at tokenise otherwise if prompt and reply are one "
                "text: trainers that tokenise whole chats would lose the first label of each",
                "keep token ids, as this set does; end prompts before white space",
            ),
            self.other_tokens.finding(
                "text is tokenised otherwise", "note", of,
                f"{percent(self.other_tokens.rows, of)} of the rows looked at hold other tokens than their text gives, "
                "as sampling at a temperature does: a chat whose history is sent as text has these tokens again as "
                "others", "keep token ids, as this set does",
            ),
        ]  # fmt: skip


def opening_offset(template: ChatTemplate, ids: list[int], start: int) -> int | None:
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


def golden_ids(
    tokenizer: Any, prompt: str | Messages, tools: Tools | None, arguments: Arguments | None
) -> list[int]:
    """The tokens that the target continues; none if its template refuses the prompt."""
    try:
        return encode_prompt(tokenizer, prompt, tools, arguments)
    except UserError:
        return []


def messages_before(row: SeenRow, span: int) -> Messages | None:
    """The messages before a span's reply; None if the row's text is not read back as messages.

    Replies are counted from the last one, since earlier replies may have no span.
    """
    if row.messages is None:
        return None
    replies = [i for i, m in enumerate(row.messages) if m["role"] == "assistant"]
    back = len(row.spans) - span
    return row.messages[: replies[-back]] if back <= len(replies) else None


def common_prefix(a: Any, b: Any) -> int:
    """Length of what two sequences have in common at their beginning."""
    same = next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), None)
    return min(len(a), len(b)) if same is None else same
