"""Samples in colour: marked is what training supervises, nothing else; the page escapes what texts hold."""

import html
import io
import json
import re
from pathlib import Path

import numpy as np
import pytest
from rich.console import Console
from transformers import PreTrainedTokenizerFast

from decode.common.chat.render import ChatTemplate
from tests import worlds
from tests.train.doctor_checks.sets import chats, clean_rows, row_of, save_set, save_target
from train.data import sample_store
from train.data.batching import collate
from train.data.sample_store import SampleRow
from train.doctor_checks.rendering import masked_texts, print_samples
from train.doctor_checks.rows import SeenRow

NASTY = "<script>alert('1 & 2')</script> \"quoted\" </pre></mark> é🙂"


def seen(tokenizer: PreTrainedTokenizerFast, row: SampleRow) -> SeenRow:
    chat = ChatTemplate(tokenizer)
    return SeenRow(row["id"], row, chat, chat.probe, True)


def supervised_text(tokenizer: PreTrainedTokenizerFast, row: SampleRow) -> str:
    """The text of the tokens whose predictions enter the loss, by the batch that training makes of the row."""
    batch = collate([row], pad_id=0, multiple=1)
    ids = batch.input_ids[0, 1:][batch.loss_mask[0, :-1]]
    return tokenizer.decode(ids, skip_special_tokens=False)


def test_marked_is_what_training_supervises(tmp_path: Path) -> None:
    """Bug: colours one token off, or by spans where training has a mask."""
    tokenizer = save_target(tmp_path / "target")
    for messages in chats(4):
        row = row_of(tokenizer, messages)
        pieces = masked_texts(seen(tokenizer, row), 10_000)
        assert "".join(p.text for p in pieces if p.supervised) == supervised_text(tokenizer, row)
        assert "".join(p.text for p in pieces) == tokenizer.decode(row["input_ids"])
        assert sum(p.tokens for p in pieces if p.supervised) == sum(
            end - start for start, end in row["loss_spans"]
        )


@pytest.mark.parametrize(("start", "end"), [(0, 5), (3, 4), (5, 9), (0, 12)])
def test_spans_anywhere_are_marked_to_the_token(start: int, end: int, tmp_path: Path) -> None:
    """Bug: the first token of a row, which nothing predicts, is marked; overlapping spans are shown twice."""
    tokenizer = save_target(tmp_path / "target")
    row = row_of(tokenizer, chats(2)[1])
    row["loss_spans"] = [[start, end], [max(0, start - 1), end - 1]]
    labels = seen(tokenizer, row).labels
    batch = collate([row], pad_id=0, multiple=1)
    assert np.array_equal(labels[1:], batch.loss_mask[0, :-1].numpy())
    assert not labels[0]
    pieces = masked_texts(seen(tokenizer, row), 10_000)
    assert "".join(p.text for p in pieces if p.supervised) == supervised_text(tokenizer, row)


def test_a_character_across_the_boundary_is_shown_once(tmp_path: Path) -> None:
    """Bug: a character of several tokens becomes two broken ones."""
    tokenizer = save_target(tmp_path / "target")
    ids = tokenizer("a🙂b")["input_ids"]
    row = row_of(tokenizer, chats(1)[0]) | {"input_ids": ids, "loss_spans": [[3, len(ids)]]}
    pieces = masked_texts(seen(tokenizer, row), 100)  # type: ignore[arg-type]
    assert [(p.text, p.supervised) for p in pieces] == [("a", False), ("🙂b", True)]


def test_long_rows_are_shown_where_the_labels_begin(tmp_path: Path) -> None:
    tokenizer = save_target(tmp_path / "target")
    chat = [{"role": "user", "content": "q" * 500}, {"role": "assistant", "content": "a" * 500}]
    pieces = masked_texts(seen(tokenizer, row_of(tokenizer, chat)), 40)
    assert [(p.tokens, p.supervised) for p in pieces] == [(10, False), (30, True)]
    assert pieces[1].text == "a" * 30


def test_the_page_escapes_texts_and_marks_the_labels(tmp_path: Path) -> None:
    """Bug: markup in a prompt or an answer becomes part of the page."""
    tokenizer = save_target(tmp_path / "target")
    chat = [{"role": "user", "content": NASTY}, {"role": "assistant", "content": f"{NASTY} too"}]
    row = row_of(tokenizer, chat)
    row["source"], row["id"] = "<b>bold</b>.jsonl", "<i>id</i>#0"
    folder = save_set(tmp_path / "set", tokenizer, [row, *clean_rows(tokenizer)])
    page = tmp_path / "page.html"
    done = worlds.call(
        "train/doctor.py", folder, "--target", tmp_path / "target", "--html", page, "--show", 99,
        "--show_tokens", 1000,
    ).ok()  # fmt: skip
    text = page.read_text()
    assert not re.search(r"<script|<b>|<i>|<link|src=|http", text)
    labels = re.findall(r'<span style="color: #008000[^"]*font-weight: bold">(.*?)</span>', text)
    marks = list(map(html.unescape, labels))
    rows = [row, *clean_rows(tokenizer)]
    spans = [tokenizer.decode(r["input_ids"][a:b]) for r in rows for a, b in r["loss_spans"]]
    assert sorted(marks) == sorted(spans)
    assert f"{NASTY} too<1>" in marks
    assert "⟦" not in done.out  # samples are on the page only


def test_without_colours_labels_stand_in_brackets(tmp_path: Path) -> None:
    tokenizer = save_target(tmp_path / "target")
    row = row_of(tokenizer, chats(1)[0])
    plain, coloured = io.StringIO(), io.StringIO()
    print_samples(Console(file=plain, width=300), [seen(tokenizer, row)], 1000)
    terminal = Console(file=coloured, width=300, force_terminal=True, color_system="standard")
    print_samples(terminal, [seen(tokenizer, row)], 1000)
    spans = [tokenizer.decode(row["input_ids"][a:b]) for a, b in row["loss_spans"]]
    assert re.findall(r"⟦(.*?)⟧", plain.getvalue(), re.S) == spans
    assert re.findall(r"\x1b\[1;32m(.*?)\x1b\[0m", coloured.getvalue(), re.S) == spans


def test_a_terminal_gets_no_control_characters(tmp_path: Path) -> None:
    """Bug: a text from the network that clears the screen or sets the window's title."""
    tokenizer = save_target(tmp_path / "target")
    chat = [
        {"role": "user", "content": "a\x1b]0;x\x07\tb"},
        {"role": "assistant", "content": "\x9bc"},
    ]
    row = row_of(tokenizer, chat) | {"source": "\x1b[2J"}
    out = io.StringIO()
    print_samples(Console(file=out, width=300), [seen(tokenizer, row)], 1000)  # type: ignore[arg-type]
    assert not re.search(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]", out.getvalue())
    assert "a␛]0;x␇" in out.getvalue()


def test_what_is_kept_of_a_row(tmp_path: Path) -> None:
    """Bug: an example or a waiting row keeps 64 rows in memory, and its text and tokens as Python objects."""
    tokenizer = save_target(tmp_path / "target")
    save_set(tmp_path / "set", tokenizer, clean_rows(tokenizer))
    row = seen(tokenizer, sample_store.read_shards(tmp_path / "set")[3])
    assert row.asked != ""
    kept = row.kept()
    assert {"ids", "text", "asked", "messages"} <= vars(row).keys()
    assert vars(kept).keys() == {"id", "row", "chat", "template", "chosen"}
    assert not np.shares_memory(np.asarray(kept.row["input_ids"]), np.asarray(row.row["input_ids"]))
    assert (kept.ids, kept.text, kept.spans) == (row.ids, row.text, row.spans)


def test_strict_and_the_files(tmp_path: Path) -> None:
    """Bug: a grave finding ends with 0 in strict mode, or notes end with 1."""
    tokenizer = save_target(tmp_path / "target")
    rows = clean_rows(tokenizer)
    clean = save_set(tmp_path / "clean", tokenizer, rows)
    rows[4]["loss_spans"][0][0] += 1
    bad = save_set(tmp_path / "bad", tokenizer, rows)
    for folder, strict, code in ((clean, "true", 0), (bad, "true", 1), (bad, "false", 0)):
        done = worlds.call(
            "train/doctor.py", folder, "--target", tmp_path / "target", "--strict", strict,
            "--out", tmp_path / "found.json", "--show", 1,
        )  # fmt: skip
        assert (done.code, done.err) == (code, "")
        last = json.loads(done.out.splitlines()[-1])
        assert last == json.loads((tmp_path / "found.json").read_text())
        assert (last["stops_or_costs"] > 0) == (folder is bad)
        shown = rows[4]["id"] if folder is bad else ""
        assert done.out.startswith(shown)
