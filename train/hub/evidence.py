"""Measurements that are published with a draft: their files, and what they must be about."""

from collections.abc import Collection
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from decode.checkpoints.draft_folder import DraftMetadata
from decode.common.errors import UserError
from decode.common.provenance import Hardware
from decode.common.published import Digest, Name, Place, Private, PromptId, Version, Word, published
from decode.common.typed_json import read_object
from eval.results.report import EvalReport, read_measurements
from eval.results.tuned import TunedReport

REFEREE_FILE = "the greedy result of scripts/referee.py --out, without --temperature"


@dataclass(frozen=True)
class Disagreement:
    """A prompt that both sides decoded differently."""

    task: Name
    id: PromptId
    gap: float | None
    """Of the target's two best logits at the first difference; None if the outputs are the same."""


@dataclass(frozen=True)
class SideCounts:
    """What one side drafted and accepted, over all prompts."""

    rounds: int | None
    drafted: int
    accepted: int
    by_position: list[int]


@dataclass(frozen=True)
class RefereeTotals:
    ours: SideCounts
    vllm: SideCounts


@dataclass(frozen=True, kw_only=True)
class RefereeResult:
    """Whether vLLM decodes prompts as this decoder does, with the same draft: the greedy result of scripts/referee.py,
    of which only what is published is read, not the compared token ids."""

    draft: Place
    draft_sha256: Digest
    family: Word
    k: int
    vllm: Version
    prompts: int
    same: int
    ties: list[Disagreement]
    differ: list[Disagreement]
    totals: RefereeTotals
    argv: Private[list[str]] = field(default_factory=list)
    git: Digest | None = None
    versions: dict[Word, Version] = field(default_factory=dict)
    hardware: Hardware = Hardware()


@dataclass(frozen=True)
class Evidence:
    """What was measured of a draft. NAME.json is the file of each, None: there is none."""

    report: EvalReport | None = None
    referee: RefereeResult | None = None
    tuned: TunedReport | None = None

    def check(self, draft: DraftMetadata) -> None:
        """UserError for measurements of other weights, of another target or family, or that are not lossless."""
        sha = draft.draft_sha256
        measured: dict[tuple[str, str], Collection[str | None]] = {}
        if self.report is not None:
            own: set[str | None] = {
                m.draft_sha256 for m in self.report.methods if m.draft_sha256 and m.measures_draft
            }
            measured["the report measures drafts", "eval/run.py"] = own
        if self.referee is not None:
            own = {self.referee.draft_sha256}
            measured["the referee's result is of draft", "scripts/referee.py"] = own
        if self.tuned is not None:
            own = {*self.tuned.drafts.values()}
            measured["the tuned settings are of drafts", "eval/tune.py"] = own
        for (what, command), found in measured.items():
            if sha not in found:
                others = ", ".join(sorted(set(map(short, found)))) or "unnamed"
                raise UserError(f"{what} {others} and not {short(sha)}: run {command} on it")
        for m in self.report.of_draft(sha) if self.report else ():
            if not m.lossy and m.lossless.greedy_identical is False:
                same = m.greedy and m.greedy.identical
                whose = "those of plain decoding" if m.is_rounded else "transformers' own"
                raise UserError(
                    f"{m.name} on {m.task} is not lossless: {same} of {m.lossless.prompts} greedy outputs equal "
                    f"{whose}; a draft is published only if all are"
                )
        if self.referee is not None and self.referee.differ:
            raise UserError(
                f"an engine decoded {len(self.referee.differ)} prompts unlike this decoder: find out why first"
            )

    def published(self, known: Collection[str]) -> dict[str, Any]:
        """The fields of each file that are published, by its name; None: there is none."""
        return {
            name: published(content, type(content), f"{name}.json", known)
            for name, content in vars(self).items()
        }


def read_evidence(report: str = "", referee: str = "", tuned: str = "") -> Evidence:
    """From these files; an empty path: there is none. UserError that names a file with other content."""

    def read(kind: type, path: str, what: str) -> Any:
        return read_measurements(kind, Path(path), what) if path else None

    return Evidence(
        read(EvalReport, report, "report.json of eval/run.py"),
        read_object(RefereeResult, referee, REFEREE_FILE) if referee else None,
        read(TunedReport, tuned, "tuned.json of eval/tune.py"),
    )


def short(sha: str | None) -> str:
    return (sha or "unnamed")[:12]
