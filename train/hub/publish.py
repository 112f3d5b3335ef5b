"""Builds the folder that is uploaded to the Hugging Face Hub, from a draft or a sampled set, and checks it.

The folder is complete or not written at all. It has only files of known names: no checkpoints, no logs, no pickles.
UserError for a token, a local path, or measurements of other weights, before anything is sent.
"""

import json
import re
import shutil
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import yaml

from decode.checkpoints import layouts
from decode.checkpoints.draft_folder import (
    METADATA_FILE,
    MODEL_FILES,
    DraftMetadata,
    check_saved_tokenizer,
    check_training_ended,
    draft_sha256,
    hashed_files,
    read_metadata,
)
from decode.common import damage, run_dir
from decode.common.errors import UserError
from decode.common.files import BUNDLED, RUN_FILE, read_json, read_json_object
from decode.common.published import display_name, hub_snapshot, published
from decode.common.run_dir import replace_folder
from decode.common.secret_patterns import redact
from decode.common.target_record import TargetRecord
from decode.common.typed_json import from_json, to_json
from decode.drafts.registry import saved_families
from decode.serving.engine import ServedDraft
from train.data.manifest import MANIFEST_FILE, describe_shards, read_manifest
from train.data.mixture import DataManifests
from train.families.registry import family_settings
from train.hub import dataset_card, model_card, redaction, serving
from train.hub.card_tables import card_images
from train.hub.card_text import CardInputs, other_targets
from train.hub.evidence import Evidence, short
from train.hub.upload import (
    MARKER_FILES,
    OWNED_FILES,
    PublishFolder,
    check_labels,
    check_repo_id,
    is_hub_name,
)
from train.settings.training import HubLabels

SAVED_NAME = re.compile(r"(?!model.*safetensors$)[\w.]+|model(?:-\d{5}-of-\d{5})?\.safetensors")
"""A model's shards are numbered; a name with anything else in it is not published."""

IMAGE = re.compile(r"!\[[^\]]*\]\(([^)\s]+)\)")
QUOTED = re.compile(r"`([\w.-][\w./-]*)`")
IN_FOLDER = re.compile(r"(?<![\w./-])(?:\./)?(serving/[\w.-]+(?:/[\w.-]+)*)")
CITED_SUFFIXES = (".json", ".safetensors", ".yaml", ".yml", ".svg", ".sh", ".py", ".pbtxt")
"""How a card and its serving files name what lies in their folder."""


def build_draft_folder(
    draft: Path,
    evidence: Evidence,
    repo: str,
    labels: HubLabels,
    out: Path,
    settings: type,
    checks: Mapping[str, Sequence[str]] | None = None,
) -> PublishFolder:
    """Writes `out` and replaces an earlier one. UserError if evidence is of other weights, and for a card that cites a
    file which the folder lacks.

    `settings` is the class of the training settings, `checks` {engine: findings of its rules} of each engine that was
    checked.
    """
    check_repo_id(repo)
    check_output_folder(out, draft)
    recorded = check_draft(draft, evidence)
    config = layouts.read_config(str(draft))
    if config.get("is_encoder_decoder"):
        raise UserError(
            f"draft {draft} is an encoder-decoder: no serving engine drafts with one, upload its folder as it stands"
        )
    check_labels(labels)
    original = recorded.original_target or recorded.target or TargetRecord()
    given = labels.base_model
    labels = replace(labels, base_model=find_base_model(labels, original))
    known = _published_in_full(recorded)
    facts = public_metadata(recorded, settings, known)
    trained_for = facts.target or TargetRecord()
    target = given or trained_for.name
    if facts.original_target is not None:
        inside = family_settings(str(facts.family)).target_folder
        target = repo if inside == "." else f"./{inside}"
    facts = replace(facts, target=replace(trained_for, name=target))
    shown = evidence.published(known)
    inputs = CardInputs(
        facts,
        config,
        from_json(Evidence, shown),
        redaction.strip_local_paths(checks or {}),
        [file.name for file in hashed_files(str(draft))],
    )
    for line in other_targets(inputs):
        damage.warn(line)
    k, source = serving.choose_k(inputs.own, inputs.tuned_chains, facts, config)
    layers = tuple(config.get("eagle_aux_hidden_state_layer_ids") or ())
    template = serving.served_arguments(facts)
    job = ServedDraft(str(facts.family), repo, target, trained_for.revision, k, layers, template)
    configs = serving.build_serving_configs(job)

    with replace_folder(out) as staging:
        left_out = _copy_published_files(draft, staging)
        _write(staging / METADATA_FILE, json.dumps(to_json(facts), indent=1) + "\n")
        for name, content in shown.items():
            if content is not None:
                text = json.dumps(content, indent=1, ensure_ascii=False)
                _write(staging / f"{name}.json", text + "\n")
        _write(staging / "run.yaml", yaml.safe_dump(facts.training or {}, sort_keys=False))
        for engine_config in configs:
            for file, text in engine_config.files.items():
                _write(staging / "serving" / file, text)
        for image in card_images(inputs.own, k):
            _write(staging / "images" / image.name, image.svg)
        model_card.render(inputs, job, source, configs, labels).save(staging / "README.md")
        check_cited_files(staging)
        redaction.check_folder(staging, known)
    return PublishFolder(out, "model", left_out)


def build_dataset_folder(
    samples: Path, repo: str, labels: HubLabels, out: Path, target: str = ""
) -> PublishFolder:
    """Writes `out` with the shards, the manifest and a data card. `target` has the tokenizer of the samples; empty: the
    manifest's target. UserError for an incomplete set, and for a secret in a row."""
    check_repo_id(repo)
    check_output_folder(out, samples)
    check_labels(labels)
    stats = dataset_card.read_stats(samples, target)
    made = read_manifest(samples)
    given = labels.base_model
    labels = replace(
        labels, base_model=find_base_model(labels, TargetRecord(made.target, made.revision))
    )
    if given:
        stats = replace(stats, manifest=stats.manifest | {"target": given})
    with replace_folder(out) as staging:
        dataset_card.copy_shards(samples, staging)
        manifest = stats.manifest | {"shards": to_json(describe_shards(staging))}
        _write(staging / MANIFEST_FILE, json.dumps(manifest, indent=2) + "\n")
        dataset_card.render(stats, repo, labels).save(staging / "README.md")
        listed = {entry["sha256"] for entry in manifest["shards"].values()}
        redaction.check_folder(staging, {*listed, str(manifest.get("revision"))})
    left_out = _unpublished_names(samples, ["shards", MANIFEST_FILE])
    return PublishFolder(out, "dataset", left_out)


def find_base_model(labels: HubLabels, target: TargetRecord) -> str:
    """What the Hub calls the target: as it was given, else as it was recorded. "" with a warning if nobody else finds
    it."""
    name = labels.base_model or hub_repository(target)
    if not name:
        damage.warn(
            f"the target was the folder {display_name(target.name) or '(unnamed)'}, which nobody else finds: say what "
            "it is called on the Hub by --labels.base_model OWNER/NAME"
        )
    return name


def hub_repository(target: TargetRecord) -> str:
    """The repository on the Hub that a recorded target is from; "" for one that others do not find there.

    Earlier versions recorded a folder as it was given: one that is here is no repository, and neither is a name without
    owner of which no commit is known.
    """
    name, commit = hub_snapshot(target.name) or (target.name, target.revision)
    owner, slash, rest = name.partition("/")
    if name.endswith(".gguf"):
        name = f"{owner}/{rest.partition('/')[0]}"
    is_local = owner in BUNDLED or Path(name).exists() or not (slash or commit)
    return name if is_hub_name(name) and not is_local else ""


def check_draft(draft: Path, evidence: Evidence) -> DraftMetadata:
    """draftsmith.json of a draft that may be published.

    UserError if its files were changed after training, and for evidence that is not about it.
    """
    if not (draft / METADATA_FILE).is_file():
        raise UserError(
            f"{draft} has no {METADATA_FILE}: give --draft, a folder written by train/distill.py"
        )
    files = (path for path in sorted(draft.iterdir()) if path.is_file())
    pickle = next(filter(redaction.is_pickle, files), None)
    if pickle is not None:
        raise UserError(
            f"{draft} contains {pickle.name}, a pickle: save it as safetensors and delete it"
        )
    read_json_object(
        draft / METADATA_FILE,
        "as train/distill.py writes it",
        ("family", "target", "draft_sha256"),
    )
    check_training_ended(str(draft))
    metadata = read_metadata(str(draft))
    if metadata.family not in saved_families():
        raise UserError(
            f"draft of family {metadata.family!r}; known: {', '.join(saved_families())}"
        )
    sha = draft_sha256(str(draft))
    if sha != metadata.draft_sha256:
        raise UserError(
            f"{draft} has weights {short(sha)} and {METADATA_FILE} is about {short(metadata.draft_sha256)}: the "
            "draft was changed after training, publish it as it was saved"
        )
    check_saved_tokenizer(str(draft))
    evidence.check(metadata)
    return metadata


def public_metadata(
    metadata: DraftMetadata, settings: type, known: Collection[str]
) -> DraftMetadata:
    """The published fields of draftsmith.json; of the training settings and manifests what their types say."""
    shown = published(metadata, DraftMetadata, METADATA_FILE, known)
    for name, kind in (("training", settings), ("data_manifest", DataManifests)):
        where = f"{METADATA_FILE}: {name}"
        shown[name] = published(vars(metadata)[name], kind, where, known)
    return from_json(DraftMetadata, shown)


def check_output_folder(out: Path, source: Path) -> None:
    """UserError if writing `out` would overwrite the source or something that is not a published folder."""
    run_dir.check_folder(out)
    run_dir.check_inputs_outside(out, [source])
    ours = (out / "README.md").is_file() and any(
        (out / mark).is_file() for mark in MARKER_FILES.values()
    )
    if out.exists() and not ours and any(out.iterdir()):
        raise UserError(f"{out} contains other files: name another folder with --out")
    run_dir.check_no_foreign_file(out, OWNED_FILES, "scripts/publish.py")


def check_cited_files(folder: Path) -> None:
    """UserError if the card or a serving file names a file or folder that is not in `folder`."""
    card = (folder / "README.md").read_text(encoding="utf-8")
    texts = [card, *(f.read_text() for f in sorted((folder / "serving").rglob("*")) if f.is_file())]
    cited = [name for name in IMAGE.findall(card) if "://" not in name]
    cited += [name for name in QUOTED.findall(card) if name.endswith(("/", *CITED_SUFFIXES))]
    cited += [name.rstrip(".,;") for text in texts for name in IN_FOLDER.findall(text)]
    absent = [name for name in dict.fromkeys(cited) if not (folder / name).exists()]
    if absent:
        raise UserError(
            f"the card cites {', '.join(absent)}, which the folder to publish lacks: restore what the draft's folder "
            "should hold, or publish with the version that wrote it"
        )


def _published_in_full(metadata: DraftMetadata) -> set[str]:
    """The checksum of the weights, and the target's commit if the settings of the training name the same one.

    Other commits and checksums are published shortened: in full they cannot be told from keys.
    """
    target = metadata.original_target or metadata.target or TargetRecord()
    training = metadata.training or {}
    asked = training.get("revision"), *(hub_snapshot(target.name) or ())
    pinned = {target.revision} if target.revision and target.revision in asked else set()
    return {*pinned, str(metadata.draft_sha256)}


def _copy_published_files(source: Path, out: Path) -> list[str]:
    """Copies MODEL_FILES and returns the names of the other files. Local paths are cut in settings only."""
    found = {path for pattern in MODEL_FILES for path in source.glob(pattern) if path.is_file()}
    kept = sorted(path for path in found if SAVED_NAME.fullmatch(path.name))
    for path in kept:
        target = out / path.relative_to(source)
        target.parent.mkdir(parents=True, exist_ok=True)
        settings = path.name in ("tokenizer_config.json", "generation_config.json")
        content = read_json(path) if settings else None
        clean = redaction.strip_local_paths(content)
        if clean == content:
            shutil.copyfile(path, target)  # byte for byte
        else:
            _write(target, json.dumps(clean, indent=2, ensure_ascii=False) + "\n")
    names = [path.relative_to(source).parts[0] for path in kept] + [METADATA_FILE, RUN_FILE]
    if (source / "target" / "config.json").is_file():
        _copy_published_files(source / "target", out / "target")
        names.append("target")
    return _unpublished_names(source, names)


def _unpublished_names(folder: Path, names: Sequence[str]) -> list[str]:
    return sorted(redact(path.name) for path in folder.iterdir() if path.name not in names)


def _write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8")
