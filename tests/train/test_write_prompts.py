"""train/write_prompts.py: prompts in the target's own words, the same after a kill, and none that was cut off."""

import json
import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoTokenizer

from decode.common.chat.render import ChatTemplate
from decode.common.errors import UserError
from decode.engine.engine import speculate
from decode.engine.records import RoundRecord
from decode.verification.sampling import SamplingParams
from tests.tiny import tiny_model
from train import prompt_writing
from train.prompt_writing import LOG_FILE, PROMPT_FILE, user_turn
from train.sampling.config import WritePromptsConfig

ASSETS = Path(__file__).resolve().parents[2] / "assets" / "target"
CHAT = (
    "{% for m in messages %}<|endoftext|>{{ m['role'] }}\n{{ m['content'] }}<|endoftext|>{% endfor %}"
    "{% if add_generation_prompt %}assistant\n{% endif %}"
)


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A random model that ends a turn every dozen tokens, with the bundled vocabulary and a chat template."""
    folder = tmp_path_factory.mktemp("target")
    model = tiny_model("llama", vocab_size=4096, max_position_embeddings=128)
    model.generation_config.eos_token_id = 0
    with torch.no_grad():
        model.lm_head.weight[0] *= 6
    model.save_pretrained(folder)
    tokenizer = AutoTokenizer.from_pretrained(ASSETS)
    tokenizer.chat_template = CHAT
    tokenizer.save_pretrained(folder)
    return str(folder)


def settings(target: str, out: Path) -> WritePromptsConfig:
    return WritePromptsConfig(
        target, systems=["", "Ask about code."], count=12, sampling=SamplingParams(temperature=1.0),
        max_new_tokens=24, batch_size=4, out=str(out),
    )  # fmt: skip


def test_a_user_turn_begins_and_ends_where_the_template_says() -> None:
    tokenizer = AutoTokenizer.from_pretrained(ASSETS)
    tokenizer.chat_template = CHAT
    ids, end = user_turn(ChatTemplate(tokenizer), "Be short.")
    assert tokenizer.decode(ids) == (
        "<|endoftext|>system\nBe short.<|endoftext|><|endoftext|>user\n"
    )
    assert end == 0
    tokenizer.chat_template = "{% for m in messages %}{{ m['content'] }}\n### Reply:{% endfor %}"
    with pytest.raises(UserError, match="does not end a user's turn with a special token"):
        user_turn(ChatTemplate(tokenizer), "")
    tokenizer.chat_template = None
    with pytest.raises(UserError, match="no chat template"):
        user_turn(ChatTemplate(tokenizer), "")


def test_prompts_are_whole_and_different_and_the_same_after_a_kill(
    target: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    straight, killed = (
        settings(target, tmp_path / "straight"),
        settings(target, tmp_path / "killed"),
    )
    prompt_writing.write(straight)
    wanted = (tmp_path / "straight" / PROMPT_FILE).read_text()
    log = [json.loads(line) for line in (tmp_path / "straight" / LOG_FILE).read_text().splitlines()]
    assert sorted(entry["number"] for entry in log) == list(range(12))
    ended = {entry["text"] for entry in log if entry["finish_reason"] == "eos"} - {""}
    prompts = [json.loads(line) for line in wanted.splitlines()]
    assert {prompt["messages"][-1]["content"] for prompt in prompts} == ended
    assert 0 < len(prompts) < 12  # some were cut off by max_new_tokens
    assert {len(prompt["messages"]) for prompt in prompts} == {1, 2}  # with and without a system

    def dies(*args: Any, **settings: Any) -> Iterator[RoundRecord]:
        for i, record in enumerate(speculate(*args, **settings)):
            if i == 40:
                raise RuntimeError("killed")
            yield record

    monkeypatch.setattr(prompt_writing, "speculate", dies)
    with pytest.raises(RuntimeError, match="killed"):
        prompt_writing.write(killed)
    monkeypatch.undo()
    assert 0 < len((tmp_path / "killed" / LOG_FILE).read_text().splitlines()) < 12
    with (tmp_path / "killed" / LOG_FILE).open("a") as file:
        file.write('{"number": 11, "fini')  # a line whose writer was killed
    prompt_writing.write(killed)
    assert (tmp_path / "killed" / PROMPT_FILE).read_text() == wanted


def test_a_larger_count_keeps_what_is_written(target: str, tmp_path: Path) -> None:
    small = replace(settings(target, tmp_path / "out"), count=6)
    prompt_writing.write(small)
    before = (tmp_path / "out" / PROMPT_FILE).read_text().splitlines()
    prompt_writing.write(replace(small, count=12, resume=True))
    assert (tmp_path / "out" / PROMPT_FILE).read_text().splitlines()[: len(before)] == before


def test_a_run_without_a_whole_prompt_says_so(target: str, tmp_path: Path) -> None:
    """Catches an empty prompts.jsonl, which train/sample.py would refuse, at the end of a run that succeeded."""
    with pytest.raises(UserError, match=r"is empty or was cut off: raise --max_new_tokens"):
        prompt_writing.write(replace(settings(target, tmp_path / "out"), max_new_tokens=1))
    assert not (tmp_path / "out" / PROMPT_FILE).exists()


def test_a_finished_run_can_be_started_again(target: str, tmp_path: Path) -> None:
    """Catches a second start that fails because nothing is left to do."""
    once = settings(target, tmp_path / "out")
    prompt_writing.write(once)
    before = (tmp_path / "out" / PROMPT_FILE).read_text()
    prompt_writing.write(once)
    assert (tmp_path / "out" / PROMPT_FILE).read_text() == before


def test_one_of_several_templates_writes_the_prompts(target: str, tmp_path: Path) -> None:
    """Catches a tokenizer with named templates, of which none is the default, that ends in a traceback."""
    folder = tmp_path / "target"
    shutil.copytree(target, folder)
    (folder / "chat_template.jinja").unlink()
    tokenizer = AutoTokenizer.from_pretrained(ASSETS)
    tokenizer.chat_template = {"a": CHAT, "b": "{{ day }}" + CHAT}
    tokenizer.save_pretrained(folder)
    with pytest.raises(UserError, match="has the chat templates a, b, and none is the default"):
        prompt_writing.write(settings(str(folder), tmp_path / "none"))
    prompt_writing.write(settings(target, tmp_path / "plain"))
    prompt_writing.write(replace(settings(str(folder), tmp_path / "a"), template="a"))
    texts = [(tmp_path / name / PROMPT_FILE).read_text() for name in ("plain", "a")]
    assert texts[0] == texts[1]
