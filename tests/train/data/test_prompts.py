import dataclasses
import json
import os
import random
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import datasets
import pytest
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit
from tokenizers.processors import TemplateProcessing
from transformers import PreTrainedTokenizerFast

from decode.common.chat.render import ChatTemplate
from decode.common.errors import UserError
from decode.model import names
from tests.rows import write_rows
from train.data import python_corpus
from train.data.conversations import Prompt, encode_prompt, encode_prompts, prompt_text
from train.data.filters import EvaluationOverlap, NearDuplicates
from train.data.sources import (
    BUNDLED_PROMPTS,
    REPEATS,
    ReadLog,
    evaluation_texts,
    read_prompts,
    stream_prompts,
)
from train.settings.data import PromptSource

WORDS = ["<s>", "[user]", "[assistant]", "hello", "world", "<unk>"]
TEMPLATE = (
    "{{ bos_token }}{% for m in messages %} [{{ m['role'] }}] {{ m['content'] }}{% endfor %}"
    "{% if add_generation_prompt %} [assistant]{% endif %}"
)


def tiny_tokenizer(chat_template: str | None) -> PreTrainedTokenizerFast:
    """Splits at white space and puts <s> in front, as Llama tokenizers do."""
    model = Tokenizer(WordLevel({word: i for i, word in enumerate(WORDS)}, unk_token="<unk>"))
    model.pre_tokenizer = WhitespaceSplit()
    model.post_processor = TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])
    return PreTrainedTokenizerFast(
        tokenizer_object=model, bos_token="<s>", unk_token="<unk>", chat_template=chat_template
    )


def text_prompt(text: str) -> Prompt:
    return Prompt("0#0", "test", text, None, 0)


def chat_prompt(*messages: dict) -> Prompt:
    return Prompt("0#0", "test", None, list(messages), 0)


def words(text: str) -> list[int]:
    return [WORDS.index(word) for word in text.split()]


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """A small folder of bundled prompts."""
    (tmp_path / "train").mkdir()
    (tmp_path / "eval").mkdir()
    for domain in ("code", "prose", "arithmetic"):
        prompts = [{"prompt": f"{domain} number {i}"} for i in range(5)]
        write_rows(tmp_path / "train" / f"{domain}.jsonl", prompts)
        write_rows(tmp_path / "eval" / f"{domain}.jsonl", [{"prompt": f"{domain} to measure"}])
    return tmp_path


@pytest.mark.slow
def test_ids_are_the_same_in_every_run() -> None:
    """Bug: set order or hash() differs between processes, and resuming finds nothing done."""
    code = (
        "from train.data.sources import PromptSource, read_prompts\n"
        "sources = [PromptSource('bundled', 'all', limit=9), PromptSource('stdlib', limit=3)]\n"
        "print([prompt.id for prompt in read_prompts(sources, seed=1)])"
    )
    outputs = {
        subprocess.run(
            [sys.executable, "-c", code],
            cwd=BUNDLED_PROMPTS.parents[1],
            env={**os.environ, "PYTHONHASHSEED": seed},
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        for seed in ("1", "2")
    }
    assert len(outputs) == 1


def test_id_is_a_golden_hash(tmp_path: Path) -> None:
    """Bug: a changed hash silently orphans every sampled set there is."""
    path = write_rows(
        tmp_path / "own.jsonl",
        [{"prompt": "hello\n"}, {"messages": [{"role": "user", "content": "hello"}]}],
    )
    prompts = read_prompts([PromptSource("file", str(path), samples=2)], seed=0)
    assert [prompt.id for prompt in prompts] == [
        "5891b5b522d5df08#0",  # sha256sum of "hello\n"
        "5891b5b522d5df08#1",
        "666210238ffa9abb#0",  # of [{"content": "hello", "role": "user"}]
        "666210238ffa9abb#1",
    ]
    assert {prompt.source for prompt in prompts} == {"own.jsonl"}


def test_duplicates_do_not_count_towards_the_limit(tmp_path: Path) -> None:
    """Bug: a limit of 3 gives fewer than 3 prompts because the file repeats itself."""
    path = write_rows(tmp_path / "own.jsonl", [{"text": str(i // 4)} for i in range(12)])
    assert len(read_prompts([PromptSource("file", str(path), limit=3)], seed=0)) == 3


@pytest.mark.slow
def test_a_larger_limit_keeps_what_was_sampled(root: Path) -> None:
    """Bug: raising the limit draws other prompts, and all that was sampled is wasted."""
    for kind, path in (("bundled", "all"), ("stdlib", "")):
        source = PromptSource(kind, path, limit=4)  # type: ignore[arg-type]
        few = read_prompts([source], 0, root)
        many = read_prompts([dataclasses.replace(source, limit=8)], 0, root)
        assert many[:4] == few


def test_limit_mixes_the_domains() -> None:
    """Bug: the first n of `all` are of one domain (chance of a false alarm < 1e-8)."""
    prompts = read_prompts([PromptSource("bundled", "all", limit=60)], seed=0)
    assert {prompt.source for prompt in prompts} == {
        "bundled/code", "bundled/prose", "bundled/arithmetic",
    }  # fmt: skip


def test_white_space_at_the_end_of_a_prompt_is_kept(tmp_path: Path) -> None:
    """Bug: stripping a prompt that stops inside an indentation changes what follows."""
    path = write_rows(tmp_path / "own.jsonl", [{"prompt": "def f():\n   "}])
    assert read_prompts([PromptSource("file", str(path))], seed=0)[0].text == "def f():\n   "


@pytest.mark.parametrize("end", ["\n", "\r\n"])
def test_a_limit_takes_lines_as_a_shuffled_list_would(tmp_path: Path, end: str) -> None:
    """Bug: lines that are found by their place in the file lose bytes of the mark, or come in another order than they
    did, so that sets of earlier versions cannot be resumed."""
    records = [json.dumps({"prompt": f"é{i}" * (i % 7 + 1)}, ensure_ascii=False) for i in range(50)]
    path = tmp_path / "own.jsonl"
    lines = [
        line for record in records for line in ([record, " \u3000"] if "3" in record else [record])
    ]
    path.write_text("\ufeff" + end.join(lines), encoding="utf-8", newline="")
    source = PromptSource("file", str(path), limit=20)
    expected = [json.loads(record)["prompt"] for record in records]
    random.Random(f"7 file {path} train").shuffle(expected)
    assert [prompt.text for prompt in read_prompts([source], seed=7)] == expected[:20]
    path.write_text("\n".join([*records, "{"]), encoding="utf-8")
    with pytest.raises(UserError, match="own.jsonl:51 is not valid JSON"):
        read_prompts([dataclasses.replace(source, limit=51)], seed=7)


def test_paragraphs_are_those_of_a_regular_expression(tmp_path: Path) -> None:
    """Bug: text files are cut at other places when they are read line by line."""
    rng = random.Random(0)
    path = tmp_path / "own.txt"
    for _ in range(300):
        text = (
            "".join(rng.choices(["a", "b", "\n", "\n", "\n", " ", "\t", "\r", "\x0b"], k=25)) + "x"
        )
        path.write_text(text, encoding="utf-8", newline="")
        parts = re.split(r"\n[ \t]*\n", path.read_text(encoding="utf-8"))
        expected = [part.strip("\n") for part in parts if part.strip() != ""]
        found = [prompt.text for prompt in read_prompts([PromptSource("file", str(path))], seed=0)]
        assert found == list(dict.fromkeys(expected))


def test_text_that_is_no_utf_8_is_named(tmp_path: Path) -> None:
    """Bug: the byte that is named is counted from somewhere in the middle of the file."""
    path = tmp_path / "own.jsonl"
    path.write_bytes(b'{"prompt": "good"}\n' * 5000 + b'{"prompt": "\xff"}\n')
    for limit in (None, 3):
        with pytest.raises(UserError, match=r"own.jsonl is not UTF-8 text \(byte 95012\)"):
            read_prompts([PromptSource("file", str(path), limit=limit)], seed=0)


def test_stdlib_cuts_are_whole_lines_of_modules_not_held_out() -> None:
    """Bug: cuts start in mid-line, have any length, or come from held-out modules."""
    sources = python_corpus.read_modules(False).values()
    prompts = read_prompts([PromptSource("stdlib", limit=10)], seed=3)
    assert len(prompts) == 10
    for prompt in prompts:
        assert prompt.text is not None
        assert 200 <= len(prompt.text) <= 600
        assert any(f"\n{prompt.text}\n" in f"\n{source}\n" for source in sources)


def test_hub_takes_the_named_column(monkeypatch: pytest.MonkeyPatch) -> None:
    """Bug: Arrow's empty fields end up in messages; rows without text become empty prompts."""
    chat = [{"role": "user", "content": "hi", "name": None}]
    data = datasets.Dataset.from_list([{"chat": chat}, {"chat": []}, {"chat": None}])
    monkeypatch.setattr(datasets, "load_dataset", lambda *args, **kwargs: data)
    prompts = read_prompts([PromptSource("hub", "some/data", column="chat")], seed=0)
    assert [prompt.messages for prompt in prompts] == [[{"role": "user", "content": "hi"}]]
    with pytest.raises(UserError, match=r"no column 'prompt'.*\['chat'\]"):
        read_prompts([PromptSource("hub", "some/data", column="prompt")], seed=0)
    with pytest.raises(
        UserError, match=r"needs a column `messages`.*`column` names it; it has chat"
    ):
        read_prompts([PromptSource("hub", "some/data")], seed=0)


def test_hub_failures_are_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    """Bug: no network ends in a page of traceback instead of what to check."""

    def fail(*args: object, **kwargs: object) -> None:
        raise ConnectionError("cannot reach it\nlong story")

    monkeypatch.setattr(datasets, "load_dataset", fail)
    monkeypatch.setattr(datasets, "get_dataset_split_names", fail)  # which asks again and again
    monkeypatch.setattr(names.constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(names, "_reaches", lambda endpoint: True)
    with pytest.raises(UserError, match=r"^hub data set 'a/b' .*cannot reach it.*$") as caught:
        read_prompts([PromptSource("hub", "a/b")], seed=0)
    assert "\n" not in str(caught.value)


NUMBERS = [f"w{i}" for i in range(40)]


@pytest.mark.parametrize(
    ("training", "dropped"),
    [
        (" ".join(NUMBERS[:20]), True),  # equal
        ("before\n" + "  ".join(NUMBERS[:20]) + " after", True),  # contains
        (" ".join(NUMBERS[5:8]), True),  # is contained
        (" ".join(["x", *NUMBERS[7:20], "y"]), True),  # 13 words in common
        (" ".join(["x", *NUMBERS[8:20], "y"]), False),  # 12 words in common
        ("something else", False),
    ],
)
def test_overlap_with_evaluation_is_found(training: str, dropped: bool) -> None:
    """Bug: a draft is measured on prompts that it was trained on."""
    chat = chat_prompt({"role": "user", "content": training})
    evaluation = EvaluationOverlap([" ".join(NUMBERS[:20])])
    for prompt in (text_prompt(training), chat):
        assert evaluation.overlaps(prompt_text(prompt)) == dropped


@pytest.mark.parametrize("role", ["system", "developer"])
def test_instructions_to_the_system_are_no_overlap(role: str) -> None:
    """Catches a service's own instructions, which all of its prompts share, that make each of them an evaluation prompt
    or a near duplicate, so that none is left to train on."""
    instructions = {"role": role, "content": " ".join(NUMBERS)}
    asked = [prompt_text(chat_prompt(instructions, {"role": "user", "content": t})) for t in "abc"]
    evaluation = EvaluationOverlap(asked[2:])
    assert [evaluation.overlaps(text) for text in asked] == [False, False, True]
    unlike = NearDuplicates(0.8)
    assert [unlike.add(text) for text in asked] == [True, True, True]
    assert not unlike.add(asked[0])
    assert prompt_text(chat_prompt(instructions)) == instructions["content"]


def test_evaluation_texts_are_those_of_the_eval_folder(root: Path) -> None:
    """Bug: decontamination compares with the wrong split and finds nothing."""
    texts = [f"{domain} to measure" for domain in ("arithmetic", "code", "prose")]
    assert sorted(evaluation_texts(root=root)) == texts


def test_plain_text_without_template_is_encoded_as_it_is() -> None:
    """Bug: plain text is wrapped in a chat that a base model has never seen."""
    tokenizer = tiny_tokenizer(None)
    assert encode_prompt(ChatTemplate(tokenizer), text_prompt("hello world")) == words(
        "<s> hello world"
    )
    assert encode_prompt(ChatTemplate(tokenizer), text_prompt("<s> hello")) == words("<s> hello")
    with pytest.raises(UserError, match="no chat template"):
        encode_prompt(ChatTemplate(tokenizer), chat_prompt({"role": "user", "content": "hello"}))


def test_template_and_tokenizer_do_not_both_add_bos() -> None:
    """Bug: the template writes BOS and the tokenizer adds another; the target answers worse."""
    tokenizer = tiny_tokenizer(TEMPLATE)
    expected = words("<s> [user] hello world [assistant]")
    chat = chat_prompt({"role": "user", "content": "hello world"})
    assert encode_prompt(ChatTemplate(tokenizer), chat) == expected
    assert encode_prompt(ChatTemplate(tokenizer), text_prompt("hello world")) == expected
    twice = tiny_tokenizer("{{ bos_token }} " + TEMPLATE)
    assert encode_prompt(ChatTemplate(twice), chat) == expected


@pytest.mark.parametrize("template", [None, TEMPLATE, "{{ bos_token }} " + TEMPLATE])
def test_many_prompts_are_encoded_as_one(template: str | None) -> None:
    """Bug: prompts that are tokenised together are padded, or get other ids than alone."""
    tokenizer = tiny_tokenizer(template)
    prompts = [text_prompt(" ".join(["hello"] * n)) for n in range(1, 6)]
    if template:
        prompts += [
            chat_prompt(
                {"role": "system", "content": "hello"}, {"role": "user", "content": "world"}
            )
        ]
    single = [encode_prompt(ChatTemplate(tokenizer), prompt) for prompt in prompts]
    assert encode_prompts(ChatTemplate(tokenizer), prompts) == single
    bad = dataclasses.replace(text_prompt("\ud800"), id="bad#0")
    with pytest.raises(UserError, match="prompt bad#0 of test: the prompt has .*surrogate"):
        encode_prompts(ChatTemplate(tokenizer), [*prompts, bad])


def test_a_chat_that_the_template_refuses_is_named() -> None:
    """Bug: a template's raise_exception ends in a Jinja traceback."""
    tokenizer = tiny_tokenizer("{{ raise_exception('roles must alternate') }}")
    with pytest.raises(UserError, match=r"0#0 of test.*roles must alternate"):
        encode_prompt(ChatTemplate(tokenizer), text_prompt("hello"))


def texts_learned(source: PromptSource) -> list[str | None]:
    return [prompt.text for prompt in stream_prompts([source], 0, ReadLog(), True)]


def test_texts_come_whole_where_they_are_learned(tmp_path: Path) -> None:
    """Bug: a file is learned in paragraphs without their context, or the standard library in random cuts."""
    path = tmp_path / "own.txt"
    path.write_text("one\n\ntwo\n")
    assert texts_learned(PromptSource("file", str(path))) == ["one\n\ntwo\n"]
    texts = texts_learned(PromptSource("stdlib", limit=5))
    known = {
        *python_corpus.read_modules(False).values(),
        *python_corpus.read_help_topics(False).values(),
    }
    assert len(texts) == 5
    assert set(texts) <= known
    with pytest.raises(UserError, match="samples to 1"):
        texts_learned(PromptSource("stdlib", samples=2))


def test_repeats_are_counted(root: Path) -> None:
    """Bug: the same prompt under two sources is sampled twice, or is dropped and appears in no count."""
    log = ReadLog()
    sources = [PromptSource("bundled", "all"), PromptSource("bundled", "code")]
    prompts = list(stream_prompts(sources, 0, log, root=root))
    assert (len(prompts), log.dropped[REPEATS]) == (15, 5)
    assert len({prompt.id for prompt in prompts}) == 15


def test_a_hub_set_is_read_as_it_arrives(monkeypatch: pytest.MonkeyPatch) -> None:
    """Bug: streaming reads all of a set for a small limit, always takes its first rows, or forgets the seed."""
    read = []

    def rows() -> Iterator[dict]:
        for i in range(100_000):
            read.append(i)
            yield {"question": f"q{i}", "reply": f"a{i}"}

    asked = {}

    def stream(*args: object, **kwargs: object) -> datasets.IterableDataset:
        asked.update(kwargs)
        return datasets.IterableDataset.from_generator(rows)

    monkeypatch.setattr(datasets, "load_dataset", stream)
    monkeypatch.setattr("eval.tasks.row_files.SHUFFLE_BUFFER", 50)
    source = PromptSource(
        "hub", "a/b", column="question", response="reply", streaming=True, limit=20
    )
    found = [list(stream_prompts([source], seed, ReadLog(), True)) for seed in (0, 0, 1)]
    assert asked["streaming"] is True
    assert len(read) < 1000
    assert found[0] == found[1] != found[2]
    assert all(prompt.answer == f"a{(prompt.text or '')[1:]}" for prompt in found[0])
    assert [p.text for p in found[0]] != [f"q{i}" for i in range(20)]
    with pytest.raises(UserError, match="no column 'other'"):
        texts_learned(dataclasses.replace(source, column="other"))
