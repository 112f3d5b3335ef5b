"""Measurements that are published with a draft: their files, their published fields, and what they must be about."""

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

from decode.checkpoints.draft_folder import DraftMetadata
from decode.common.errors import UserError
from decode.common.published import published
from eval.results.forecast import ForecastReport
from eval.results.referee import RefereeResult
from eval.results.report import EvalReport
from eval.results.tuned import TunedReport
from eval.scaling.data_curve import DataCurve
from train.hub.report_entries import draft_entries

TYPES = {
    "report": EvalReport,
    "referee": RefereeResult,
    "tuned": TunedReport,
    "data_curve": DataCurve,
    "forecast": ForecastReport,
}
"""What each file holds; the types of its fields say what of it is published."""


@dataclass(frozen=True)
class Evidence:
    """What the files with measurements of a draft hold. NAME.json is the file of each, None: there is none."""

    report: Mapping[str, Any] | None = None
    """Of eval/run.py."""
    referee: Mapping[str, Any] | None = None
    """The greedy result of scripts/referee.py."""
    tuned: Mapping[str, Any] | None = None
    """Of eval/tune.py."""
    data_curve: Mapping[str, Any] | None = None
    """Of scripts/lab/data_curve.py."""
    forecast: Mapping[str, Any] | None = None
    """Of eval/forecast.py."""

    def check(self, draft: DraftMetadata) -> None:
        """UserError for measurements of other weights, of another target or family, or that are not lossless."""
        for name, content in vars(self).items():
            if content is not None:
                CHECKS[name](content, draft)

    def published(self, known: Collection[str]) -> "Evidence":
        """Only the fields that are published."""
        return Evidence(
            **{
                name: published(content, TYPES[name], f"{name}.json", known)
                for name, content in vars(self).items()
            }
        )


def check_forecast(forecast: Mapping[str, Any], draft: DraftMetadata) -> None:
    """UserError if it is the forecast.json of another draft, or lacks what the card shows."""
    sha = str(draft.draft_sha256)
    found = published(forecast, ForecastReport, "forecast.json", {sha})
    other = (found["draft"] or {}).get("sha256")
    if other != sha:
        raise UserError(
            f"the forecast is of draft {short(other)} and not {short(sha)}: run eval/forecast.py on it"
        )
    needed = {"task", "rule", "temperature", "k", "tau", "tau_ci"}
    if not all(needed <= row.keys() for row in found["rows"]):
        raise UserError(f"forecast.json: each of rows needs {', '.join(sorted(needed))}")


def check_data_curve(curve: Mapping[str, Any], draft: DraftMetadata) -> None:
    """UserError if the curve is of drafts of another family or for another target than the draft's."""
    ours = draft.family, draft.tokenizer_hash
    if ours != (curve["family"], curve["target"]["tokenizer"]):
        raise UserError(
            f"the data curve is not of family {ours[0]} and tokenizer {ours[1]}, as the draft: give one of such drafts"
        )


def check_tuned(tuned: Mapping[str, Any], draft: DraftMetadata) -> None:
    """UserError if it is the tuned.json of other drafts."""
    sha = draft.draft_sha256
    others = sorted({short(other) for other in tuned.get("drafts", {}).values()})
    if sha not in tuned.get("drafts", {}).values():
        raise UserError(
            f"the tuned settings are of drafts {', '.join(others) or 'unnamed'} and not {short(sha)}: run "
            "eval/tune.py on it"
        )


def check_report(report: Mapping[str, Any], draft: DraftMetadata) -> None:
    """UserError if the report is of another draft, or if its greedy outputs differ from the target's own."""
    sha = draft.draft_sha256
    entries = draft_entries(report, sha)
    if len(entries) == 0:
        others = sorted({short(m["draft_sha256"]) for m in report["methods"] if m["draft_sha256"]})
        raise UserError(
            f"the report measures drafts {', '.join(others) or 'none'} and not {short(sha)}: run eval/run.py on it"
        )
    for m in entries:
        verdict = m["lossless"] or {}
        if not m["lossy"] and verdict.get("greedy_identical") is False:
            raise UserError(
                f"{m['name']} on {m['task']} is not lossless: {verdict.get('identical')} of {verdict.get('prompts')} "
                "greedy outputs equal transformers' own; a draft is published only if all are"
            )


def check_referee(referee: Mapping[str, Any], draft: DraftMetadata) -> None:
    """UserError if it is the result of another draft, or not that of greedy decoding, or vLLM decoded otherwise."""
    if referee.get("draft_sha256") != draft.draft_sha256:
        raise UserError(
            f"the referee's result is of draft {short(referee.get('draft_sha256'))} and not "
            f"{short(draft.draft_sha256)}: run scripts/referee.py on this draft"
        )
    if "differ" not in referee:
        raise UserError("give the greedy result of scripts/referee.py, not that of --temperature")
    if len(referee["differ"]) > 0:
        raise UserError(
            f"vLLM decoded {len(referee['differ'])} prompts differently from this decoder: find out why first"
        )


def short(sha: str | None) -> str:
    return (sha or "unnamed")[:12]


CHECKS = {
    "report": check_report,
    "referee": check_referee,
    "tuned": check_tuned,
    "data_curve": check_data_curve,
    "forecast": check_forecast,
}
