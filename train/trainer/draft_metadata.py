"""The folder of a trained draft, with draftsmith.json, which records how the draft was made."""

import json
from pathlib import Path
from typing import Any

from decode.common import files, provenance, run_dir
from decode.common.disk_errors import naming
from decode.common.settings import to_dict
from decode.common.typed_json import to_json
from decode.drafts.base import METADATA_FILE, draft_sha256
from decode.drafts.registry import DRAFT_FAMILIES
from decode.model.loading import Target, model_fingerprint
from train.data import mixture
from train.families.base import TrainableDraft
from train.trainer.checkpoint import TrainingState
from train.trainer.tracking import NullTracker


def build_metadata(
    s: Any,
    target: Target,
    trainable: TrainableDraft,
    state: TrainingState,
    samples: int,
    processes: int,
) -> dict[str, Any]:
    """The content of draftsmith.json, without the checksum; `s` are the settings of train/distill.py."""
    return {
        "family": DRAFT_FAMILIES[s.draft.family].saved_name,
        "target": to_json(target.describe()),
        "tokenizer_hash": target.fingerprint,
        "training": to_dict(s),
        "trained_steps": state.measured_at if s.loop.keep_best else state.step,
        "samples": samples,
        "processes": processes,
        "data_manifest": mixture.data_manifests(s.data),
        "templates": mixture.templates_of(s.data),
        "inputs": state.inputs,
        "measured_in_training": state.measured,
        "cost": {"wall_seconds": round(state.seconds, 1), "tokens": state.learned},
        **trainable.metadata,
        **to_json(provenance.collect()),
    }


def save_draft(
    s: Any, trainable: TrainableDraft, metadata: dict[str, Any], tracker: NullTracker
) -> None:
    """Writes the draft's folder, draftsmith.json last, and gives the tracker its files as artifacts."""
    out = Path(s.out)
    with naming(out):
        trainable.save(out)
    if "original_target" in metadata:  # the target was trained too, and is saved beside the draft
        weights = model_fingerprint(metadata["target"]["name"]).weights
        metadata["target"] = {**metadata["target"], "weights": weights}
    metadata["draft_sha256"] = draft_sha256(s.out)
    files.write_atomically(out / METADATA_FILE, json.dumps(metadata, indent=1) + "\n")
    tracker.artifact("settings", "settings", [out / run_dir.RUN_FILE])
    for number, part in enumerate(mixture.mixture_parts(s.data)):
        name = f"manifest-{number}" if number else "manifest"
        tracker.artifact(name, "dataset", [Path(part.path) / "manifest.json"])
    names = ("config.json", "model.safetensors", "tokenizer.json", METADATA_FILE)
    tracker.artifact("draft", "model", [out / name for name in names if (out / name).is_file()])
