"""Measurements of one target are not continued with another, and a draft of another target is named."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file

from decode.checkpoints.draft_folder import draft_sha256
from decode.common import damage, provenance
from decode.common.errors import UserError
from decode.common.journal import Journal
from decode.common.run_dir import RunFolder
from decode.common.target_record import ModelFingerprint
from decode.common.typed_json import from_json, to_json
from decode.drafts.registry import load_draft
from decode.model.fingerprint import weights_fingerprint
from decode.model.loading import load_target
from eval.benchmark.config import earlier_targets, open_journal
from eval.reporting.summary import other_targets_lines
from eval.results.report import EvalReport
from tests import drafts, worlds
from tests.worlds import Done, World, contents


@pytest.fixture(scope="module")
def original(tmp_path_factory: pytest.TempPathFactory) -> World:
    return worlds.build(tmp_path_factory.mktemp("base"), prompts=8, layers=1)


@pytest.fixture
def world(original: World, tmp_path: Path) -> World:
    """A copy of its own, to be altered."""
    return worlds.copied(original, tmp_path / "world")


def other_weights(folder: Path) -> None:
    file = folder / "model.safetensors"
    tensors = load_file(file)
    tensors["lm_head.weight"] = tensors["lm_head.weight"].flip(0)
    save_file(tensors, file, metadata={"format": "pt"})


def weights(folder: Path) -> str:
    return str(weights_fingerprint(str(folder)))


def run(world: World, out: Path, *more: object) -> Done:
    methods = json.dumps([{"name": "causal", "draft": str(world.draft)}])
    own = ["--methods", methods, "--k", 2, "--phase_prompts", 0]
    return worlds.call("eval/run.py", *common(world, out), *own, *more)


def tune(world: World, out: Path, *more: object) -> Done:
    methods = json.dumps([{"name": "causal", "draft": str(world.draft)}])
    return worlds.call(
        "eval/tune.py", *common(world, out), "--methods", methods, "--ks", "[1, 2]", "--calibrate", "[1, 2]",
        "--tree_nodes", "[]", "--batch_sizes", "[]", *more,
    )  # fmt: skip


def common(world: World, out: Path) -> list[object]:
    tasks = json.dumps([{"name": "own", "path": str(world.prompts), "limit": 4}])
    return [
        "--target", world.target, "--out", out, "--tasks", tasks, "--temperatures", "[0.0]",
        "--max_new_tokens", 6, "--device", "cpu",
    ]  # fmt: skip


COMMANDS = {"report.json": run, "tuned.json": tune}


@pytest.mark.parametrize("file", COMMANDS)
def test_measurements_are_of_one_target(world: World, tmp_path: Path, file: str) -> None:
    """Bug: references of the old weights are compared with answers of the new ones, or old rounds with new ones."""
    command, out = COMMANDS[file], tmp_path / "out"
    then = weights(world.target)
    command(world, out).ok()
    found = json.loads((out / file).read_text())
    assert found["target"]["weights"] == then
    assert found["target"]["dtype"] == "float32"
    assert found["earlier_targets"] == []
    before = contents(out)
    other_weights(world.target)
    now = weights(world.target)
    error = command(world, out).error()
    for word in (str(out), f"weights {then} then, {now} now", "--allow_changed true"):
        assert word in error
    assert contents(out) == before
    done = command(world, out, "--allow_changed", "true").ok()
    assert f"weights {then} then, {now} now" in done.err
    found = json.loads((out / file).read_text())
    assert found["target"]["weights"] == now
    assert found["earlier_targets"] == [{"weights": then, "dtype": "float32"}]
    shutil.rmtree(out)
    assert command(world, out).code == 0  # begun anew it is of one target
    assert json.loads((out / file).read_text())["earlier_targets"] == []


def test_a_report_says_that_two_targets_are_in_it(world: World, tmp_path: Path) -> None:
    """Bug: who allowed a mixture passes a report on that looks like any other."""
    then = weights(world.target)
    assert run(world, tmp_path / "out").code == 0
    other_weights(world.target)
    assert run(world, tmp_path / "out", "--allow_changed", "true").code == 0
    page = (tmp_path / "out" / "report.md").read_text()
    assert (
        f"Some measurements are of another target, as allowed: weights {then} in float32." in page
    )


def test_a_copy_is_the_same_target(world: World, tmp_path: Path) -> None:
    """Bug: a target that was moved is refused, although its weights are the same."""
    assert run(world, tmp_path / "out").code == 0
    moved = world.target.rename(tmp_path / "moved")
    moved.joinpath("config.json").touch()
    world.target.symlink_to(moved)
    done = run(world, tmp_path / "out").ok()
    assert "warning" not in done.err


ONE, TWO = ModelFingerprint("aa", "float32"), ModelFingerprint("bb", "float32")
JOURNALS: dict[str, tuple[ModelFingerprint, dict[str, str | None], str]] = {
    "same": (ONE, {"d": "1"}, ""),
    "commit alone": (ModelFingerprint("aa", "float32", "abc"), {"d": "1"}, ""),
    "weights": (TWO, {"d": "1"}, "weights aa then, bb now"),
    "dtype": (ModelFingerprint("aa", "bfloat16"), {"d": "1"}, "dtype float32 then, bfloat16 now"),
    "draft": (ONE, {"d": "2"}, "other weights of d"),
}


@pytest.mark.parametrize("what", JOURNALS)
def test_a_journal_is_of_its_target_and_drafts(tmp_path: Path, what: str) -> None:
    """Bug: a kept batch or reference is taken although what gave it is gone."""
    open_journal(RunFolder(tmp_path, False), ONE, {"d": "1"}, False).put(["reference", "a"], [1, 2])
    before = contents(tmp_path)
    target, drafts, words = JOURNALS[what]
    if not words:
        assert open_journal(RunFolder(tmp_path, False), target, drafts, False).get(
            ["reference", "a"]
        ) == [1, 2]
        return
    with pytest.raises(UserError, match=words):
        open_journal(RunFolder(tmp_path, False), target, drafts, False)
    assert contents(tmp_path) == before
    kept = open_journal(RunFolder(tmp_path, False), target, drafts, True)
    assert kept.get(["reference", "a"]) == [1, 2]
    assert earlier_targets(kept) == ([] if what == "draft" else [ONE])
    open_journal(
        RunFolder(tmp_path, False), target, drafts, False
    )  # allowed once, it is the last state


def test_a_journal_of_an_earlier_version_goes_on(tmp_path: Path) -> None:
    """Bug: measurements that name no target cannot be finished, or are said to be of this one."""
    Journal(tmp_path / "journal.jsonl", to_json(provenance.hardware())).put(["drafts"], {"d": "1"})
    journal = open_journal(RunFolder(tmp_path, False), TWO, {"d": "1"}, False)
    assert earlier_targets(journal) == [ModelFingerprint()]
    lines = other_targets_lines(
        from_json(EvalReport, drafts.report("") | {"methods": [], "earlier_targets": [{}]})
    )
    assert lines == ["Some measurements may be of another target: they do not name it."]


@pytest.fixture
def trained(world: World) -> Callable[[str], str]:
    """The draft's folder, with draftsmith.json that names a target with these weights."""

    def record(then: str) -> str:
        target = load_target(str(world.target), "cpu")
        facts = {
            "family": "causal", "target": {"name": "t", "weights": then}, "tokenizer_hash": target.fingerprint,
            "draft_sha256": draft_sha256(str(world.draft)),
        }  # fmt: skip
        (world.draft / "draftsmith.json").write_text(json.dumps(facts))
        return str(world.draft)

    return record


def test_a_draft_of_another_target_is_named_once(
    world: World, trained: Callable[[str], str], capsys: pytest.CaptureFixture[str]
) -> None:
    """Bug: a draft for other weights is measured as if it were this target's; or decoding with it, which is exact and
    often wanted, is refused."""
    damage.warn_once.cache_clear()
    target = load_target(str(world.target), "cpu")
    load_draft(trained(weights(world.target)), target)
    assert capsys.readouterr().err == ""
    folder = trained("0123456789abcdef")
    for _ in range(2):
        load_draft(folder, target)
    [said] = capsys.readouterr().err.splitlines()
    for word in (folder, "0123456789abcdef", weights(world.target)):
        assert word in said


def test_a_report_names_drafts_of_another_target(
    world: World, trained: Callable[[str], str], tmp_path: Path
) -> None:
    """Bug: low acceptance stands in the report, and not why."""
    trained("0123456789abcdef")
    assert run(world, tmp_path / "other").code == 0
    report = json.loads((tmp_path / "other" / "report.json").read_text())
    assert {m["name"]: m["trained_for"] for m in report["methods"]} == {
        "plain": None,
        "causal": "0123456789abcdef",
    }
    line = "Trained for another target than this one: causal."
    assert line in (tmp_path / "other" / "report.md").read_text()
    trained(weights(world.target))
    assert run(world, tmp_path / "own").code == 0
    assert line not in (tmp_path / "own" / "report.md").read_text()
