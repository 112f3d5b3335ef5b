"""What a finished training leaves behind: the draft directory, and facts about how it was made."""

import json
from pathlib import Path
from typing import Any

from decode.common import files, run_dir
from decode.common.cli import to_dict
from decode.drafts.base import METADATA_FILE, draft_sha256
from decode.model.loading import Target
from train.data import mixture
from train.families.base import TrainableDraft
from train.trainer.checkpoint import TrainingState
from train.trainer.tracking import NullTracker, Tracker


def build_metadata(
    s: Any,
    target: Target,
    trainee: TrainableDraft,
    state: TrainingState,
    samples: int,
    processes: int,
) -> dict[str, Any]:
    """What draftsmith.json tells of the draft, for the settings of train/distill.py."""
    return {
        "family": s.draft.family,
        "target": {"name": target.name, "revision": target.revision},
        "tokenizer_hash": target.fingerprint,
        "training": to_dict(s),
        "trained_steps": state.measured_at if s.loop.keep_best else state.step,
        "samples": samples,
        "processes": processes,
        "data_manifest": mixture.data_manifests(s.data),
        "measured_in_training": state.measured,
        "cost": {"wall_seconds": round(state.seconds, 1), "tokens": state.learned},
        **trainee.facts,
        **run_dir.provenance(),
    }


def save_draft(
    s: Any, trainee: TrainableDraft, facts: dict[str, Any], tracker: Tracker | NullTracker
) -> None:
    """The draft directory, with draftsmith.json written last; W&B gets what belongs to it."""
    out = Path(s.out)
    trainee.save(out)
    facts["draft_sha256"] = draft_sha256(s.out)
    files.write_atomically(out / METADATA_FILE, json.dumps(facts, indent=1) + "\n")
    tracker.artifact("settings", "settings", [out / run_dir.RUN_FILE])
    for number, part in enumerate(mixture.mixture_parts(s.data)):
        name = f"manifest-{number}" if number else "manifest"
        tracker.artifact(name, "dataset", [Path(part.path) / "manifest.json"])
    names = ("config.json", "model.safetensors", "tokenizer.json", METADATA_FILE)
    tracker.artifact("draft", "model", [out / name for name in names if (out / name).is_file()])
