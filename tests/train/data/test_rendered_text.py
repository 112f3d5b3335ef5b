"""Texts that were rendered with a chat template already are seen before the template renders them once more."""

import json
from pathlib import Path
from typing import Any

import pytest
from transformers import AddedToken

from decode.common.chat.probe import TemplateMarks
from decode.common.chat.render import ChatTemplate
from tests import worlds
from tests.rows import file_sources, sample, write_rows
from tests.tiny import tiny_model
from tests.worlds import byte_tokenizer
from train.data.conversations import Prompt

CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
THINKING = CHATML.replace("assistant\n{% endif %}", "assistant\n<think>\n{% endif %}")
HEADERS = (
    "<|begin|>{% for m in messages %}<|head|>{{ m.role }}<|/head|>\n\n{{ m.content }}<|eot|>{% endfor %}"
    "{% if add_generation_prompt %}<|head|>assistant<|/head|>\n\n{% endif %}"
)
INST = (
    "<s>{% for m in messages %}{% if m.role == 'user' %}[INST] {{ m.content }} [/INST]"
    "{% else %} {{ m.content }}</s>{% endif %}{% endfor %}"
)
ALPACA = (
    "Below is a task.\n\n{% for m in messages %}{% if m.role == 'user' %}### Instruction:\n{{ m.content }}\n\n"
    "{% else %}### Response:\n{{ m.content }}\n\n{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}### Response:\n{% endif %}"
)
ZEPHYR = (
    "{% for m in messages %}<|{{ m.role }}|>\n{{ m.content }}</s>\n{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>\n{% endif %}"
)
PLAIN = "{% for m in messages %}{{ m.content }}\n{% endfor %}{% if add_generation_prompt %}\n{% endif %}"
SPECIAL = {
    CHATML: ["<|im_start|>", "<|im_end|>"],
    THINKING: ["<|im_start|>", "<|im_end|>", "<think>", "</think>"],
    HEADERS: ["<|begin|>", "<|head|>", "<|/head|>", "<|eot|>"],
}


def tokenizer_with(template: str | None) -> Any:
    tokenizer = byte_tokenizer()
    tokenizer.add_special_tokens({"bos_token": "<s>", "eos_token": "</s>"})
    names = SPECIAL.get(template or "", [])
    tokenizer.add_tokens([AddedToken(name, special=True) for name in names])
    if template == HEADERS:
        tokenizer.bos_token = "<|begin|>"
    if template in (CHATML, THINKING):
        tokenizer.eos_token = "<|im_end|>"
    tokenizer.chat_template = template
    return tokenizer


def rendered(template: str, *contents: str) -> str:
    chat = [
        {"role": ("user", "assistant")[i % 2], "content": content}
        for i, content in enumerate(contents)
    ]
    opened = len(contents) % 2 == 1
    text = tokenizer_with(template).apply_chat_template(
        chat, tokenize=False, add_generation_prompt=opened
    )
    return str(text)


MARKS = {
    CHATML: TemplateMarks(("<|im_start|>",)),
    THINKING: TemplateMarks(("<|im_start|>",)),
    HEADERS: TemplateMarks(("<|eot|>", "<|head|>", "<|/head|>")),
    INST: TemplateMarks((), ("[INST]", "[/INST]")),
    ALPACA: TemplateMarks((), ("### Instruction:", "### Response:")),
    ZEPHYR: TemplateMarks((), ("<|user|>", "<|assistant|>")),
    PLAIN: TemplateMarks(),
    None: TemplateMarks(),
}


@pytest.mark.parametrize("template", MARKS)
def test_the_marks_of_a_template_are_found_by_rendering(template: str | None) -> None:
    marks = ChatTemplate(tokenizer_with(template)).marks
    assert marks == MARKS[template]
    if template not in (PLAIN, None):
        for contents in (["Hi there"], ["Hi", "Yes.", "And?"], ["Hi", "Yes."]):
            assert marks.found_in(rendered(str(template), *contents))


def test_a_template_that_refuses_the_probe_has_no_marks() -> None:
    assert ChatTemplate(tokenizer_with("{{ raise_exception('no') }}")).marks == TemplateMarks()
    assert ChatTemplate(tokenizer_with("{{ messages[0].content }}")).marks == TemplateMarks()


@pytest.mark.parametrize(
    ("template", "text"),
    [
        (CHATML, "What does <|endoftext|> mean?"),
        (INST, "Put [INST] before a question."),  # half of a turn
        (INST, "<s>struck</s> through"),
        (ALPACA, "### Instruction:\nsort a list"),
        (ZEPHYR, "if a<b|c>d: assistant|user"),
        (THINKING, "<think>\nHm.\n</think>\nYes"),
        (HEADERS, "<|begin|> of all"),
    ],
)
def test_other_texts_are_not_taken_for_rendered_ones(template: str, text: str) -> None:
    assert ChatTemplate(tokenizer_with(template)).marks.found_in(text) == ""


def test_only_what_is_asked_is_looked_at() -> None:
    marks = MARKS[CHATML]
    messages = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "<|im_start|>"}]
    assert marks.found_in(*Prompt("1", "s", None, messages, 0).texts_asked) == ""
    system = [
        {"role": "system", "content": "<|im_start|>system"},
        {"role": "user", "content": "Hi"},
    ]
    assert marks.found_in(*Prompt("1", "s", None, system, 0).texts_asked) == "<|im_start|>"
    assert (
        marks.found_in(*Prompt("1", "s", "<|im_start|>user", None, 0).texts_asked) == "<|im_start|>"
    )


# ---- the commands ----


def make_target(folder: Path, template: str | None) -> Path:
    tokenizer = tokenizer_with(template)
    model = tiny_model("llama", vocab_size=300, max_position_embeddings=512, num_hidden_layers=2)
    return worlds.save(folder, model, tokenizer)


def examined(tmp_path: Path, *words: object) -> list[dict[str, Any]]:
    out = tmp_path / "doctor.json"
    worlds.call("train/doctor.py", *words, "--out", out).ok()
    findings = json.loads(out.read_text())["findings"]
    return [x for x in findings if x["name"] == "text is rendered already"]


@pytest.mark.parametrize("template", [CHATML, HEADERS, INST, ALPACA, ZEPHYR])
def test_doctor_and_sampling_name_the_first_row(tmp_path: Path, template: str) -> None:
    """Bug: prompts in which a chat lies rendered were rendered once more, without a word."""
    target = make_target(tmp_path / "target", template)
    rows = [{"prompt": f"zq{i} count"} for i in range(10)]
    rows[3:3] = [{"prompt": rendered(template, f"zq{i} what")} for i in range(2)]
    path = write_rows(tmp_path / "rows.jsonl", rows)
    (found,) = examined(tmp_path, "--target", target, "--sources", file_sources(path))
    assert (found["rows"], found["of"], found["severity"]) == (2, 12, "stops")
    assert "16.7 % of the prompts" in found["cost"]
    assert found["examples"][0] in found["cost"]
    assert "`messages`" in found["mend"]
    done = sample(target, path, tmp_path / "out").ok()
    (line,) = [line for line in done.err.splitlines() if "rendered with a chat template" in line]
    assert line.startswith(
        f"2 prompts were rendered with a chat template already, such as {tmp_path}"
    )
    assert "rows.jsonl:4 ('" in line
    (found,) = examined(tmp_path, "--target", target, "--data", tmp_path / "out")
    assert (found["rows"], found["of"]) == (2, 12)


def test_texts_that_are_trained_on_as_they_stand(tmp_path: Path) -> None:
    target = make_target(tmp_path / "target", CHATML)
    texts = [{"text": rendered(CHATML, f"zq{i}", "Yes.")} for i in range(3)]
    path = write_rows(tmp_path / "rows.jsonl", [*texts, {"text": "one two three four"}])
    done = sample(target, path, tmp_path / "out", "--origin", "text").ok()
    assert "3 prompts were rendered with a chat template already" in done.err
    (found,) = examined(tmp_path, "--target", target, "--data", tmp_path / "out")
    assert (found["rows"], found["of"]) == (3, 4)


@pytest.mark.parametrize("template", [CHATML, None])
def test_nothing_is_said_of_good_prompts(tmp_path: Path, template: str | None) -> None:
    """Without a template a rendered text is the only way to ask in turns."""
    target = make_target(tmp_path / "target", template)
    asked = "zq count to ten" if template else rendered(CHATML, "zq count")
    chat = [{"role": "user", "content": "zq"}, {"role": "assistant", "content": "<think>a</think>"}]
    chats = [{"messages": [*chat, {"role": "user", "content": "and?"}]}] if template else []
    path = write_rows(tmp_path / "rows.jsonl", [{"prompt": asked}, *chats])
    assert examined(tmp_path, "--target", target, "--sources", file_sources(path)) == []
    done = sample(target, path, tmp_path / "out").ok()
    assert "rendered" not in done.err
    assert examined(tmp_path, "--target", target, "--data", tmp_path / "out") == []
