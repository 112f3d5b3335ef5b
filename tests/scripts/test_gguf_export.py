"""Exported GGUF files, read again by our own reader: the same weights, logits, tokenizer and ends of texts."""

import json
import shutil
from pathlib import Path
from typing import Any

import gguf
import pytest
import torch
from huggingface_hub import constants
from safetensors.torch import load_file, save_file

from decode.checkpoints.draft_vocab import save_ids
from decode.common.chat.choice import with_template
from decode.common.chat.render import ChatTemplate
from decode.common.errors import UserError
from decode.model.formats.gguf_reader import read_file
from decode.model.loading import Target, load_model, load_target, load_tokenizer
from decode.serving import gguf_export
from decode.serving.gguf_export import write_gguf
from tests import worlds
from tests.params import pairwise
from tests.tiny import rope, tiny_model
from tests.worlds import ROOT

TEMPLATE = "{% for message in messages %}{{ message['content'] }}{% endfor %}"
ENDS = [1, 2]


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(constants, "HF_HOME", str(tmp_path / "cache"))


def save(folder: Path, arch: str = "llama", rows: int = 4096, **changes: Any) -> str:
    """A tiny model with the bundled tokenizer, a chat template and two ids that end a text."""
    model = tiny_model(arch, vocab_size=rows, num_hidden_layers=2, **changes)
    model.generation_config.eos_token_id = ENDS
    model.save_pretrained(folder)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copyfile(ROOT / "assets/target" / name, folder / name)
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    return str(folder)


def read_back(path: str, out: Path, **options: Any) -> Target:
    write_gguf(path, out, **options)
    return load_target(str(out), "cpu")


def logits(model: Any) -> torch.Tensor:
    ids = torch.arange(2, 30)[None] * 7
    with torch.inference_mode():
        return model(ids).logits


def assert_same(got: torch.Tensor, expected: torch.Tensor) -> None:
    """Equal but for the last bits, which depend on where in memory a file's weights lie."""
    torch.testing.assert_close(got, expected, rtol=0, atol=1e-5)


@pytest.mark.parametrize(
    ("arch", "changes"),
    [
        ("llama", {"tie_word_embeddings": True}),
        ("llama", {"tie_word_embeddings": False}),
        ("qwen2", {}),
    ],
)
def test_what_is_read_again_is_the_model(
    arch: str, changes: dict[str, Any], tmp_path: Path
) -> None:
    """Catches lost or renamed tensors, sizes, a head of another size, and a tokenizer or an end that got lost."""
    path = save(tmp_path / "model", arch, **changes)
    original = load_target(path, "cpu")
    target = read_back(path, tmp_path / "model.gguf")
    assert_same(logits(target.runner.model), logits(original.runner.model))
    assert target.fingerprint == original.fingerprint
    assert target.tokenizer.chat_template == TEMPLATE
    assert target.eos == original.eos
    assert target.eos >= {*ENDS}
    assert target.runner.context == original.runner.context


def test_all_named_templates_are_written_and_read_again(tmp_path: Path) -> None:
    """Catches a traceback while writing, and named templates that a GGUF's reader leaves out."""
    path = save(tmp_path / "model")
    tokenizer = load_tokenizer(path)
    tokenizer.chat_template = {
        "default": TEMPLATE, "tool_use": "T" + TEMPLATE, "rag": "R{{ date }}",
    }  # fmt: skip
    (tmp_path / "model" / "chat_template.jinja").unlink()
    tokenizer.save_pretrained(path)
    assert load_tokenizer(path).chat_template == tokenizer.chat_template
    read = read_back(path, tmp_path / "model.gguf")
    assert read.tokenizer.chat_template == tokenizer.chat_template
    asked = with_template(read.tokenizer, {"name": "rag", "date": "2026"})
    assert asked.decode(ChatTemplate(asked).encode("hi")) == "R2026"


@pytest.mark.parametrize(
    ("arch", "flag", "rows"), pairwise(["llama", "qwen2"], [True, False], [0, 4100])
)
def test_the_head_that_is_there_is_written(
    arch: str, flag: bool, rows: int, tmp_path: Path
) -> None:
    """Catches a head that was trained apart and dropped because the config says that it is the embedding."""
    path = Path(save(tmp_path / "model", arch, tie_word_embeddings=flag))
    stored = load_file(path / "model.safetensors")
    head = torch.randn(stored["model.embed_tokens.weight"].shape)
    save_file(stored | {"lm_head.weight": head}, path / "model.safetensors", {"format": "pt"})
    target = save(tmp_path / "target", arch, rows=rows) if rows else ""
    model = read_back(str(path), tmp_path / "model.gguf", target=target).runner.model
    assert torch.equal(model.lm_head.weight[:4096], head)
    assert torch.equal(model.model.embed_tokens.weight[:4096], stored["model.embed_tokens.weight"])
    assert len(model.lm_head.weight) == (rows or 4096)


def test_a_head_that_is_the_embedding_is_written_once(tmp_path: Path) -> None:
    """Catches a file with the same matrix twice, and one that is read back as two."""
    path = Path(save(tmp_path / "model", tie_word_embeddings=False))
    stored = load_file(path / "model.safetensors")
    stored["lm_head.weight"] = stored["model.embed_tokens.weight"].clone()
    save_file(stored, path / "model.safetensors", {"format": "pt"})
    original = load_model(str(path), "target", "cpu", "float32")
    model = read_back(str(path), tmp_path / "model.gguf").runner.model
    assert model.config.tie_word_embeddings
    assert torch.equal(model.lm_head.weight, stored["lm_head.weight"])
    assert_same(logits(model), logits(original))


def test_rows_in_transformers_order_are_seen(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The test above is blind unless it fails for queries and keys that are not interleaved."""
    path = save(tmp_path / "model")
    monkeypatch.setattr(gguf_export, "in_gguf_order", lambda key, array, config: array)
    wrong = read_back(path, tmp_path / "model.gguf")
    assert not torch.allclose(logits(wrong.runner.model), logits(load_target(path, "cpu").runner.model))  # fmt: skip


@pytest.mark.parametrize("rows", [4090, 4104])
def test_a_draft_gets_the_targets_rows(rows: int, tmp_path: Path) -> None:
    """Catches a draft whose logits llama.cpp would take for other tokens, or refuse for their number."""
    target = save(tmp_path / "target", rows=4100)
    draft = save(tmp_path / "draft", rows=rows)
    if rows < 4096:
        with pytest.raises(UserError, match="embeds 4090 of its tokenizer's 4096 tokens"):
            write_gguf(draft, tmp_path / "alone.gguf")
    write_gguf(draft, tmp_path / "draft.gguf", target=target)
    header = read_file(tmp_path / "draft.gguf").keys
    assert header["llama.vocab_size"] == len(header["tokenizer.ggml.tokens"]) == 4100
    assert header["tokenizer.ggml.token_type"][4096:] == [gguf.TokenType.UNUSED] * 4
    assert header["tokenizer.ggml.token_type"][:2] == [gguf.TokenType.CONTROL, gguf.TokenType.NORMAL]  # fmt: skip
    assert header["tokenizer.ggml.pre"] == "smollm"


@pytest.mark.parametrize(
    ("tied", "arch", "dtype"),
    pairwise([True, False], ["llama", "qwen2"], ["float32", "float16", "bfloat16"]),
)
def test_llamacpp_drafts_trained_tokens_alone(
    tied: bool, arch: str, dtype: Any, tmp_path: Path
) -> None:
    """Catches a draft whose other tokens, which its file cannot leave out, win where llama.cpp drafts."""
    path, ids = save(tmp_path / "model", arch, tie_word_embeddings=tied), torch.arange(5, 4096, 17)
    target = save(tmp_path / "target", arch, rows=4100)
    own = logits(load_model(path, "draft", "cpu", "float32"))
    assert not torch.isin(own.argmax(-1), ids).all()
    save_ids(tmp_path / "model", ids)
    got = logits(read_back(path, tmp_path / "draft.gguf", dtype=dtype, target=target).runner.model)
    assert got.shape[-1] == 4100
    assert torch.isin(got.argmax(-1), ids).all()
    if dtype == "float32":
        assert_same(got[..., ids], own[..., ids])


@pytest.mark.parametrize(
    ("arch", "changes", "says"),
    [
        ("gemma", {}, "is a gemma"),
        ("llama", rope("llama3", factor=4.0, low_freq_factor=1.0, high_freq_factor=4.0), "RoPE of type llama3"),
        ("llama", {"attention_bias": True}, "has biases"),
        ("qwen2", {"sliding_window": 8, "use_sliding_window": True, "max_window_layers": 0}, "a sliding window"),
    ],
)  # fmt: skip
def test_what_a_gguf_would_compute_otherwise_is_refused(
    arch: str, changes: dict[str, Any], says: str, tmp_path: Path
) -> None:
    """Catches a file that loads in llama.cpp and drafts something else."""
    with pytest.raises(UserError, match=f"{says}.*convert_hf_to_gguf"):
        write_gguf(save(tmp_path / "model", arch, **changes), tmp_path / "model.gguf")
    assert not (tmp_path / "model.gguf").exists()


def test_another_tokenizer_is_refused(tmp_path: Path) -> None:
    """Catches texts that are cut otherwise, and a draft whose ids mean other tokens than the target's."""
    path, other = save(tmp_path / "model"), save(tmp_path / "other")
    file = tmp_path / "other" / "tokenizer.json"
    content = json.loads(file.read_text())
    vocab = content["model"]["vocab"]
    vocab["x"], vocab["y"] = vocab["y"], vocab["x"]
    file.write_text(json.dumps(content))
    with pytest.raises(UserError, match="disagree on token ids"):
        write_gguf(path, tmp_path / "model.gguf", target=other)
    content["pre_tokenizer"]["pretokenizers"][0]["individual_digits"] = False
    file.write_text(json.dumps(content))
    with pytest.raises(UserError, match="cuts texts as one of"):
        write_gguf(other, tmp_path / "other.gguf")


def test_the_command_writes_a_model_that_loads(tmp_path: Path) -> None:
    """The bundled draft through scripts/export.py; catches a layout that the command does not know."""
    words = ["--format", "gguf", "--target", ROOT / "assets/target", "--dtype", "bfloat16"]
    worlds.call("scripts/export.py", ROOT / "assets/draft", *words, "--out", tmp_path / "out").ok()
    assert [file.name for file in (tmp_path / "out").iterdir()] == ["model.gguf"]
    model = load_model(str(tmp_path / "out"), "draft", "cpu", "float32")
    bundled = load_model(str(ROOT / "assets/draft"), "draft", "cpu", "float32")
    assert_same(logits(model), logits(bundled))
