"""Turns as token ids: which tokens of a chat are replies, and what a template puts between them."""

from typing import Any

import pytest
from transformers import PreTrainedTokenizerFast

from decode.common.chat.render import ChatTemplate
from decode.common.errors import UserError
from tests.worlds import byte_tokenizer
from train.data.conversations import (
    Conversation,
    Prompt,
    conversation_with_replies,
    conversations_without_replies,
    join_turns,
    make_prompt,
    skip_repeated_turn_end,
    split_into_windows,
)

EOS = frozenset({1})
CHATML = (
    "{% for m in messages %}<2>{{ m['role'] }}\n{{ m['content'] }}<1>\n{% endfor %}"
    "{% if add_generation_prompt %}<2>assistant\n{% endif %}"
)
REASONING = (  # as Qwen3's: of earlier replies only what follows the reasoning stays
    "{% for m in messages %}<2>{{ m['role'] }}\n"
    "{% if m['role'] == 'assistant' and not loop.last %}{{ m['content'].split('</think>')[-1].lstrip() }}"
    "{% elif m['role'] == 'assistant' %}<think>\n</think>\n{{ m['content'] }}"
    "{% else %}{{ m['content'] }}{% endif %}<1>\n{% endfor %}"
    "{% if add_generation_prompt %}<2>assistant\n{% endif %}"
)
TRIMMING = CHATML.replace("m['content']", "m['content'] | trim")
ALTERNATING = (
    "{% if messages | length > 2 %}{{ raise_exception('one turn only') }}{% endif %}" + CHATML
)


def tokenizer(template: str | None) -> PreTrainedTokenizerFast:
    made = byte_tokenizer()
    made.chat_template = template
    return made


def chat(*contents: str, system: str = "") -> Prompt:
    """User and assistant by turns."""
    messages: list[dict[str, Any]] = [
        {"role": ("user", "assistant")[i % 2], "content": text} for i, text in enumerate(contents)
    ]
    if system:
        messages.insert(0, {"role": "system", "content": system})
    return make_prompt("test", messages)


def text_of(made: PreTrainedTokenizerFast, script: Conversation) -> tuple[str, list[str]]:
    """(all of the row, what of it is learned) as text."""
    ids, spans = join_turns(script.prompt_segments, script.replies)
    return made.decode(ids), [made.decode(ids[start:end]) for start, end in spans]


@pytest.mark.parametrize("template", [CHATML, TRIMMING])
def test_the_supervised_text_is_the_replies_and_their_ends(template: str) -> None:
    """Bug: spans by searching for the reply find its first occurrence, or cover role names or the newline behind EOS.
    The reply "a" occurs in the question, in the system text and in the other reply."""
    made = tokenizer(template)
    whole, learned = text_of(
        made,
        conversation_with_replies(
            ChatTemplate(made), chat("a?", "a", "a a?", "a a", system="a"), "all", EOS
        ),
    )
    assert learned == ["a<1>", "a a<1>"]
    assert whole == (
        "<2>system\na<1>\n<2>user\na?<1>\n<2>assistant\na<1>\n<2>user\na a?<1>\n<2>assistant\na a<1>"
    )
    _, learned = text_of(
        made, conversation_with_replies(ChatTemplate(made), chat("q", "a", "r", "b"), "last", EOS)
    )
    assert learned == ["b<1>"]


def segments(tokenizer: Any, prompt: Prompt, turns: Any) -> Any:
    """What stands before each reply that the target will generate."""
    [found] = conversations_without_replies(ChatTemplate(tokenizer), [prompt], turns)
    return found.prompt_segments


def test_the_row_is_what_the_template_gives(monkeypatch: pytest.MonkeyPatch) -> None:
    """Bug: turns tokenised one by one give other ids than the chat as it is served."""
    made = tokenizer(CHATML)
    prompt = chat("één", "zwei\n", "drei ", "🙂 vier")
    script = conversation_with_replies(ChatTemplate(made), prompt, "all", EOS)
    ids, spans = join_turns(script.prompt_segments, script.replies)
    served = made.apply_chat_template(prompt.messages, tokenize=True, return_dict=False)
    assert ids == served[: len(ids)]
    assert made.decode(served[len(ids) :]) == "\n"
    for (start, _), turn in zip(spans, (1, 3), strict=True):
        opened = made.apply_chat_template(
            prompt.messages[:turn], add_generation_prompt=True, return_dict=False
        )
        assert ids[:start] == opened


def test_a_template_that_rewrites_earlier_turns_is_refused() -> None:
    """Bug: replies are learned in a form that the target never sees or says."""
    made = tokenizer(REASONING)
    with pytest.raises(UserError, match="0 of test.*set turns to last"):
        conversation_with_replies(ChatTemplate(made), chat("q", "a", "r", "b"), "all", EOS)
    with pytest.raises(UserError, match="0 of test.*set turns to last"):
        segments(made, chat("q", "a", "r"), "all")
    whole, learned = text_of(
        made, conversation_with_replies(ChatTemplate(made), chat("q", "a", "r", "b"), "last", EOS)
    )
    assert learned == [
        "<think>\n</think>\nb<1>"
    ]  # what the template puts in front, the target says
    assert "<2>assistant\na<1>" in whole
    assert len(segments(made, chat("q", "a", "r"), "last")) == 1
    with pytest.raises(UserError, match="one turn only"):
        conversation_with_replies(
            ChatTemplate(tokenizer(ALTERNATING)), chat("q", "a", "r", "b"), "all", EOS
        )


def test_a_prompt_with_its_answer() -> None:
    """Bug: with a template the pair is not put as a chat; without one the prompt is learned or the end is missing."""
    pair = make_prompt("test", ("1 + 1 =", " 2"))
    made = tokenizer(CHATML)
    assert text_of(made, conversation_with_replies(ChatTemplate(made), pair, "last", EOS)) == (
        "<2>user\n1 + 1 =<1>\n<2>assistant\n 2<1>", [" 2<1>"]
    )  # fmt: skip
    plain = tokenizer(None)
    assert text_of(plain, conversation_with_replies(ChatTemplate(plain), pair, "last", EOS)) == (
        "1 + 1 = 2<eos>",
        [" 2<eos>"],
    )
    with pytest.raises(UserError, match="no chat template"):
        conversation_with_replies(ChatTemplate(plain), chat("q", "a"), "all", EOS)


def test_a_greeting_is_read_and_not_learned() -> None:
    """Bug: a chat that begins with the assistant is refused, because nothing stands before its first reply."""
    made = tokenizer(CHATML)
    roles = ("assistant", "user", "assistant")
    messages = [{"role": role, "content": text} for role, text in zip(roles, "abc", strict=True)]
    for turns in ("all", "last"):
        script = conversation_with_replies(
            ChatTemplate(made), make_prompt("test", messages), turns, EOS
        )
        whole, learned = text_of(made, script)
        assert learned == ["c<1>"]
        assert whole == "<2>assistant\na<1>\n<2>user\nb<1>\n<2>assistant\nc<1>"


def test_what_lies_between_the_target_s_replies() -> None:
    """Bug: the target's second prompt holds the data set's reply, lacks the end of the first, or has it twice."""
    made = tokenizer(CHATML)
    asked = segments(made, chat("q", "THEIRS", "r", "THEIRS", "s", system="be"), "all")
    assert [made.decode(ids) for ids in asked] == [
        "<2>system\nbe<1>\n<2>user\nq<1>\n<2>assistant\n",
        "<1>\n<2>user\nr<1>\n<2>assistant\n",
        "<1>\n<2>user\ns<1>\n<2>assistant\n",
    ]
    ended = made("mine<1>")["input_ids"]
    behind = skip_repeated_turn_end(ended, asked[1])
    assert made.decode([*ended, *behind]).startswith("mine<1>\n<2>user")
    assert skip_repeated_turn_end(ended[:-1], asked[1]) == asked[1]
    replies = [made("one<1>")["input_ids"], made("two<1>")["input_ids"]]
    given = [asked[0], skip_repeated_turn_end(replies[0], asked[1])]
    served = [
        *(chat("q", "one", "r", system="be").messages or []),
        {"role": "assistant", "content": "two"},
    ]
    ids, _ = join_turns(given, replies)
    whole = made.apply_chat_template(served, tokenize=True, return_dict=False)
    assert ids == whole[: len(ids)]
    assert len(segments(made, chat("q"), "all")) == 1
    assert len(segments(made, make_prompt("test", "plain"), "all")) == 1


@pytest.mark.parametrize("size", [2, 5, 64])
@pytest.mark.parametrize("bos", [False, True])
def test_each_token_of_a_text_is_learned_once(size: int, bos: bool) -> None:
    """Bug: windows lose the token at their seam or learn it twice; the first of a window is never predicted."""
    made = with_bos() if bos else tokenizer(None)
    text = "Größe: 12 🙂 and some more words"
    pieces = split_into_windows(made, make_prompt("test", text), size)
    ids = made(text, add_special_tokens=False)["input_ids"]
    seen = []
    for _, script in pieces:
        row, [[start, end]] = join_turns(script.prompt_segments, script.replies)
        assert start == 1 < end == len(row) <= size
        seen += row[start:end]
    assert seen == ids[0 if bos else 1 :]
    with pytest.raises(UserError, match="window 1"):
        split_into_windows(made, make_prompt("test", text), 1)


def with_bos() -> PreTrainedTokenizerFast:
    from tokenizers.processors import TemplateProcessing

    made = byte_tokenizer()
    made.bos_token = "<3>"
    made.backend_tokenizer.post_processor = TemplateProcessing(
        single="<3> $A", special_tokens=[("<3>", 3)]
    )
    return made
