"""A disk that refuses: each command names the file or folder, loses nothing that is whole, and goes on afterwards."""

import errno
import json
import threading
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
import transformers
from huggingface_hub import constants

from decode.common.errors import UserError
from decode.model import loading
from decode.model.formats.made_folders import made_folder
from tests import worlds
from tests.decode.common.test_errors import caused, full, largest_file
from tests.decode.model.test_adapters import lora, write_adapter, write_base
from tests.decode.model.test_quantized import quantized
from tests.quantized import FORMS
from tests.worlds import Done, World
from train.teacher import feature_store
from train.teacher.feature_store import FeatureStore


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(constants, "HF_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache"


def words(command: str, world: World, data: Path, out: Path) -> list[object]:
    models = ["--target", world.target, "--out", out]
    source = json.dumps([{"kind": "file", "path": str(world.prompts)}])
    tasks = json.dumps([{"name": "own", "path": str(world.prompts), "limit": 4}])
    train = ["train/distill.py", *models, "--data", data, "--draft.init", world.draft]
    train += ["--loop.steps", 2, "--loop.batch_size", 4, "--loop.eval_every", 0]
    by_name: dict[str, list[object]] = {
        "sample": ["train/sample.py", *models, "--sources", source, "--max_new_tokens", 16],
        "train": train,
        "features": [*train, "--draft.init", "", "--draft.family", "eagle1", "--features", out.parent / "features"],
        "evaluate": ["eval/run.py", *models, "--tasks", tasks, "--max_new_tokens", 8,
                     "--methods", "[{name: ngram}]", "--temperatures", "[0.0]"],
    }  # fmt: skip
    return by_name[command]


def assert_refused(done: Done, out: Path, file: str) -> None:
    assert done.code == 2, done.err
    said = done.err.splitlines()[-1]
    assert said.startswith(f"error: {out.parent}/{file}"), said
    assert "File too large: the file system takes no file of this size" in said
    assert f"what is finished is kept in {out}, and the same command goes on" in said
    assert list(out.parent.rglob("*.tmp")) == []


@pytest.mark.parametrize(
    ("command", "size", "file"),
    [
        ("sample", 4_000, "out/shards/"),
        ("train", 100_000, "out/checkpoints/step-000002"),
        ("evaluate", 12_000, "out/report.json"),
    ],
)
def test_a_command_names_what_was_not_written_and_goes_on(
    world: World, data: Path, tmp_path: Path, command: str, size: int, file: str
) -> None:
    """The refusals are the system's own. Before, the error of most libraries named no file."""
    out = tmp_path / "out"
    line = words(command, world, data, out)
    with largest_file(size):
        done = worlds.call(*map(str, line))
    assert_refused(done, out, file)
    worlds.call(*map(str, line)).ok()


def test_features_name_their_shard(
    world: World, data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Their shards are small, so that the limit holds for them alone."""
    line = words("features", world, data, tmp_path / "out")
    real = FeatureStore.write

    def write(*args: Any) -> None:
        with largest_file(400):
            real(*args)

    with monkeypatch.context() as patch:
        patch.setattr(FeatureStore, "write", write)
        assert_refused(worlds.call(*map(str, line)), tmp_path / "out", "features/final/shards/")
    assert worlds.call(*map(str, line)).code == 0


def test_a_shard_that_may_not_be_read_is_not_taken_for_a_damaged_one(
    world: World, data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Bug: sampling set every shard aside and began anew, because a file could not be opened once."""
    out = tmp_path / "out"
    line = words("sample", world, data, out)
    assert worlds.call(*map(str, line)).code == 0
    before = worlds.contents(out / "shards")
    real = pq.ParquetFile

    def refused(path: Any, *more: Any, **named: Any) -> Any:
        if str(path).startswith(str(out)):
            raise OSError(errno.EMFILE, f"Failed to open local file '{path}'")
        return real(path, *more, **named)

    with monkeypatch.context() as patch:
        patch.setattr(pq, "ParquetFile", refused)
        done = worlds.call(*map(str, line))
    assert done.code == 2
    said = done.err.splitlines()[-1]
    assert f"error: {out}/shards/" in said
    assert "Too many open files" in said
    assert "raise the limit of open files" in said
    assert worlds.contents(out / "shards") == before


def test_features_that_may_not_be_read_are_not_made_again(
    world: World, data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "out"
    line = words("features", world, data, out)
    assert worlds.call(*map(str, line)).code == 0
    before = worlds.contents(tmp_path / "features")

    def refused(path: Any, *_: Any) -> Any:
        raise PermissionError(errno.EACCES, "Permission denied", str(path))

    with monkeypatch.context() as patch:
        patch.setattr(feature_store, "safe_open", refused)
        done = worlds.call(*map(str, line), "--overwrite", "true")
    assert done.code == 2
    assert f"error: {tmp_path}/features/" in done.err
    assert "Permission denied: change its permissions" in done.err
    assert worlds.contents(tmp_path / "features") == before


# ---- loading ----


@pytest.mark.parametrize("part", ["AutoConfig", "AutoModelForCausalLM", "AutoTokenizer"])
@pytest.mark.parametrize(
    ("refusal", "said"),
    [
        (lambda: caused(PermissionError(errno.EACCES, "Permission denied", "CACHE/hub/models--a--b")),
         "CACHE/hub/models--a--b: Permission denied: change its permissions, or name another path, or set HF_HOME"),
        (lambda: caused(full()), "CACHE: No space left on device: free some space, or set HF_HOME"),
        (lambda: RuntimeError("Data processing error: Disk quota exceeded (os error 122)"), "CACHE: Disk quota"),
        (lambda: NotADirectoryError(errno.ENOTDIR, "Not a directory", "CACHE/hub"), "CACHE/hub: Not a directory"),
        (lambda: OSError(errno.EROFS, "Read-only file system", "CACHE/hub/x"), "CACHE/hub/x: Read-only file system"),
    ],
)  # fmt: skip
def test_a_cache_that_refuses_is_named(
    world: World, cache: Path, monkeypatch: pytest.MonkeyPatch, part: str, refusal: Any, said: str
) -> None:
    """Bug: "restore its files" for files that are whole, or not yet here."""
    raised = refusal()
    for error in (raised, raised.__cause__):
        if isinstance(error, OSError) and error.filename:
            error.filename = str(error.filename).replace("CACHE", str(cache))

    def load(*_: Any, **__: Any) -> Any:
        raise raised

    monkeypatch.setattr(getattr(transformers, part), "from_pretrained", load)
    with pytest.raises(UserError) as caught:
        loading.load_target(str(world.target), "cpu")
    line = str(caught.value)
    assert f"{str(world.target)!r} cannot be loaded: {said.replace('CACHE', str(cache))}" in line
    assert "restore" not in line
    assert "\n" not in line


@pytest.mark.parametrize(
    ("refusal", "said"),
    [
        (PermissionError(errno.EACCES, "Permission denied", "/m/x.safetensors"), "/m/x.safetensors: Permission"),
        (Exception("Input/output error (os error 5)"), "TARGET: Input/output error: check the disk"),
        (OSError(errno.EMFILE, "Too many open files"), "TARGET: Too many open files: raise the limit"),
    ],
)  # fmt: skip
def test_a_folder_that_may_not_be_read_is_named(
    world: World, cache: Path, monkeypatch: pytest.MonkeyPatch, refusal: Exception, said: str
) -> None:
    def load(*_: Any, **__: Any) -> Any:
        raise refusal

    monkeypatch.setattr(transformers.AutoModelForCausalLM, "from_pretrained", load)
    with pytest.raises(UserError) as caught:
        loading.load_target(str(world.target), "cpu")
    assert f"cannot be loaded: {said.replace('TARGET', str(world.target))}" in str(caught.value)
    assert "HF_HOME" not in str(caught.value)


# ---- folders made of a model's files ----


def fill(text: str) -> Any:
    def make(folder: Path) -> None:
        (folder / "a").write_text(text)
        (folder / "last").write_text("")

    return make


def test_a_folder_is_made_once_by_many_at_a_time(cache: Path) -> None:
    """Catches two processes that each take the memory of a whole model, and the one's half folder in the other's."""
    made: list[int] = []
    begun = threading.Event()

    def make(folder: Path) -> None:
        made.append(1)
        begun.wait(1)
        assert list(folder.iterdir()) == []
        fill("x")(folder)

    found: list[Path] = []
    threads = [
        threading.Thread(target=lambda: found.append(made_folder("k", "n", "last", "it", make)))
        for _ in range(3)
    ]
    for thread in threads:
        thread.start()
    begun.set()
    for thread in threads:
        thread.join()
    assert len(made) == 1
    assert found == [cache / "draftsmith" / "k" / "n"] * 3
    assert sorted(file.name for file in (cache / "draftsmith" / "k").iterdir()) == ["n"]


def test_what_a_kill_left_is_not_used(cache: Path) -> None:
    """A folder without its last file is no folder, whichever name it has."""
    for name in ("n", "n.partial"):
        (cache / "draftsmith" / "k" / name).mkdir(parents=True)
        (cache / "draftsmith" / "k" / name / "old").write_text("half")
    folder = made_folder("k", "n", "last", "it", fill("new"))
    assert {file.name: file.read_text() for file in folder.iterdir()} == {"a": "new", "last": ""}
    assert sorted(file.name for file in folder.parent.iterdir()) == ["n"]


def test_a_failure_leaves_nothing_and_stays_what_it_was(cache: Path) -> None:
    def fail(folder: Path) -> None:
        fill("x")(folder)
        raise ValueError("no such tensor")

    with pytest.raises(ValueError, match="no such tensor"):
        made_folder("k", "n", "last", "it", fail)
    assert list((cache / "draftsmith" / "k").iterdir()) == []


def test_quantised_weights_and_adapters_name_the_cache(tmp_path: Path, cache: Path) -> None:
    """Bug: "restore its files" for quantised weights that are whole."""
    quantised = tmp_path / "quantised"
    quantized(next(iter(FORMS)), quantised)
    with largest_file(2_000), pytest.raises(UserError) as caught:
        loading.load_model(str(quantised), "target", "cpu", "float32")
    line = str(caught.value)
    assert line.startswith(f"{str(quantised)!r} is converted in the cache: ")
    assert f"{cache}/draftsmith/quantized/" in line
    assert "File too large" in line
    assert "set HF_HOME" in line
    adapter = tmp_path / "lora"
    write_adapter(adapter, write_base(tmp_path / "base"), lora())
    with largest_file(20_000), pytest.raises(UserError) as caught:
        loading.load_model(str(adapter), "target", "cpu", "float32")
    line = str(caught.value)
    assert line.startswith(
        f"target {str(adapter)!r}, an adapter, is converted in the cache: {cache}"
    )
    assert "File too large" in line
    for kind in ("quantized", "adapters"):
        assert list((cache / "draftsmith" / kind).iterdir()) == []
