"""Every finding of the doctor in one table, and the tally that counts rows by finding."""

import itertools
from collections import Counter, defaultdict
from dataclasses import dataclass, field
from typing import Any, Literal

from train.data.sources import RENDERED_ADVICE
from train.doctor_checks.rows import SeenRow

Severity = Literal["stops", "costs", "note"]
"""stops: do not train on this; costs: acceptance or compute is lost; note: good to know."""
SEVERITIES: tuple[Severity, ...] = ("stops", "costs", "note")
STOPS, COSTS, NOTE = ((severity, severity) for severity in SEVERITIES)
STOPS_OR_COSTS, COSTS_OR_NOTE = itertools.pairwise(SEVERITIES)
MAX_EXAMPLES = 3


@dataclass(frozen=True)
class FindingKind:
    """What the doctor says of a defect. Texts are format strings: {share} of the rows looked at have it, {rows} of
    them, with {tokens} labels, {token_share} of all; what else they name is in `Tally.said`."""

    name: str
    severity: tuple[Severity, Severity]
    """From the share `worth` of the rows on, and below it."""
    of: str
    """Which rows are looked at for it: a key of `Tally.looked`; empty where `Tally.report` says it."""
    cost: str
    """What it costs, with a number of this data."""
    mend: str
    """The setting or the step that mends it."""
    by_tokens: bool = False
    """The share of the labels decides about the severity, not that of the rows."""


# fmt: off
KINDS = {kind.name: kind for kind in (
    FindingKind("made with another chat template", COSTS, "", "all {rows:,} rows of {path} were rendered {other}",
        "sample again, or serve with the template of the set"),
    FindingKind("template refuses a simple chat", STOPS, "",
        "the target's chat template renders no message of a user: no prompt reaches the target as served{refusal}",
        "give its arguments (--template), or mend chat_template.jinja of the target"),
    FindingKind("a turn's end is no EOS", STOPS, "",
        "the template ends replies with {ends!r}, but generation ends at {known}: answers run on to the limit",
        "add its id to eos_token_id in the target's generation_config.json, and sample again"),
    # Prompts before sampling
    FindingKind("prompt is refused", STOPS, "rows",
        "{share} of the prompts cannot be encoded; sampling skips them, and ends above its max_bad_rows: {why:.400}",
        "remove or change them"),
    FindingKind("row is refused", STOPS_OR_COSTS, "",
        "{share} of the rows cannot be read; sampling skips them, and ends above its max_bad_rows: {refused:.400}",
        "correct or remove them"),
    FindingKind("template drops {what}", COSTS, "",
        "{share} of the prompts have {what}, which the template drops: the target answers without them",
        "remove them from the prompts, or give the target a template that keeps {what}"),
    # Where labels begin and end
    FindingKind("mask begins at the wrong token", STOPS_OR_COSTS, "replied",
        "{share} of the rows are masked from another token than the first generated one (by {by}; {late} too late, "
        "{early} too early): {tokens} labels are missing or are the template's",
        "make the set again with train/sample.py, which stores where the target began and ended"),
    FindingKind("reply without generation prompt", STOPS_OR_COSTS, "replied",
        "{share} of the rows have a reply that does not follow {opening!r}: the draft learns contexts that are never "
        "served", "sample this target again with its own chat template"),
    FindingKind("EOS is not supervised", STOPS_OR_COSTS, "ended",
        "{share} of the rows that ended have a reply without EOS as its last label: {tokens} ends are not learned, and "
        "drafts run on past them",
        "make the set again with train/sample.py, which stores where the target began and ended"),
    FindingKind("BOS twice", STOPS_OR_COSTS, "texts",
        "{share} of the rows begin with two BOS tokens, which the target is not served with: its distributions in them "
        "are others", "drop the BOS of the text (train/sample.py does) and make the set again"),
    # What the template would write otherwise
    FindingKind("prompt is rendered otherwise", COSTS, "compared",
        "{share} of the rows looked at begin with other tokens than the template gives today: the draft learns "
        "contexts that are never served", "sample again with the template that is served"),
    FindingKind("template rewrites history", COSTS, "rendered",
        "{share} of the chats of several turns looked at hold earlier replies that the template renders otherwise "
        "({token_share} of all labels): these contexts are never served", "sample with --turns last"),
    # Answers that teach little or nothing
    FindingKind("tokens outside the vocabulary", STOPS, "rows",
        "{share} of the rows hold ids that the target has no embedding for: training ends there",
        "use the target that the samples were made with"),
    FindingKind("image cannot be read", STOPS, "rows",
        "{share} of the rows hold an image that is not as it was sampled: training ends there ({unread:.400})",
        "run the train/sample.py command again"),
    FindingKind("images are supervised", STOPS_OR_COSTS, "rows",
        "{share} of the rows have loss spans over what stands for an image, which is no text: training leaves {tokens} "
        "tokens of them out", "make the set again with train/sample.py, whose spans are answers alone"),
    FindingKind("special token inside a reply", COSTS, "answers",
        "{share} of the answers hold {tokens_in_words} that are special tokens and not their end ({specials}): engines "
        "end or hide the text there, so drafts learn what is never shown",
        "list turn ends as EOS of the target and sample again, or clean the answers"),
    FindingKind("loops", COSTS_OR_NOTE, "answers",
        "{token_share} of the supervised tokens are loops ({share} of the answers end by repeating a phrase): the "
        "draft's acceptance on them says nothing about other text",
        "sampling.temperature above 0, a lower --max_new_tokens, other prompts", by_tokens=True),
    FindingKind("answers cut off", COSTS_OR_NOTE, "answers",
        "{share} of the answers, with {token_share} of the supervised tokens, were cut at the limit: the set shows "
        "{ends_in_words} of an answer", "raise --max_new_tokens, and --loop.max_length with it"),
    FindingKind("rows longer than training reads", COSTS_OR_NOTE, "rows",
        "{token_share} of the supervised tokens lie behind token {max_length:,} of their row and are cut",
        "raise --loop.max_length (here --max_length)", by_tokens=True),
    FindingKind("few supervised tokens", STOPS_OR_COSTS, "",
        "{labelled} of the tokens of text that the target reads are labels",
        "longer answers (--max_new_tokens), --turns all, or --supervise all in training"),
    # Prompts and answers as a whole
    FindingKind("evaluation prompt in the data", COSTS, "texts",
        "{share} of the prompts overlap prompts that drafts are evaluated on: what is measured on those is too good",
        "sample again with --decontaminate FILE (bundled evaluation prompts are always left out)"),
    FindingKind("answers copy their prompts", NOTE, "",
        "answers copy their prompts (n-gram τ {ngram_tau:.2f}): a lookup may do",
        "measure `ngram` with eval/run.py before training; a draft behind a lookup adds what is not copied"),
    FindingKind("text is rendered already", STOPS_OR_COSTS, "rows",
        "{share} of the {items} hold marks of the chat template, such as {example}: it renders them once more, or "
        "learns marks and questions as answers", RENDERED_ADVICE),
)}
"""{name of a kind: what is said of it}, in the order of reports."""
# fmt: on


@dataclass(frozen=True)
class DataFinding:
    """What is wrong, how often, what it costs and what to do, as the doctor's JSON has it."""

    name: str
    severity: Severity
    rows: int
    """Rows (or prompts) that have it."""
    of: int
    """Rows that were looked at for it."""
    cost: str
    mend: str
    examples: list[str]
    """Ids of up to MAX_EXAMPLES of the rows."""


@dataclass
class Defect:
    """The rows that have a defect, and how many of their tokens it concerns."""

    rows: int = 0
    tokens: int = 0
    examples: list[SeenRow] = field(default_factory=list)

    def add(self, row: SeenRow, tokens: int = 0) -> None:
        self.rows += 1
        self.tokens += tokens
        if len(self.examples) < MAX_EXAMPLES:
            self.examples.append(row.kept())


class Tally:
    """What one pass over sets or prompts counts, which the findings are made from."""

    def __init__(self, worth: float):
        self.worth = worth
        self.labels = 0
        self.looked: Counter[str] = Counter()
        """{which rows: how many were looked at}."""
        self.defects: defaultdict[str, Defect] = defaultdict(Defect)
        """{name of a kind: the rows that have it}."""
        self.said: dict[str, Any] = {}
        """{name in the texts of KINDS: its value}."""
        self._reported: list[tuple[str, DataFinding, list[SeenRow]]] = []

    def add(self, name: str, row: SeenRow, tokens: int = 0) -> None:
        """Counts a row with the defect KINDS[name]; `tokens` of it are affected."""
        # The table is asked already here, so that a name it does not have fails where it is written.
        self.defects[KINDS[name].name].add(row, tokens)

    def report(
        self,
        name: str,
        rows: int,
        of: int,
        defect: Defect | None = None,
        judged: float | None = None,
        **said: Any,
    ) -> None:
        """Notes a finding about `rows` of `of` rows, if there are any; `judged` is the share that decides how grave it
        is."""
        if rows == 0:
            return
        kind, defect = KINDS[name], defect or Defect()
        if judged is None:
            part, whole = (defect.tokens, self.labels) if kind.by_tokens else (rows, of)
            judged = part / whole if whole > 0 else -1.0
        known = {
            "share": percent(rows, of),
            "rows": rows,
            "tokens": defect.tokens,
            "tokens_in_words": count(defect.tokens, "label"),
            "token_share": percent(defect.tokens, self.labels),
        }
        shown, cost, mend = (
            text.format(**{**known, **self.said, **said})
            for text in (kind.name, kind.cost, kind.mend)
        )
        severity = kind.severity[judged < self.worth]
        names = [row.id for row in defect.examples]
        finding = DataFinding(shown, severity, rows, of, cost, mend, names)
        self._reported.append((name, finding, defect.examples))

    def findings(self) -> tuple[list[DataFinding], list[SeenRow]]:
        """(the findings, the gravest first; an example of each one that stops or costs)."""
        for name, defect in self.defects.items():
            self.report(name, defect.rows, self.looked[KINDS[name].of], defect)
        order = list(KINDS)
        found = sorted(
            self._reported, key=lambda x: (SEVERITIES.index(x[1].severity), order.index(x[0]))
        )
        grave = [rows[0] for _, finding, rows in found if finding.severity != "note" and rows]
        return [finding for _, finding, _ in found], grave


def percent(part: float, whole: float) -> str:
    return f"{100 * part / whole:.1f} %" if whole > 0 else "0.0 %"


def count(number: int, noun: str) -> str:
    return f"{number:,} {noun}" if number == 1 else f"{number:,} {noun}s"
