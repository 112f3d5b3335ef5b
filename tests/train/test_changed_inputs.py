"""A target, a sampled set or a first draft that is replaced between two starts is noticed by its content."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
from safetensors.torch import load_file, save_file

from decode.common.target_record import ModelFingerprint
from decode.model.fingerprint import weights_fingerprint
from tests import worlds
from tests.worlds import Done, World, contents
from train.data import sample_store
from train.data.manifest import read_manifest, write_manifest

SAMPLE, DISTILL = "train/sample.py", "train/distill.py"
NORM = "model.norm.weight"
Rows = dict[str, list[int]]


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> World:
    return worlds.build(tmp_path_factory.mktemp("base"), prompts=12, layers=1)


@pytest.fixture
def world(base: World, tmp_path: Path) -> World:
    """A copy of its own, to be altered."""
    return worlds.copied(base, tmp_path / "world")


def tune(folder: Path, factor: float = 3.0, tensor: str = NORM) -> None:
    """Puts other weights into a model's folder."""
    file = folder / "model.safetensors"
    tensors = load_file(file)
    tensors[tensor] = tensors[tensor].flip(0) * factor
    save_file(tensors, file, metadata={"format": "pt"})


def edit_config(folder: Path, **fields: Any) -> None:
    file = folder / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | fields))


def weights(folder: Path) -> str:
    return str(weights_fingerprint(str(folder)))


def sample(world: World, out: Path, *more: object) -> Done:
    sources = json.dumps([{"kind": "file", "path": str(world.prompts)}])
    return worlds.call(
        SAMPLE, "--target", world.target, "--sources", sources, "--out", out, "--max_new_tokens", 12,
        "--batch_size", 3, "--shard_rows", 4, "--device", "cpu", *more,
    )  # fmt: skip


def sample_texts(world: World, out: Path) -> Done:
    """The world's texts as they stand: nobody answers them."""
    path = world.prompts.with_name("texts.jsonl")
    path.write_text(world.prompts.read_text().replace('{"prompt":', '{"text":'))
    sources = json.dumps([{"kind": "file", "path": str(path)}])
    return sample(world, out, "--sources", sources, "--origin", "text")


def stopped(world: World, out: Path) -> Rows:
    """A set whose sampling was killed after two of three shards; returns their rows."""
    assert sample(world, out).code == 0
    shards = sorted((out / "shards").glob("*.parquet"))
    assert len(shards) == 3
    shards[-1].unlink()
    (out / "manifest.json").unlink()
    return rows_of(out)


def rows_of(out: Path) -> Rows:
    return {row["id"]: list(row["input_ids"]) for row in sample_store.read_shards(out)}


def assert_refused(done: Done, out: Path, before: dict[str, str], *words: str) -> None:
    """One line with these words that names the setting to go on with; nothing in `out` has changed."""
    error = done.error()
    for word in (*words, "--allow_changed true"):
        assert word in error
    assert contents(out) == before


# ---- train/sample.py ----


def test_sampling_goes_on_with_the_same_target_only(world: World, tmp_path: Path) -> None:
    """Bug: the rows of a set are of two targets, and nobody is told."""
    out, then = tmp_path / "out", weights(world.target)
    kept = stopped(world, out)
    before = contents(out)
    tune(world.target)
    now = weights(world.target)
    assert_refused(sample(world, out), out, before, "another target", then, now)
    done = sample(world, out, "--allow_changed", "true").ok()
    assert f"weights {then} then, {now} now" in done.err
    assert sample(world, tmp_path / "fresh").code == 0
    fresh, found = rows_of(tmp_path / "fresh"), rows_of(out)
    assert found == {name: kept.get(name, ids) for name, ids in fresh.items()}
    assert found != fresh
    told = read_manifest(out).fingerprints
    assert sorted(one.weights for one in told) == sorted([then, now])
    again = sample(world, out)  # a part of it is still of the other one
    assert then in again.error()


OTHER_TARGETS: dict[str, Callable[[Path], None]] = {
    "head alone": lambda folder: tune(folder, tensor="lm_head.weight"),
    "a little": lambda folder: tune(folder, 1.001),
    "rope_theta": lambda folder: edit_config(folder, rope_parameters={"rope_type": "default", "rope_theta": 77.0}),
    "eps": lambda folder: edit_config(folder, rms_norm_eps=0.1),
    "finished set": lambda folder: tune(folder),
}  # fmt: skip


@pytest.mark.parametrize("what", OTHER_TARGETS)
def test_every_kind_of_other_target_is_noticed(world: World, tmp_path: Path, what: str) -> None:
    """Bug: only large changes, only weights, or only unfinished sets are looked at."""
    out, then = tmp_path / "out", weights(world.target)
    if what == "finished set":
        assert sample(world, out).code == 0
    else:
        stopped(world, out)
    before = contents(out)
    OTHER_TARGETS[what](world.target)
    assert_refused(sample(world, out), out, before, then, weights(world.target))


def test_another_dtype_of_the_same_weights_is_noticed(world: World, tmp_path: Path) -> None:
    """Bug: --resume true, which allows other settings, mixes answers of two arithmetics."""
    out = tmp_path / "out"
    stopped(world, out)
    before = contents(out)
    more = ["--dtype", "bfloat16", "--resume", "true"]
    assert_refused(sample(world, out, *more), out, before, "dtype float32 then, bfloat16 now")
    for path in (out / "shards").glob("*.parquet"):  # as if bfloat16 had answered
        earlier = json.dumps({"weights": weights(world.target), "dtype": "bfloat16"})
        pq.write_table(
            pq.read_table(path).replace_schema_metadata({sample_store.TARGET_KEY: earlier}), path
        )
    before = contents(out)
    assert_refused(sample(world, out), out, before, "dtype bfloat16 then, float32 now")
    assert sample(world, out, "--allow_changed", "true").code == 0
    assert {one.dtype for one in read_manifest(out).fingerprints} == {"float32", "bfloat16"}


def test_a_copy_of_the_target_goes_on(world: World, tmp_path: Path) -> None:
    """Bug: the target is its path: a copied, sharded or renamed folder is another one."""
    out = tmp_path / "out"
    assert sample(world, tmp_path / "undisturbed").code == 0
    stopped(world, out)
    copy = shutil.copytree(world.target, tmp_path / "elsewhere")
    done = sample(world, out, "--target", copy, "--resume", "true").ok()
    assert "warning" not in done.err
    assert rows_of(out) == rows_of(tmp_path / "undisturbed")
    [told] = read_manifest(out).fingerprints
    assert told == ModelFingerprint(weights=weights(world.target), dtype="float32")


def test_shards_of_earlier_versions_go_on(world: World, tmp_path: Path) -> None:
    """Bug: what was sampled before shards named their target cannot be finished."""
    out = tmp_path / "out"
    stopped(world, out)
    for path in (out / "shards").glob("*.parquet"):
        pq.write_table(pq.read_table(path).replace_schema_metadata(None), path)
    tune(world.target)
    done = sample(world, out).ok()
    [said] = [line for line in done.err.splitlines() if "warning" in line]
    assert "name no target" in said


def test_texts_as_they_stand_are_of_no_target(world: World, tmp_path: Path) -> None:
    """Bug: a set without any answer is refused because weights changed that nobody used."""
    out = tmp_path / "out"
    assert sample_texts(world, out).code == 0
    tune(world.target)
    sample_texts(world, out).ok()
    assert read_manifest(out).fingerprints == []


# ---- train/distill.py ----


def distill(world: World, data: object, out: Path, *more: object) -> Done:
    return worlds.call(
        DISTILL, "--target", world.target, "--data", data, "--draft.init", world.draft, "--out", out,
        "--loop.steps", 4, "--loop.batch_size", 2, "--loop.micro_batch", 2, "--loop.save_every", 2,
        "--loop.eval_every", 0, "--loop.log_every", 1, *more,
    )  # fmt: skip


@pytest.fixture
def data(world: World, tmp_path: Path) -> Path:
    assert sample(world, tmp_path / "data").code == 0
    return tmp_path / "data"


def replaced_set(world: World, data: Path) -> None:
    """The same prompts, answered with another seed."""
    shutil.rmtree(data)
    assert sample(world, data, "--seed", 9).code == 0


def extended_set(world: World, data: Path) -> None:
    worlds.write_prompts(world.prompts, [*world.texts, "another prompt", "and one more"])
    sample(world, data).ok()


def shortened_set(world: World, data: Path) -> None:
    """A shard is gone, and a manifest says that this is right."""
    manifest = read_manifest(data)
    sorted((data / "shards").glob("*.parquet"))[0].unlink()
    write_manifest(data, manifest)


def tuned_target(world: World, data: Path) -> None:
    """Other weights, and their own answers: the target and its set go together."""
    tune(world.target)
    shutil.rmtree(data)
    assert sample(world, data).code == 0


CHANGES: dict[str, tuple[Callable[[World, Path], None], str]] = {
    "target and set": (tuned_target, "target: weights"),
    "set": (replaced_set, "samples: "),
    "set extended": (extended_set, "samples: "),
    "set shortened": (shortened_set, "samples: "),
    "first draft": (lambda world, data: tune(world.draft), "draft.init: "),
}


@pytest.mark.parametrize("what", CHANGES)
def test_training_goes_on_with_the_same_inputs_only(
    world: World, data: Path, tmp_path: Path, what: str
) -> None:
    """Bug: the first steps are trained on one thing and the others on another, or the draft names only the last."""
    out, (change, words) = tmp_path / "out", CHANGES[what]
    assert distill(world, data, out).code == 0
    facts = json.loads((out / "draftsmith.json").read_text())
    assert facts["target"]["weights"] == weights(world.target)
    [learned] = facts["inputs"]
    assert learned["data"] == [sample_store.rows_digest(sample_store.read_shards(data))]
    before = contents(out)
    change(world, data)
    assert_refused(distill(world, data, out), out, before, words, "step-000004")
    more = ["--resume", "true", "--loop.steps", 6]
    done = distill(world, data, out, *more, "--allow_changed", "true").ok()
    assert words in done.err
    facts = json.loads((out / "draftsmith.json").read_text())
    assert facts["target"]["weights"] == weights(world.target)
    assert facts["inputs"][0] == learned
    assert len(facts["inputs"]) == 2
    done = distill(world, data, out, *more).ok()  # the last checkpoint is of what was allowed
    assert "warning" not in done.err


def test_another_targets_answers_are_not_trained_on(
    world: World, data: Path, tmp_path: Path
) -> None:
    """Bug: a draft learns one target's distributions on another one's text from the first step on."""
    out, then = tmp_path / "out", weights(world.target)
    tune(world.target)
    error = distill(world, data, out).error()
    for word in (then, weights(world.target), str(data), "--allow_changed true"):
        assert word in error
    assert not out.exists()
    mixed = json.dumps([{"path": str(data)}, {"path": str(data), "weight": 2}])
    assert then in distill(world, mixed, out).error()
    done = distill(world, data, out, "--allow_changed", "true").ok()
    assert f"weights {then} then" in done.err


def test_answers_in_another_dtype_are_said_and_used(
    world: World, data: Path, tmp_path: Path
) -> None:
    """Bug: sampling in bfloat16 and teaching in float32, which is usual, is refused, or passed over."""
    manifest = json.loads((data / "manifest.json").read_text())
    manifest["fingerprints"][0]["dtype"] = "bfloat16"
    (data / "manifest.json").write_text(json.dumps(manifest))
    done = distill(world, data, tmp_path / "out").ok()
    [said] = [line for line in done.err.splitlines() if "warning" in line]
    assert "answered in bfloat16, and the target teaches in float32" in said


def test_the_same_rows_elsewhere_go_on(world: World, data: Path, tmp_path: Path) -> None:
    """Bug: a set is its files: the same rows in other shards, or a copy of the target, end a training."""
    out = tmp_path / "out"
    assert distill(world, data, out).code == 0
    rows, target = list(sample_store.read_shards(data)), sample_store.targets_in(data)[0]
    manifest = read_manifest(data)
    shutil.rmtree(data / "shards")
    sample_store.write_shard(data, rows[::-1], "all", target)
    write_manifest(data, manifest)
    copy = shutil.copytree(world.target, tmp_path / "elsewhere")
    more = ["--target", copy, "--resume", "true", "--loop.steps", 6]
    done = distill(world, data, out, *more).ok()
    assert "warning" not in done.err


def test_what_earlier_versions_left_goes_on(world: World, data: Path, tmp_path: Path) -> None:
    """Bug: sets and checkpoints without fingerprints are refused."""
    out = tmp_path / "out"
    manifest = json.loads((data / "manifest.json").read_text())
    del manifest["fingerprints"]
    (data / "manifest.json").write_text(json.dumps(manifest))
    assert distill(world, data, out).code == 0
    for path in (out / "checkpoints").glob("step-*/contents.json"):
        found = json.loads(path.read_text())
        path.write_text(json.dumps({k: v for k, v in found.items() if k not in ("inputs", "sha256")}))  # fmt: skip
    tune(world.target)
    distill(world, data, out).ok()
    assert json.loads((out / "draftsmith.json").read_text())["target"]["weights"] == weights(world.target)  # fmt: skip


# ---- features ----


def test_features_are_of_one_target(world: World, tmp_path: Path) -> None:
    """Bug: stored states of other weights teach; or those of a copied folder, of the same weights, do not."""
    stored, texts, then = tmp_path / "features", tmp_path / "texts", weights(world.target)
    assert sample_texts(world, texts).code == 0  # a set that any target may read
    with_features = ["--features", stored]
    assert distill(world, texts, tmp_path / "first", *with_features).code == 0
    shards = contents(stored)
    copy = shutil.copytree(world.target, tmp_path / "elsewhere")
    distill(world, texts, tmp_path / "second", *with_features, "--target", copy).ok()
    assert (tmp_path / "first" / "model.safetensors").read_bytes() == (
        tmp_path / "second" / "model.safetensors"
    ).read_bytes()
    error = distill(world, texts, tmp_path / "third", *with_features, "--target_dtype", "bfloat16").error()  # fmt: skip
    assert "dtype float32 then, bfloat16 now" in error
    tune(world.target, 1.0, "lm_head.weight")
    error = distill(world, texts, tmp_path / "third", *with_features).error()
    for word in (f"weights {then} then, {weights(world.target)} now", "--allow_changed true"):
        assert word in error
    assert contents(stored) == shards
    assert not (tmp_path / "third").exists()
    done = distill(world, texts, tmp_path / "third", *with_features, "--allow_changed", "true").ok()
    assert then in done.err


def test_features_of_an_earlier_version_are_read(world: World, tmp_path: Path) -> None:
    """Bug: a folder whose manifest names a target by path and a digest of a few values is made again, or refused."""
    stored, texts = tmp_path / "features", tmp_path / "texts"
    assert sample_texts(world, texts).code == 0
    assert distill(world, texts, tmp_path / "first", "--features", stored).code == 0
    for path in stored.glob("*/manifest.json"):
        found = json.loads(path.read_text())
        del found["targets"]
        earlier = {"target": "t", "revision": None, "weights": "0" * 16, "dtype": "float32"}
        path.write_text(json.dumps(found | earlier))
    before = contents(stored)
    distill(world, texts, tmp_path / "second", "--features", stored).ok()
    assert contents(stored) == before
