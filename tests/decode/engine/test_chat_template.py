"""Prompts that no model can be given, and templates that fail: one line each."""

from typing import Any

import pytest

from decode.common.errors import UserError
from decode.engine.chat_template import apply_template, encode_prompt
from tests.worlds import byte_tokenizer


@pytest.mark.parametrize("template", [None, "{{ messages[0].content }}"])
def test_half_of_a_surrogate_pair(template: str | None) -> None:
    """Catches a TypeError of the tokenizer for bytes on the command line that are no UTF-8."""
    tokenizer = byte_tokenizer()
    tokenizer.chat_template = template
    for text in ("a\udcff", "\ud800"):
        with pytest.raises(UserError, match="the prompt has .*half of a surrogate pair"):
            encode_prompt(tokenizer, text)
    assert encode_prompt(tokenizer, "😀") == tokenizer("😀")["input_ids"]


def test_a_prompt_without_tokens() -> None:
    """Catches an empty row in a batch."""
    tokenizer = byte_tokenizer()
    with pytest.raises(UserError, match="the prompt has no tokens"):
        encode_prompt(tokenizer, "")


@pytest.mark.parametrize(
    "template",
    ["{{ nonsense", "{{ messages[0].content + 3 }}", "{{ 1 / 0 }}", "{{ raise_exception('no') }}"],
)
def test_templates_that_fail(template: str) -> None:
    """Catches a traceback out of the program that came with a model, whatever it raises."""
    tokenizer = byte_tokenizer()
    tokenizer.chat_template = template
    with pytest.raises(UserError, match="chat template refuses its messages") as error:
        encode_prompt(tokenizer, "a")
    assert "\n" not in str(error.value)
    with pytest.raises(UserError, match="chat template refuses its messages"):
        apply_template(tokenizer, [{"role": "user", "content": "a"}])


PARTS = (
    "{% for m in messages %}<{% for c in m['content'] %}{{ c['text'] }}{% endfor %}>{% endfor %}"
)


@pytest.mark.parametrize("content", ["abc", [{"type": "text", "text": "abc"}]])
def test_templates_that_want_a_list_of_parts(content: Any) -> None:
    """Catches prompts that such a template drops in silence (those of some vision-language models)."""
    tokenizer = byte_tokenizer()
    tokenizer.chat_template = PARTS
    ids = encode_prompt(tokenizer, [{"role": "user", "content": content}])
    assert tokenizer.decode(ids) == "<abc>"
    assert tokenizer.decode(encode_prompt(tokenizer, "abc")) == "<abc>"
