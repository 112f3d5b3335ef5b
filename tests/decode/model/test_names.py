"""What is a path and what is a name on the Hub, and how the Hub is asked where it cannot be reached."""

import re
from pathlib import Path

import pytest

from decode.common.errors import UserError
from decode.model import names
from decode.model.names import check_name, is_local, load_error


@pytest.fixture(autouse=True)
def _folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Works in a folder with one model, one folder of drafts, and a Hub cache that holds one repository."""
    monkeypatch.chdir(tmp_path)
    for folder in ("model", "drafts/mine", "Qwen/Small", "cache/models--Qwen--Cached"):
        (tmp_path / folder).mkdir(parents=True)
    (tmp_path / "link").symlink_to("nowhere")
    monkeypatch.setattr(names.constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(names.constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(names, "_reaches", lambda endpoint: True)


@pytest.mark.parametrize(
    "name", ["model", "drafts/mine", "./missing", "/missing", "~/missing", "../x", "a/b/c", "link"]
    + ["prompts.jsonl", "owner/weights.safetensors", "x.gguf", "a/b.gguf", "a/b/c/d.gguf"]
    + ["drafts/missing", "Qwen/Missing"],
)  # fmt: skip
def test_what_is_or_looks_like_a_path(name: str) -> None:
    """Catches a wrong path that is looked for on the Hub, which takes up to a minute without a network."""
    assert is_local(name)


@pytest.mark.parametrize(
    "name",
    ["gpt2", "Org/Qwen2.5-0.5B", "Qwen/Cached", "owner/name/file-Q4_0.gguf", "hf://datasets/a/b"],
)
def test_what_is_a_name_on_the_hub(name: str) -> None:
    """Catches a rule for paths that takes names of the Hub: with dots, a cached one, a file in a repository."""
    assert not is_local(name)
    assert not check_name(name, "target")


def test_what_is_not_there_is_refused_by_name() -> None:
    """Catches a missing path that is passed on, and a message without its role."""
    for name in ("./missing", "link", "drafts/missing", "Qwen/Missing", "x.gguf"):
        with pytest.raises(UserError, match=f"^draft '{name}' does not exist.*correct the path"):
            check_name(name, "draft")
    for name in ("", "  ", "a\0b", "x" * 300, "o/" + "x" * 300):
        with pytest.raises(UserError, match=r"^draft .*(is empty|is no name)"):
            check_name(name, "draft")


def test_a_path_has_no_revision() -> None:
    """Catches a revision of a local model that is ignored in silence."""
    assert check_name("model", "target")
    with pytest.raises(UserError, match="revision 'v1' is of no use: 'model' is a local path"):
        check_name("model", "target", revision="v1")
    assert not check_name("owner/name", "target", revision="v1")


def test_without_a_hub_its_libraries_go_offline(monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches retries for each file, and a reason that does not name the network."""
    asked = []
    monkeypatch.setattr(names, "_reaches", lambda endpoint: asked.append(endpoint))
    check_name("model", "target")
    assert asked == []
    assert not names.constants.HF_HUB_OFFLINE
    check_name("owner/name", "target")
    assert names.constants.HF_HUB_OFFLINE
    check_name("owner/other", "target")
    assert asked == [names.constants.ENDPOINT]
    reason = load_error("owner/name", "model", OSError("offline\nmode"))
    assert re.search("no such path.*is not reached", reason)
    assert load_error("Qwen/Cached", "model", OSError("cut\noff")) == "cut off"
    assert load_error("model", "model", KeyError("size")) == "KeyError 'size'"


def test_the_hub_is_asked_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches an address that cannot be reached and costs its time for every name, or raises."""
    monkeypatch.undo()
    names._reaches.cache_clear()
    assert not names._reaches("http://127.0.0.1:1")
    assert names._reaches.cache_info().misses == 1
    assert not names._reaches("http://127.0.0.1:1")
    assert names._reaches.cache_info().misses == 1
