"""Rows of files and of sampled sets, a target whose tokens are bytes, and the command that samples it."""

import json
from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from decode.model.loading import Target
from tests import worlds
from tests.tiny import tiny_model, tiny_target
from tests.worlds import EOS, byte_tokenizer
from train.data.sample_store import SampleRow


def sample_row(
    ids: Sequence[int], spans: list[list[int]], name: str = "x", source: str = "test"
) -> SampleRow:
    return {
        "id": name, "source": source, "origin": "target", "input_ids": ids, "loss_spans": spans,
        "finish_reason": "eos",
    }  # fmt: skip


def write_rows(path: Path, rows: Iterable[Any]) -> Path:
    """A file of JSON lines; a row that is a text is a line as it stands."""
    lines = (row if isinstance(row, str) else json.dumps(row) for row in rows)
    path.write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
    return path


def file_sources(*paths: Path) -> str:
    """The setting `sources` for these files."""
    return json.dumps([{"kind": "file", "path": str(path)} for path in paths])


def byte_target(template: str | None = None, context: int = 512) -> Target:
    tokenizer = byte_tokenizer()
    tokenizer.chat_template = template
    model = tiny_model("llama", vocab_size=len(tokenizer), max_position_embeddings=context)
    return replace(tiny_target(model, tuple(EOS)), tokenizer=tokenizer)


def save_byte_target(folder: Path, template: Any, context: int = 2048) -> Path:
    tokenizer = byte_tokenizer()
    tokenizer.chat_template = template
    model = tiny_model("llama", vocab_size=len(tokenizer), max_position_embeddings=context)
    return worlds.save(folder, model, tokenizer)


def sample(target: Path, path: Path, out: Path, *more: object) -> worlds.Done:
    """The command on the rows of a file."""
    return worlds.call(
        "train/sample.py", "--target", target, "--sources", file_sources(path), "--out", out,
        "--max_new_tokens", 3, *more,
    )  # fmt: skip
