"""The manifest of a sampled set: sets that lost, gained or changed rows are refused, and sampling mends them."""

import dataclasses
import functools
import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pyarrow.parquet as pq
import pytest

from decode.common.errors import UserError
from decode.common.typed_json import to_json
from tests import worlds
from tests.rows import sample_row
from train.data.manifest import Manifest, load_set, read_manifest, set_damaged_aside, write_manifest
from train.data.sample_store import row_ends, write_shard

MANIFEST = Manifest(
    target="tiny", revision="main", tokenizer_hash="aa", chat_template_hash=None,
    sampling={"temperature": 1.0}, seed=7, counts={"asked": 7, "answered": 6, "failed": 1},
    git_sha=None, versions={"torch": "2"},
)  # fmt: skip
IDS = {f"{shard}{i}" for shard in "abc" for i in (0, 1)}
row = functools.partial(sample_row, [5, 6, 7, 8], [[1, 2], [3, 4]])


def finished(folder: Path) -> Path:
    """A set of three shards of two rows each."""
    for name in "abc":
        write_shard(folder, [row(f"{name}0"), row(f"{name}1")], name)
    write_manifest(folder, MANIFEST)
    return folder


def drop_list(folder: Path) -> None:
    """Makes the manifest that of an earlier version."""
    path = folder / "manifest.json"
    content = json.loads(path.read_text())
    del content["shards"]
    path.write_text(json.dumps(content))


def edit(path: Path) -> None:
    """Changes a token as an editor of parquet files would: page checksums are right again."""
    table = pq.read_table(path).to_pylist()
    path.unlink()
    write_shard(path.parents[1], [{**found, "input_ids": [1, 2, 3, 4]} for found in table], "b")


def truncate(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-40])


def add_foreign(path: Path) -> None:
    write_shard(path.parents[1], [row("z0")], "z")


Damage = Callable[[Path], object]
DAMAGES: dict[str, tuple[Damage, str]] = {
    "missing": (Path.unlink, "shard b.parquet with 2 rows is missing"),
    "truncated": (truncate, "shard b.parquet is damaged or was altered"),
    "flipped": (lambda path: worlds.flip_byte(path, 200), "shard b.parquet is damaged or was"),
    "altered": (edit, "shard b.parquet is damaged or was altered"),
    "empty": (lambda path: path.write_bytes(b""), "shard b.parquet is damaged or was altered"),
    "foreign": (add_foreign, "shard z.parquet is not listed"),
    "doubled": (lambda path: shutil.copy(path, path.with_name("d.parquet")), "shard d.parquet is"),
    "renamed": (lambda path: path.rename(path.with_name("d.parquet")), "and 1 more of its shards"),
}


@pytest.mark.parametrize("what", DAMAGES)
def test_damage_is_refused_with_advice(tmp_path: Path, what: str) -> None:
    """Bug: a set that lost or gained rows is trained on in silence."""
    damage, message = DAMAGES[what]
    folder = finished(tmp_path)
    assert len(load_set(folder)[1]) == 6
    damage(folder / "shards" / "b.parquet")
    with pytest.raises(UserError) as refusal:
        load_set(folder)
    assert message in str(refusal.value)
    assert "run the train/sample.py command that made it again" in str(refusal.value)


@pytest.mark.parametrize("what", DAMAGES)
def test_exactly_what_is_lost_is_made_again(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], what: str
) -> None:
    """Bug: the sampling command stops at a damaged shard, keeps foreign rows, or answers intact prompts again."""
    folder = finished(tmp_path)
    DAMAGES[what][0](folder / "shards" / "b.parquet")
    set_damaged_aside(folder, IDS)
    lost = {"b0", "b1"} if what not in ("foreign", "doubled", "renamed") else set()
    assert set(row_ends(folder)) == IDS - lost
    assert capsys.readouterr().err.count("warning: shard ") == 1
    aside = [path.name for path in (folder / "shards").glob("*.damaged")]
    at = {"foreign": "z", "doubled": "d"}.get(what, "b")
    assert aside == ([] if what in ("missing", "renamed") else [f"{at}.parquet.damaged"])
    for name in lost:
        write_shard(folder, [row(name)], f"new-{name}")
    write_manifest(folder, MANIFEST)
    assert {found["id"] for found in load_set(folder)[1]} == IDS


def test_nothing_is_said_of_an_intact_set(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Bug: rows of a run that was killed, or of an earlier run with more prompts, are thrown away."""
    folder = finished(tmp_path)
    before = worlds.contents(folder)
    set_damaged_aside(folder, {"a0"})  # --resume true with fewer prompts
    assert worlds.contents(folder) == before
    write_shard(folder, [row("n0")], "n")  # --resume true with more prompts was killed
    set_damaged_aside(folder, IDS | {"n0"})
    (folder / "manifest.json").unlink()  # a first run was killed
    set_damaged_aside(folder, IDS | {"n0"})
    assert set(row_ends(folder)) == IDS | {"n0"}
    assert capsys.readouterr().err == ""


def test_a_damaged_manifest_is_written_again(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Bug: a manifest of zeros stops the command that would write it."""
    folder = finished(tmp_path)
    (folder / "manifest.json").write_bytes(b"\0" * 100)
    set_damaged_aside(folder, IDS)
    assert set(row_ends(folder)) == IDS
    assert "manifest.json" in capsys.readouterr().err


def test_a_set_of_an_earlier_version_is_counted(tmp_path: Path) -> None:
    """Bug: sets without a list of shards cannot be read any more, or are not checked at all."""
    folder = finished(tmp_path)
    drop_list(folder)
    manifest, rows = load_set(folder)
    assert (manifest.shards, len(rows)) == (None, 6)
    (folder / "shards" / "b.parquet").unlink()
    with pytest.raises(UserError, match="has 4 rows and its manifest counts 6"):
        load_set(folder)


def test_an_unfinished_set_is_said(tmp_path: Path) -> None:
    """Bug: a sampling run that was killed is trained on, or called a damaged file."""
    folder = finished(tmp_path)
    (folder / "manifest.json").unlink()
    with pytest.raises(UserError, match="holds no finished set.*run train/sample.py"):
        load_set(folder)


def test_manifest_comes_back_as_written(tmp_path: Path) -> None:
    """Bug: a field is lost on the way, or a field added by a later version is an error."""
    write_manifest(tmp_path, MANIFEST)
    written = dataclasses.replace(MANIFEST, shards={})
    assert read_manifest(tmp_path) == written
    path = tmp_path / "manifest.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "new": 1}))
    assert read_manifest(tmp_path) == written


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (None, "holds no set"),
        ("{", "is not valid JSON"),
        ("[]", "is damaged .it is not a mapping."),
        ('{"target": "x"}', "is damaged .it has no 'revision'."),
        (json.dumps(to_json(MANIFEST) | {"shards": [1]}), "is damaged"),
        (json.dumps(to_json(MANIFEST) | {"shards": {"a": 1}}), "is damaged"),
        (json.dumps(to_json(MANIFEST) | {"counts": 3}), "is damaged"),
    ],
)
def test_bad_manifest_is_named(tmp_path: Path, text: str | None, message: str) -> None:
    """Bug: a missing or old manifest ends in a traceback."""
    if text is not None:
        (tmp_path / "manifest.json").write_text(text)
    with pytest.raises(UserError, match=message) as refusal:
        read_manifest(tmp_path)
    assert "manifest.json" in str(refusal.value)
