"""manifest.json of a sampled set: how it was made and which shards it has; sets whose shards are others are refused.

Sampling writes it at its end, so a set without one is not finished. It counts the rows of every shard and has its
checksum. Manifests of earlier versions only have the number of all rows.
"""

import json
from collections import Counter
from collections.abc import Iterable, Set
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from decode.common import damage, files
from decode.common.errors import UserError
from decode.common.published import Argument, Digest, Name, Place, Private, Revision, Version, Word
from decode.common.target_record import ModelFingerprint
from decode.common.typed_json import Omitted, WrongTypeError, from_json, to_json
from train.data import sample_store
from train.data.sample_store import SampleStore

MANIFEST_FILE = "manifest.json"
ADVICE = (
    "run the train/sample.py command that made it again, which answers what is missing and nothing else, or download "
    "the set again"
)
MOST_TEMPLATES = 16
"""Arguments of rows that a manifest lists: a date in each row would fill it."""


@dataclass(frozen=True, kw_only=True)
class ShardRecord:
    rows: int | None = None
    sha256: Digest


@dataclass(frozen=True)
class RowTemplate:
    """Arguments of the chat template that rows have of their own, and how many rows have them."""

    arguments: dict[Name, Argument]
    prompts: int


@dataclass(frozen=True)
class Manifest:
    """How a sampled set was made. `counts`: asked = answered + failed + answers_too_short + skipped."""

    target: Place
    revision: Revision | None
    tokenizer_hash: Digest
    chat_template_hash: Digest | None
    sampling: dict[Word, float | None]
    seed: int
    counts: dict[Word, int]
    git_sha: Digest | None
    versions: dict[Word, Version]
    shards: Private[Omitted[dict[str, ShardRecord]]] = None
    """By file name; None in a manifest of an earlier version."""
    engine: Word = "local"
    """Who answered: local or openai, see SampleConfig."""
    encoder_decoder: bool = False
    """The target is one: what stands before a row's loss span is the encoder's input, what stands in it is the answer.
    The decoder's start token is not stored."""
    fingerprints: list[ModelFingerprint] = field(default_factory=list)
    """The targets that answered, as the shards name them: one, unless others were allowed; none for texts as they
    stand and in a manifest of an earlier version."""
    template: dict[Name, Argument] = field(default_factory=dict)
    """Which chat template rendered the prompts, and its arguments (`read_setting`); {}: the tokenizer's
    own."""
    row_templates: list[RowTemplate] = field(default_factory=list)
    """They stand above the arguments of `template`. The most frequent first, MOST_TEMPLATES at most; []: no row has
    any."""

    def templates(self) -> list[dict[str, Any]]:
        """Each setting that prompts were rendered with, the most frequent first."""
        own = [one.arguments for one in self.row_templates] or [{}]
        return [{**self.template, **arguments} for arguments in own]


def count_arguments(found: Iterable[dict[str, Any]]) -> list[RowTemplate]:
    """`Manifest.row_templates` of rows with these arguments of their own."""
    counts = Counter(json.dumps(own, sort_keys=True) for own in found)
    if set(counts) <= {"{}"}:
        return []
    frequent = counts.most_common(MOST_TEMPLATES)
    return [RowTemplate(json.loads(text), number) for text, number in frequent]


def write_manifest(folder: Path, manifest: Manifest) -> None:
    """Writes or replaces `<folder>/manifest.json`, with shards and their targets as they are in the folder now."""
    targets = [one for one in sample_store.targets_in(folder) if one is not None]
    content = to_json(replace(manifest, shards=describe_shards(folder), fingerprints=targets))
    files.write_atomically(folder / MANIFEST_FILE, json.dumps(content, indent=2) + "\n")


def read_manifest(folder: Path) -> Manifest:
    """The manifest of a sampled set; unknown fields are ignored. UserError if it is absent, damaged or incomplete."""
    path = folder / MANIFEST_FILE
    if not path.exists():
        state = "holds no finished set" if sample_store.shard_paths(folder) else "holds no set"
        raise UserError(f"{folder} {state}, it has no {MANIFEST_FILE}: run train/sample.py with it")
    try:
        return from_json(Manifest, files.read_json(path))
    except WrongTypeError as error:
        raise UserError(
            f"{path} is damaged ({error}): delete it and run train/sample.py again"
        ) from error


def describe_shards(folder: Path) -> dict[str, ShardRecord]:
    """Of the shards in the folder, by file name. UserError for one that cannot be read."""
    return {
        path.name: ShardRecord(rows=len(sample_store.ids_in(path)), sha256=damage.sha256(path))
        for path in sample_store.shard_paths(folder)
    }


def load_set(folder: Path) -> tuple[Manifest, SampleStore]:
    """The manifest and all rows of a finished set.

    UserError for a set that is not finished or has no rows, a shard that is missing, damaged, altered or not of the
    set, and for the errors of `sample_store.read_shards`.
    """
    manifest = read_manifest(folder)
    problems = shard_problems(folder, manifest)
    if problems:
        (name, problem), others = next(iter(problems.items())), len(problems) - 1
        more = f" (and {others} more of its shards cannot be used)" if others else ""
        raise UserError(f"{folder}: shard {name} {problem}{more}: {ADVICE}")
    rows = sample_store.read_shards(folder)
    counts = manifest.counts
    expected = counts.get("answered", len(rows)) + counts.get("answers_too_short", 0)
    if manifest.shards is None and expected != len(rows):
        raise UserError(
            f"{folder} has {len(rows)} rows and its manifest counts {expected}: {ADVICE}"
        )
    return manifest, rows


def shard_problems(folder: Path, manifest: Manifest) -> dict[str, str]:
    """{file name: what is wrong with it} of the shards that are not as the manifest says."""
    if manifest.shards is None:
        return {}
    there = {path.name: path for path in sample_store.shard_paths(folder)}
    problems = {}
    for name, entry in manifest.shards.items():
        if name not in there:
            problems[name] = f"with {entry.rows or 'its'} rows is missing"
        elif damage.sha256(there[name]) != entry.sha256:
            problems[name] = "is damaged or was altered"
    foreign = there.keys() - manifest.shards
    return problems | dict.fromkeys(sorted(foreign), f"is not listed in {MANIFEST_FILE}")


def set_damaged_aside(folder: Path, wanted: Set[str]) -> None:
    """Renames shards that cannot be used, each with a warning, so that rows with the ids in `wanted` are made again.

    These are shards that cannot be read or are not as the manifest says, that repeat an id, or that are not in the
    manifest and have no wanted id. To be called by one process before any reads the set.
    """
    problems: dict[str, str] = dict.fromkeys((x.name for x in sample_store.shard_paths(folder)), "")
    listed: Set[str] = frozenset()
    if (folder / MANIFEST_FILE).exists():
        try:
            manifest = read_manifest(folder)
            listed = (manifest.shards or {}).keys()
            found = shard_problems(folder, manifest)
            problems |= {name: what for name, what in found.items() if name in listed}
        except UserError as error:
            damage.warn(f"{error}; it is written again")
    seen: set[str] = set()
    # Of two shards that hold an id, the one stays that the manifest lists.
    for name in sorted(problems, key=lambda name: (name not in listed, name)):
        path, kept = folder / "shards" / name, ""
        problem = problems[name] or _other_problem(path, name in listed, seen, wanted)
        if problem and path.exists():
            kept = f"kept as {damage.move_aside(path).name}; "
        if problem:
            damage.warn(
                f"shard {path} {problem}: {kept}the rows that the set now lacks are made again"
            )


def _other_problem(path: Path, listed: bool, seen: set[str], wanted: Set[str]) -> str:
    """What is wrong with a shard by its rows, whose ids are added to `seen`; "" for nothing."""
    try:
        ids = sample_store.ids_in(path, check_rows=not listed)
    except UserError:
        return "is damaged"
    if len(set(ids)) < len(ids) or not seen.isdisjoint(ids):
        return "repeats ids"
    if not listed and wanted.isdisjoint(ids):
        return "has none of the prompts that are asked"
    seen.update(ids)
    return ""
