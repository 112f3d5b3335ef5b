"""Prompts and data files with bad content: encodings, halves of characters, depth, digits, lengths, shapes."""
# ruff: noqa: E501 (a case is one row of its table)

import gzip
import json
from pathlib import Path

import pytest

from tests.hostile.case import Case, Prepare, check, params
from tests.hostile.files import copy, write
from tests.hostile.lab import BASE, Lab, call

DEEP = "[" * 100_000 + "]" * 100_000
DIGITS = "9" * 5000
LONG = "a" * 600
"""More tokens than the context of the lab's target, which holds 512."""

JSONL: list[tuple[str, str | bytes]] = [
    ("empty", ""),
    ("blank", "\n \n"),
    ("not JSON", "{'prompt': 'a'}\n"),
    ("cut", '{"prompt": "abc'),
    ("number", "3\n"),
    ("null", "null\n"),
    ("list", "[1]\n"),
    ("other fields", '{"text_of_prompt": "a"}\n'),
    ("prompt is empty", '{"prompt": ""}\n'),
    ("prompt is a number", '{"prompt": 3}\n'),
    ("prompt is null", '{"prompt": null}\n'),
    ("prompt is a mapping", '{"prompt": {"a": 1}}\n'),
    ("messages are texts", '{"messages": ["a"]}\n'),
    ("message without content", '{"messages": [{"role": "user"}]}\n'),
    ("content is a number", '{"messages": [{"role": "user", "content": 3}]}\n'),
    ("messages empty", '{"messages": []}\n'),
    ("half a surrogate pair", '{"prompt": "a\\ud800b"}\n'),
    ("half in a message", '{"messages": [{"role": "user", "content": "\\udc00"}]}\n'),
    ("deep", f'{{"prompt": {DEEP}}}\n'),
    ("digits", f'{{"prompt": "a", "n": {DIGITS}}}\n'),
    ("Latin-1", '{"prompt": "café"}\n'.encode("latin-1")),
    ("UTF-16", '{"prompt": "abc"}\n'.encode("utf-16")),
    ("second line bad", '{"prompt": "abc"}\n{"prompt": \n'),
]
TASK_ONLY: list[tuple[str, str | bytes]] = [
    ("turns empty", '{"turns": []}\n'),
    ("turns of numbers", '{"turns": [1]}\n'),
    ("turns is text", '{"turns": "abc"}\n'),
    ("too long", json.dumps({"prompt": LONG}) + "\n"),
    ("id twice", '{"prompt": "a", "id": 1}\n{"prompt": "b", "id": 1}\n'),
]
TASK_FILES: list[tuple[str, str, str | bytes]] = [
    ("empty.txt", "empty text", ""),
    ("blank.txt", "blank text", "\n\n\n"),
    ("latin.txt", "Latin-1 text", "café\n".encode("latin-1")),
    ("list.json", "mapping for a list", "{}"),
    ("list.json", "list of numbers", "[1, 2]"),
    ("list.json", "deep list", DEEP),
    ("list.json", "empty list", "[]"),
    ("rows.parquet", "no parquet", b"PAR1 and more"),
    ("rows.jsonl.gz", "no gzip", b"\x1f\x8b and more"),
    ("rows.jsonl.gz", "cut gzip", gzip.compress(b'{"prompt": "abc"}\n' * 99, mtime=0)[:30]),
    ("rows.csv", "CSV", "prompt\nabc\n"),
]
ANSWERED: list[tuple[str, str]] = [
    ("response is a number", '{"prompt": "a", "response": 3}\n'),
    ("response is empty", '{"prompt": "a", "response": ""}\n'),
    ("half in the response", '{"prompt": "a", "response": "\\ud800"}\n'),
]
PROMPT_FILES: list[tuple[str, str | bytes]] = [
    ("empty", ""),
    ("Latin-1", "café".encode("latin-1")),
    ("UTF-16", "abc".encode("utf-16")),
    ("too long", LONG),
    ("only a mark", b"\xef\xbb\xbf"),
]
REFUSES = "{% if messages|length > 1 %}{{ raise_exception('no systems here') }}{% endif %}<1>{{ messages[0]['content'] }}<2>"


def template(text: str, name: str = "") -> Prepare:
    """Gives tmp/chat another chat template."""
    return write("chat/chat_template.jinja", text, name or f"template {text[:30]}")


OTHER = [
    Case("decode/generate.py", "--prompt '' ", "prompt"),
    Case("decode/generate.py", f"--prompt {LONG}", ("600", "512")),
    Case("decode/generate.py", "--prompt a\udc80b", "prompt"),
    Case("train/sample.py", "--sources '[{kind: file, path: $tmp/a.jsonl}]'", "512", (write("a.jsonl", json.dumps({"prompt": LONG}) + "\n", "all too long"),)),
    Case("train/sample.py", "--sources '[{kind: file, path: $tmp/a.txt}]'", "a.txt", (write("a.txt", "\n\n", "blank text"),)),
    Case("train/sample.py", "--sources '[{kind: file, path: $tmp/a.txt}]'", "a.txt", (write("a.txt", "café".encode("latin-1"), "Latin-1 text"),)),
    Case("train/sample.py", "--decontaminate $tmp/a.jsonl", "a.jsonl", (write("a.jsonl", "{", "cut"),)),
    Case("train/doctor.py", "--decontaminate $tmp/a.jsonl", "a.jsonl", (write("a.jsonl", "{", "cut"),)),
    Case("train/doctor.py", "--sources '[{kind: file, path: $tmp/a.txt}]'", "a.txt", (write("a.txt", "café".encode("latin-1"), "Latin-1 text"),)),
    Case("train/doctor.py", "--sources '[{kind: file, path: $tmp/a.txt}]'", "a.txt", (write("a.txt", "\n\n", "blank text"),)),
    Case("train/sample.py", "--filters.min_prompt 500", "filters"),
    Case("train/sample.py", "--filters.max_prompt 1", "filters"),
    Case("train/sample.py", "--filters.min_prompt 9 --filters.max_prompt 5", ("min_prompt", "max_prompt")),
    Case("train/sample.py", "--sources '[{kind: file, path: $tmp/c.jsonl}]'", "chat template", (write("c.jsonl", '{"messages": [{"role": "user", "content": "a"}]}\n', "a chat"),)),
    Case("train/write_prompts.py", f"--systems '[abc, {LONG}]'", ("systems[1]", "512")),
    Case("train/write_prompts.py", "--systems '[a\udc80b]'", "--systems"),
    Case("train/write_prompts.py", "--systems '[\"a\\ud800b\"]'", "--systems"),
    Case("train/write_prompts.py", "--target $tmp/chat", "special token", (copy("chat"), template("{{ messages[-1]['content'] }} ###"))),
    Case("train/write_prompts.py", "--target $tmp/chat", "special token", (copy("chat"), template("<1>user:<2>", "without content"))),
    Case("train/write_prompts.py", "--target $tmp/chat", "user's words", (copy("chat"), template("{{ messages[-1]['content'] }}<2>", "nothing before"))),
    Case("train/write_prompts.py", "--target $tmp/chat", "template", (copy("chat"), template("{% for x in %}"))),
    Case("train/write_prompts.py", "--target $tmp/chat", "no systems", (copy("chat"), template(REFUSES))),
    Case("train/distill.py", "--loop.max_length 1", "max_length"),
    Case("scripts/lab/task_prompts.py", "--math $tmp/a.jsonl", ("a.jsonl", "question"), (write("a.jsonl", '{"prompt": "a"}\n', "other"),)),
    Case("scripts/lab/task_prompts.py", "--math $tmp/a.jsonl", "a.jsonl:1", (write("a.jsonl", "{\n", "no JSON"),)),
]  # fmt: skip


def cases() -> list[Case]:
    out = []
    for what, content in JSONL:
        steps = (write("a.jsonl", content, what),)
        sources = "--sources '[{kind: file, path: $tmp/a.jsonl}]'"
        out.append(Case("train/sample.py", sources, "a.jsonl", steps))
    for what, content in [*JSONL, *TASK_ONLY]:
        steps = (write("a.jsonl", content, what),)
        out.append(
            Case("eval/run.py", "--tasks '[{name: own, path: $tmp/a.jsonl}]'", "a.jsonl", steps)
        )
    for path, what, content in TASK_FILES:
        tasks = f"--tasks '[{{name: own, path: $tmp/{path}}}]'"
        out.append(Case("eval/run.py", tasks, path, (write(path, content, what),)))
    for what, content in JSONL:
        arguments = "--log $tmp/a.jsonl"
        out.append(
            Case("eval/rescore.py", arguments, "a.jsonl", (write("a.jsonl", content, what),))
        )
    for what, content in ANSWERED:
        sources = "--origin text --sources '[{kind: file, path: $tmp/a.jsonl}]'"
        out.append(Case("train/sample.py", sources, "a.jsonl", (write("a.jsonl", content, what),)))
    for what, content in PROMPT_FILES:
        arguments, says = "--prompt '' --prompt_file $tmp/p.txt", "p.txt"
        says = "512" if content == LONG else says
        out.append(Case("decode/generate.py", arguments, says, (write("p.txt", content, what),)))
    return [*out, *OTHER]


@pytest.mark.parametrize("case", params(*cases()))
def test_a_bad_text_is_refused(case: Case, lab: Lab, tmp_path: Path) -> None:
    check(case, lab, tmp_path)


MARK = b"\xef\xbb\xbf"
MARKED = {
    "config": ("decode/generate.py", "--config $tmp/f.yaml", "f.yaml", b"k: 2\n"),
    "prompt_file": ("decode/generate.py", "--prompt '' --prompt_file $tmp/f.txt", "f.txt", b"abc"),
    "sources": ("train/sample.py", "--sources '[{kind: file, path: $tmp/f.jsonl}]'", "f.jsonl", b'{"prompt": "zqx qqz"}\n'),
    "decontaminate": ("train/sample.py", "--decontaminate $tmp/f.jsonl", "f.jsonl", b'{"prompt": "zzz zzz"}\n'),
}  # fmt: skip


@pytest.mark.parametrize("name", MARKED)
def test_a_byte_order_mark_is_read_over(name: str, lab: Lab, tmp_path: Path) -> None:
    """Catches a mark that is refused, or that becomes part of the first key or of the prompt."""
    command, arguments, file, content = MARKED[name]
    (tmp_path / file).write_bytes(MARK + content)
    done = call(command, lab.words(f"{BASE[command]} {arguments}", tmp_path), tmp_path).ok()
    assert "\ufeff" not in done.out
