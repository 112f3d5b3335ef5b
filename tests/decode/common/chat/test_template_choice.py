"""Which chat template renders a prompt, and its arguments: compared with transformers given the same as keywords."""

import json
from pathlib import Path
from typing import Any

import pytest

from decode.checkpoints.draft_folder import METADATA_FILE, trained_templates
from decode.common.chat.choice import check_setting, names_in, read_setting, with_template
from decode.common.chat.render import ChatTemplate
from decode.common.errors import UserError
from tests.tiny import tiny_model, tiny_target
from tests.worlds import byte_tokenizer

CHAT = [{"role": "system", "content": "Be."}, {"role": "user", "content": "Hi é 😀"}]
TOOL = {
    "type": "function",
    "function": {"name": "add", "parameters": {"type": "object", "properties": {}}},
}
BODY = "{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}"
OPEN = "{% if add_generation_prompt %}[assistant]{% endif %}"
SWITCH = (
    BODY
    + "{% if add_generation_prompt %}[assistant]{% if enable_thinking is defined and enable_thinking is false %}"
    + "<think></think>{% endif %}{% endif %}"
)
DEFAULTED = (
    "{%- set enable_thinking = enable_thinking if enable_thinking is defined else true -%}\n"
    + SWITCH
)
NAMED = {
    "default": "D" + BODY + OPEN,
    "tool_use": "T{{ tools | length }}" + BODY + OPEN,
    "rag": "R{{ date }}" + BODY + OPEN,
}


def tokenizer_with(template: Any) -> Any:
    tokenizer = byte_tokenizer()
    tokenizer.chat_template = template
    return tokenizer


def wanted(tokenizer: Any, chat: list[dict[str, Any]] = CHAT, **arguments: Any) -> list[int]:
    """The ids of what transformers renders with these keywords."""
    text = tokenizer.apply_chat_template(
        chat, tokenize=False, add_generation_prompt=True, **arguments
    )
    ids: list[int] = tokenizer(text, add_special_tokens=False)["input_ids"]
    return ids


SHOWN = BODY + "({{ x }})" + OPEN
VALUES: list[tuple[str, Any]] = [
    (SWITCH, {"enable_thinking": False}),
    (SWITCH, {"enable_thinking": True}),
    (DEFAULTED, {"enable_thinking": False}),
    (SHOWN, {"x": "26 Jul 2024"}),
    (SHOWN, {"x": "a 'b' \"c\" \\n \n\t {{ y }} {% raw %} é 😀 \x00"}),
    (SHOWN, {"x": -1.5e-07}),
    (SHOWN, {"x": 12345678901234567890}),
    (BODY + "({{ x | tojson }})" + OPEN, {"x": {"a": [1, None, True, {"b": "}"}]}}),
    (BODY + "{% for v in x %}<{{ v }}>{% endfor %}" + OPEN, {"x": ["1", 2, []]}),
    ("\n\n  " + SHOWN, {"x": "y"}),
    ("  {% if x %}\n  a{% endif %}\n" + SHOWN, {"x": "y"}),
    ("{%- if x -%}\n  a\n{%- endif %}" + SHOWN, {"x": 0}),
    ("{% macro f(m) %}{{ x }}{{ m.content }}{% endmacro %}{% for m in messages %}{{ f(m) }}{% endfor %}", {"x": 7}),
    ("{% for m in messages %}{% set x = m.role %}{{ x }}{% endfor %}" + SHOWN, {"x": "y"}),
    (BODY + "{% for d in documents %}{{ d.text }}{% endfor %}" + OPEN, {"documents": [{"text": "t"}]}),
    (SHOWN + "{% generation %}{{ z }}{% endgeneration %}", {"x": 1, "z": 2}),
]  # fmt: skip


@pytest.mark.parametrize(("template", "arguments"), VALUES)
def test_a_setting_renders_as_keywords_do(template: str, arguments: dict[str, Any]) -> None:
    """Bug: an argument that is lost, is another value, or changes the white space of the template."""
    tokenizer = tokenizer_with(template)
    right = wanted(tokenizer, **arguments)
    chosen = with_template(tokenizer, read_setting(arguments))
    assert ChatTemplate(chosen).encode(CHAT) == right
    # of a row: the same, alone and above another one of the setting
    assert ChatTemplate(tokenizer).encode(CHAT, None, arguments) == right
    other = with_template(tokenizer, dict.fromkeys(arguments, "other"))
    assert ChatTemplate(other).encode(CHAT, None, arguments) == right
    assert tokenizer.chat_template == template
    assert ChatTemplate(chosen).hash != ChatTemplate(tokenizer).hash


def test_the_switch_changes_the_prompt() -> None:
    """A control of the test above: with and without the argument there are two prompts."""
    tokenizer = tokenizer_with(SWITCH)
    off = with_template(tokenizer, {"enable_thinking": False})
    text = tokenizer.decode(ChatTemplate(off).encode("Hi"))
    assert text == "[user]Hi[assistant]<think></think>"
    assert tokenizer.decode(ChatTemplate(tokenizer).encode("Hi")) == "[user]Hi[assistant]"
    assert tokenizer.decode(ChatTemplate(off).encode("Hi", None, {"enable_thinking": True})) == (
        "[user]Hi[assistant]"
    )


CHOICES: list[tuple[Any, Any, str]] = [
    ("", None, "default"),
    ("", [TOOL], "tool_use"),
    ("default", [TOOL], "default"),
    ("tool_use", [TOOL], "tool_use"),
    ({"name": "rag", "date": "2026-01-31"}, None, "rag"),
    ({"name": "rag", "date": "x"}, [TOOL], "rag"),
]


@pytest.mark.parametrize(("setting", "tools", "name"), CHOICES)
def test_one_of_several_templates(setting: Any, tools: Any, name: str) -> None:
    """Bug: `'dict' object has no attribute 'encode'` when the manifest is written, and no way to choose."""
    tokenizer = tokenizer_with(NAMED)
    template = read_setting(setting)
    chosen = with_template(tokenizer, template)
    given = {key: value for key, value in template.items() if key != "name"}
    right = wanted(tokenizer, chat_template=NAMED[name], tools=tools, **given)
    assert ChatTemplate(chosen).encode(CHAT, tools) == right
    assert ChatTemplate(chosen).hash is not None
    if not setting:  # as transformers itself chooses
        assert right == wanted(tokenizer, tools=tools)


def test_hashes_tell_templates_apart() -> None:
    """Bug: sets of two templates have one hash, or a template without arguments no longer its text's."""
    tokenizer = tokenizer_with(NAMED)
    settings: list[Any] = [
        "",
        "default",
        "tool_use",
        {"name": "rag", "date": "a"},
        {"name": "rag", "date": "b"},
    ]
    hashes = [ChatTemplate(with_template(tokenizer, read_setting(x))).hash for x in settings]
    assert len(set(hashes)) == 5
    assert ChatTemplate(tokenizer_with("x")).hash == "2d711642b726b044"
    assert ChatTemplate(tokenizer_with(None)).hash is None


def test_no_template_at_all() -> None:
    """Plain text where the user asks for it, or where the tokenizer has none."""
    for tokenizer in (tokenizer_with(SWITCH), tokenizer_with(NAMED), tokenizer_with(None)):
        plain = with_template(tokenizer, read_setting("none"))
        assert ChatTemplate(plain).encode("Hi é") == tokenizer("Hi é")["input_ids"]
        with pytest.raises(UserError, match="is a chat, but the target's tokenizer has no chat"):
            ChatTemplate(plain).encode(CHAT)


WRONG: list[tuple[Any, Any, str]] = [
    (NAMED, "rags", r"no chat template 'rags': choose among default, rag, tool_use$"),
    (NAMED, {"name": "RAG"}, r"no chat template 'RAG': choose among default, rag, tool_use$"),
    ({"a": "A", "b": "B"}, None, "has the chat templates a, b, and none is the default: choose"),
    ({"tool_use": "A"}, None, "has the chat templates tool_use, and none is the default: choose"),
    (SWITCH, "rag", "no chat template 'rag': it has one, unnamed"),
    (None, "rag", "has no chat template: drop --template rag"),
    (None, {"enable_thinking": False}, r"drop --template '\{enable_thinking: false\}'"),
    (SWITCH, {"enable_thinkin": False}, "does not read enable_thinkin; it reads enable_thinking$"),
    (NAMED, {"date": "x"}, "does not read date; it reads none$"),
    ({"default": BODY, "x": SWITCH}, {"enable_thinking": 1}, "does not read enable_thinking"),
    (SWITCH, {"name": 3}, "name is 3, give the name"),
    (SWITCH, {"tools": []}, "tools is no argument that can be given"),
    (SWITCH, {"add_generation_prompt": False}, "add_generation_prompt is no argument"),
    (SWITCH, {"a b": 1}, "'a b' cannot be the name of an argument"),
    (SWITCH, {"enable_thinking": float("nan")}, "enable_thinking is nan: give a text"),
    (SWITCH, {"enable_thinking": {1: 2}}, r"enable_thinking is \{1: 2\}: give a text"),
    (SWITCH, {"name": "none", "enable_thinking": True}, "without a template .* no arguments"),
]  # fmt: skip


@pytest.mark.parametrize(("template", "setting", "line"), WRONG)
def test_what_cannot_be_chosen_is_named(template: Any, setting: Any, line: str) -> None:
    """Bug: a traceback, a misspelt switch that changes nothing in silence, a message without the names there are."""
    tokenizer = tokenizer_with(template)
    with pytest.raises(UserError, match=line) as error:
        check_setting(tokenizer, read_setting(setting))
    assert "\n" not in str(error.value)


# what the template holds: the argument that it needs for this chat, "" for none
NEEDS: dict[str, str] = {
    "{{ date }}": "date",
    "{{ 'Today: ' + date }}": "date",
    "{{ 'Today: ' ~ date }}": "date",
    "{{ date | trim }}": "date",
    "{{ date.year }}": "date",
    "{{ day(date) }}": "day",
    "{% set d = date %}{{ d }}": "date",
    "{% macro f() %}{{ date }}{% endmacro %}{{ f() }}": "date",
    "{% if x is defined %}{{ x }}{% endif %}{{ date }}": "date",
    "{% if messages | length > 1 %}{{ date }}{% endif %}": "date",
    "{% if messages | length > 5 %}{{ date }}{% endif %}": "",
    "{% if tools %}{{ date }}{% endif %}": "",
    "{{ date | default('now') }}": "",
    "{{ date | d('now') }}": "",
    "{{ date if date is defined else 'now' }}": "",
    "{{ date or 'now' }}": "",
    "{% if date %}{{ date }}{% endif %}": "",
    "{% if date is not defined %}{% set date = 'now' %}{% endif %}{{ date }}": "",
    "{% if date is not defined %}now{% else %}{{ date }}{% endif %}": "",
    "{% if not (date is defined and date) %}now{% elif messages %}{{ date }}{% endif %}": "",
    "{% for d in dates %}{{ d }}{% endfor %}": "",
    "{{ bos_token }}{{ eos_token }}{{ messages[0].name }}": "",
    "{% if false %}{% set s = 1 %}{% endif %}{{ s }}": "",
    "{% set ns = namespace(a=1) %}{{ ns.a }}{{ ns.b }}": "",
    "{{ strftime_now('%Y') }}": "",
}


@pytest.mark.parametrize("part", NEEDS)
def test_an_argument_that_nobody_gave_is_named(part: str) -> None:
    """Bug: Jinja prints nothing for it, and hours of answers are to prompts with a hole; or templates that do without
    are refused."""
    tokenizer = tokenizer_with(part + BODY + OPEN)
    name = NEEDS[part]
    if not name:
        assert ChatTemplate(tokenizer).encode(CHAT) == wanted(tokenizer)
        return
    line = rf"the target's chat template needs {name}, which nobody gave: add --template '\{{{name}: …\}}'"
    with pytest.raises(UserError, match=line):
        ChatTemplate(tokenizer).encode(CHAT)
    if name == "date" and "year" not in part:
        given = {"date": "2026-01-31"}
        right = wanted(tokenizer, **given)
        assert ChatTemplate(tokenizer).encode(CHAT, None, given) == right
        assert ChatTemplate(with_template(tokenizer, given)).encode(CHAT) == right


def test_only_chats_that_reach_it_need_an_argument() -> None:
    tokenizer = tokenizer_with("{% if tools %}{{ date }}{% endif %}" + BODY)
    assert ChatTemplate(tokenizer).render(CHAT) == "[system]Be.[user]Hi é 😀"
    with pytest.raises(UserError, match="needs date, which nobody gave"):
        ChatTemplate(tokenizer).render(CHAT, tools=[TOOL])
    assert names_in(tokenizer.chat_template).needed == {"date"}


def trained(folder: Path, *templates: dict[str, Any]) -> str:
    folder.mkdir()
    (folder / METADATA_FILE).write_text(json.dumps({"templates": templates}))
    return str(folder)


OFF, ON = {"enable_thinking": False}, {"enable_thinking": True}
USES: dict[str, tuple[Any, list[list[dict[str, Any]]], dict[str, Any], int]] = {
    "as in training": (None, [[OFF]], OFF, 1),
    "as in most of training": (None, [[OFF, ON, {}]], OFF, 1),
    "both drafts alike": (None, [[OFF, {}], [OFF]], OFF, 1),
    "drafts disagree": (None, [[OFF], [ON]], {}, 2),
    "one knows nothing": (None, [[], [OFF]], OFF, 1),
    "nobody knows": (None, [[]], {}, 0),
    "trained on the default": (None, [[{}]], {}, 0),
    "given, as in training": (OFF, [[ON, OFF]], OFF, 0),
    "given, another": (ON, [[OFF]], ON, 1),
    "given, the default": ({}, [[OFF]], {}, 1),
    "no draft": (OFF, [], OFF, 0),
}


@pytest.mark.parametrize("case", USES)
def test_prompts_are_rendered_as_in_the_draft_s_training(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], case: str
) -> None:
    """Bug: a draft of answers without thoughts is measured on prompts with them, and nothing is said."""
    setting, drafts, right, lines = USES[case]
    model = tiny_model("llama", vocab_size=300)
    target = tiny_target(model)
    vars(target)["tokenizer"] = tokenizer_with(SWITCH)
    folders = [trained(tmp_path / f"d{i}", *found) for i, found in enumerate(drafts)]
    used = target.with_template(setting, trained_templates(["ngram", "", *folders]))
    assert used.template == right
    assert used.chat.encode(CHAT) == wanted(target.tokenizer, **right)
    assert (used.describe().template or {}) == right
    said = capsys.readouterr().err.splitlines()
    assert len(said) == lines, said
    assert all(str(tmp_path) in line and "--template" in line for line in said)
