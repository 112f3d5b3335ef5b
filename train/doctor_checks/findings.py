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
    shown: str = ""
    """The name in reports, where two kinds share one; empty: `name`."""


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
    FindingKind("template and tokenizer both add BOS", NOTE, "",
        "an engine that tokenises the rendered chat as text gives the target two BOS tokens",
        "serve through the chat API, or tokenise with add_special_tokens false"),
    # Prompts before sampling
    FindingKind("prompt is refused", STOPS, "rows",
        "{share} of the prompts cannot be encoded; sampling skips them, and ends above its max_bad_rows: {why:.160}",
        "remove or change them"),
    FindingKind("prompt longer than the context", COSTS_OR_NOTE, "rows",
        "{share} of the prompts leave no room for an answer in {context:,} tokens and are not sampled",
        "filters.max_prompt, or shorter prompts"),
    FindingKind("row is refused", STOPS_OR_COSTS, "",
        "{share} of the rows cannot be read; sampling skips them, and ends above its max_bad_rows: {refused:.400}",
        "correct or remove them"),
    FindingKind("repeated contents", COSTS_OR_NOTE, "",
        "{share} of the prompts read are equal to earlier ones: sampling drops them, so there are fewer than it seems",
        "more prompts", shown="repeated prompts"),
    FindingKind("template refuses {what}", STOPS, "",
        "{share} of the prompts have {what}, which the template refuses: sampling ends there",
        "remove them from the prompts, or give the target a template that keeps {what}"),
    FindingKind("template drops {what}", COSTS, "",
        "{share} of the prompts have {what}, which the template drops: the target answers without them",
        "remove them from the prompts, or give the target a template that keeps {what}"),
    FindingKind("turns cannot be sampled", STOPS, "",
        "{share} of the prompts are chats of several turns, and the template changes earlier replies: with --turns all "
        "sampling refuses them", "--turns last", shown="template rewrites history"),
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
    # What the template or the tokenizer would write otherwise
    FindingKind("prompt is rendered otherwise", COSTS, "compared",
        "{share} of the rows looked at begin with other tokens than the template gives today: the draft learns "
        "contexts that are never served", "sample again with the template that is served"),
    FindingKind("template rewrites history", COSTS, "rendered",
        "{share} of the rows looked at hold earlier replies that the template renders otherwise ({token_share} of all "
        "labels): these contexts are never served", "sample with --turns last"),
    FindingKind("template changes the reply", NOTE, "rendered",
        "{share} of the rows looked at hold a last reply that the template trims or rearranges when it renders the "
        "whole chat; while it is generated nothing changes", "nothing, for answers of the target itself"),
    FindingKind("chat cannot be read back", NOTE, "compared",
        "{share} of the rows looked at are no rendering of the target's template, or one with the date of that day: "
        "whether they are what is served is not known",
        "compare with the prompts: give --sources too, or sample again"),
    FindingKind("text behind the last EOS", NOTE, "rendered",
        "{share} of the rows looked at lack the white space that the template puts behind the end of a turn: the "
        "target never generates it, and it is no label", "nothing"),
    FindingKind("tokens merge across the boundary", COSTS_OR_NOTE, "tokenised",
        "{share} of the rows looked at tokenise otherwise if prompt and reply are one text: trainers that tokenise "
        "whole chats would lose the first label of each",
        "keep token ids, as this set does; end prompts before white space"),
    FindingKind("text is tokenised otherwise", NOTE, "tokenised",
        "{share} of the rows looked at hold other tokens than their text gives, as sampling at a temperature does: a "
        "chat whose history is sent as text has these tokens again as others", "keep token ids, as this set does"),
    # Answers that teach little or nothing
    FindingKind("tokens outside the vocabulary", STOPS, "rows",
        "{share} of the rows hold ids that the target has no embedding for: training ends there",
        "use the target that the samples were made with"),
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
    FindingKind("very short answers", COSTS_OR_NOTE, "answers",
        "{share} of the answers have fewer than {short} tokens and give {token_share} of the labels, while their "
        "prompts are read in full", "filters.min_answer, or --supervise all in training"),
    FindingKind("rows without labels", COSTS_OR_NOTE, "rows",
        "{share} of the rows have no supervised token (skipped, too short or empty answers) and are dropped by "
        "training", "a server that lists token ids; filters.min_answer"),
    FindingKind("rows longer than training reads", COSTS_OR_NOTE, "rows",
        "{token_share} of the supervised tokens lie behind token {max_length:,} of their row and are cut",
        "raise --loop.max_length (here --max_length)", by_tokens=True),
    FindingKind("few supervised tokens", STOPS_OR_COSTS, "",
        "{labelled} of the tokens that the target reads are labels",
        "longer answers (--max_new_tokens), --turns all, or --supervise all in training"),
    # Prompts beside each other, and beside those of evaluation
    FindingKind("evaluation prompt in the data", COSTS, "texts",
        "{share} of the prompts overlap prompts that drafts are evaluated on: what is measured on those is too good",
        "sample again with --decontaminate FILE (bundled evaluation prompts are always left out)"),
    FindingKind("repeated prompts", COSTS_OR_NOTE, "texts",
        "{share} of the prompts ask what an earlier one asked: their labels tell the draft little that is new",
        "train/sample.py drops equal prompts; mix sets by weight instead"),
    FindingKind("nearly repeated prompts", COSTS_OR_NOTE, "different",
        "{share} of the prompts looked at share {alike} or more of their 5-word shingles with an earlier one",
        "--filters.near_duplicates {similarity:g}"),
    FindingKind("answers copy their prompts", NOTE, "",
        "answers copy their prompts (n-gram τ {ngram_tau:.2f}): a lookup may do",
        "measure `ngram` with eval/run.py before training; a draft behind a lookup adds what is not copied"),
    # Chats
    FindingKind("thoughts without an end", COSTS_OR_NOTE, "replied",
        "{share} of the answers, with {token_share} of the supervised tokens, were cut while thinking: the draft "
        "learns no answer from them", "raise --max_new_tokens"),
    FindingKind("turns that are not supervised", NOTE, "replied",
        "{supervised:,} of {replies:,} replies are supervised; of chats of several turns ({share} of the rows) the "
        "others are only read", "--turns all, if the template keeps earlier turns"),
    FindingKind("thoughts in earlier turns", COSTS, "replied",
        "{share} of the rows hold thoughts of earlier replies, which the template drops: later replies are learned in "
        "contexts that are never served", "--turns last"),
    FindingKind("thinking", NOTE, "",
        "{thinking} of the answers think ({served}): acceptance measured here holds for serving in the same mode",
        "sample both modes, in the shares in which they are served{setting}"),
    FindingKind("template does not keep tools", COSTS, "replied",
        "{share} of the rows hold tool calls or results, but the template has tools {template.tools}, calls "
        "{template.tool_calls}, results {template.tool_results}: served chats differ",
        "a template with tools (chat_template.jinja of the target)"),
    FindingKind("text is rendered already", STOPS_OR_COSTS, "rows",
        "{share} of the {items} hold marks of the chat template, such as {example}: it renders them once more, or "
        "learns marks and questions as answers", RENDERED_ADVICE),
    FindingKind("answer in another script", NOTE, "chosen",
        "{share} of the answers looked at are mostly in another script than their prompt: acceptance differs by "
        "language", "prompts in the languages that are served"),
    FindingKind("draft vocabulary of {size:,}", NOTE, "",
        "{missed:.1f} % of the supervised tokens of rows that did not choose it are not in it: no acceptance there "
        "exceeds the rest", "more answers, a --draft.vocab above {size:,}, or 0 for all tokens"),
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
            for text in (kind.shown or kind.name, kind.cost, kind.mend)
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
