"""Prompts that no model can be given, and templates that fail: one line each."""

import json
from typing import Any

import pytest

from decode.common.chat.render import ChatTemplate
from decode.common.errors import UserError
from tests.worlds import byte_tokenizer


@pytest.mark.parametrize("template", [None, "{{ messages[0].content }}"])
def test_half_of_a_surrogate_pair(template: str | None) -> None:
    """Catches a TypeError of the tokenizer for bytes on the command line that are no UTF-8."""
    tokenizer = byte_tokenizer()
    tokenizer.chat_template = template
    for text in ("a\udcff", "\ud800"):
        with pytest.raises(UserError, match="the prompt has .*half of a surrogate pair"):
            ChatTemplate(tokenizer).encode(text)
    assert ChatTemplate(tokenizer).encode("😀") == tokenizer("😀")["input_ids"]


def test_a_prompt_without_tokens() -> None:
    """Catches an empty row in a batch."""
    tokenizer = byte_tokenizer()
    with pytest.raises(UserError, match="the prompt has no tokens"):
        ChatTemplate(tokenizer).encode("")


@pytest.mark.parametrize(
    "template",
    ["{{ nonsense", "{{ messages[0].content + 3 }}", "{{ 1 / 0 }}", "{{ raise_exception('no') }}"],
)
def test_templates_that_fail(template: str) -> None:
    """Catches a traceback out of the program that came with a model, whatever it raises."""
    tokenizer = byte_tokenizer()
    tokenizer.chat_template = template
    with pytest.raises(UserError, match="chat template refuses its messages") as error:
        ChatTemplate(tokenizer).encode("a")
    assert "\n" not in str(error.value)
    with pytest.raises(UserError, match="chat template refuses its messages"):
        ChatTemplate(tokenizer).render([{"role": "user", "content": "a"}])


PARTS = (
    "{% for m in messages %}<{% for c in m['content'] %}{{ c['text'] }}{% endfor %}>{% endfor %}"
)


@pytest.mark.parametrize("content", ["abc", [{"type": "text", "text": "abc"}]])
def test_templates_that_want_a_list_of_parts(content: Any) -> None:
    """Catches prompts that such a template drops in silence (those of some vision-language models)."""
    tokenizer = byte_tokenizer()
    tokenizer.chat_template = PARTS
    ids = ChatTemplate(tokenizer).encode([{"role": "user", "content": content}])
    assert tokenizer.decode(ids) == "<abc>"
    assert tokenizer.decode(ChatTemplate(tokenizer).encode("abc")) == "<abc>"


def calling(arguments: str, before: str = "{{ m.content }}") -> str:
    """A chat template that writes the arguments of calls by a Jinja expression, behind `before`."""
    return (
        "{% if tools %}({{ tools | tojson }}){% endif %}{% for m in messages %}<" + before
        + "{% for c in m.tool_calls or [] %}{{ c.function.name }}=" + arguments + "{% endfor %}>{% endfor %}"
    )  # fmt: skip


OBJECTS = calling("{{ c.function.arguments | tojson }}")
ITEMS = calling("{% for k, v in c.function.arguments.items() %}{{ k }}:{{ v }};{% endfor %}")
WHOLE = calling("{{ c.function | tojson }}")
TEXTS = calling("{{ '`' + c.function.arguments + '`' }}")
EITHER = calling(
    "{% if c.function.arguments is string %}{{ c.function.arguments }}"
    "{% else %}{{ c.function.arguments | tojson }}{% endif %}"
)
PRINTED = calling("{{ c.function.arguments }}")
NOT_NONE = calling("{{ c.function.arguments | tojson }}", "{{ m['content'] + '' }}")
GIVEN = {"city": "Ålesund", "days": 2}
TEXT = json.dumps(GIVEN, ensure_ascii=False)
ONCE = f"f={TEXT}"
OTHER_TEXT = '{"days":2}'


def chat_with(arguments: Any, **content: Any) -> list[dict[str, Any]]:
    calls = [{"id": "1", "type": "function", "function": {"name": "f", "arguments": arguments}}]
    reply = {"role": "assistant", "tool_calls": calls, **content}
    return [{"role": "user", "content": "q"}, reply]


@pytest.mark.parametrize(
    ("template", "arguments", "shown"),
    [
        (OBJECTS, GIVEN, ONCE),
        (OBJECTS, TEXT, ONCE),
        (OBJECTS, "no JSON", 'f="no JSON"'),
        (OBJECTS, {}, "f={}"),
        (OBJECTS, {"a": '{"b": 1}'}, 'f={"a": "{\\"b\\": 1}"}'),  # a text within stays a text
        (OBJECTS, {"a": None}, 'f={"a": null}'),
        (ITEMS, GIVEN, "f=city:Ålesund;days:2;"),
        (ITEMS, TEXT, "f=city:Ålesund;days:2;"),
        (WHOLE, TEXT, f'f={{"name": "f", "arguments": {TEXT}}}'),
        (TEXTS, GIVEN, f"f=`{TEXT}`"),
        (TEXTS, TEXT, f"f=`{TEXT}`"),
        (TEXTS, OTHER_TEXT, f"f=`{OTHER_TEXT}`"),
        (EITHER, GIVEN, ONCE),
        (EITHER, OTHER_TEXT, f"f={OTHER_TEXT}"),
        (PRINTED, TEXT, ONCE),
        (PRINTED, GIVEN, f"f={GIVEN}"),  # as transformers renders it
    ],
)
def test_arguments_are_encoded_once(template: str, arguments: Any, shown: str) -> None:
    """Catches a JSON text that is encoded again, and templates that refuse the form that a data set has."""
    tokenizer = byte_tokenizer()
    tokenizer.chat_template = template
    chat = chat_with(arguments, content="")
    before = json.dumps(chat)
    assert ChatTemplate(tokenizer).render(chat) == f"<q><{shown}>"
    assert json.dumps(chat) == before


@pytest.mark.parametrize("template", [OBJECTS, EITHER, NOT_NONE])
@pytest.mark.parametrize("content", [{}, {"content": ""}, {"content": "so"}])
def test_a_call_without_content(template: str, content: dict[str, Any]) -> None:
    """Catches templates that refuse a call without text, and an absent text that is written."""
    tokenizer = byte_tokenizer()
    tokenizer.chat_template = template
    text = ChatTemplate(tokenizer).render(chat_with({"a": 1}, **content))
    assert text == f'<q><{content.get("content", "")}f={{"a": 1}}>'


def test_each_prompt_has_its_own_tools() -> None:
    """Catches tools of one prompt in another's, where many are rendered together."""
    tokenizer = byte_tokenizer()
    tokenizer.chat_template = OBJECTS
    tools = [None, [{"name": "a"}], [{"name": "b"}, {"name": "c"}], None]
    prompts = [f"p{i}" for i in range(4)]
    asked = [(*one, None) for one in zip(prompts, tools, strict=True)]
    together = ChatTemplate(tokenizer).encode_all(asked)
    assert together == [
        tokenizer.apply_chat_template(
            [{"role": "user", "content": text}], tools=offered, return_dict=False
        )
        for text, offered in zip(prompts, tools, strict=True)
    ]
    assert together == [ChatTemplate(tokenizer).encode(*one) for one in asked]
    tokenizer.chat_template = None
    with pytest.raises(UserError, match="has tools, but .* no chat template"):
        ChatTemplate(tokenizer).encode_all(asked)
    with pytest.raises(UserError, match="half of a surrogate pair"):
        ChatTemplate(tokenizer).encode("a", [{"name": "\ud800"}])
