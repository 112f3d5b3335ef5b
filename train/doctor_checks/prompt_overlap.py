"""Repeated prompts, nearly repeated prompts, and prompts that drafts are evaluated on."""

import hashlib
from dataclasses import dataclass, field

from train.data.filters import drop_near_duplicates, drop_overlaps
from train.data.prompts import Prompt
from train.doctor_checks.findings import DataFinding, Defect, cost_or_note, percent
from train.doctor_checks.seen_rows import SeenRow

CHUNK = 1000
"""Rows whose texts are compared with the evaluation prompts at a time."""


@dataclass
class OverlapCheck:
    """Compares what users asked; answers to one prompt (ids with one beginning) are no repetition."""

    evaluation_texts: list[str]
    similarity: float
    """Share of 5-word shingles in common from which prompts count as nearly equal; 0: not looked for."""
    rows: int = 0
    waiting: list[tuple[SeenRow, Prompt]] = field(default_factory=list)
    chosen: list[tuple[SeenRow, Prompt]] = field(default_factory=list)
    seen: dict[bytes, bytes] = field(default_factory=dict)
    """{digest of what was asked: digest of the id of the content}, some 200 bytes for each prompt."""
    repeated: Defect = field(default_factory=Defect)
    evaluated: Defect = field(default_factory=Defect)

    def add(self, row: SeenRow) -> None:
        """Checks one row; rows of the chosen sample are kept to be compared in pairs."""
        self.rows += 1
        content = _digest(row.row["id"].rpartition("#")[0] or row.row["id"])
        if self.seen.setdefault(_digest(row.asked), content) != content:
            self.repeated.add(row)
        pair = row.kept(), row.as_prompt()
        if row.chosen:
            self.chosen.append(pair)
        self.waiting.append(pair)
        if len(self.waiting) == CHUNK:
            self._compare()

    def _compare(self) -> None:
        """Compares the waiting rows with the evaluation prompts."""
        prompts = [prompt for _, prompt in self.waiting]
        kept = {id(prompt) for prompt in drop_overlaps(prompts, self.evaluation_texts)[0]}
        for row, prompt in self.waiting:
            if id(prompt) not in kept:
                self.evaluated.add(row)
        self.waiting = []

    def findings(self, worth: float) -> list[DataFinding]:
        """The findings; shares from `worth` on cost something."""
        self._compare()
        near, looked = self._near_duplicates()
        rows = self.rows
        found = [
            self.evaluated.finding(
                "evaluation prompt in the data", "costs", rows,
                f"{percent(self.evaluated.rows, rows)} of the prompts overlap prompts that drafts are evaluated on: "
                "what is measured on those is too good",
                "sample again with --decontaminate FILE (bundled evaluation prompts are always left out)",
            ),
            self.repeated.finding(
                "repeated prompts", cost_or_note(self.repeated.rows, rows, worth), rows,
                f"{percent(self.repeated.rows, rows)} of the prompts ask what an earlier one asked: their labels tell "
                "the draft little that is new", "train/sample.py drops equal prompts; mix sets by weight instead",
            ),
            near.finding(
                "nearly repeated prompts", cost_or_note(near.rows, looked, worth), looked,
                f"{percent(near.rows, looked)} of the prompts looked at share {percent(self.similarity, 1)} or more of "
                "their 5-word shingles with an earlier one", f"--filters.near_duplicates {self.similarity:g}",
            ),
        ]  # fmt: skip
        return [finding for finding in found if finding.rows > 0]

    def _near_duplicates(self) -> tuple[Defect, int]:
        """(rows of the sample nearly equal to an earlier one, rows compared); equal ones are counted elsewhere."""
        first = {prompt.text or "": row for row, prompt in reversed(self.chosen)}
        first.pop("", None)
        prompts = {p.id: p for row, p in self.chosen if first.get(p.text or "") is row}
        kept, _ = drop_near_duplicates(list(prompts.values()), self.similarity)
        names = {prompt.id for prompt in kept}
        near = Defect()
        for row, prompt in self.chosen:
            if prompts.get(prompt.id) is prompt and prompt.id not in names:
                near.add(row)
        return near, len(prompts)


def _digest(text: str) -> bytes:
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).digest()[:8]
