"""Adds a report to the W&B run in which its draft was trained, as an artifact and as summary metrics.

python scripts/track_report.py --run outputs/bundled/drafts/causal --report outputs/bundled/report
"""

import sys
from dataclasses import dataclass
from pathlib import Path

if not __package__:
    sys.path[0] = str(Path(__file__).resolve().parents[1])

from decode.common import lock
from decode.common.command import run_command
from decode.common.errors import UserError
from decode.common.files import RUN_FILE, read_json_object
from decode.common.settings import parse_settings, to_dict
from train.trainer.settings import DistillConfig


@dataclass
class TrackReportConfig:
    run: str
    """Output folder of train/distill.py."""
    report: str
    """Output folder of eval/run.py."""


def main(s: TrackReportConfig) -> None:
    """Logs the report. UserError if it measures other weights than the run saved."""
    # These load torch: --help does without.
    from decode.checkpoints.draft_folder import METADATA_FILE
    from eval.results.report import read_report
    from train.trainer.tracking import Tracker, check_tracker

    run, folder = Path(s.run), Path(s.report)
    report = read_report(folder / "report.json")
    what = "the metadata of a draft of train/distill.py"
    checksum = read_json_object(run / METADATA_FILE, what, ("draft_sha256",))["draft_sha256"]
    entries = [m for m in report.of_draft(checksum) if m.is_pooled]
    if len(entries) == 0:
        raise UserError(
            f"{folder} measures other weights than those in {run}: run eval/run.py on it"
        )
    files = [folder / f for f in ("report.json", "report.md", "report.html", "outputs.jsonl")]
    missing = [file for file in files if not file.is_file()]
    if missing:
        raise UserError(
            f"{missing[0]} does not exist: run eval/report.py {folder}, or measure again"
        )
    trained = parse_settings(DistillConfig, "", ["--config", str(run / RUN_FILE)])
    step = trained.loop.steps
    values = {
        f"report/T{m.temperature:g}/{name}": vars(m)[name].value
        for m in entries
        for name in ("tau", "alpha", "acceptance_rate", "speedup")
        if vars(m)[name].value is not None
    }
    for note in check_tracker(trained.tracker, trained.wandb, trained.project):
        print(note, file=sys.stderr)
    with lock.hold(run / lock.LOCK_FILE, run):
        config = to_dict(trained)
        tracker = Tracker(run, trained.project, config, trained.wandb, step, trained.tracker)
        tracker.log(step, values)
        tracker.artifact("report", "evaluation", files)
        tracker.finish()


if __name__ == "__main__":
    run_command(main, TrackReportConfig, __doc__)
