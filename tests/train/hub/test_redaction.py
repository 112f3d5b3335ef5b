"""Nothing of this machine is published: tokens and pickles are found wherever they hide, paths are cut."""

import json
import pickle
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from decode.common.errors import UserError
from train.hub import redaction

HF, OPENAI = "hf_" + "aB3" * 11, "sk-" + "proj-x9" * 5
KEY = "0123456789abcdef" * 2 + "01234567"


@pytest.mark.parametrize(
    ("text", "clean"),
    [
        ("/home/me/models/llama", "llama"),
        ("/data", "data"),
        ("~/drafts/x", "x"),
        ("../../home/me/x", "x"),
        ("C:\\Users\\me\\draft", "draft"),
        ("--data=/mnt/big/samples", "--data=samples"),
        ("out: /scratch/me/run\nseed: 0\n", "out: run\nseed: 0\n"),
        ("file:///home/me/x.jsonl", "x.jsonl"),
        ("org/name", "org/name"),
        ("outputs/drafts/x", "outputs/drafts/x"),
        ("https://huggingface.co/org/name/tree", "https://huggingface.co/org/name/tree"),
        ("</think> either/or 3/4 // x", "</think> either/or 3/4 // x"),
    ],
)
def test_paths_are_cut(text: str, clean: str) -> None:
    """Catches a home folder in a card, and a hub name or URL taken for a path."""
    assert redaction.strip_local_paths({"a": [text]}) == {"a": [clean]}


def test_paths_below_the_current_folder_stay_as_they_are_typed() -> None:
    """Catches `outputs/x` given as an absolute path, of which only the last part would be left."""
    assert redaction.strip_local_paths(str(Path.cwd() / "outputs" / "x")) == "outputs/x"


@pytest.mark.parametrize(
    ("name", "text", "what"),
    [
        (
            "run.yaml",
            f"seed: 0\ntoken: {HF}\n",
            "run.yaml, line 2, holds what looks like a Hugging Face",
        ),
        (
            "a/b.json",
            json.dumps({"argv": ["--key", OPENAI]}),
            r"a/b.json: argv\[1\] holds .* an API key",
        ),
        ("a.json", json.dumps({"wandb": KEY}), "a.json: wandb holds what looks like a key"),
        ("a.json", json.dumps({"a": HF}).replace("hf_", "h\\u0066_"), "a.json: a holds"),
        ("a.json", json.dumps({KEY: 1}), "a key of a.json holds"),
        ("a.json", f'{{"a": "{HF}", "a": 1}}', "a.json, line 1, holds"),
        ("tokenizer.json", json.dumps({"x": HF}), "tokenizer.json"),
        ("tokenizer.json", json.dumps({"model": {"vocab": {HF: 0}}}), "tokenizer.json"),
        ("merges.txt", f"a b\n{HF} c\n", "merges.txt, line 2"),
        (
            "config.json",
            json.dumps({"run": "https://wandb.ai/me/x"}),
            "config.json: run holds a link",
        ),
        ("README.md", "made in `/home/me/drafts/x`\n", "local path '/home/me/drafts/x'"),
        ("README.md", "see ../../home/me/x\n", "local path '../../home/me/x'"),
        ("config.json", json.dumps({"_name_or_path": "/models"}), "local path '/models'"),
    ],
)
def test_what_must_not_be_published_is_found(
    tmp_path: Path, name: str, text: str, what: str
) -> None:
    """Catches a key in an argument, in a tokenizer's file, in a subfolder; the error does not repeat it."""
    (tmp_path / name).parent.mkdir(exist_ok=True)
    (tmp_path / name).write_text(text)
    with pytest.raises(UserError, match=what) as caught:
        redaction.check_folder(tmp_path)
    assert name in str(caught.value)
    assert "\n" not in str(caught.value)
    assert all(secret not in str(caught.value) for secret in (HF, OPENAI, KEY))


def test_weights_are_searched_too(tmp_path: Path) -> None:
    """Catches a path in the metadata of a safetensors file, where people do not look."""
    save_file({"a": torch.ones(1)}, tmp_path / "model.safetensors", {"from": "/home/me/run/x"})
    with pytest.raises(UserError, match="local path"):
        redaction.check_folder(tmp_path)


def test_the_token_in_use_is_found_whatever_it_looks_like(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Catches the tokens of self-hosted Hubs, which have no known form."""
    monkeypatch.setenv("HF_TOKEN", "plainpassword1")
    (tmp_path / "run.yaml").write_text("x: plainpassword1\n")
    with pytest.raises(UserError, match=r"run.yaml, line 1, holds .* a secret of this environment"):
        redaction.check_folder(tmp_path)
    (tmp_path / "run.yaml").unlink()
    (tmp_path / "tokenizer.model").write_bytes(b"\xff\x00plainpassword1\xff")
    with pytest.raises(UserError, match=r"tokenizer.model holds a secret of this environment"):
        redaction.check_folder(tmp_path)


def test_ordinary_folders_pass(tmp_path: Path) -> None:
    """Catches an alarm at commits, checksums, vocabularies, templates and special tokens."""
    commit = KEY[::-1]
    (tmp_path / "draftsmith.json").write_text(
        json.dumps({"git": "0123456789ab+dirty", "draft_sha256": "ab" * 32})
    )
    (tmp_path / "README.md").write_text(f"commit {commit}, {'ab' * 32}, τ 1.0/2, https://a.b/c/d\n")
    (tmp_path / "tokenizer.json").write_text(json.dumps({"/usr/bin": 3}))
    (tmp_path / "tokenizer_config.json").write_text(
        json.dumps({"eos_token": "</s>", "chat_template": "a\n/b/c"[:2]})
    )
    redaction.check_folder(tmp_path, {commit, "ab" * 32})


@pytest.mark.parametrize("name", ["pytorch_model.bin", "x.pt", "tokenizer.model", "weights.json"])
def test_pickles_are_known_by_name_or_content(tmp_path: Path, name: str) -> None:
    """Catches a pickle under a harmless name: old ones and torch's archives."""
    path = tmp_path / name
    path.write_bytes(pickle.dumps({"a": 1}))
    assert redaction.is_pickle(path)
    torch.save({"a": torch.ones(1)}, path)
    assert redaction.is_pickle(path)
    with pytest.raises(UserError, match="pickle"):
        redaction.check_folder(tmp_path)
