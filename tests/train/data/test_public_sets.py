"""First rows of ten public data sets, in their columns and files and our words: read without a setting by sampling, the
doctor and evaluation, and rendered as two usual chat templates render the chat that each row means.

What is right is written here by hand, by functions that put strings together, not by a template.
"""

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet
import pytest
from transformers import PreTrainedTokenizerFast

from decode.model.loading import load_target
from eval.tasks.loading import Task, load_task_prompts
from tests import worlds
from tests.tiny import tiny_model
from tests.worlds import byte_tokenizer
from train.data import sample_store
from train.data.manifest import read_manifest

Turn = tuple[str, str]
"""(role, content) of a message."""

# ---- the sets: (file, rows, the chat of each, system messages and replies included) ----

SCORES = {"harassment": 0.01, "self-harm/intent": 0.0}
FLAGS = {"harassment": False, "self-harm/intent": False}
TOOLS = [
    {
        "name": "tide_table",
        "description": "Times of high water.",
        "parameters": {
            "port": {"description": "Name of the port.", "type": "str", "default": "Bergen"},
            "days": {"description": "How many days.", "type": "int, optional", "default": ""},
        },
    },
    {"name": "moon", "description": "Phase of the moon.", "parameters": {}},
]
CALLS = [
    {"name": "tide_table", "arguments": {"port": "Bodø", "days": 2}},
    {"name": "moon", "arguments": {}},
]
SETS: dict[str, tuple[str, list[dict[str, Any]], list[list[Turn]]]] = {
    "ShareGPT": (
        "ShareGPT_V3_unfiltered_cleaned_split.json",
        [
            {"id": "zq9Kd_0", "conversations": [
                {"from": "human", "value": "How do I sharpen a plane iron?\n"},
                {"from": "gpt", "value": "Flatten its back first:\n\n1. 1000 grit\n2. 8000 grit"},
                {"from": "human", "value": "And the bevel?"},
                {"from": "gpt", "value": "Hold it at 25°."},
            ]},
            {"id": "zq9Kd_1", "conversations": [
                {"from": "gpt", "value": "So much for planes."},
                {"from": "user", "value": "zq chisels too?"},
                {"from": "bing", "value": "The same way."},
            ]},
        ],
        [
            [("user", "How do I sharpen a plane iron?\n"),
             ("assistant", "Flatten its back first:\n\n1. 1000 grit\n2. 8000 grit"),
             ("user", "And the bevel?"), ("assistant", "Hold it at 25°.")],
            [("assistant", "So much for planes."), ("user", "zq chisels too?"),
             ("assistant", "The same way.")],
        ],
    ),
    "ultrachat_200k": (
        "train_sft-00000-of-00003.parquet",
        [{"prompt": "Plan a garden for a windy hill.", "prompt_id": "5f" * 32, "messages": [
            {"content": "Plan a garden for a windy hill.", "role": "user"},
            {"content": "Begin with a hedge.", "role": "assistant"},
            {"content": "Which plants stand salt?", "role": "user"},
            {"content": "Sea holly and thrift.", "role": "assistant"},
        ]}],
        [[("user", "Plan a garden for a windy hill."), ("assistant", "Begin with a hedge."),
          ("user", "Which plants stand salt?"), ("assistant", "Sea holly and thrift.")]],
    ),
    "open-perfectblend": (
        "train-00000-of-00006.parquet",
        [{"conversations": [
            {"from": "human", "value": "Is 91 a prime number?"},
            {"from": "gpt", "value": "No: $91 = 7 \\cdot 13$."},
        ], "source": "meta-math/MetaMathQA"}],
        [[("user", "Is 91 a prime number?"), ("assistant", "No: $91 = 7 \\cdot 13$.")]],
    ),
    "Magpie": (
        "train-00000-of-00012.parquet",
        [{
            "uuid": "0b7c-11", "model": "some-instruct",
            "gen_input_configs": {"temperature": 1.0, "top_p": 1.0, "input_generator": "x", "seed": None,
                                  "pre_query_template": "<|begin_of_text|>"},
            "conversations": [
                {"from": "human", "value": "Name a knot for climbing."},
                {"from": "gpt", "value": "**Figure eight.**"},
                {"from": "human", "value": "How is it tied?"},
                {"from": "gpt", "value": "Around, under, back."},
            ],
            "instruction": "Name a knot for climbing.", "response": "**Figure eight.**",
            "instruction_2": "How is it tied?", "response_2": "Around, under, back.",
            "difficulty": "easy", "input_quality": "good", "task_category": "Advice",
            "other_task_category": ["Sport"], "llama_guard_2": "safe", "instruct_reward": -4.5,
            "reward_model": "r", "language": "EN", "response_length": 17,
        }],
        [[("user", "Name a knot for climbing."), ("assistant", "**Figure eight.**"),
          ("user", "How is it tied?"), ("assistant", "Around, under, back.")]],
    ),
    "OpenHermes-2.5": (
        "openhermes2_5.json",
        [
            {"custom_instruction": None, "topic": None, "model_name": None, "model": None,
             "skip_prompt_formatting": False, "category": "riddle", "views": None, "language": None,
             "id": None, "title": None, "idx": None, "hash": None, "avatarUrl": None,
             "system_prompt": None, "source": "airoboros2.2", "conversations": [
                 {"from": "human", "value": "What has keys and opens nothing?", "weight": None},
                 {"from": "gpt", "value": "A piano.", "weight": None}]},
            {"custom_instruction": None, "system_prompt": None, "source": "slimorca", "conversations": [
                {"from": "system", "value": "You answer in one word.", "weight": 0},
                {"from": "human", "value": "Colour of zq moss?", "weight": 0},
                {"from": "gpt", "value": "Green.", "weight": 1}]},
        ],
        [[("user", "What has keys and opens nothing?"), ("assistant", "A piano.")],
         [("system", "You answer in one word."), ("user", "Colour of zq moss?"),
          ("assistant", "Green.")]],
    ),
    "xLAM": (
        "xlam_function_calling_60k.json",
        [{"query": "When is high water in Bodø, and is the moon full?", "id": 0,
          "answers": json.dumps(CALLS, ensure_ascii=False), "tools": json.dumps(TOOLS)}],
        [[("user", "When is high water in Bodø, and is the moon full?"), ("calls", "")]],
    ),
    "GSM8K": (
        "main-train-00000-of-00001.parquet",
        [{"question": "A ferry takes 12 cars. How many trips do 40 cars need?",
          "answer": "40 / 12 is <<40/12=3.33>>3.33.\nSo 4 trips.\n#### 4"}],
        [[("user", "A ferry takes 12 cars. How many trips do 40 cars need?"),
          ("assistant", "40 / 12 is <<40/12=3.33>>3.33.\nSo 4 trips.\n#### 4")]],
    ),
    "CodeAlpaca-20k": (
        "code_alpaca_20k.json",
        [
            {"instruction": "Reverse the list.", "input": "words = ['b', 'a']",
             "output": "words.reverse()\n"},
            {"instruction": "Write a regex for zq dates.", "input": "", "output": "\\d{4}-\\d\\d"},
        ],
        [[("user", "Reverse the list.\n\nwords = ['b', 'a']"), ("assistant", "words.reverse()\n")],
         [("user", "Write a regex for zq dates."), ("assistant", "\\d{4}-\\d\\d")]],
    ),
    "LMSYS-chat-1m": (
        "train-00000-of-00006-4feeb3f83346a0e9.parquet",
        [{"conversation_id": "a0" * 16, "model": "vicuna-13b", "turn": 2, "language": "English",
          "conversation": [
              {"content": "Hi, I am NAME_1", "role": "user"},
              {"content": "Hello NAME_1!", "role": "assistant"},
              {"content": "spell it backwards", "role": "user"},
              {"content": "1_EMAN", "role": "assistant"}],
          "openai_moderation": [{"categories": FLAGS, "category_scores": SCORES, "flagged": False}] * 4,
          "redacted": True}],
        [[("user", "Hi, I am NAME_1"), ("assistant", "Hello NAME_1!"),
          ("user", "spell it backwards"), ("assistant", "1_EMAN")]],
    ),
    "KoAlpaca": (
        "KoAlpaca_v1.1a_textonly.jsonl",
        [{"instruction": "바닷물은 왜 짠가요?", "output": "강물이 바위의 소금을 날라 옵니다.\n그래서 짭니다. 🌊",
          "url": "https://kin.example.com/1"}],
        [[("user", "바닷물은 왜 짠가요?"),
          ("assistant", "강물이 바위의 소금을 날라 옵니다.\n그래서 짭니다. 🌊")]],
    ),
}  # fmt: skip

NOT_USED = {
    "ShareGPT": "id",
    "ultrachat_200k": "prompt, prompt_id",
    "open-perfectblend": "source",
    "Magpie": "uuid, model, gen_input_configs, instruction, response, instruction_2, response_2, difficulty, "
    "input_quality, task_category, other_task_category, llama_guard_2, instruct_reward, reward_model, language, "
    "response_length",
    "OpenHermes-2.5": "skip_prompt_formatting, category, source",
    "xLAM": "id",
    "LMSYS-chat-1m": "conversation_id, model, turn, language, openai_moderation, redacted",
    "KoAlpaca": "url",
}
"""Columns that are said to be unused when answers are learned."""

# ---- the two templates, each as its source and as what is right ----

CALL_TAGS = (
    "{% for c in m.tool_calls or [] %}<tool_call>\n"
    '{"name": "{{ c.function.name }}", "arguments": {{ c.function.arguments | tojson }}}\n'
    "</tool_call>{% endfor %}"
)
CHATML = (
    "{% if tools %}<|im_start|>system\nTools:{% for t in tools %}{{ '\n' ~ (t | tojson) }}{% endfor %}<|im_end|>\n"
    "{% endif %}"
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content or '' }}" + CALL_TAGS + "<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)  # fmt: skip
LLAMA3 = (
    "{{ bos_token }}{% if tools %}<|start_header_id|>system<|end_header_id|>\n\nTools:"
    "{% for t in tools %}{{ '\n' ~ (t | tojson) }}{% endfor %}<|eot_id|>{% endif %}"
    "{% for m in messages %}<|start_header_id|>{{ m.role }}<|end_header_id|>\n\n{{ (m.content or '') | trim }}"
    + CALL_TAGS + "<|eot_id|>{% endfor %}"
    "{% if add_generation_prompt %}<|start_header_id|>assistant<|end_header_id|>\n\n{% endif %}"
)  # fmt: skip
CALLED = "".join(
    f'<tool_call>\n{{"name": "{call["name"]}", "arguments": {json.dumps(call["arguments"], ensure_ascii=False)}}}\n'
    "</tool_call>"
    for call in CALLS
)
OFFERED = "Tools:" + "".join("\n" + json.dumps(tool, ensure_ascii=False) for tool in TOOLS)


def chatml(turn: Turn) -> str:
    return f"<|im_start|>{turn[0]}\n{turn[1]}<|im_end|>\n"


def llama3(turn: Turn) -> str:
    return f"<|start_header_id|>{turn[0]}<|end_header_id|>\n\n{turn[1].strip()}<|eot_id|>"


KINDS: dict[str, tuple[str, str, str, str, Callable[[Turn], str]]] = {
    "chatml": (CHATML, "<|im_end|>", "", "<|im_start|>assistant\n", chatml),
    "llama3": (LLAMA3, "<|eot_id|>", "<|begin_of_text|>", "<|start_header_id|>assistant<|end_header_id|>\n\n", llama3),
}  # fmt: skip
"""{name: (template, token that ends a turn, BOS, generation prompt, how a turn is written)}."""
SPECIAL = [
    "<|im_start|>", "<|im_end|>", "<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>",
]  # fmt: skip


def save_target(folder: Path, kind: str) -> PreTrainedTokenizerFast:
    template, end, bos, _, _ = KINDS[kind]
    tokenizer = byte_tokenizer()
    tokenizer.add_special_tokens({"additional_special_tokens": SPECIAL})
    tokenizer.chat_template = template
    tokenizer.eos_token, tokenizer.bos_token = end, bos or None
    model = tiny_model("llama", vocab_size=len(tokenizer), max_position_embeddings=2048)
    model.generation_config.eos_token_id = tokenizer.convert_tokens_to_ids(end)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return tokenizer


def write(folder: Path, name: str) -> Path:
    """The set's rows in a file as it is published: a JSON list, JSON lines or Parquet."""
    file, rows, _ = SETS[name]
    path = folder / name / file
    path.parent.mkdir(parents=True)
    if path.suffix == ".parquet":
        pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), path)
    elif path.suffix == ".jsonl":
        path.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows))
    else:
        path.write_text(json.dumps(rows, indent=2, ensure_ascii=False))
    return path


def expected(kind: str, name: str) -> list[tuple[str, str, list[str]]]:
    """(prompt, whole chat, what of it is learned) of each row."""
    _, end, bos, opening, written = KINDS[kind]
    found = []
    for chat in SETS[name][2]:
        said = [("assistant", CALLED) if role == "calls" else (role, text) for role, text in chat]
        begin = bos + (written(("system", OFFERED)) if name == "xLAM" else "")
        *asked, _ = map(written, said)
        whole = (begin + "".join(map(written, said))).removesuffix("\n")
        replies = [
            written(turn).removeprefix(opening).removesuffix("\n")
            for i, turn in enumerate(said)
            if turn[0] == "assistant" and i > 0
        ]
        found.append((begin + "".join(asked) + opening, whole, replies))
    return found


@pytest.fixture(scope="module", params=KINDS)
def world(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> tuple[str, Path, dict[str, Path], PreTrainedTokenizerFast]:
    """(kind of template, folder of the target, {set: its file}, tokenizer)."""
    folder = tmp_path_factory.mktemp(request.param)
    tokenizer = save_target(folder / "target", request.param)
    return (
        request.param,
        folder / "target",
        {name: write(folder, name) for name in SETS},
        tokenizer,
    )


def sources(files: dict[str, Path]) -> str:
    return json.dumps([{"kind": "file", "path": str(path)} for path in files.values()])


def sampled(world: Any, out: Path, *more: object) -> tuple[worlds.Done, dict[str, list[str]]]:
    """(how the command ended, {file: [the text of each row with ⟦what is learned⟧]})."""
    _, target, files, tokenizer = world
    done = worlds.call(
        "train/sample.py", "--target", target, "--sources", sources(files), "--out", out, "--max_new_tokens", 2, *more
    ).ok()  # fmt: skip
    rows: dict[str, list[str]] = {}
    for row in sample_store.read_shards(out):
        ids, at, text = list(row["input_ids"]), 0, ""
        for start, end in row["loss_spans"]:
            text += f"{tokenizer.decode(ids[at:start])}⟦{tokenizer.decode(ids[start:end])}⟧"
            at = end
        rows.setdefault(row["source"], []).append(text + tokenizer.decode(ids[at:]))
    return done, rows


def test_sampling_asks_what_the_rows_mean(world: Any, tmp_path: Path) -> None:
    """Bug: a set needs a setting, a turn or a system message is lost, or the template gets another chat. Before, the
    speaker "bing" was refused, and an `input` that is empty in one row was said to be unused in the whole set."""
    kind, _, files, _ = world
    done, rows = sampled(world, tmp_path / "out")
    for name, path in files.items():
        asked = sorted(text.partition("⟦")[0] for text in rows[path.name])
        assert asked == sorted(prompt for prompt, _, _ in expected(kind, name)), name
        assert len(re.findall(f"^{re.escape(path.name)}: read as", done.err, re.MULTILINE)) == 1
    counts = read_manifest(tmp_path / "out").counts
    assert (counts["asked"], counts["answered"]) == (13, 13)


def test_origin_text_learns_the_answers(world: Any, tmp_path: Path) -> None:
    """Bug: an answer is not found, calls of tools are learned as JSON of the row, a question is a label."""
    kind, _, files, _ = world
    done, rows = sampled(world, tmp_path / "out", "--origin", "text", "--turns", "all")
    for name, path in files.items():
        wanted = []
        for _, whole, replies in expected(kind, name):
            for reply in replies:  # no reply of these sets occurs twice in its chat
                assert whole.count(reply) == 1
                whole = whole.replace(reply, f"⟦{reply}⟧")
            wanted.append(whole)
        assert sorted(rows[path.name]) == sorted(wanted), name
        [said] = [line for line in done.err.splitlines() if line.startswith(f"{path.name}: ")]
        assert said.partition("; not used: ")[2] == NOT_USED.get(name, "")


def test_the_doctor_shows_the_same_prompts(world: Any) -> None:
    """Bug: the doctor reads or renders a row otherwise than sampling, or finds fault with a set as it is published."""
    kind, target, files, _ = world
    done = worlds.call(
        "train/doctor.py", "--target", target, "--sources", sources(files), "--show", 20, "--show_tokens", 2000
    ).ok()  # fmt: skip
    for name in SETS:
        for prompt, _, _ in expected(kind, name):
            assert f" supervised\n{prompt}\n\n" in done.out, name
    told = json.loads(done.out.splitlines()[-1])
    facts = told["parts"]["Prompts before sampling"]["facts"]
    assert (facts["prompts"], facts["with tools"], facts["with a system message"]) == ("13", 1, 1)
    assert facts["chats of several turns"] == 5
    assert told["findings"] == []


def test_evaluation_asks_the_same(world: Any) -> None:
    """Bug: a task of the user's own file asks another prompt than sampling does."""
    kind, folder, files, tokenizer = world
    target = load_target(str(folder), "cpu")
    for name, path in files.items():
        items = load_task_prompts(Task("own", str(path)), target)
        texts = [tokenizer.decode(item.prompt_ids) for item in items]
        assert texts == [prompt for prompt, _, _ in expected(kind, name)]
