"""What rendering placeholders says of templates, and the way back from a text to its messages."""

from typing import Any

import pytest

from decode.common.chat.probe import TemplateProbe
from decode.common.chat.render import ChatTemplate
from tests.train.doctor_checks.sets import CHATML, REASONING
from tests.worlds import byte_tokenizer
from train.doctor_checks.boundary import opening_offset

DEFAULT_SYSTEM = (
    "{% if messages[0]['role'] != 'system' %}<2>system\nBe kind.<1>\n{% endif %}" + CHATML
)
INST = (  # as Mistral's: no generation prompt, the system message goes into the user's
    "{% for m in messages %}{% if m['role'] == 'user' %}[INST] {{ m['content'] }} [/INST]"
    "{% elif m['role'] == 'assistant' %}{{ m['content'] }}<1>{% endif %}{% endfor %}"
)
NO_SYSTEM = (
    "{% if messages[0]['role'] == 'system' %}{{ raise_exception('no') }}{% endif %}" + CHATML
)
OPENS_A_THOUGHT = (  # as DeepSeek-R1's: replies begin with a thought, which the history loses
    "{% for m in messages %}{% if m['role'] == 'assistant' %}<4>{{ m['content'].split('</think>')[-1] }}<1>"
    "{% else %}<2>{{ m['content'] }}{% endif %}"
    "{% for c in m['tool_calls'] or [] %}{{ c['function']['name'] + c['function']['arguments'] }}{% endfor %}"
    "{% endfor %}"
    "{% if add_generation_prompt %}<4><think>\n{% endif %}"
)
TOOLS = (
    "{% if tools %}<2>system\n{{ tools | tojson }}<1>\n{% endif %}"
    "{% for m in messages %}<2>{{ m['role'] }}\n{{ m['content'] }}"
    "{% for c in m['tool_calls'] or [] %}<tool_call>{{ c['function'] | tojson }}</tool_call>{% endfor %}<1>\n"
    "{% endfor %}{% if add_generation_prompt %}<2>assistant\n{% endif %}"
)


def probed(template: str) -> TemplateProbe:
    tokenizer = byte_tokenizer()
    tokenizer.chat_template = template
    found = ChatTemplate(tokenizer).probe
    assert found is not None
    return found


@pytest.mark.parametrize(
    ("template", "opening", "facts"),
    [
        (CHATML, "<2>assistant\n", {"system": "kept", "tools": "dropped"}),
        (DEFAULT_SYSTEM, "<2>assistant\n", {"before_user": "<2>system\nBe kind.<1>\n<2>user\n"}),
        (INST, " [/INST]", {"system": "dropped", "tool_results": "dropped"}),
        (NO_SYSTEM, "<2>assistant\n", {"system": "refused"}),
        (TOOLS, "<2>assistant\n", {"tools": "kept", "tool_calls": "kept", "tool_results": "kept"}),
        (REASONING, "<2>assistant\n", {"drops_thoughts": True, "has_thinking_switch": True}),
        (CHATML, "<2>assistant\n", {"drops_thoughts": False, "has_thinking_switch": False}),
        (OPENS_A_THOUGHT, "<4><think>\n", {"tool_calls": "kept"}),
    ],
)
def test_what_a_template_does(template: str, opening: str, facts: dict[str, Any]) -> None:
    found = probed(template)
    assert found.opening == opening
    assert found.turn_end == [1]
    assert {name: vars(found)[name] for name in facts} == facts


@pytest.mark.parametrize("template", [CHATML, DEFAULT_SYSTEM, TOOLS])
@pytest.mark.parametrize("system", ["", "Be\nodd."])
@pytest.mark.parametrize("turns", [1, 2, 3, 4])
def test_a_text_goes_back_to_its_messages(template: str, system: str, turns: int) -> None:
    """Bug: a row's messages are not those that were rendered, and every comparison after it is of something else."""
    found = probed(template)
    texts = ["what?\n", "this <tool_call>x</tool_call>", "and\n\nthen?", "that."][:turns]
    messages = [{"role": ("user", "assistant")[i % 2], "content": t} for i, t in enumerate(texts)]
    messages = [{"role": "system", "content": system}, *messages] if system else messages
    text = ChatTemplate(found.tokenizer).render(messages, opened=turns % 2 == 1)
    assert found.unrender(text) == messages
    assert found.unrender("x" + text) is None


def test_earlier_replies_may_be_opened_otherwise() -> None:
    """Bug: a chat of several turns is read as one question, because earlier replies have no thought."""
    found = probed(OPENS_A_THOUGHT)
    texts = ["what?", "this", "and then?"]
    messages = [{"role": ("user", "assistant")[i % 2], "content": t} for i, t in enumerate(texts)]
    text = ChatTemplate(found.tokenizer).render(messages, opened=True)
    assert text == "<2>what?<4>this<1><2>and then?<4><think>\n"
    assert found.unrender(text) == messages
    said = "so\n</think>that"
    answered = [*messages, {"role": "assistant", "content": said}]
    assert found.unrender(f"{text}{said}<1>") == answered


def test_no_template_and_one_that_refuses() -> None:
    tokenizer = byte_tokenizer()
    assert ChatTemplate(tokenizer).probe is None
    tokenizer.chat_template = "{{ raise_exception('never') }}"
    assert ChatTemplate(tokenizer).probe is None


@pytest.mark.parametrize("by", [-8, -2, -1, 0, 1, 3, 8, 9])
def test_the_distance_to_the_generation_prompt(by: int) -> None:
    """Bug: the offset has the wrong sign, or the search ends too early."""
    found = probed(CHATML)
    ids = found.tokenizer("<2>user\nhello there<1>\n<2>assistant\nhow are you<1>")["input_ids"]
    start = len(found.tokenizer("<2>user\nhello there<1>\n<2>assistant\n")["input_ids"])
    assert opening_offset(found, ids, start + by) == (by if abs(by) <= 8 else None)


def test_thinking_switched_off_is_a_generation_prompt_too() -> None:
    """Bug: rows that were sampled without thinking seem to begin too late."""
    found = probed(REASONING)
    off = "<2>user\nhello<1>\n<2>assistant\n<think>\n</think>\n"
    ids = found.tokenizer(off + "hi<1>")["input_ids"]
    assert opening_offset(found, ids, len(found.tokenizer(off)["input_ids"])) == 0
