"""The folder of a saved draft: which files it has, and draftsmith.json, which says how the draft was made."""

import hashlib
import json
import warnings
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from decode.checkpoints.draft_vocab import VOCAB_FILE
from decode.common import damage, files
from decode.common.errors import UserError
from decode.common.files import read_text, write_atomically
from decode.common.provenance import Hardware
from decode.common.published import Argument, Digest, Name, Private, Version, Word
from decode.common.target_record import ModelFingerprint, TargetRecord
from decode.common.typed_json import Omitted, read_object, to_json
from decode.model.formats.adapters import CONFIG_FILE as ADAPTER_FILE
from decode.model.loading import (
    Target,
    adapter_folder,
    compare_tokenizers,
    load_tokenizer,
    tokenizer_fingerprint,
)
from decode.model.vocabularies import disagreement

METADATA_FILE = "draftsmith.json"
CHECKPOINTS = "checkpoints"
"""The folder of a training's checkpoints in that of its draft."""
TRAINING = f"{files.COMMAND_HEADER}train/distill.py"
"""How the run.yaml of a training begins."""
MODEL_FILES = (
    "config.json",
    "generation_config.json",
    "model*.safetensors",
    "model.safetensors.index.json",
    "medusa_lm_head.safetensors",
    VOCAB_FILE,
    "tokenizer.json",
    "tokenizer_config.json",
    "tokenizer.model",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "chat_template.jinja",
    "additional_chat_templates/*.jinja",
)
"""Patterns of the files of a saved model with its tokenizer."""


@dataclass(frozen=True)
class ReducedVocabulary:
    """The tokens that a draft can draft, where they are not all of the target's."""

    size: int
    coverage: float  # share of the tokens of the training text that are among them
    digest: Digest


@dataclass(frozen=True)
class LearnedFrom:
    """What a training learned from, by content; more than one if a change was allowed."""

    target: ModelFingerprint | None = None
    data: list[Digest] | None = None
    init: Digest | None = None


@dataclass(frozen=True)
class Transplant:
    """What a draft was before it got its target's vocabulary (decode/serving/transplant.py)."""

    source: TargetRecord
    shared: int  # tokens of the target that the source has too
    tokens: int  # of the target


@dataclass(frozen=True)
class TimeSpent:
    wall_seconds: float
    tokens: int


@dataclass(frozen=True)
class DraftMetadata:
    """draftsmith.json. Earlier versions lack fields, and a draft that was made elsewhere has none."""

    family: Omitted[Word] = None
    target: Omitted[TargetRecord] = None
    tokenizer_hash: Omitted[Digest] = None
    training: Private[Omitted[dict[str, Any]]] = None  # the settings of train/distill.py
    trained_steps: Omitted[int] = None
    samples: Omitted[int] = None
    processes: Omitted[int] = None
    data_manifest: Private[Omitted[Any]] = None
    """That of the sampled set without its shards, or [{path, weight, limit, manifest}, …] of several."""
    templates: Omitted[list[dict[Name, Argument]]] = None
    """Settings of the chat template that training prompts were rendered with, the most frequent first."""
    inputs: Omitted[list[LearnedFrom]] = None
    measured_in_training: Omitted[dict[Name, float]] = None
    cost: Omitted[TimeSpent] = None
    norms: Omitted[list[Word]] = None
    vocabulary: Omitted[ReducedVocabulary] = None
    original_target: Omitted[TargetRecord] = None
    """What `target` was before it was trained together with the draft."""
    argv: Private[Omitted[list[str]]] = None
    git: Omitted[Digest] = None
    versions: Omitted[dict[Word, Version]] = None
    hardware: Omitted[Hardware] = None
    draft_sha256: Omitted[Digest] = None
    exported_from: Omitted[Digest] = None
    """Checksum of the draft that this one is a copy of in another layout."""
    transplanted: Omitted[Transplant] = None

    @property
    def is_known(self) -> bool:
        return self != DraftMetadata()


def write_metadata(folder: Path, metadata: DraftMetadata) -> None:
    text = json.dumps(to_json(metadata), indent=1)
    write_atomically(folder / METADATA_FILE, text + "\n")


def read_metadata(path: str) -> DraftMetadata:
    """draftsmith.json of a draft's folder, empty if there is none. UserError if it is damaged."""
    file = Path(path) / METADATA_FILE
    if not file.is_file():
        return DraftMetadata()
    return read_object(DraftMetadata, file, "what train/distill.py writes beside a draft")


def trained_templates(drafts: Iterable[str]) -> dict[str, list[dict[str, Any]]]:
    """{draft: the settings of the chat template that its training prompts were rendered with, the most frequent first};
    of drafts (folders or other names) only those of which they are written down."""
    found = {draft: read_metadata(draft).templates for draft in drafts if draft}
    return {draft: templates for draft, templates in found.items() if templates}


def draft_sha256(path: str) -> str | None:
    """Checksum of the weights' files, draft_vocab.json if there is one, and config.json; None for a draft that is not a
    local folder. That of an adapter is of the folder with its base merged."""
    digest = hashlib.sha256()
    files = hashed_files(path)
    for file in files:
        with file.open("rb") as content:
            hashlib.file_digest(content, lambda: digest)
    return digest.hexdigest() if files else None


def hashed_files(path: str) -> list[Path]:
    """The files that `draft_sha256` reads, in their order; [] for a draft that is not a local folder."""
    folder = Path(path)
    if (folder / ADAPTER_FILE).is_file():
        folder = Path(adapter_folder(path, "draft") or path)
    shards = sorted(folder.glob("model-*-of-*.safetensors"))
    options = ([folder / "model.safetensors"], shards, [folder / "medusa_lm_head.safetensors"])
    weights = next((files for files in options if files and files[0].is_file()), [])
    if not weights or not (folder / "config.json").is_file():
        return []
    vocab = [file for file in [folder / VOCAB_FILE] if file.is_file()]
    return [*weights, *vocab, folder / "config.json"]


def is_altered(path: str, sha256: str | None) -> bool:
    """Whether `sha256`, that of the draft in the folder `path`, is not the one in draftsmith.json; False if that has
    none."""
    return sha256 is not None and read_metadata(path).draft_sha256 not in (None, sha256)


def check_saved_draft(path: str) -> None:
    """Compares the files of a draft's folder with draftsmith.json: a warning if weights or config.json were altered
    after training, UserError if the tokenizer was. Nothing is done for what draftsmith.json does not record. Both also
    as from `check_training_ended`."""
    check_training_ended(path)
    if is_altered(path, draft_sha256(path)):
        damage.warn_once(
            f"draft {path!r} has other weights or another config.json than {METADATA_FILE} says: it was changed or "
            "damaged after training, and what was measured in training is not about it"
        )
    check_saved_tokenizer(path)


def check_training_ended(path: str) -> None:
    """UserError for the folder of a training that has saved no draft yet, and for a checkpoint in it; a warning for a
    draft whose training has gone on since it was saved."""
    folder = Path(path).resolve()
    is_checkpoint = folder.parent.name == CHECKPOINTS
    training = folder.parent.parent if is_checkpoint else folder
    run_file, latest = training / files.RUN_FILE, training / CHECKPOINTS / "latest"
    if not run_file.is_file() or not read_text(run_file).startswith(TRAINING):
        return
    number = read_text(latest).strip().rpartition("-")[2] if latest.is_file() else "0"
    done, saved = int(number) if number.isdecimal() else 0, read_metadata(str(training))
    if is_checkpoint:
        raise UserError(f"draft {path!r} is a checkpoint of a training: name the folder {training}")
    if not saved.is_known:
        raise UserError(
            f"draft {path!r}: its training has not ended, {done} steps are saved and no draft: the same command of "
            "train/distill.py goes on"
        )
    asked = (saved.training or {}).get("loop", {}).get("steps", 0)
    if done > max(saved.trained_steps or 0, asked):
        damage.warn_once(
            f"draft {path!r} is that of step {saved.trained_steps}, and its training has not ended: it has gone on to "
            f"step {done} since; the same command of train/distill.py goes on and saves its draft"
        )


def trained_for(path: str) -> str | None:
    """The fingerprint of the weights that the draft in a folder was trained for; None where nobody wrote it down."""
    target = read_metadata(path).target
    return None if target is None else target.weights


def check_target_weights(path: str, target: Target) -> None:
    """A warning for a draft that was trained for another target. It decodes losslessly, and accepts less."""
    then = trained_for(path)
    if then is not None and target.identity.weights not in (None, then):
        damage.warn_once(
            f"draft {path!r} was trained for a target with weights {then}, and {target.name!r} has "
            f"{target.identity.weights}: what it decodes is this target's text, and fewer of its tokens may be accepted"
        )


def check_saved_tokenizer(path: str) -> None:
    """UserError if the tokenizer in a draft's folder is not the one that draftsmith.json names."""
    recorded = read_metadata(path).tokenizer_hash
    there = any((Path(path) / name).is_file() for name in ("tokenizer.json", "tokenizer.model"))
    if recorded is None or not there:
        return
    found = tokenizer_fingerprint(load_tokenizer(path))
    if found != recorded:
        raise UserError(
            f"draft {path!r} was trained for tokenizer {recorded}, and the one in its folder is {found}: copy the "
            "tokenizer files of its target into the folder, or train the draft again"
        )


def check_target(path: str, target: Target) -> None:
    """UserError for heads that were trained on a target with another tokenizer; a warning if that is not recorded."""
    metadata = read_metadata(path)
    if not metadata.is_known:
        warnings.warn(
            f"draft {path!r} was not made here: it names no tokenizer to compare with that of {target.name!r}, only "
            "the vocabulary sizes are compared",
            stacklevel=2,
        )
        return
    if metadata.tokenizer_hash is None:
        raise UserError(
            f"{path}/{METADATA_FILE} names no tokenizer_hash: train the draft again or restore the file"
        )
    check_tokenizer(path, metadata.tokenizer_hash, target)


def check_vocabulary(path: str, target: Target) -> Any:
    """The tokenizer of a causal draft, which gives no id that it shares with the target's to another token: either may
    have tokens that the other lacks. UserError names the first id that they give to different tokens."""
    tokenizer = load_tokenizer(path)
    same = tokenizer_fingerprint(tokenizer) == target.fingerprint
    found = None if same else disagreement(tokenizer, target.tokenizer)
    if found is not None:
        raise UserError(
            f"draft {path!r} and target {target.name!r} disagree on token ids, {found}: use a draft trained for this "
            "target's tokenizer, or a copy with its vocabulary (scripts/export.py --format transplant)"
        )
    return tokenizer


def check_tokenizer(path: str, draft_fingerprint: str, target: Target) -> None:
    """UserError naming both tokenizers if draft and target would decode the same ids to different text. Where the
    target that the draft was trained for still has its tokenizer, vocabularies that extend each other are one
    (`disagreement`); else only equal ones are."""
    if draft_fingerprint == target.fingerprint:
        return
    trained = read_metadata(path).target or TargetRecord()
    name, revision = trained.name or None, trained.revision
    found, _ = compare_tokenizers(draft_fingerprint, name, revision, target.tokenizer)
    if found is not None:
        raise UserError(
            f"draft {path!r} (tokenizer {draft_fingerprint}) and target {target.name!r} (tokenizer "
            f"{target.fingerprint}) disagree on token ids{', ' * bool(found)}{found}: use a draft trained for this "
            "target's tokenizer"
        )
