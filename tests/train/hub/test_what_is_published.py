"""What a target is called is decided when it is recorded: the same wherever a command runs, never a path of a machine.

And a push leaves of a repository what the folder holds, under its owner's name, with the labels that were given.
"""

import json
import os
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from decode.checkpoints.draft_folder import METADATA_FILE
from decode.common.errors import UserError
from decode.common.files import read_json
from decode.common.published import display_name
from decode.common.settings import to_dict
from decode.model.loading import load_target
from decode.model.names import recorded_name
from tests import drafts, hub, worlds
from tests.hub import Hub
from tests.train.hub.test_publish import COMMAND, api, files_of, sampled, server
from tests.worlds import ROOT, World
from train.hub import publish, upload
from train.hub.evidence import Evidence
from train.settings.training import HubLabels
from train.trainer.settings import DistillConfig

__all__ = ["api", "server"]  # fixtures
COMMIT = "0123456789abcdef0123" * 2


def cached(folder: Path, repository: str = "org/tiny") -> Path:
    """The folder of a repository's commit in a Hub cache below `folder`, which is empty."""
    name = repository.replace("/", "--")
    snapshot = folder / f"models--{name}" / "snapshots" / COMMIT
    snapshot.mkdir(parents=True)
    return snapshot


def made(tmp_path: Path, labels: HubLabels = HubLabels(), **facts: Any) -> Path:  # noqa: B008
    """The published folder of a draft with these facts in draftsmith.json."""
    folder = tmp_path / "draft"
    shutil.rmtree(folder, ignore_errors=True)
    draft = drafts.draft(folder, **facts)
    out = tmp_path / "out"
    return publish.build_draft_folder(draft, Evidence(), "me/x", labels, out, DistillConfig).path


# ---- what a target is called ----

LOCAL: dict[str, Callable[[Path], tuple[str, str]]] = {
    "an absolute path": lambda home: (str(home / "model"), "model"),
    "two parts, as a Hub name has": lambda home: ("alice/model", "model"),
    "one part, as gpt2": lambda home: ("model", "model"),
    "more parts": lambda home: ("home/alice/model", "model"),
    "with a dot": lambda home: ("./alice/../alice/model", "model"),
    "with a slash at its end": lambda home: ("alice/model/", "model"),
}


@pytest.mark.parametrize("case", LOCAL)
def test_a_folder_is_recorded_as_one(
    case: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Catches a folder of the user's that is taken for a Hub name once it is out of sight: the name of the home folder
    in the card, and base_model alice/model."""
    for place in ("model", "alice/model", "home/alice/model"):
        (tmp_path / place).mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    given, shown = LOCAL[case](tmp_path)
    name, commit = recorded_name(given)
    assert Path(name).samefile(given)
    assert (name[0] in "./", commit) == (True, None)
    monkeypatch.chdir("/")
    out = made(tmp_path, target={"name": name, "revision": None})
    assert read_json(out / METADATA_FILE)["target"] == {"name": shown, "revision": None}
    assert "base_model" not in (out / "README.md").read_text()


SETS = {
    "foo/bar": "bar",
    "bar": "bar",
    "foo/bar/": "bar",
    "./foo/bar": "bar",
    "/home/alice/foo/bar": "bar",
    "../bar": "bar",
    "outputs/quickstart/samples": "outputs/quickstart/samples",
    str(ROOT / "outputs" / "samples"): "outputs/samples",
    "/cache/datasets--org--answers/snapshots/0123456789abcdef": "org/answers",
}


@pytest.mark.parametrize("given", SETS)
def test_the_folders_of_sets_are_no_hub_names(given: str, tmp_path: Path) -> None:
    """Catches a card that says that a draft learned from alice/answers, a folder of the user's, on the Hub."""
    for data in (given, [{"path": given, "weight": 1.0}, {"path": given, "weight": 2.0}]):
        settings = to_dict(DistillConfig()) | {"data": data}
        stored = read_json(made(tmp_path, training=settings) / METADATA_FILE)["training"]["data"]
        paths = [stored] if isinstance(data, str) else [part["path"] for part in stored]
        assert set(paths) == {SETS[given]}


CACHED: dict[str, Callable[[Path], str]] = {
    "the folder": lambda cache: str(cached(cache)),
    "with a slash at its end": lambda cache: f"{cached(cache)}/",
    "a link to it": lambda cache: link(cache / "mine", cached(cache)),
    "the current folder": lambda cache: enter(cached(cache)),
    "relative": lambda cache: os.path.relpath(cached(cache)),
}


def link(place: Path, folder: Path) -> str:
    place.symlink_to(folder)
    return str(place)


def enter(folder: Path) -> str:
    os.chdir(folder)
    return "."


@pytest.mark.parametrize("case", CACHED)
def test_a_place_in_the_hubs_cache_is_its_repository(
    case: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Catches a commit in a path that looks like a key, and a target on the Hub that is published as a local folder."""
    monkeypatch.chdir(tmp_path)
    assert recorded_name(CACHED[case](tmp_path)) == ("org/tiny", COMMIT)


def test_other_names_on_the_hub_are_recorded_too(tmp_path: Path) -> None:
    """Catches a repository without owner, and a GGUF file in the cache, which is a link to a blob without its name."""
    assert recorded_name("Qwen/Qwen3-8B") == ("Qwen/Qwen3-8B", None)
    assert recorded_name("gpt2") == ("gpt2", None)
    assert recorded_name(str(cached(tmp_path, "gpt2"))) == ("gpt2", COMMIT)
    (tmp_path / "blob").write_text("")
    file = cached(tmp_path, "org/tiny-GGUF") / "q4.gguf"
    file.symlink_to(tmp_path / "blob")
    assert recorded_name(str(file)) == ("org/tiny-GGUF/q4.gguf", COMMIT)
    assert recorded_name(str(ROOT / "assets" / "target")) == ("assets/target", None)


@pytest.mark.parametrize("case", ["recorded now", "recorded by an earlier version", "a GGUF file"])
def test_a_target_of_the_hubs_cache_is_published_with_its_commit(case: str, tmp_path: Path) -> None:
    """Catches a refusal of a commit that the user named by its folder, and a card without its base model."""
    snapshot, name = str(cached(tmp_path)), "org/tiny"
    target: dict[str, Any] = {"name": "org/tiny", "revision": COMMIT}
    training: dict[str, Any] = {"target": "org/tiny", "revision": COMMIT, "check": {"k": 4}}
    if case == "recorded by an earlier version":
        target["name"] = training["target"] = snapshot
        training["revision"] = None
    elif case == "a GGUF file":
        target["name"] = training["target"] = name = "org/tiny/q4.gguf"
    out = made(tmp_path, target=target, training=training)
    facts = read_json(out / METADATA_FILE)
    assert facts["target"] == {"name": name, "revision": COMMIT}
    assert facts["training"]["target"] == name
    assert "base_model: org/tiny\n" in (out / "README.md").read_text()
    assert f"--revision {COMMIT}" in (out / "serving" / "vllm.sh").read_text()


def test_a_target_describes_itself_by_what_others_find(world: World, tmp_path: Path) -> None:
    """Catches commands that record the path that they loaded: from the cache, and from a folder."""
    place = cached(tmp_path)
    shutil.copytree(world.target, place, dirs_exist_ok=True)
    record = load_target(str(place), "cpu").describe()
    assert (record.name, record.revision) == ("org/tiny", COMMIT)
    assert load_target(str(world.target), "cpu").describe().name == str(world.target)


@pytest.mark.slow
def test_a_training_on_the_hubs_cache_is_published(world: World, tmp_path: Path) -> None:
    """Catches a commit that looks like a key in what the commands record, of the draft and of the samples."""
    world = replace(world, target=cached(tmp_path))
    shutil.copytree(ROOT / "assets" / "target", world.target, dirs_exist_ok=True)
    data, lm = worlds.sampled(world, tmp_path, "--max_new_tokens", 4), tmp_path / "lm"
    worlds.call(
        "train/distill.py", "--target", world.target, "--data", data, "--draft.init", world.target,
        "--out", lm, "--loop.steps", 1, "--loop.batch_size", 2, "--loop.eval_every", 0, "--tracker", "none",
    ).ok()  # fmt: skip
    for kind, folder in (("--draft", lm), ("--samples", data)):
        out = tmp_path / f"out{kind}"
        more = ("--target", world.target) if kind == "--samples" else ()
        worlds.call(COMMAND, kind, folder, "--repo", "me/x", "--out", out, *more).ok()
        assert "base_model: org/tiny\n" in (out / "README.md").read_text()
    facts = read_json(tmp_path / "out--draft" / METADATA_FILE)
    assert facts["target"]["name"] == "org/tiny"
    assert facts["training"]["draft"]["init"] == "org/tiny"
    for found in (facts["training"], facts["data_manifest"]):
        assert (found["target"], found["revision"]) == ("org/tiny", COMMIT)
    assert facts["target"]["revision"] == COMMIT
    made = read_json(tmp_path / "out--samples" / "manifest.json")
    assert (made["target"], made["revision"]) == ("org/tiny", COMMIT)


@pytest.mark.parametrize("where", ["/", "above", "beside", "checkout"])
def test_what_is_published_does_not_depend_on_the_current_folder(
    where: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Catches local paths that are published from / or from a folder above: in settings, weights' tokenizer, target."""
    home = tmp_path / "alice.example"
    (home / "model").mkdir(parents=True)
    paths = {
        "target": str(home / "model"), "data": str(home / "samples"),
        "draft": {"family": "eagle3", "init": str(home / "init")},
    }  # fmt: skip
    folder = drafts.draft(
        tmp_path / "d", target={"name": str(home / "model"), "revision": None},
        training={**paths, "check": {"k": 4}}, data_manifest={"target": str(home / "model")},
    )  # fmt: skip
    settings = {"eos_token": "<eos>", "name_or_path": str(home / "model")}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    monkeypatch.chdir({"above": tmp_path, "beside": home, "checkout": ROOT}.get(where, Path("/")))
    out = publish.build_draft_folder(
        folder, Evidence(), "me/x", HubLabels(), tmp_path / "out", DistillConfig
    ).path
    for path in out.rglob("*"):
        assert not path.is_file() or b"alice" not in path.read_bytes(), path
    facts = read_json(out / METADATA_FILE)
    assert facts["target"]["name"] == facts["training"]["target"] == "model"
    assert (facts["training"]["data"], facts["training"]["draft"]["init"]) == ("samples", "init")
    assert facts["data_manifest"]["target"] == "model"
    assert read_json(out / "tokenizer_config.json")["name_or_path"] == "model"
    assert "vllm serve model " in (out / "serving" / "vllm.sh").read_text()


def test_paths_have_one_display_name() -> None:
    """Catches parts of a path outside of this checkout."""
    shown = {
        "/home/alice/models/llama": "llama", "/home/alice/x/": "x", "C:\\Users\\alice\\x": "x",
        str(ROOT / "outputs" / "x"): "outputs/x", "~/alice/x": "x",
        f"/c/models--org--m/snapshots/{COMMIT}/": "org/m",
        f"/c/datasets--org--d/snapshots/{COMMIT}/": "org/d",
    }  # fmt: skip
    assert {path: display_name(path) for path in shown} == shown


# ---- labels, and the base model ----

LABELS: dict[str, tuple[str, str]] = {
    "with an owner": ("org/tiny", "base_model: org/tiny"),
    "without an owner": ("gpt2", "base_model: gpt2"),
    "none, but the Hub's": ("", "base_model: org/target"),
}


@pytest.mark.parametrize("case", LABELS)
def test_labels_are_kept(case: str, tmp_path: Path) -> None:
    """Catches labels that were given and are in no card."""
    given, line = LABELS[case]
    labels = HubLabels(given, "mit", "me/samples")
    head = (made(tmp_path, labels) / "README.md").read_text().split("\n---\n")[0]
    assert {line, "license: mit", "- me/samples"} <= set(head.split("\n"))


def test_labels_of_a_sampled_set_are_kept(tmp_path: Path) -> None:
    """Catches a base model that was given for samples, whose card names a folder."""
    labels = HubLabels("org/tiny", "mit", "org/prompts")
    out = publish.build_dataset_folder(sampled(tmp_path / "s"), "me/s", labels, tmp_path / "o").path
    head, page = (out / "README.md").read_text().split("\n---\n", 1)
    assert {"base_model: org/tiny", "license: mit", "- org/prompts"} <= set(head.split("\n"))
    assert page.lstrip().startswith("# s\n\nAnswers of `org/tiny` to prompts")
    assert read_json(out / "manifest.json")["target"] == "org/tiny"


@pytest.mark.parametrize("name", ["/home/me/x", "a b", "org/x/y", "org//x"])
@pytest.mark.parametrize("label", ["base_model", "dataset"])
def test_a_label_that_the_hub_cannot_have_is_refused(label: str, name: str, tmp_path: Path) -> None:
    """Catches a label that is dropped without a word, and a local path in a card."""
    with pytest.raises(UserError) as refused:
        made(tmp_path, HubLabels(**{label: name}))
    assert str(refused.value) == f"labels.{label} {name!r} is no name on the Hub: give OWNER/NAME"
    assert not (tmp_path / "out").exists()


def test_a_base_model_that_nobody_finds_is_said(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Catches a card for a folder of the user's that is published without a word, and a warning without a cause."""
    line = (
        "the target was the folder model, which nobody else finds: say what it is called on the Hub by "
        "--labels.base_model OWNER/NAME"
    )
    local = {"name": "/home/alice/model", "revision": None}
    for labels, said in ((HubLabels(), 1), (HubLabels("org/tiny"), 0)):
        made(tmp_path, labels, target=local)
        assert " ".join(capsys.readouterr().err.split()).count(line) == said
    made(tmp_path)
    assert "nobody else finds" not in capsys.readouterr().err


# ---- the owner ----


def test_a_name_alone_is_the_users(api: Hub, tmp_path: Path) -> None:
    """Catches commands and a title for a repository that nobody has: the owner is known before the folder is made."""
    folder = drafts.draft(tmp_path / "d")
    for more in ([], ["--push"]):
        words = ("--draft", folder, "--repo", "x", "--out", tmp_path / "out", *more)
        done = worlds.call(COMMAND, *words).ok()
        about = json.loads(done.out.splitlines()[-1])
        assert about["repo"] == "me/x"
        assert "me/x" in (tmp_path / "out" / "serving" / "vllm.sh").read_text()
    assert set(api.repos) == {("model", "me/x")}
    assert len(api.sent("GET", "/api/whoami-v2")) == 2


def test_an_owner_that_cannot_be_known_is_asked_for(
    api: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Catches a folder for a repository without owner; with an owner nobody is asked."""
    assert upload.resolve_repo("org/x", push=True) == "org/x"
    assert api.calls == []
    api.refuse["GET", "/api/whoami"] = 500
    words = ("--draft", drafts.draft(tmp_path / "d"), "--repo", "x", "--out", tmp_path / "out")
    assert "give --repo OWNER/x" in worlds.call(COMMAND, *words).error()
    monkeypatch.setattr(upload, "get_token", lambda: None)
    with pytest.raises(UserError, match="hf auth login.*or give --repo OWNER/x to write"):
        upload.resolve_repo("x", push=False)
    assert upload.resolve_repo("org/x", push=False) == "org/x"
    assert not (tmp_path / "out").exists()


# ---- a second version ----

EARLIER: dict[str, list[str]] = {
    "measurements": [
        "report.json", "speculation_profile.json", "tuned.json", "forecast.json", "referee.json",
        "data_curve.json", "images/speedup-t0-b1.svg",
    ],
    "shards of larger weights": [
        "model.safetensors.index.json", "model-00001-of-00002.safetensors",
        "model-00002-of-00002.safetensors",
    ],
    "a tokenizer": [
        "vocab.json", "merges.txt", "chat_template.jinja", "additional_chat_templates/rag.jinja",
    ],
    "another family": ["medusa_lm_head.safetensors", "target/config.json", "target/model.safetensors"],
    "an engine": ["serving/old.sh", "serving/triton/old/1/model.json"],
}  # fmt: skip
FOREIGN = ["LICENSE", "demo/talk.gif", "gguf/draft-q4.gguf", "report[1].json"]


@pytest.mark.parametrize("case", EARLIER)
def test_a_repository_becomes_the_folder(case: str, api: Hub, tmp_path: Path) -> None:
    """Catches files of an earlier version beside the new weights, and files of others that are deleted."""
    folder = publish.build_draft_folder(
        drafts.draft(tmp_path / "d"), Evidence(), "me/x", HubLabels(), tmp_path / "o", DistillConfig
    )
    repo = api.repos["model", "me/x"] = hub.Repo(private=False)
    names = [METADATA_FILE, *EARLIER[case], *FOREIGN]
    repo.commit({".gitattributes": b"", **dict.fromkeys(names, b"old")})
    upload.push(folder, "me/x", private=False)
    assert set(repo.files) == files_of(folder.path) | {".gitattributes", *FOREIGN}


def test_a_set_of_samples_becomes_the_folder(api: Hub, tmp_path: Path) -> None:
    """Catches shards of an earlier set, which the Hub's viewer and load_dataset read as rows of this one."""
    source = sampled(tmp_path / "s")
    folder = publish.build_dataset_folder(source, "me/s", HubLabels("org/t"), tmp_path / "o")
    repo = api.repos["dataset", "me/s"] = hub.Repo(private=False)
    repo.commit(dict.fromkeys(("manifest.json", "shards/00ff.parquet", "LICENSE"), b"old"))
    upload.push(folder, "me/s", private=False)
    assert set(repo.files) == files_of(folder.path) | {"LICENSE"}
