"""scripts/publish.py: the folder is the one that is sent, what must not go out is refused, uploads go on.

The Hub is tests/hub.py, an HTTP server on loopback that the real huggingface_hub talks to.
"""

import hashlib
import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from huggingface_hub import DatasetCard
from transformers import AutoModelForCausalLM, AutoTokenizer

from decode.checkpoints.draft_folder import METADATA_FILE
from decode.common.errors import UserError
from decode.drafts.registry import load_draft
from decode.engine.engine import decode
from decode.model.loading import load_target
from decode.serving import hf_engine
from decode.serving.engine import ServedDraft
from tests import drafts, heads, hub, worlds
from tests.hub import Hub
from tests.worlds import World
from train import training
from train.data import sample_store
from train.data.manifest import Manifest, load_set, write_manifest
from train.hub import publish, upload
from train.hub.evidence import Evidence
from train.settings.training import HubLabels
from train.trainer.settings import DistillConfig

COMMAND = "scripts/publish.py"


def made(
    tmp_path: Path,
    folder: Path,
    labels: HubLabels = HubLabels(),  # noqa: B008
    **contents: Any,
) -> Path:
    """The published folder of a draft, with these contents of files of measurements."""
    found, out = drafts.evidence(**contents), tmp_path / "out"
    return publish.build_draft_folder(folder, found, "me/x", labels, out, DistillConfig).path


def rewrite_facts(folder: Path, **changes: Any) -> Path:
    """Changes draftsmith.json, whose checksum is again that of the files."""
    facts = json.loads((folder / METADATA_FILE).read_text())
    facts |= {"draft_sha256": publish.draft_sha256(str(folder)), **changes}
    (folder / METADATA_FILE).write_text(json.dumps(facts))
    return folder


def files_of(folder: Path) -> set[str]:
    return {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()}


def test_the_folder_is_exactly_what_is_served(tmp_path: Path) -> None:
    """Catches checkpoints, logs or W&B files that go out, and weights that are not the ones of the checksum."""
    folder = drafts.draft(tmp_path / "d")
    (folder / "notes.txt").write_text("mine")
    sha = drafts.sha_of(folder)
    out = made(tmp_path, folder, report=drafts.report(sha), referee=drafts.referee(sha))
    assert files_of(out) == {
        "README.md", "config.json", "draftsmith.json", "model.safetensors", "referee.json", "report.json",
        "run.yaml", "tokenizer_config.json", "images/acceptance-t0-b1.svg", "images/speedup-t0-b1.svg",
        "serving/llamacpp.sh", "serving/sglang.sh", "serving/trtllm.sh", "serving/trtllm.yml", "serving/vllm.sh",
        "serving/triton/draftsmith_eagle3/config.pbtxt", "serving/triton/draftsmith_eagle3/1/model.json",
    }  # fmt: skip
    for name in ("config.json", "model.safetensors", "tokenizer_config.json"):
        assert (out / name).read_bytes() == (folder / name).read_bytes()
    assert yaml.safe_load((out / "run.yaml").read_text())["loop"] == {"steps": 312, "lr": 0.0023}


def test_the_card_names_the_settings_of_the_chat_template(tmp_path: Path) -> None:
    """Catches a draft of one mode of thinking that is served in the other, and arguments that are private."""
    private = "You are Alice of /home/alice, " * 3
    made_of = [{"enable_thinking": False}, {}, {"name": "rag", "persona": private, "docs": ["a"]}]
    report_of = {"name": "org/target", "revision": None, "template": {"enable_thinking": False}}
    folder = drafts.draft(tmp_path / "d", templates=made_of)
    (folder / "additional_chat_templates").mkdir()
    (folder / "additional_chat_templates" / "rag.jinja").write_text("R")
    sha = drafts.sha_of(folder)
    out = made(tmp_path, folder, report=drafts.report(sha) | {"target": report_of})
    assert (out / "additional_chat_templates" / "rag.jinja").read_text() == "R"
    card = (out / "README.md").read_text()
    assert (
        "settings of the target's chat template: '{enable_thinking: false}' and the tokenizer's"
        in card
    )
    command = (out / "serving" / "vllm.sh").read_text()
    assert """--default-chat-template-kwargs '{"enable_thinking": false}'""" in command
    facts = json.loads((out / METADATA_FILE).read_text())
    hidden = {"name": "rag", "persona": "not published", "docs": "not published"}
    assert facts["templates"] == [{"enable_thinking": False}, {}, hidden]
    assert json.loads((out / "report.json").read_text())["target"]["template"] == made_of[0]
    assert all(b"alice" not in path.read_bytes() for path in out.rglob("*") if path.is_file())


def test_local_paths_are_gone(tmp_path: Path) -> None:
    """Catches a home folder in draftsmith.json, run.yaml, the report or the card; weights keep their checksum."""
    home = str(tmp_path)
    folder = drafts.draft(tmp_path / "d", target={"name": f"{home}/llama", "revision": None})
    report = drafts.report(drafts.sha_of(folder)) | {
        "settings": f"out: {home}/report\n",
        "argv": [home],
    }
    assert home in (folder / METADATA_FILE).read_text()
    out = made(tmp_path, folder, HubLabels("org/target"), report=report)
    for path in out.rglob("*"):
        assert not path.is_file() or home.encode() not in path.read_bytes(), path
    facts = json.loads((out / METADATA_FILE).read_text())
    assert facts["target"]["name"] == "org/target"
    assert "argv" not in facts
    assert "out" not in facts["training"]
    assert facts["draft_sha256"] == publish.draft_sha256(str(out))


def test_a_target_that_was_trained_along_is_published(tmp_path: Path) -> None:
    """Catches Medusa-2 heads without the target that they fit, and commands that serve the original."""
    folder = drafts.draft(
        tmp_path / "d", "medusa", target={"name": str(tmp_path / "d" / "target"), "revision": None},
        original_target={"name": "org/target", "revision": None},
    )  # fmt: skip
    with pytest.raises(UserError, match="cites target/, "):
        made(tmp_path, folder)
    shutil.copytree(
        folder, tmp_path / "copy", ignore=shutil.ignore_patterns("checkpoints", "wandb")
    )
    (tmp_path / "copy").rename(folder / "target")
    out = made(tmp_path, folder)
    assert files_of(out / "target") == {"config.json", "model.safetensors", "tokenizer_config.json"}
    assert "vllm serve ./target" in (out / "serving" / "vllm.sh").read_text()
    text = (out / "README.md").read_text()
    assert "base_model: org/target" in text
    assert "serve the one in `target/`" in text


def test_a_target_that_drafts_for_itself_is_published(tmp_path: Path) -> None:
    """Catches commands that ask for a folder inside, and a card that is silent about the changed target."""
    names = {"target": str(tmp_path / "d"), "original_target": "org/target"}
    targets = {key: {"name": name, "revision": None} for key, name in names.items()}
    out = made(tmp_path, drafts.draft(tmp_path / "d", "layerskip2", **targets))
    assert json.loads((out / METADATA_FILE).read_text())["target"]["name"] == "me/x"
    text = (out / "README.md").read_text()
    assert "base_model: org/target" in text
    assert "this folder is that target, which is not the original" in text


def damaged(folder: Path, what: str) -> tuple[Any, Any]:
    """(report, referee) of a draft that must not be published, for the named reason."""
    sha = drafts.sha_of(folder)
    report, referee = drafts.report(sha), drafts.referee(sha)
    if what == "another report":
        report = drafts.report("0" * 64)
    elif what == "not lossless":
        report["methods"][-1]["lossless"] |= {"greedy_identical": False, "identical": 36}
    elif what == "another referee":
        referee["draft_sha256"] = "0" * 64
    elif what == "a referee that disagrees":
        referee["differ"] = referee["ties"]
    elif what == "changed weights":
        worlds.flip_byte(folder / "model.safetensors", -1)
    elif what == "a pickle":
        (folder / "pytorch_model.bin").write_bytes(b"\x80\x04.")
    elif what == "a token":
        rewrite_facts(folder, training={"draft": {"family": "eagle3", "init": hub.TOKEN}})
    elif what == "a path in config.json":
        (folder / "config.json").write_text(json.dumps({"_name_or_path": "/home/me/x"}))
        rewrite_facts(folder)
        report, referee = None, None
    elif what == "no facts":
        (folder / METADATA_FILE).unlink()
    return report, referee


@pytest.mark.parametrize(
    ("what", "message"),
    [
        ("another report", "the report measures drafts 000000000000 and not"),
        ("not lossless", "eagle3 on prose is not lossless: 36 of 37"),
        ("another referee", "the referee's result is of draft 000000000000"),
        ("a referee that disagrees", "an engine decoded 1 prompts unlike this decoder"),
        ("changed weights", "the draft was changed after training"),
        ("a pickle", "pytorch_model.bin, a pickle"),
        ("a token", r"draftsmith.json: training.draft.init holds what looks like a Hugging Face"),
        ("a path in config.json", "config.json: _name_or_path is the local path '/home/me/x'"),
        ("no facts", "has no draftsmith.json"),
    ],
)
def test_what_does_not_fit_is_refused(tmp_path: Path, what: str, message: str) -> None:
    """Catches a card with the numbers of other weights, a lossy draft called lossless, a leak; nothing is left."""
    folder = drafts.draft(tmp_path / "d")
    report, referee = damaged(folder, what)
    with pytest.raises(UserError, match=message) as caught:
        made(tmp_path, folder, report=report, referee=referee)
    assert hub.TOKEN not in str(caught.value)
    assert not (tmp_path / "out").exists()
    assert not (tmp_path / "out.tmp").exists()


def test_tuned_lengths_are_served(tmp_path: Path) -> None:
    """Catches serving files and a card with the report's K where another was tuned, pictures that are lost with it, and
    a table that says nothing."""
    folder = drafts.draft(tmp_path / "d")
    sha = drafts.sha_of(folder)
    cards = []
    for ks in ({"all": 3, "code": 6, "prose": 2}, {"all": 3, "code": 3, "prose": 3}):
        out = made(tmp_path, folder, report=drafts.report(sha), tuned=drafts.tuned(sha, ks))
        assert '"num_speculative_tokens": 3' in (out / "serving" / "vllm.sh").read_text()
        assert "max_draft_len: 3" in (out / "serving" / "trtllm.yml").read_text()
        assert {"tuned.json", "images/acceptance-t0-b1.svg"} <= files_of(out)
        cards.append((out / "README.md").read_text())
    assert "K = 3 drafted tokens a round: the fastest of [2, 3, 4, 5, 6]" in cards[0]
    assert "Tuned on AMD EPYC, batch 1, prompts of code@1, prose@1." in cards[0]
    for row in ("| all | 0 | 3 | 31 |", "| code | 0 | 6 | 31 |", "| prose | 1 | 2 | 31 |"):
        assert row in cards[0]
    assert "By domain another K" not in cards[1]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"drafts": {"eagle3": "0" * 64}}, "settings are of drafts 000000000000 and not"),
        ({"drafts": {}}, "settings are of drafts unnamed"),
        ({"cells": None}, "is not tuned.json of eval/tune.py: it has no 'cells'"),
    ],
)
def test_settings_of_another_draft_are_refused(
    tmp_path: Path, changes: dict[str, Any], message: str
) -> None:
    """Catches a draft served with the length that was tuned for another, and a report given for tuned.json."""
    folder = drafts.draft(tmp_path / "d")
    tuned = drafts.tuned(drafts.sha_of(folder), {"all": 3}) | changes
    path = tmp_path / "tuned.json"
    path.write_text(json.dumps({k: v for k, v in tuned.items() if v is not None}))
    done = worlds.call(COMMAND, "--draft", folder, "--tuned", path, "--repo", "me/x")
    assert message in done.error()


def test_a_draft_may_be_lossy_by_choice(tmp_path: Path) -> None:
    """Catches a refusal of typical acceptance, which says that it changes the output."""
    folder = drafts.draft(tmp_path / "d")
    sha = drafts.sha_of(folder)
    lossless = {"greedy_identical": False, "prompts": 37, "identical": 30, "ties": []}
    typical = drafts.entry(sha, "typical", lossy=True, lossless=lossless)
    text = (made(tmp_path, folder, report=drafts.report(sha, typical)) / "README.md").read_text()
    assert "Lossy by choice: typical" in text


CITED = (
    "report.json", "tuned.json", "referee.json", "images/speedup-t0-b1.svg",
    "serving/vllm.sh", "serving/trtllm.yml", "serving/triton/draftsmith_eagle3/1/model.json",
)  # fmt: skip


@pytest.mark.parametrize("lost", [None, *CITED])
def test_every_file_that_the_card_cites_is_there(
    lost: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Catches a card whose files are missing: it is refused, one line names the file, and nothing is written."""
    folder = drafts.draft(tmp_path / "d")
    sha = drafts.sha_of(folder)
    write = publish._write

    def lossy_write(path: Path, text: str) -> None:
        if lost is None or not str(path).endswith(lost):
            write(path, text)

    monkeypatch.setattr(publish, "_write", lossy_write)

    found = {
        "report": drafts.report(sha), "referee": drafts.referee(sha),
        "tuned": drafts.tuned(sha, {"all": 3, "code": 6}),
    }  # fmt: skip
    if lost is None:
        assert set(CITED) <= files_of(made(tmp_path, folder, **found))
        return
    with pytest.raises(UserError, match=lost) as raised:
        made(tmp_path, folder, **found)
    assert "\n" not in str(raised.value)
    assert not (tmp_path / "out").exists()


def test_a_card_without_measurements_cites_none(tmp_path: Path) -> None:
    """Catches a card that cites reports which nobody gave, and a checksum of files with other names."""
    folder = drafts.draft(tmp_path / "d")
    (folder / "model.safetensors").rename(folder / "model-00001-of-00001.safetensors")
    text = (made(tmp_path, rewrite_facts(folder)) / "README.md").read_text()
    assert not any(name in text for name in CITED[:4])
    assert "images/" not in text
    assert "draft_sha256 (model-00001-of-00001.safetensors + config.json)" in text


@pytest.mark.parametrize("there", [True, False])
def test_a_reduced_vocabulary_is_published_with_its_ids(there: bool, tmp_path: Path) -> None:
    """Catches a card that names draft_vocab.json, or a target trained along, where the folder has none."""
    folder = drafts.draft(
        tmp_path / "d",
        family="causal",
        vocabulary={"size": 64, "coverage": 0.97, "digest": "ab" * 8},
    )
    if there:
        (folder / "draft_vocab.json").write_text("[1, 2]")
        assert "draft_vocab.json" in files_of(made(tmp_path, rewrite_facts(folder)))
    else:
        with pytest.raises(UserError, match="draft_vocab.json"):
            made(tmp_path, folder)


def test_other_folders_are_never_overwritten(tmp_path: Path) -> None:
    """Catches --out on somebody's work, on the draft itself or around it; an earlier publication is replaced."""
    folder = drafts.draft(tmp_path / "d")
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "thesis.tex").write_text("x")
    with pytest.raises(UserError, match="contains other files"):
        made(tmp_path, folder)
    for out in (folder, folder / "checkpoints", tmp_path):
        with pytest.raises(UserError, match="one inside the other|contains other files"):
            publish.build_draft_folder(folder, Evidence(), "me/x", HubLabels(), out, DistillConfig)
    (tmp_path / "out" / "thesis.tex").unlink()
    out = made(tmp_path, folder)
    (out / "serving" / "old.sh").write_text("x")
    assert "serving/old.sh" not in files_of(made(tmp_path, folder))


# ---- against the stand-in of the Hub ----


@pytest.fixture
def server() -> Iterator[Hub]:
    with hub.serving() as running:
        yield running


def head(folder: Path, world: World) -> Path:
    """An EAGLE-3 draft for the world's target, as training leaves it."""
    target = load_target(str(world.target), "cpu")
    net = heads.net_of("eagle3", target)
    heads.save(folder, "eagle3", net, target, torch.float32)
    return finished(folder, world, "eagle3")


def small_lm(folder: Path, world: World) -> Path:
    """A causal draft for the world's target, as training leaves it."""
    shutil.copytree(world.draft, folder)
    return finished(folder, world, "causal")


def finished(folder: Path, world: World, family: str) -> Path:
    """Writes the facts of a draft of the world."""
    if not (folder / METADATA_FILE).is_file():
        (folder / METADATA_FILE).write_text("{}")
    return rewrite_facts(
        folder, family=family, target={"name": str(world.target), "revision": None},
        training={"check": {"k": 4}, "out": str(folder)},
    )  # fmt: skip


@pytest.mark.slow
def test_a_killed_upload_goes_on(server: Hub, world: World, tmp_path: Path) -> None:
    """Catches an upload that starts over, and a commit without its weights: the process is killed while the weights are
    on their way, and the same command then sends what is missing, commits, tags."""
    lm = small_lm(tmp_path / "lm", world)
    args = ["--draft", lm, "--repo", "me/lm", "--out", tmp_path / "out", "--push"]
    env = hub.environment(server, tmp_path / "home")
    server.hold_back = hashlib.sha256((lm / "model.safetensors").read_bytes()).hexdigest()
    ready = lambda: bool(server.sent("PUT", "/objects/"))  # noqa: E731
    assert worlds.kill_when(ready, COMMAND, *args, env=env, own_start=True) == -9
    assert server.sent("POST", "/commit/") == []
    server.hold_back = None
    server.calls.clear()

    done = worlds.run(COMMAND, *args, env=env).ok()
    repo = server.repos["model", "me/lm"]
    assert set(repo.files) == files_of(tmp_path / "out") | {".gitattributes"}
    assert repo.files["model.safetensors"] == (lm / "model.safetensors").read_bytes()
    assert repo.tags == {"v1": repo.head}
    assert json.loads(done.out.splitlines()[-1])["pushed"]["tag"] == "v1"
    assert hub.TOKEN not in done.out + done.err
    assert not any(hub.TOKEN.encode() in data for data in repo.files.values())


@pytest.fixture
def api(server: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Hub:
    """This process talks to the stand-in."""
    monkeypatch.setenv("HF_TOKEN", hub.TOKEN)
    monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", server.url)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_DISABLE_XET", True)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "cache"))
    template = "{repo_id}/resolve/{revision}/{filename}"
    monkeypatch.setattr(
        "huggingface_hub.constants.HUGGINGFACE_CO_URL_TEMPLATE", f"{server.url}/{template}"
    )
    monkeypatch.setattr("time.sleep", lambda seconds: None)  # between attempts
    return server


def folder_of(tmp_path: Path, family: str = "eagle3", name: str = "d") -> upload.PublishFolder:
    folder = drafts.draft(tmp_path / name, family)
    return publish.build_draft_folder(
        folder, Evidence(), "me/x", HubLabels(), tmp_path / f"out-{name}", DistillConfig
    )


@pytest.mark.slow
def test_published_drafts_are_loaded_back(api: Hub, world: World, tmp_path: Path) -> None:
    """Catches files that are missing or changed in what was sent: heads decode losslessly by their hub name. A causal
    draft is also loaded by transformers, where it assists and changes nothing."""
    target = load_target(str(world.target), "cpu")
    prompt = [20, 30, 40]
    plain = decode(target, None, [prompt], k=1, max_new_tokens=12)[0].output_ids
    for name, draft in (
        ("lm", small_lm(tmp_path / "a", world)),
        ("eagle", head(tmp_path / "b", world)),
    ):
        repo = f"me/{name}"
        folder = publish.build_draft_folder(
            draft, Evidence(), repo, HubLabels(), tmp_path / name, DistillConfig
        )
        upload.push(folder, repo, private=False)
        loaded = load_draft(repo, target)
        assert loaded.name == ("causal" if name == "lm" else "eagle3")
        found = decode(target, loaded, [prompt], k=3, max_new_tokens=12)[0]
        assert found.output_ids == plain
        local = decode(target, load_draft(str(draft), target), [prompt], k=3, max_new_tokens=12)[0]
        assert found.rounds == local.rounds
    assistant = AutoModelForCausalLM.from_pretrained("me/lm")
    model = AutoModelForCausalLM.from_pretrained(world.target)
    ids = AutoTokenizer.from_pretrained("me/lm")("abc", return_tensors="pt")
    kept = {"max_new_tokens": 12, "do_sample": False}
    helped = model.generate(**ids, assistant_model=assistant, **kept)
    assert helped.tolist() == model.generate(**ids, **kept).tolist()
    served = ServedDraft("causal", "me/lm", str(world.target), None, 3)
    exec(hf_engine.serving_files(served)["transformers_assistant.py"], {})  # as a stranger runs it


def test_heads_for_another_tokenizer_are_refused_by_hub_name(
    api: Hub, world: World, tmp_path: Path
) -> None:
    """Catches a check that looks for draftsmith.json in a folder of the hub's name, finds none, and lets all pass."""
    folder = publish.build_draft_folder(
        head(tmp_path / "b", world), Evidence(), "me/e", HubLabels(), tmp_path / "e", DistillConfig
    )
    upload.push(folder, "me/e", private=False)
    with pytest.raises(UserError, match="disagree on token ids"):
        load_draft("me/e", load_target(str(world.stranger), "cpu"))


def test_a_refused_commit_keeps_what_was_sent(api: Hub, tmp_path: Path) -> None:
    """Catches weights that are sent again after the Hub failed behind them; the token is in no message."""
    folder = folder_of(tmp_path)
    api.refuse["POST", "/commit/"] = 403
    with pytest.raises(UserError, match="continues where it stopped") as caught:
        upload.push(folder, "me/x", private=False)
    assert hub.TOKEN not in str(caught.value)
    assert len(api.sent("PUT", "/objects/")) == 1
    api.refuse.clear()
    first = upload.push(folder, "me/x", private=False)
    assert len(api.sent("PUT", "/objects/")) == 1
    assert upload.push(folder, "me/x", private=False) == first
    assert len(api.sent("POST", "/commit/")) == 2  # the refused one and the one that counts


def test_a_lost_tag_is_made_up_for(api: Hub, tmp_path: Path) -> None:
    """Catches a version without its tag after a failure between commit and tag, and a second tag for one version."""
    folder = folder_of(tmp_path)
    api.refuse["POST", "/tag/"] = 403
    with pytest.raises(UserError):
        upload.push(folder, "me/x", private=False)
    api.refuse.clear()
    assert upload.push(folder, "me/x", private=False)["tag"] == "v1"
    (folder.path / "README.md").write_text("another card\n")
    (folder.path / "serving" / "vllm.sh").unlink()
    assert upload.push(folder, "me/x", private=False)["tag"] == "v2"
    repo = api.repos["model", "me/x"]
    assert list(repo.tags) == ["v1", "v2"]
    assert repo.tags["v2"] == repo.head
    assert "serving/vllm.sh" not in repo.files  # no leftovers of an earlier version
    assert repo.files["README.md"] == b"another card\n"


def test_repositories_of_others_are_left_alone(api: Hub, tmp_path: Path) -> None:
    """Catches a draft pushed over another model by a slip of the name, and a private one into a public place."""
    folder = folder_of(tmp_path)
    api.repos["model", "me/x"] = repo = hub.Repo(private=False)
    repo.commit({"pytorch_model.bin": b"precious"})
    with pytest.raises(UserError, match="contains pytorch_model.bin and no file of draftsmith"):
        upload.push(folder, "me/x", private=False)
    with pytest.raises(UserError, match="is public already"):
        upload.push(folder, "me/x", private=True)
    assert repo.files == {"pytorch_model.bin": b"precious"}


def test_a_bad_token_is_told(api: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches a traceback, or the token in the message, when the Hub does not know us."""
    wrong = "hf_" + "wrong" * 6
    monkeypatch.setenv("HF_TOKEN", wrong)
    with pytest.raises(UserError, match="401") as caught:
        upload.push(folder_of(tmp_path), "me/x", private=False)
    assert wrong not in str(caught.value)


def test_training_ends_with_publishing(
    api: Hub, world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Catches a draft that is published before it is saved, a card that claims a report, hours lost to a bad name. Run
    again, the command is not refused: publishing is not part of what makes a run another one."""
    target = load_target(str(world.target), "cpu")
    data = sampled(tmp_path / "s", rows=8)
    manifest = json.loads((data / "manifest.json").read_text()) | {
        "tokenizer_hash": target.fingerprint
    }
    (data / "manifest.json").write_text(json.dumps(manifest))
    args = [
        "--target", world.target, "--data", data, "--draft.init", world.draft, "--out", tmp_path / "lm",
        "--loop.steps", 1, "--loop.batch_size", 4, "--loop.micro_batch", 4, "--loop.warmup", 0,
        "--check.prompts", 3, "--check.max_new_tokens", 4, "--wandb", "disabled",
    ]  # fmt: skip
    # Publishing is a process of its own.
    monkeypatch.setattr(worlds, "ENV", worlds.ENV | hub.environment(api, tmp_path))
    wrong = worlds.call("train/distill.py", *args, "--publish.repo", "me/x y")
    assert "is not a valid name" in wrong.error()
    named = ("--publish.repo", "me/lm", "--publish.labels.base_model", tmp_path / "llama")
    wrong = worlds.call("train/distill.py", *args, *named)
    assert "is no name on the Hub: give OWNER/NAME" in wrong.error()
    assert not (tmp_path / "lm").exists()
    more = ("--publish.repo", "me/lm", "--publish.private", "true")
    done = worlds.call("train/distill.py", *args, *more).ok()
    assert "published: " in done.err
    with monkeypatch.context() as patch:
        patch.setattr(training, "publish", lambda *_: "nothing new")
        assert "published: nothing new" in worlds.call("train/distill.py", *args, *more).err
    repo = api.repos["model", "me/lm"]
    assert repo.private
    assert repo.files["model.safetensors"] == (tmp_path / "lm" / "model.safetensors").read_bytes()
    text = repo.files["README.md"].decode()
    assert "no report was given" in text
    assert str(tmp_path) not in text
    assert "tau" in text


# ---- sampled sets ----


def sampled(folder: Path, rows: int = 3, answered: int = 3, source: str = "stdlib") -> Path:
    made = [
        sample_store.SampleRow(
            id=f"p{i}#0", source=source, origin="target", input_ids=[1, 2, 3, 4], loss_spans=[[2, 4]],
            finish_reason="eos",
        )
        for i in range(rows)
    ]  # fmt: skip
    sample_store.write_shard(folder, made, "0001")
    counts = {"asked": answered, "answered": answered, "failed": 0}
    manifest = Manifest(
        str(worlds.ROOT / "assets" / "target"),
        None,
        "33c2eb365440cc00",
        None,
        {"temperature": 1.0},
        0,
        counts,
        None,
        {},
    )
    write_manifest(folder, manifest)
    (folder / "run.yaml").write_text("out: /home/me/samples\n")
    return folder


def test_a_sampled_set_is_published_with_its_manifest(api: Hub, tmp_path: Path) -> None:
    """Catches a data card whose counts are not those of the rows, and shards that the Hub's viewer does not find."""
    folder = publish.build_dataset_folder(
        sampled(tmp_path / "s"), "me/s", HubLabels(license="mit"), tmp_path / "out"
    )
    assert files_of(folder.path) == {"README.md", "manifest.json", "shards/0001.parquet"}
    text = (folder.path / "README.md").read_text()
    assert "| tokens | 12 |" in text
    assert "| stdlib | target | 3 | 12 | 6 |" in text
    data = DatasetCard(text).data.to_dict()
    assert data["configs"] == [{"config_name": "default", "data_files": "shards/*.parquet"}]
    assert data["size_categories"] == "n<1K"
    assert upload.push(folder, "me/s", private=False)["tag"] == "v1"
    files = api.repos["dataset", "me/s"].files
    assert files["shards/0001.parquet"] == (tmp_path / "s" / "shards" / "0001.parquet").read_bytes()


def test_paths_in_shards_are_cut(tmp_path: Path) -> None:
    """Catches the path of a prompts file, which stands in each row; ids and tokens stay."""
    source = sampled(tmp_path / "s", source=str(tmp_path / "prompts.jsonl"))
    out = publish.build_dataset_folder(source, "me/s", HubLabels(), tmp_path / "out").path
    rows = list(sample_store.read_shards(out))
    assert {row["source"] for row in rows} == {"prompts.jsonl"}
    assert [row["id"] for row in rows] == ["p0#0", "p1#0", "p2#0"]
    assert [list(row["input_ids"]) for row in rows] == [[1, 2, 3, 4]] * 3
    assert len(load_set(out)[1]) == 3  # its manifest lists the shards as they were written
    for path in out.rglob("*"):
        assert not path.is_file() or str(tmp_path).encode() not in path.read_bytes()


def test_an_unfinished_set_is_refused(tmp_path: Path) -> None:
    """Catches a set that was published while it was sampled, or that lost a shard."""

    def refused(source: Path) -> str:
        with pytest.raises(UserError) as refusal:
            publish.build_dataset_folder(source, "me/s", HubLabels(), tmp_path / "out")
        assert not (tmp_path / "out").exists()
        return str(refusal.value)

    early = sampled(tmp_path / "early", answered=5)  # as earlier versions wrote it
    content = json.loads((early / "manifest.json").read_text())
    del content["shards"]
    (early / "manifest.json").write_text(json.dumps(content))
    assert "has 3 rows and its manifest counts 5" in refused(early)
    lost = sampled(tmp_path / "lost")
    (lost / "shards" / "0001.parquet").rename(tmp_path / "away")
    assert "0001.parquet with 3 rows is missing" in refused(lost)
    (tmp_path / "away").rename(lost / "shards" / "0001.parquet")
    (lost / "manifest.json").unlink()
    assert "no finished set" in refused(lost)
