"""What a finished training leaves behind: the draft directory, and facts about how it was made."""

import json
from pathlib import Path
from typing import Any

from decode import runs
from decode.drafts.base import FACTS, draft_sha256
from decode.settings import to_dict
from decode.target import Target
from train import mixture
from train.checkpoint import State
from train.families import Trainee
from train.tracking import NullTracker, Tracker


def facts_of(
    s: Any, target: Target, trainee: Trainee, state: State, samples: int, processes: int
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
        "data_manifest": mixture.manifests(s.data),
        "measured_in_training": state.measured,
        "cost": {"wall_seconds": round(state.seconds, 1), "tokens": state.learned},
        **trainee.facts,
        **runs.provenance(),
    }


def save(s: Any, trainee: Trainee, facts: dict[str, Any], tracker: Tracker | NullTracker) -> None:
    """The draft directory, with draftsmith.json written last; W&B gets what belongs to it."""
    out = Path(s.out)
    trainee.save(out)
    facts["draft_sha256"] = draft_sha256(s.out)
    runs.write_atomically(out / FACTS, json.dumps(facts, indent=1) + "\n")
    tracker.artifact("settings", "settings", [out / runs.SETTINGS])
    for number, part in enumerate(mixture.parts_of(s.data)):
        name = f"manifest-{number}" if number else "manifest"
        tracker.artifact(name, "dataset", [Path(part.path) / "manifest.json"])
    names = ("config.json", "model.safetensors", "tokenizer.json", FACTS)
    tracker.artifact("draft", "model", [out / name for name in names if (out / name).is_file()])
