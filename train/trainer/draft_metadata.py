"""The folder of a trained draft, with draftsmith.json, which records how the draft was made."""

from dataclasses import replace
from pathlib import Path

from decode.checkpoints.draft_folder import (
    METADATA_FILE,
    DraftMetadata,
    LearnedFrom,
    TimeSpent,
    draft_sha256,
    write_metadata,
)
from decode.common import files, provenance
from decode.common.errors import naming
from decode.common.settings import to_dict
from decode.common.typed_json import from_json
from decode.drafts.registry import DRAFT_FAMILIES
from decode.model.loading import Target, model_fingerprint
from decode.model.names import recorded_name
from train.data import mixture
from train.families.base import TrainableDraft
from train.trainer.checkpoint import TrainingState
from train.trainer.settings import DistillConfig
from train.trainer.tracking import NullTracker


def build_metadata(
    s: DistillConfig,
    target: Target,
    trainable: TrainableDraft,
    state: TrainingState,
    samples: int,
    processes: int,
) -> DraftMetadata:
    """What is known before the draft is saved; `s` are the settings of train/distill.py."""
    training = to_dict(s)
    for group, key in ((training, "target"), (training, "tokenizer"), (training["draft"], "init")):
        if group.get(key):
            group[key], commit = recorded_name(group[key])
            training["revision"] = training["revision"] or (commit if key == "target" else None)
    known = {"target": target.describe(), **trainable.metadata, **vars(provenance.collect())}
    return DraftMetadata(
        family=DRAFT_FAMILIES[s.draft.family].saved_name,
        tokenizer_hash=target.fingerprint,
        training=training,
        trained_steps=state.measured_at if s.loop.keep_best else state.step,
        samples=samples,
        processes=processes,
        data_manifest=mixture.data_manifests(s.data),
        templates=mixture.templates_of(s.data),
        inputs=from_json(list[LearnedFrom], state.inputs),
        measured_in_training=state.measured,
        cost=TimeSpent(round(state.seconds, 1), state.learned),
        **known,
    )


def save_draft(
    s: DistillConfig, trainable: TrainableDraft, metadata: DraftMetadata, tracker: NullTracker
) -> None:
    """Writes the draft's folder, draftsmith.json last, and gives the tracker the settings and the manifests, and the
    draft where that was asked for."""
    out, target = Path(s.out), metadata.target
    with naming(out):
        trainable.save(out)
    if metadata.original_target is not None and target is not None:
        # the target was trained as well, and is saved beside the draft
        target = replace(target, weights=model_fingerprint(target.name).weights)
    write_metadata(out, replace(metadata, target=target, draft_sha256=draft_sha256(s.out)))
    tracker.artifact("settings", "settings", [out / files.RUN_FILE])
    for number, part in enumerate(mixture.mixture_parts(s.data)):
        name = f"manifest-{number}" if number else "manifest"
        tracker.artifact(name, "dataset", [Path(part.path) / "manifest.json"])
    names = ("config.json", "model.safetensors", "tokenizer.json", METADATA_FILE)
    tracker.artifact("draft", "model", [out / name for name in names if (out / name).is_file()])
