"""Which columns of a row are its prompt, its answer and its tools: for training and evaluation, from JSON and Arrow.

What is right is what `tokenizer.apply_chat_template(messages, tools=tools)` gives for the chat that the row means.
"""

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import datasets
import pyarrow
import pyarrow.parquet
import pytest
from transformers import PreTrainedTokenizerFast

from decode.common.chat.render import ChatTemplate
from decode.common.errors import UserError
from decode.model.loading import Target
from eval.tasks.loading import Task, TaskPrompt, load_task_prompts, with_later_turns
from eval.tasks.row_files import PACKED, SUFFIXES
from eval.tasks.row_forms import PROMPT_COLUMNS, DatasetRow, read_tools
from tests import worlds
from tests.rows import byte_target, file_sources, sample, save_byte_target, write_rows
from tests.worlds import byte_tokenizer
from train.data import sample_store
from train.data.conversations import (
    Prompt,
    conversation_with_replies,
    encode_prompt,
    encode_prompts,
    join_turns,
    make_prompt,
    prompt_text,
)
from train.data.manifest import read_manifest
from train.data.sources import UNANSWERED, ReadLog, read_prompts, stream_prompts
from train.settings.data import PromptSource

TEMPLATE = (
    "{% if tools %}<2>tools {{ tools | tojson }}<1>\n{% endif %}"
    "{% for m in messages %}<2>{{ m.role }}\n{{ m.content }}"
    "{% for c in m.tool_calls or [] %}[{{ c.function.name }} {{ c.function.arguments | tojson }}]{% endfor %}"
    "<1>\n{% endfor %}{% if add_generation_prompt %}<2>assistant\n{% endif %}"
)
END = frozenset({1})


def user(text: Any) -> dict[str, Any]:
    return {"role": "user", "content": text}


def reply(text: str) -> dict[str, Any]:
    return {"role": "assistant", "content": text}


def call(name: str, arguments: Any, **more: Any) -> dict[str, Any]:
    function = {"name": name, "arguments": arguments}
    calls = [{"id": "1", "type": "function", "function": function}]
    return {"role": "assistant", "tool_calls": calls, **more}


def result(text: str) -> dict[str, Any]:
    return {"role": "tool", "content": text}


def tool(name: str, **properties: Any) -> dict[str, Any]:
    parameters = {"type": "object", "properties": properties}
    return {"type": "function", "function": {"name": name, "parameters": parameters}}


CITY = {"type": "string"}
WEATHER, TIME = (
    tool("weather", city=CITY),
    tool("time", zone={"type": "string", "enum": ["a", "b"]}),
)
TALK = [user("Hello to Ann."), reply("Hello Ann."), user("And to Bob?"), reply("Hello Bob.")]
ASKED = TALK[:3]
SHAREGPT = [
    {"from": "human", "value": "Hello to Ann."},
    {"from": "gpt", "value": "S.", "weight": 1},
    {"from": "Human", "value": "Again?"},
    {"from": "gpt", "value": "A."},
]
OSLO = [user("Oslo?"), call("weather", {"city": "Oslo"}, content=""), result("12"), reply("12 C")]
CITY_CALL = {"name": "weather", "arguments": {"city": "Oslo"}}
MADE_CALL: dict[str, Any] = {
    "role": "assistant",
    "tool_calls": [{"type": "function", "function": CITY_CALL}],
}


def written(value: Any) -> str:
    return json.dumps(value)


@pytest.fixture(scope="module")
def target() -> Target:
    return byte_target(TEMPLATE, 4096)


def served(
    tokenizer: PreTrainedTokenizerFast, messages: list[dict], tools: Any = None, opened: bool = True
) -> list[int]:
    """What transformers gives."""
    return tokenizer.apply_chat_template(
        messages, tools=tools, add_generation_prompt=opened, return_dict=False
    )


def write(path: Path, rows: list[dict[str, Any]]) -> Path:
    if path.suffix == ".jsonl":
        return write_rows(path, rows)
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), path)
    return path


def read(path: Path, monkeypatch: pytest.MonkeyPatch, answered: bool = False) -> list[Prompt]:
    """The prompts of a file; a Parquet file is read as a set of the Hub."""
    if path.suffix == ".parquet":
        data = datasets.Dataset.from_parquet(str(path), cache_dir=str(path.parent / "cache"))
        monkeypatch.setattr(datasets, "load_dataset", lambda *args, **kwargs: data)
        source = PromptSource("hub", "some/data")
    else:
        source = PromptSource("file", str(path))
    return list(stream_prompts([source], 0, ReadLog(), answered))


# ---- the prompt of a row: (row, the chat that it means, its tools) ----

LIKE_A_LIST = [
    '[{"role": "admin", "id": 3}]: as CSV', '[{"role": "admin", "id": 3}]', "[1, 2, 3]: sort them",
    "[1, 2, 3]", "[", '[{"a": 1}]', "[]", '["a", "b"]',
]  # fmt: skip
PROMPTS: list[tuple[dict[str, Any], list[dict[str, Any]], Any]] = [
    ({"prompt": "Hello to Ann.", "prompt_id": "a1", "messages": TALK}, ASKED, None),
    ({"prompt": "Something else.", "messages": TALK[:2]}, TALK[:1], None),
    ({"messages": [user("first")], "prompt": "Hello."}, [user("first")], None),
    ({"prompt": [user("x")], "messages": [user("not x")]}, [user("not x")], None),
    ({"prompt": "Only this.", "messages": None}, [user("Only this.")], None),
    ({"prompt": "Only that.", "messages": []}, [user("Only that.")], None),
    ({"prompt": "Only 2.", "messages": "[]"}, [user("Only 2.")], None),
    ({"prompt": "Only 3.", "messages": "null"}, [user("Only 3.")], None),
    ({"prompt": "Only it.", "messages": "  "}, [user("Only it.")], None),
    ({"text": "whole text", "messages": [user("chat")]}, [user("chat")], None),
    ({"text": "whole", "prompt": "asked"}, [user("asked")], None),
    ({"text": "a text"}, [user("a text")], None),
    ({"messages": written([user("as JSON")])}, [user("as JSON")], None),
    ({"messages": written([*TALK, user("more")])}, [*TALK, user("more")], None),
    ({"messages": "\n " + json.dumps(TALK[2:], indent=2)}, TALK[2:3], None),
    ({"prompt": written([user("JSON in prompt")])}, [user("JSON in prompt")], None),
    ({"prompt": [user("TRL?")], "completion": [reply("yes")]}, [user("TRL?")], None),
    ({"prompt": [{"role": "system", "content": "Be."}, user("TRL")], "completion": "yes"},
     [{"role": "system", "content": "Be."}, user("TRL")], None),
    *[({"prompt": text}, [user(text)], None) for text in LIKE_A_LIST],
    ({"messages": [written(user("each")), written(reply("as JSON"))]}, [user("each")], None),
    ({"conversations": SHAREGPT}, ASKED[:1] + [reply("S."), user("Again?")], None),
    ({"conversations": written(SHAREGPT[2:])}, [user("Again?")], None),
    ({"conversation": [user("LMSYS?"), reply("Yes.")], "turn": 1}, [user("LMSYS?")], None),
    ({"conversations": [user("Role?"), reply("Yes.")]}, [user("Role?")], None),
    ({"messages": [user([{"type": "text", "text": "one"}, {"type": "text", "text": "two"}])]},
     [user("one\ntwo")], None),
    ({"instruction": "Sort.", "input": "3 1", "output": "1 3"}, [user("Sort.\n\n3 1")], None),
    ({"instruction": "Sing.", "input": "", "output": "La."}, [user("Sing.")], None),
    ({"question": "2 + 2?", "answer": "4"}, [user("2 + 2?")], None),
    ({"query": "Rain?", "answers": "[]", "tools": written([WEATHER])}, [user("Rain?")], [WEATHER]),
    ({"messages": OSLO, "tools": [WEATHER]}, OSLO[:3], [WEATHER]),
    ({"messages": OSLO, "tools": [WEATHER, TIME]}, OSLO[:3], [WEATHER, TIME]),
    ({"messages": OSLO, "tools": written([TIME])}, OSLO[:3], [TIME]),
    ({"messages": OSLO, "tools": [written(TIME), written(WEATHER)]}, OSLO[:3], [TIME, WEATHER]),
    ({"messages": written(OSLO[:1]), "tools": written([WEATHER])}, OSLO[:1], [WEATHER]),
    ({"prompt": "Bergen?", "tools": [WEATHER]}, [user("Bergen?")], [WEATHER]),
    ({"prompt": "Bodø?", "tools": []}, [user("Bodø?")], None),
    ({"prompt": "Moss?", "tools": None}, [user("Moss?")], None),
    ({"prompt": "Ski?", "tools": "[]"}, [user("Ski?")], None),
    ({"prompt": "Ås?", "tools": "null"}, [user("Ås?")], None),
    ({"prompt": "Hamar?", "tools": ""}, [user("Hamar?")], None),
    ({"prompt": "Voss?", "tools": [{"name": "bare", "parameters": '{"type": "object"}'}]},
     [user("Voss?")], [{"name": "bare", "parameters": {"type": "object"}}]),
    ({"messages": [user("Null?"), call("weather", {"city": "Null"}, content=None), result("1")]},
     [user("Null?"), call("weather", {"city": "Null"}), result("1")], None),
    ({"messages": [user("Absent?"), call("weather", {"city": "Absent"}), result("1")]},
     [user("Absent?"), call("weather", {"city": "Absent"}), result("1")], None),
    ({"messages": [user("Text?"), call("weather", '{"city": "Text"}', content=""), result("1")]},
     [user("Text?"), call("weather", {"city": "Text"}, content=""), result("1")], None),
    ({"messages": [user("Real?"), call("f", {"a": None, "b": [None, 1]}, content=""), result("1")]},
     [user("Real?"), call("f", {"a": None, "b": [None, 1]}, content=""), result("1")], None),
    ({"conversations": [{"from": "human", "value": "F?"},
                        {"from": "function_call", "value": written(CITY_CALL)},
                        {"from": "observation", "value": "1"}], "tools": written([WEATHER])},
     [user("F?"), MADE_CALL, result("1")], [WEATHER]),
    ({"conversations": [{"from": "human", "value": "List?"},
                        {"from": "tool_call", "value": written([CITY_CALL, CITY_CALL])},
                        {"from": "tool_response", "value": "1"}]},
     [user("List?"), MADE_CALL | {"tool_calls": MADE_CALL["tool_calls"] * 2}, result("1")], None),
    ({"messages": [user("Old?"), {"role": "assistant", "content": None, "function_call": CITY_CALL},
                   {"role": "observation", "content": "1"}]},
     [user("Old?"), MADE_CALL, result("1")], None),
    ({"conversations": [{"from": "System", "value": "Be."}, {"from": "prompter", "value": "OA?"},
                        {"from": "bot", "value": "yes"}]},
     [{"role": "system", "content": "Be."}, user("OA?")], None),
    ({"messages": [{"role": "Human", "content": "Caps?"}, {"role": "model", "content": "A."},
                   {"role": "human", "content": "More?"}]},
     [user("Caps?"), reply("A."), user("More?")], None),
    ({"conversation": [{"role": "user", "value": "Mixed?"}]}, [user("Mixed?")], None),
    ({"conversation": [{"from": "human", "content": "Mixed 2?"}]}, [user("Mixed 2?")], None),
    ({"messages": [user(["bare", {"type": "input_text", "text": "part"}])]}, [user("bare\npart")], None),
    ({"messages": [user("P?"), reply([{"type": "output_text", "text": "yes"}]), user("Q?")]},  # type: ignore[arg-type]
     [user("P?"), reply("yes"), user("Q?")], None),
]  # fmt: skip


def test_a_row_is_the_chat_that_it_means_in_training_and_evaluation(
    target: Target, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Bug: of a row with prompt and messages the prompt alone is read, JSON of messages is the prompt, tools are
    dropped, or evaluation takes another column than training."""
    path = write(tmp_path / "rows.jsonl", [row for row, _, _ in PROMPTS])
    wanted = [served(target.tokenizer, chat, tools) for _, chat, tools in PROMPTS]
    prompts = read(path, monkeypatch)
    assert [encode_prompt(target.chat, prompt) for prompt in prompts] == wanted
    assert encode_prompts(target.chat, prompts) == wanted
    items = load_task_prompts(Task("own", str(path)), target)
    assert [item.prompt_ids for item in items] == wanted


# ---- Arrow ----

CHATS_IN_ARROW: list[tuple[list[dict[str, Any]], Any]] = [
    ([user("Oslo?"), call("weather", {"city": "Oslo"}), result("1"), reply("One.")], [WEATHER]),
    ([user("Zone?"), call("time", {"zone": "a"}), result("2"), reply("Two.")], [TIME]),
    ([user("Nested?"), call("deep", {"at": {"x": 1}, "all": ["a", None, "b"]}), result("3"),
      reply("3.")], [tool("deep", at={"type": "object"})]),
    ([user("Other?"), call("deep", {"at": {"y": [{"p": 1}, {"q": 2}]}}), result("4"), reply("4.")],
     [WEATHER, TIME]),
    ([user("None?"), call("now", {}), result("5"), reply("Five.")], None),
    ([user("Plain?"), reply("Plain.")], None),
]  # fmt: skip


def test_nulls_of_arrow_are_no_text(
    target: Target, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Bug: calls with different arguments in one Parquet file are rendered with each other's, as null; so are tools; or
    only rows of a set that is stored, not streamed, lose Arrow's nulls."""
    rows = [{"messages": chat, "tools": tools} for chat, tools in CHATS_IN_ARROW]
    path = write(tmp_path / "rows.parquet", rows)
    raw = pyarrow.parquet.read_table(path).to_pylist()
    assert raw[0]["messages"][1]["tool_calls"][0]["function"]["arguments"]["zone"] is None
    made = target.tokenizer
    asked = [served(made, chat[:-1], tools) for chat, tools in CHATS_IN_ARROW]
    assert encode_prompts(ChatTemplate(made), read(path, monkeypatch)) == asked
    assert [item.prompt_ids for item in load_task_prompts(Task("own", str(path)), target)] == asked
    stored = datasets.Dataset.from_parquet(str(path), cache_dir=str(tmp_path / "cache"))
    stream = stored.to_iterable_dataset()
    with monkeypatch.context() as patch:
        patch.setattr(datasets, "load_dataset", lambda *args, **kwargs: stream)
        prompts = read_prompts([PromptSource("hub", "some/data", streaming=True)], 0)
    assert encode_prompts(ChatTemplate(made), prompts) == asked
    for prompt, (chat, tools) in zip(read(path, monkeypatch, True), CHATS_IN_ARROW, strict=True):
        script = conversation_with_replies(ChatTemplate(made), prompt, "all", END)
        ids, spans = join_turns(script.prompt_segments, script.replies)
        assert ids == served(made, chat, tools, opened=False)[:-1]  # without the newline behind EOS
        learned = [made.decode(ids[start:end]) for start, end in spans]
        assert learned == [text_of(message) for message in chat if message["role"] == "assistant"]


def text_of(message: dict[str, Any]) -> str:
    """What the template writes of a reply."""
    calls = [one["function"] for one in message.get("tool_calls") or []]
    said = [f"[{f['name']} {json.dumps(f['arguments'], ensure_ascii=False)}]" for f in calls]
    return (message.get("content") or "") + "".join(said) + "<1>"


ARGUMENTS: list[tuple[Any, Any]] = [
    ({"city": "Oslo", "unit": None}, {"city": "Oslo"}),  # a null that was said is one that was not
    ('{"city": "Oslo", "unit": null}', {"city": "Oslo", "unit": None}),  # in a text it was said
    ('{"q": "a \\"quoted\\" \\u00e9"}', {"q": 'a "quoted" é'}),
    ("{}", {}),
    ("not JSON", "not JSON"),
]


@pytest.mark.parametrize(("given", "meant"), ARGUMENTS)
def test_arguments_from_arrow(
    target: Target, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, given: Any, meant: Any
) -> None:
    """Bug: arguments that are JSON texts are encoded once more."""
    filler = {"other": 1, "unit": "C"} if isinstance(given, dict) else '{"other": 1}'
    chats = [[user(f"{i}?"), call("f", x), result("1")] for i, x in enumerate((given, filler))]
    path = write(tmp_path / "rows.parquet", [{"messages": chat} for chat in chats])
    meant_chat = [user("0?"), call("f", meant), result("1")]
    wanted = served(target.tokenizer, meant_chat)
    assert encode_prompt(target.chat, read(path, monkeypatch)[0]) == wanted
    assert load_task_prompts(Task("own", str(path)), target)[0].prompt_ids == wanted


@pytest.mark.parametrize("streaming", [False, True])
def test_nulls_in_arrow_s_json_are_what_the_row_said(
    target: Target, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, streaming: bool
) -> None:
    """Bug: `datasets` stores objects of different forms as JSON; its nulls are dropped too, or its texts not parsed."""
    tools = [tool("f", city={"type": "string", "default": None})]
    chats = [
        [user("Said?"), call("f", {"city": "Oslo", "unit": None}, content=None), result("1")],
        [user("Not?"), call("f", {"city": 3, "all": [1, None, "a"]}, content=""), result("2")],
    ]
    rows = [{"messages": chats[0], "tools": tools}, {"messages": chats[1], "tools": [TIME]}]
    lines = write(tmp_path / "rows.jsonl", rows)
    data = datasets.load_dataset(
        "json", data_files=str(lines), split="train", streaming=streaming, cache_dir=str(tmp_path)
    )
    assert "Json" in str(data.features["messages"])
    del chats[0][1]["content"]
    wanted = [
        served(target.tokenizer, chat, offered)
        for chat, offered in zip(chats, (tools, [TIME]), strict=True)
    ]
    path = tmp_path / "rows.parquet"
    datasets.Dataset.from_list(list(data), features=data.features).to_parquet(str(path))
    items = load_task_prompts(Task("own", str(path)), target)
    assert [item.prompt_ids for item in items] == wanted
    monkeypatch.setattr(datasets, "load_dataset", lambda *args, **kwargs: data)
    prompts = read_prompts([PromptSource("hub", "some/data", streaming=streaming)], 0)
    assert encode_prompts(target.chat, prompts) == wanted


# ---- the answer of a row: (row, the chat that is learned, what of it are labels; None: it has no answer) ----

QA = [user("Say hello."), reply("Hello.")]
ANSWERS: list[tuple[dict[str, Any], list[dict[str, Any]] | None, Any]] = [
    ({"prompt": "Say hello.", "completion": "Hello."}, QA, None),
    ({"query": "Oslo, Oslo?", "id": 7, "tools": written([WEATHER]),
      "answers": written([CITY_CALL])}, [user("Oslo, Oslo?"), MADE_CALL], [WEATHER]),
    ({"query": "No call?", "answers": "[]", "tools": written([WEATHER])}, None, None),
    ({"query": "Passages?", "answers": ["one", "two"]}, None, None),
    ({"prompt": "JSON?", "response": written(CITY_CALL)}, [user("JSON?"), reply(written(CITY_CALL))], None),
    ({"prompt": "1?", "response": "One."}, [user("1?"), reply("One.")], None),
    ({"prompt": "2?", "output": "Two."}, [user("2?"), reply("Two.")], None),
    ({"prompt": "3?", "completion": "", "response": None, "output": "3."}, [user("3?"), reply("3.")], None),
    ({"prompt": "4?", "completion": "4.", "output": "other"}, [user("4?"), reply("4.")], None),
    ({"prompt": [user("5?")], "completion": [reply("5.")]}, [user("5?"), reply("5.")], None),
    ({"prompt": "6?", "completion": [reply("6.")]}, [user("6?"), reply("6.")], None),
    ({"prompt": [user("7?")], "completion": "7."}, [user("7?"), reply("7.")], None),
    ({"prompt": written([user("8?")]), "completion": written([reply("8.")])}, [user("8?"), reply("8.")], None),
    ({"prompt": "9?", "completion": "[9]"}, [user("9?"), reply("[9]")], None),
    ({"messages": [*TALK], "prompt": "Hello to Ann.", "response": "no"}, TALK, None),
    ({"messages": written(TALK[:2])}, TALK[:2], None),
    ({"conversations": SHAREGPT[2:]}, [user("Again?"), reply("A.")], None),
    ({"instruction": "Sort.", "input": "3 1", "output": "1 3"}, [user("Sort.\n\n3 1"), reply("1 3")], None),
    ({"question": "2 + 2?", "answer": "4"}, [user("2 + 2?"), reply("4")], None),
    ({"messages": OSLO, "tools": [WEATHER]}, OSLO, [WEATHER]),
    ({"prompt": "Bergen?", "completion": "9 C", "tools": written([WEATHER])},
     [user("Bergen?"), reply("9 C")], [WEATHER]),
    ({"prompt": [user("Call?")], "completion": [call("weather", {"city": "A"}), result("1"), reply("ok")],
      "tools": [WEATHER]}, [user("Call?"), call("weather", {"city": "A"}), result("1"), reply("ok")], [WEATHER]),
    ({"prompt": "alone"}, None, None),
    ({"prompt": "blank", "completion": " \n"}, None, None),
    ({"prompt": "none", "response": None, "chosen": "x"}, None, None),
    ({"messages": [user("nobody answers")]}, None, None),
    ({"messages": [reply("A greeting answers nobody."), user("?")]}, None, None),
    ({"prompt": [user("nobody either")]}, None, None),
    ({"prompt": "text is not its answer", "text": "text is not its answer at all"}, None, None),
]  # fmt: skip


def test_answers_are_learned_and_questions_are_not(
    target: Target, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Bug: an answer column is dropped and the question learned as a text, or JSON of a chat is."""
    made = target.tokenizer
    path = write(tmp_path / "rows.jsonl", [row for row, _, _ in ANSWERS])
    log = ReadLog()
    prompts = list(stream_prompts([PromptSource("file", str(path))], 0, log, True))
    answered = [(chat, tools) for _, chat, tools in ANSWERS if chat is not None]
    assert log.dropped == {UNANSWERED: len(ANSWERS) - len(answered)}
    first = next(i for i, (_, chat, _) in enumerate(ANSWERS, 1) if chat is None)
    assert f"{path}:{first}:" in log.lines()[-1]
    for prompt, (chat, tools) in zip(prompts, answered, strict=True):
        for turns in ("all", "last"):
            script = conversation_with_replies(ChatTemplate(made), prompt, turns, END)
            ids, spans = join_turns(script.prompt_segments, script.replies)
            assert ids == served(made, chat, tools, opened=False)[:-1]
            replies = [text_of(message) for message in chat if message["role"] == "assistant"]
            learned = [made.decode(ids[start:end]) for start, end in spans]
            assert learned == (replies if turns == "all" else replies[-1:])


def test_a_limit_skips_the_same_rows_and_names_their_line(tmp_path: Path) -> None:
    """Bug: rows without an answer use up the limit, or the line that is named is one of the shuffled order."""
    rows = [{"prompt": f"q{i}", **({"output": "a"} if i % 2 else {})} for i in range(20)]
    path = write(tmp_path / "rows.jsonl", rows)
    log = ReadLog()
    prompts = list(stream_prompts([PromptSource("file", str(path), limit=10)], 3, log, True))
    assert sorted(prompt.text or "" for prompt in prompts) == sorted(
        f"q{i}" for i in range(1, 20, 2)
    )
    line = int(log.unanswered.rpartition(":")[2])
    assert "output" not in rows[line - 1]
    assert 0 < log.dropped[UNANSWERED] <= 10


# ---- columns that are named, values that are refused, ids ----

BOTH = {
    "prompt": "Named.", "messages": TALK, "other": "Third.", "output": "Answer.", "good": "Better.",
}  # fmt: skip
NAMED: list[tuple[dict[str, str], bool, tuple[Any, Any, Any]]] = [
    ({}, False, (None, None, ASKED)),
    ({}, True, (None, None, TALK)),
    ({"column": "prompt"}, False, ("Named.", None, None)),
    ({"column": "prompt"}, True, ("Named.", "Answer.", None)),
    ({"column": "prompt", "response": "good"}, True, ("Named.", "Better.", None)),
    ({"column": "messages"}, True, (None, None, TALK)),
    ({"column": "other"}, False, ("Third.", None, None)),
    ({"column": "other"}, True, ("Third.", None, None)),  # a column of whole texts
    ({"column": "other", "response": "good"}, True, ("Third.", "Better.", None)),
]


@pytest.mark.parametrize(("settings", "answered", "wanted"), NAMED)
@pytest.mark.parametrize("kind", ["jsonl", "parquet"])
def test_named_columns_win(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str, settings: dict[str, str],
    answered: bool, wanted: tuple[Any, Any, Any],
) -> None:  # fmt: skip
    """Bug: a column that the user names is overruled, or ignored in a file."""
    path = write(tmp_path / f"rows.{kind}", [BOTH])
    if kind == "parquet":
        data = datasets.Dataset.from_parquet(str(path), cache_dir=str(tmp_path / "cache"))
        monkeypatch.setattr(datasets, "load_dataset", lambda *args, **kwargs: data)
    source = PromptSource("hub", "a/b") if kind == "parquet" else PromptSource("file", str(path))
    source = replace(source, **settings)  # type: ignore[arg-type]
    [prompt] = stream_prompts([source], 0, ReadLog(), answered)
    assert (prompt.text, prompt.answer, prompt.messages) == wanted


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"messages": "hello"}, "`messages` is no list of messages"),
    ({"messages": "[{'role': 'user', 'content': 'as Python'}]"}, "`messages` is no list of messages"),
    ({"messages": '[{"role": "user", "content": "cut o'}, "`messages` is no list of messages"),
    ({"messages": {"role": ["user"], "content": ["x"]}}, "`messages` must be text or a list"),
    ({"prompt": "x", "tools": "weather"}, "`tools` must be a list of objects"),
    ({"prompt": "x", "tools": ["weather", "time"]}, "`tools` must be a list of objects"),
    ({"prompt": "x", "tools": {"name": "weather"}}, "`tools` must be a list of objects"),
    ({"messages": [user("x"), {"role": "assistant", "content": None}, user("y")]}, "`role` and `content`"),
    ({"messages": [{"role": "user", "tool_calls": [{"name": "f"}]}]}, "`role` and `content`"),
    ({"messages": '[{"role": "user", "content": "\\ud800"}]'}, "surrogate"),
    ({"ask": "x", "b": 1}, "needs a column `messages`, .*; it has ask, b"),
    ({"conversations": [{"from": "narrator", "value": "x"}]}, "`role` and `content` .*narrator"),
    ({"messages": [user([{"type": "image_url", "image_url": {"url": "x"}}])]}, "`role` and `content`"),
    ({"prompt": "x", "messages": written({"role": "user"})}, "`messages` is no list of messages"),
    ({"messages": [], "prompt": ""}, "`messages`, `prompt` are empty"),
    ({"conversations": [{"from": "gpt", "value": "alone"}]}, "`conversations` holds replies alone"),
    ({"messages": [user([{"type": "image"}, {"type": "text", "text": "x"}])]}, "`role` and `content` .*image"),
    ({"prompt": ["one", "two"]}, "`role` and `content`"),
]  # fmt: skip


@pytest.mark.parametrize(("row", "said"), REFUSED)
def test_what_is_no_prompt_is_refused(
    target: Target, tmp_path: Path, row: dict[str, Any], said: str
) -> None:
    """Bug: a broken chat becomes a text prompt in silence, or is refused by one reader only."""
    path = write(tmp_path / "rows.jsonl", [row])
    with pytest.raises(UserError, match=f"rows.jsonl:1.*{said}"):
        read_prompts([PromptSource("file", str(path))], 0)
    with pytest.raises(UserError, match="rows.jsonl:1") as caught:
        load_task_prompts(Task("own", str(path)), target)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("row", "said"),
    [
        (
            {"prompt": "p", "answer": TALK},
            "`answer` is a whole chat",
        ),  # as preference data has them
        (
            {"messages": TALK, "answer": "again"},
            "`messages` ends with a reply, and `answer` is another",
        ),
        ({"prompt": "p", "answer": 5}, "`answer` must be text or a list"),
        ({"prompt": "p", "answer": {"text": "a"}}, "`answer` must be text or a list"),
        ({"prompt": "p", "reply": "a"}, "no column 'answer'"),
    ],
)
def test_what_is_no_answer_is_refused(tmp_path: Path, row: dict[str, Any], said: str) -> None:
    """Bug: a question is learned twice in one chat, or a reply that follows a reply."""
    path = write(tmp_path / "rows.jsonl", [row])
    source = PromptSource("file", str(path), response="answer")
    with pytest.raises(UserError, match=f"rows.jsonl:1: {said}"):
        list(stream_prompts([source], 0, ReadLog(), True))


def test_ids_tell_tools_apart_and_stay_as_they_were(
    target: Target, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Bug: rows that differ in their tools are dropped as repeats, or sets made before have other ids."""
    same = [
        {"prompt": "Oslo?", "tools": tools}
        for tools in (None, [], [WEATHER], [TIME], written([TIME]))
    ]
    path = write(tmp_path / "rows.jsonl", same)
    prompts = read(path, monkeypatch)
    assert [prompt.tools for prompt in prompts] == [None, [WEATHER], [TIME]]
    assert len({prompt.id for prompt in prompts}) == 3
    different = write(tmp_path / "two.jsonl", [same[0], same[2], same[3]])
    assert len({x.id for x in load_task_prompts(Task("own", str(different)), target)}) == 3
    assert prompts[0].id == make_prompt("", "Oslo?").id == "e53dd0207b5f343e#0"
    pair = make_prompt("", ("Oslo?", "12")).id
    [found] = read(
        write(tmp_path / "pair.jsonl", [{"prompt": "Oslo?", "completion": "12"}]), monkeypatch, True
    )
    assert found.id == pair
    chat = write(tmp_path / "chat.jsonl", [{"messages": [{**user("hello"), "name": None}]}])
    assert read(chat, monkeypatch)[0].id == "666210238ffa9abb#0"


def test_later_turns_keep_the_tools(target: Target, tmp_path: Path) -> None:
    """Bug: the second turn of a task's chat is rendered without the tools of its first."""
    path = write(tmp_path / "rows.jsonl", [{"turns": ["One?", "Two?"], "tools": [WEATHER]}])
    first = load_task_prompts(Task("own", str(path)), target)
    assert first[0].prompt_ids == served(target.tokenizer, [user("One?")], [WEATHER])

    def answers(items: Any) -> list[list[int]]:
        return [target.tokenizer("1.")["input_ids"] for _ in items]

    items: list[TaskPrompt] = with_later_turns(first, target, {"own": "refuse"}, answers)
    chat = [user("One?"), reply("1."), user("Two?")]
    assert items[1].prompt_ids == served(target.tokenizer, chat, [WEATHER])


def test_tools_without_a_template_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Bug: a base model is asked, or learns an answer, without the tools that the row offers."""
    rows = [{"prompt": "Oslo?", "output": "12", "tools": [WEATHER]}, {"text": "a", "tools": "any"}]
    pair, whole = read(write(tmp_path / "rows.jsonl", rows), monkeypatch, True)
    assert (whole.text, whole.tools) == ("a", None)
    with pytest.raises(UserError, match=r"prompt .* of rows.jsonl: the prompt has tools"):
        conversation_with_replies(ChatTemplate(byte_tokenizer()), pair, "last", END)
    prompt = make_prompt("test", "Oslo?", [WEATHER])
    with pytest.raises(
        UserError, match="prompt .* of test: the prompt has tools, .*no chat template"
    ):
        encode_prompt(ChatTemplate(byte_tokenizer()), prompt)


def test_a_call_has_no_text_for_the_filters() -> None:
    """Bug: comparing prompts ends in a traceback at a message that only calls a tool."""
    chat = [user("Oslo?"), call("weather", {"city": "Oslo"}), result("12")]
    assert prompt_text(make_prompt("test", chat)) == "Oslo?\n\n12"


# ---- the commands ----


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A saved target with TEMPLATE."""
    return save_byte_target(tmp_path_factory.mktemp("world") / "target", TEMPLATE)


def test_sampling_says_how_rows_were_read_and_counts_what_it_skips(
    world: Path, target: Target, tmp_path: Path
) -> None:
    """Bug: the command writes rows without the tools, learns a question, or is silent about unused columns."""
    rows = [
        {"id": 7, "prompt": "Oslo?", "messages": OSLO, "tools": [WEATHER]},
        {"prompt": "Bergen?", "completion": "9 C"},
        {"prompt": "Nobody knows."},
        {"messages": [user("Nobody asked.")]},
    ]
    path = write(tmp_path / "rows.jsonl", rows)
    done = sample(world, path, tmp_path / "text", "--origin", "text", "--turns", "all").ok()
    assert (
        "rows.jsonl: read as messages (columns messages, tools); not used: id, prompt" in done.err
    )
    assert "rows.jsonl: read as prompt and answer (columns prompt, completion)\n" in done.err
    assert f"2 rows without an answer skipped, such as {path}:3: " in done.err
    stored = {tuple(row["input_ids"]) for row in sample_store.read_shards(tmp_path / "text")}
    learned = [(OSLO, [WEATHER]), ([user("Bergen?"), reply("9 C")], None)]
    assert stored == {
        tuple(served(target.tokenizer, chat, tools, opened=False)[:-1]) for chat, tools in learned
    }
    counts = read_manifest(tmp_path / "text").counts
    assert (counts["asked"], counts["answered"], counts[UNANSWERED]) == (2, 2, 2)

    sample(world, path, tmp_path / "target").ok()
    asked = [
        (OSLO[:3], [WEATHER]),
        *(([user(x)], None) for x in ("Bergen?", "Nobody knows.", "Nobody asked.")),
    ]
    starts = [
        tuple(row["input_ids"][: row["loss_spans"][0][0]])
        for row in sample_store.read_shards(tmp_path / "target")
    ]
    assert sorted(starts) == sorted(tuple(served(target.tokenizer, chat, t)) for chat, t in asked)
    assert UNANSWERED not in read_manifest(tmp_path / "target").counts


def test_origin_text_without_any_answer_is_refused(world: Path, tmp_path: Path) -> None:
    """Bug: a file of questions is learned as texts."""
    path = write(tmp_path / "rows.jsonl", [{"prompt": f"q{i}", "chosen": "x"} for i in range(3)])
    error = sample(world, path, tmp_path / "out", "--origin", "text").error()
    assert f"none of 3 rows has an answer, such as {path}:1" in error
    assert "`response`" in error
    assert not (tmp_path / "out").exists()


def test_the_doctor_counts_tools_and_what_the_template_does_with_them(
    world: Path, tmp_path: Path
) -> None:
    """Bug: a row's tools are in no count, and a template that drops them is not told of."""
    path = write(
        tmp_path / "rows.jsonl", [{"messages": OSLO[:1], "tools": [WEATHER]}, {"prompt": "x?"}]
    )
    deaf = save_byte_target(tmp_path / "deaf", TEMPLATE.partition("{% endif %}")[2])
    for folder, severities in ((world, []), (deaf, ["costs"])):
        done = worlds.call(
            "train/doctor.py", "--target", folder, "--sources", file_sources(path)
        ).ok()
        told = json.loads(done.out.splitlines()[-1])
        facts = told["parts"]["Prompts before sampling"]["facts"]
        assert facts["with tools"] == 1
        assert "read as messages (columns messages, tools)" in facts["read"]
        found = [f["severity"] for f in told["findings"] if f["name"] == "template drops tools"]
        assert found == severities


def test_the_doctor_compares_rows_with_their_tools(world: Path, tmp_path: Path) -> None:
    """Bug: rows that were sampled with tools are said to be rendered otherwise."""
    path = write(
        tmp_path / "rows.jsonl", [{"prompt": f"{i}?", "tools": [WEATHER]} for i in range(4)]
    )
    assert sample(world, path, tmp_path / "out").code == 0
    done = worlds.call(
        "train/doctor.py", tmp_path / "out", "--target", world, "--sources", file_sources(path)
    ).ok()
    names = {finding["name"] for finding in json.loads(done.out.splitlines()[-1])["findings"]}
    assert "prompt is rendered otherwise" not in names


# ---- the examples of docs/data_forms.md ----

FORMS_PAGE = (Path(__file__).parents[3] / "docs" / "data_forms.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"```jsonl\n(.+?)\n```\n```json\n(.+?)\n```", FORMS_PAGE, re.DOTALL)
EXAMPLES = [
    (json.loads(row), json.loads(meaning))
    for rows, meanings in BLOCKS
    for row, meaning in zip(rows.split("\n"), meanings.split("\n"), strict=True)
]


@pytest.mark.parametrize(("row", "meaning"), EXAMPLES)
def test_the_examples_of_the_documentation_are_read(
    target: Target, tmp_path: Path, row: dict[str, Any], meaning: Any
) -> None:
    """Bug: the documentation promises a form that is not read, or says that it means something else."""
    path = write(tmp_path / "rows.jsonl", [row])
    [learned] = stream_prompts([PromptSource("file", str(path))], 0, ReadLog(), True)
    pair = learned.text if learned.answer is None else [learned.text, learned.answer]
    assert (learned.messages or pair) == meaning
    chat = [user(meaning)] if isinstance(meaning, str) else meaning
    asked = [user(chat[0])] if isinstance(chat[0], str) else chat
    while asked[-1]["role"] == "assistant":
        asked = asked[:-1]
    tools = read_tools(DatasetRow(row, "row"))
    [item] = load_task_prompts(Task("own", str(path)), target)
    [prompt] = read_prompts([PromptSource("file", str(path))], 0)
    wanted = served(target.tokenizer, asked, tools)
    assert item.prompt_ids == encode_prompt(target.chat, prompt) == wanted


def test_the_documentation_has_an_example_of_every_form() -> None:
    """Bug: a form is read that no page names, or an example is passed over because its block has another shape."""
    assert len(BLOCKS) == FORMS_PAGE.count("```jsonl") == 9
    assert len(EXAMPLES) == 18
    assert set().union(*(row for row, _ in EXAMPLES)) >= PROMPT_COLUMNS
    table = FORMS_PAGE[: FORMS_PAGE.index("## Forms of rows")]
    assert all(f"`{suffix}`" in table for suffix in (*SUFFIXES, *PACKED))
