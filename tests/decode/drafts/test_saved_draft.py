"""A draft whose files were changed after training is seen where it is loaded, decoded with and published."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from decode.checkpoints.draft_folder import (
    METADATA_FILE,
    check_saved_draft,
    draft_sha256,
    is_altered,
)
from decode.common.errors import UserError
from decode.drafts.registry import load_draft
from decode.model.loading import load_target
from tests import drafts, worlds
from tests.worlds import World
from train.hub import publish
from train.hub.evidence import Evidence

WEIGHTS = "model.safetensors"


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> World:
    return worlds.build(tmp_path_factory.mktemp("world"), prompts=3)


@pytest.fixture
def trained(world: World, tmp_path: Path) -> Path:
    """A causal draft with what training writes into draftsmith.json."""
    folder = tmp_path / "draft"
    shutil.copytree(world.draft, folder)
    target = load_target(str(world.target), "cpu")
    sha256 = draft_sha256(str(folder))
    facts = {"family": "causal", "tokenizer_hash": target.fingerprint, "draft_sha256": sha256}
    (folder / METADATA_FILE).write_text(json.dumps(facts))
    return folder


def alter(folder: Path) -> None:
    """Other weights of the same shapes."""
    weights = load_file(folder / WEIGHTS)
    weights["model.norm.weight"] += 0.5
    save_file(weights, folder / WEIGHTS, metadata={"format": "pt"})


def test_other_weights_are_said_once(
    world: World, trained: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Bug: a draft that was changed after training decodes under the name of the one that was measured."""
    target = load_target(str(world.target), "cpu")
    load_draft(str(trained), target)
    assert "warning" not in capsys.readouterr().err
    alter(trained)
    for _ in range(2):
        load_draft(str(trained), target)
    [said] = [line for line in capsys.readouterr().err.splitlines() if "warning" in line]
    assert said.startswith(f"warning: draft {str(trained)!r} has other weights")
    (trained / METADATA_FILE).write_text('{"family": "causal"}')  # an early version
    load_draft(str(trained), target)
    assert "warning" not in capsys.readouterr().err


def test_decoding_says_it_and_a_report_records_it(
    world: World, trained: Path, tmp_path: Path
) -> None:
    """Bug: a report calls the measurement of altered weights that of the draft."""
    alter(trained)
    tasks = json.dumps([{"name": "t", "path": str(world.prompts)}])
    methods = json.dumps([{"name": "small", "draft": str(trained)}, {"name": "ngram"}])
    done = worlds.call(
        "eval/run.py", "--target", world.target, "--tasks", tasks, "--methods", methods,
        "--out", tmp_path / "out", "--max_new_tokens", 4, "--temperatures", "[0]",
    )  # fmt: skip
    assert done.code == 0, done.err
    assert done.err.count("warning: draft") == 1
    report = json.loads((tmp_path / "out" / "report.json").read_text())
    altered = {m["name"]: m["draft_altered"] for m in report["methods"]}
    assert altered == {"plain": False, "small": True, "ngram": False}
    assert ", altered after training" in (tmp_path / "out" / "report.md").read_text()


def test_a_tokenizer_with_other_ids_is_refused(world: World, trained: Path) -> None:
    """Bug: a draft whose tokenizer.json was permuted is loaded, or published for engines to read."""
    check_saved_draft(str(trained))
    for file in world.stranger.glob("tokenizer*"):
        shutil.copy(file, trained)
    with pytest.raises(UserError, match="was trained for tokenizer .* the one in its folder is"):
        load_draft(str(trained), load_target(str(world.target), "cpu"))


@pytest.mark.parametrize("family", ["eagle3", "medusa"])
def test_a_tokenizer_with_other_ids_is_not_published(
    world: World, tmp_path: Path, family: str
) -> None:
    """Bug: heads, which do not read their own tokenizer, are published with a permuted one."""
    target = load_target(str(world.target), "cpu")
    folder = drafts.draft(tmp_path / "d", family, tokenizer_hash=target.fingerprint)
    shutil.copy(world.target / "tokenizer.json", folder)
    shutil.copy(world.target / "tokenizer_config.json", folder)
    publish.check_draft(folder, Evidence())
    shutil.copy(world.stranger / "tokenizer.json", folder)
    with pytest.raises(UserError, match="was trained for tokenizer"):
        publish.check_draft(folder, Evidence())


def test_every_shard_counts(tmp_path: Path) -> None:
    """Bug: a draft in several files has no checksum, so that nothing can be compared with it."""
    (tmp_path / "config.json").write_text("{}")
    for part in (1, 2):
        save_file({f"w{part}": torch.ones(2)}, tmp_path / f"model-0000{part}-of-00002.safetensors")
    before = draft_sha256(str(tmp_path))
    assert before is not None
    (tmp_path / METADATA_FILE).write_text(json.dumps({"draft_sha256": before}))
    assert not is_altered(str(tmp_path), draft_sha256(str(tmp_path)))
    worlds.flip_byte(tmp_path / "model-00002-of-00002.safetensors", -1)
    assert is_altered(str(tmp_path), draft_sha256(str(tmp_path)))
