"""Measurements that are published with a draft: their files, and what they must be about."""

from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from decode.checkpoints.draft_folder import DraftMetadata
from decode.common.errors import UserError
from decode.common.published import published
from decode.common.typed_json import read_object
from eval.results.forecast import ForecastReport
from eval.results.referee import RefereeResult
from eval.results.report import EvalReport, read_measurements
from eval.results.tuned import TunedReport
from eval.scaling.data_curve import DataCurve, read_data_curve

REFEREE_FILE = "the greedy result of scripts/referee.py --out, without --temperature"


@dataclass(frozen=True)
class Evidence:
    """What was measured of a draft. NAME.json is the file of each, None: there is none."""

    report: EvalReport | None = None
    referee: RefereeResult | None = None
    tuned: TunedReport | None = None
    data_curve: DataCurve | None = None
    forecast: ForecastReport | None = None

    def check(self, draft: DraftMetadata) -> None:
        """UserError for measurements of other weights, of another target or family, or that are not lossless."""
        sha = draft.draft_sha256
        if self.report is not None:
            check_report(self.report, sha)
        if self.referee is not None:
            found = [self.referee.draft_sha256]
            check_measured(found, sha, "the referee's result is of draft", "scripts/referee.py")
            if self.referee.differ:
                raise UserError(
                    f"vLLM decoded {len(self.referee.differ)} prompts differently from this decoder: find out why first"
                )
        if self.tuned is not None:
            drafts = self.tuned.drafts.values()
            check_measured(drafts, sha, "the tuned settings are of drafts", "eval/tune.py")
        if self.data_curve is not None:
            ours = draft.family, draft.tokenizer_hash
            if ours != (self.data_curve.family, self.data_curve.target.tokenizer):
                raise UserError(
                    f"the data curve is not of family {ours[0]} and tokenizer {ours[1]}, as the draft: give one of "
                    "such drafts"
                )
        if self.forecast is not None:
            measured = [self.forecast.draft.sha256]
            check_measured(measured, sha, "the forecast is of draft", "eval/forecast.py")

    def published(self, known: Collection[str]) -> dict[str, Any]:
        """The fields of each file that are published, by its name; None: there is none."""
        return {
            name: published(content, type(content), f"{name}.json", known)
            for name, content in vars(self).items()
        }


def read_evidence(
    report: str = "", referee: str = "", tuned: str = "", data_curve: str = "", forecast: str = ""
) -> Evidence:
    """From these files; an empty path: there is none. UserError that names a file with other content."""

    def read(kind: type, path: str, what: str) -> Any:
        return read_measurements(kind, Path(path), what) if path else None

    return Evidence(
        read(EvalReport, report, "report.json of eval/run.py"),
        read_object(RefereeResult, referee, REFEREE_FILE) if referee else None,
        read(TunedReport, tuned, "tuned.json of eval/tune.py"),
        read_data_curve(data_curve) if data_curve else None,
        read(ForecastReport, forecast, "forecast.json of eval/forecast.py"),
    )


def check_report(report: EvalReport, sha: str | None) -> None:
    """UserError if the report is of another draft, or if its greedy outputs differ from the target's own."""
    found = {m.draft_sha256 for m in report.methods if m.draft_sha256 and m.drafts_alone}
    check_measured(found, sha, "the report measures drafts", "eval/run.py")
    for m in report.of_draft(sha):
        if not m.lossy and m.lossless.greedy_identical is False:
            same = m.greedy and m.greedy.identical
            raise UserError(
                f"{m.name} on {m.task} is not lossless: {same} of {m.lossless.prompts} greedy outputs equal "
                "transformers' own; a draft is published only if all are"
            )


def check_measured(found: Collection[str | None], sha: str | None, what: str, command: str) -> None:
    """UserError unless the draft with this checksum is among the `found` ones."""
    if sha not in found:
        others = ", ".join(sorted(set(map(short, found)))) or "unnamed"
        raise UserError(f"{what} {others} and not {short(sha)}: run {command} on it")


def short(sha: str | None) -> str:
    return (sha or "unnamed")[:12]
