"""Prompts before sampling, targets without a chat template, sets of the real command, and the shipped answers."""

from pathlib import Path
from typing import Any

import pytest
from huggingface_hub import constants

from decode.model.loading import load_tokenizer, tokenizer_fingerprint
from tests import worlds
from tests.rows import file_sources, write_rows
from tests.train.doctor_checks.sets import (
    CHATML,
    chats,
    examine,
    graves,
    save_set,
    save_target,
    text_row,
    words,
)
from train.data import manifest, sample_store
from train.data.conversations import make_prompt
from train.data.sources import evaluation_texts

SMOLLM2 = Path(constants.HF_HOME) / "draftsmith" / "gguf" / "b179c9523d0e6a0f-v2"
"""Where `bash scripts/get_models.sh smollm2` leaves the tokenizer of the shipped answers."""
ANSWERS = worlds.ROOT / "assets" / "smollm2-answers"


def write_sources(path: Path, *contents: Any) -> str:
    """The setting `sources` for a file of prompts: texts and chats."""
    rows = [{"messages": c} if isinstance(c, list) else {"prompt": c} for c in contents]
    return file_sources(write_rows(path, rows))


def user(text: str) -> dict[str, str]:
    return {"role": "user", "content": text}


def test_clean_prompts_have_no_grave_finding(tmp_path: Path) -> None:
    save_target(tmp_path / "target")
    asked = [messages[:-1] for messages in chats()]
    result = examine(
        tmp_path / "target", "", "--sources", write_sources(tmp_path / "p.jsonl", *asked)
    )
    assert graves(result) == []
    assert result["parts"]["Prompts before sampling"]["facts"]["chats of several turns"] == 8


def test_planted_defects_of_prompts(tmp_path: Path) -> None:
    """Bug: what sampling refuses, or what is evaluated on, is learned only after the sampling."""
    refusing = "{% if messages[0]['role'] == 'system' %}{{ raise_exception('no') }}{% endif %}"
    save_target(tmp_path / "target", refusing + CHATML)
    asked: list[Any] = [words(f"u{i}", 6) for i in range(16)]
    asked += [next(t for t in evaluation_texts() if len(t) < 300)]
    asked += [[{"role": "system", "content": "Be odd."}, user(words("s", 6))]]
    sources = write_sources(tmp_path / "p.jsonl", *asked)
    result = examine(tmp_path / "target", "", "--sources", sources)
    found = result["found"]
    assert set(graves(result)) == {"prompt is refused", "evaluation prompt in the data"}
    assert found["prompt is refused"]["severity"] == "stops"
    assert found["evaluation prompt in the data"]["rows"] == 1


def test_what_the_template_does_not_keep(tmp_path: Path) -> None:
    """Bug: tool calls and system messages vanish from the prompts without a word."""
    dropping = CHATML.replace("in messages", "in messages if m['role'] in ('user', 'assistant')")
    save_target(tmp_path / "target", dropping)
    call = {"type": "function", "function": {"name": "look", "arguments": {}}}
    chat = [
        {"role": "system", "content": "Be odd."}, user(words("a", 4)),
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "content": "42"},
    ]  # fmt: skip
    sources = write_sources(tmp_path / "p.jsonl", chat, *(words(f"u{i}", 6) for i in range(9)))
    result = examine(tmp_path / "target", "", "--sources", sources)
    assert set(graves(result)) == {
        "template drops system messages", "template drops tool calls", "template drops tool results"
    }  # fmt: skip
    assert all(result["found"][name]["rows"] == 1 for name in graves(result))


def test_without_a_template_prompts_show_the_boundary(tmp_path: Path) -> None:
    """Bug: a mask one token off in a plain text, which no generation prompt gives away."""
    tokenizer = save_target(tmp_path / "target", template=None, ends=[0])
    texts = [words(f"u{i}", 5) for i in range(12)]
    rows = []
    for i, text in enumerate(texts):
        row = text_row(tokenizer, "", text, f" {words(f'a{i}', 8)}<eos>")
        rows.append(row | {"id": make_prompt("", text).id})
    sources = write_sources(tmp_path / "p.jsonl", *texts)
    folder = save_set(tmp_path / "clean", tokenizer, rows)  # type: ignore[arg-type]
    assert graves(examine(tmp_path / "target", folder, "--sources", sources)) == []
    rows[3]["loss_spans"] = [[rows[3]["loss_spans"][0][0] - 1, len(rows[3]["input_ids"])]]
    folder = save_set(tmp_path / "bad", tokenizer, rows)  # type: ignore[arg-type]
    assert graves(examine(tmp_path / "target", folder)) == []
    result = examine(tmp_path / "target", folder, "--sources", sources)
    assert graves(result) == ["mask begins at the wrong token"]
    assert "by -1" in result["found"]["mask begins at the wrong token"]["cost"]


def test_a_set_of_the_real_command(tmp_path: Path) -> None:
    """Bug: the command cannot read what train/sample.py writes, or finds faults in boundaries that it made."""
    world = worlds.build(tmp_path)
    (world.target / "chat_template.jinja").write_text(CHATML)
    chosen = {"max_new_tokens": 12, "shard_rows": 8}
    more = [word for name, value in chosen.items() for word in (f"--{name}", value)]
    folder = worlds.sampled(world, tmp_path, *more)
    result = examine(world.target, folder, "--rows", 0)
    rows, labels = manifest.load_set(folder)[1], result["parts"]["Sampled set"]["labels"]
    assert result["parts"]["Sampled set"]["rows"] == len(rows) == 48
    assert labels == sum(end - start for row in rows for start, end in row["loss_spans"])
    boundary = {"mask begins at the wrong token", "reply without generation prompt", "BOS twice"}
    boundary |= {"EOS is not supervised", "prompt is rendered otherwise"}
    assert boundary.isdisjoint(result["found"])


@pytest.mark.skipif(
    not SMOLLM2.is_dir(), reason="bash scripts/get_models.sh smollm2 has not been run"
)
def test_the_shipped_answers() -> None:
    """Bug: the shipped answers have a wrong boundary, or hold prompts that are evaluated on."""
    result = examine(SMOLLM2, ANSWERS / "articles", "--rows", 20)
    ends = [reason for _, reason in sample_store.row_ends(ANSWERS / "articles").values()]
    assert result["found"]["answers cut off"]["rows"] == ends.count("length")
    assert [f["name"] for f in result["findings"] if f["severity"] == "stops"] == []
    assert "evaluation prompt in the data" not in result["found"]
    assert manifest.read_manifest(ANSWERS / "articles").tokenizer_hash == tokenizer_fingerprint(
        load_tokenizer(str(SMOLLM2))
    )
