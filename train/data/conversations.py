"""Prompts, chats and texts as token ids in turns: what is given, what is said to it, what is given next.

A sampled set stores what was generated token by token, never text that was tokenised again. So the turns of a chat are
put together from ids, and how a chat template joins them is found out by rendering it.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import jinja2
from transformers import PreTrainedTokenizerBase

from decode.common.errors import UserError
from train.data.prompts import Prompt, encode_prompt, make_prompt

TurnSelection = Literal["last", "all"]
Messages = list[dict[str, Any]]
PROBE_REPLY = "<think>\nwhy\n</think>\n\nso"
"""Stands for a reply: a template that takes reasoning out of earlier turns shows by it."""


@dataclass(frozen=True)
class Conversation:
    """given[0], reply 0, given[1], reply 1, …; the replies are to come, or there are as many as given parts."""

    prompt_segments: list[list[int]]
    replies: list[list[int]]


def join_turns(
    given: Sequence[list[int]], replies: Sequence[list[int]]
) -> tuple[list[int], list[list[int]]]:
    """(all ids up to the last reply, [start, end) of each reply in them)."""
    ids: list[int] = []
    spans = []
    for before, reply in zip(given, replies, strict=False):
        ids += before
        spans.append([len(ids), len(ids) + len(reply)])
        ids += reply
    return ids, spans


def skip_repeated_turn_end(ids: Sequence[int], given: list[int]) -> list[int]:
    """What goes behind `ids` of the `given` part that follows: an end of turn that was generated is not repeated."""
    return given[1:] if given[:1] == list(ids[-1:]) else given


def conversation_without_replies(
    tokenizer: PreTrainedTokenizerBase, prompt: Prompt, turns: TurnSelection
) -> Conversation:
    """What the target is given, without replies. With `all` its own replies take the place of a chat's.

    UserError for a template that would show the target its earlier replies otherwise than it gave them.
    """
    messages = prompt.messages or []
    if turns == "last" or all(message["role"] != "assistant" for message in messages):
        return Conversation([encode_prompt(tokenizer, prompt)], [])
    parts: list[Messages] = [[]]
    for before, message in zip([None, *messages], messages, strict=False):
        if message["role"] == "assistant":
            continue
        if before is not None and before["role"] == "assistant" and parts[-1]:
            parts.append([])
        parts[-1].append(message)
    said: Messages = parts[0]
    given = [encode_prompt(tokenizer, Prompt(prompt.id, prompt.source, None, said, prompt.sample))]
    for part in parts[1:]:
        before_reply = render_chat(tokenizer, prompt, said, True) + PROBE_REPLY
        said = [*said, {"role": "assistant", "content": PROBE_REPLY}, *part]
        whole = render_chat(tokenizer, prompt, said, True)
        if not whole.startswith(before_reply):
            raise _template_rewrites_error(prompt)
        given.append(tokenizer(whole[len(before_reply) :], add_special_tokens=False)["input_ids"])
    return Conversation(given, [])


def conversation_with_replies(
    tokenizer: PreTrainedTokenizerBase, prompt: Prompt, turns: TurnSelection, eos: frozenset[int]
) -> Conversation:
    """A chat, or a prompt with its answer, whose replies are there: the last one, or all.

    A reply ends with the end of its turn, if that is one of `eos`. UserError for a template whose prefixes the whole
    chat does not go on from.
    """
    messages = prompt.messages
    if messages is None:
        question, answer = {"role": "user", "content": prompt.text}, prompt.answer or ""
        if tokenizer.chat_template is None:
            return _plain_text_conversation(tokenizer, prompt.text or "", answer)
        messages = [question, {"role": "assistant", "content": answer}]
    if tokenizer.chat_template is None:
        encode_prompt(tokenizer, prompt)  # says what is missing
    if not tokenizer.is_fast:
        raise UserError("finding replies in a chat needs a fast tokenizer (tokenizer.json)")
    whole = render_chat(tokenizer, prompt, messages, False)
    found = tokenizer(whole, add_special_tokens=False, return_offsets_mapping=True)
    ids, places = found["input_ids"], found["offset_mapping"]
    number = [i for i, message in enumerate(messages) if message["role"] == "assistant"]
    given, replies, at = [], [], _extra_bos_count(tokenizer, ids)
    for i in number if turns == "all" else number[-1:]:
        opening = render_chat(tokenizer, prompt, messages[:i], True)
        upto = render_chat(tokenizer, prompt, messages[: i + 1], False)
        if not (whole.startswith(upto) and upto.startswith(opening) and len(upto) > len(opening)):
            raise _template_rewrites_error(prompt)
        start = next(n for n, (_, end) in enumerate(places) if end > len(opening))
        end = next((n for n, (begin, _) in enumerate(places) if begin >= len(upto)), len(ids))
        stop = next((n + 1 for n in range(start, end) if ids[n] in eos), end)
        given.append(ids[at:start])
        replies.append(ids[start:stop])
        at = stop
    return Conversation(given, replies)


def split_into_windows(
    tokenizer: PreTrainedTokenizerBase, prompt: Prompt, size: int
) -> list[tuple[Prompt, Conversation]]:
    """A text cut into pieces of up to `size` tokens, each with an id of its own, all of them to be learned.

    Each token is learned once: where the tokenizer begins texts with BOS, so does each piece, elsewhere it begins with
    the last token of the one before. Nothing predicts a text's very first token then.
    """
    if not tokenizer.is_fast:
        raise UserError("cutting texts into windows needs a fast tokenizer (tokenizer.json)")
    if size < 2:
        raise UserError(f"window {size}: need at least 2 tokens")
    text = prompt.text or ""
    found = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True, verbose=False)
    ids, places = found["input_ids"], found["offset_mapping"]
    bos = tokenizer.bos_token_id
    begins = bos is not None and tokenizer("a")["input_ids"][:1] == [bos]
    first = 0 if begins else 1
    pieces = []
    for at in range(first, len(ids), size - 1):
        body = ids[at : at + size - 1]
        head = [bos] if begins else [ids[at - 1]]
        start = places[at][0] if at > first else 0
        piece = make_prompt(prompt.source, text[start : places[at + len(body) - 1][1]], 0)
        pieces.append((piece, Conversation([head], [body])))
    return pieces


def render_chat(tokenizer: Any, prompt: Prompt, messages: Messages, opened: bool) -> str:
    """The chat as the template writes it, `opened` for the next reply. UserError if the template refuses it."""
    try:
        return tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=opened)
    except jinja2.TemplateError as error:
        raise UserError(
            f"prompt {prompt.id} of {prompt.source}: the chat template refuses its messages ({error}): "
            "change or remove it"
        ) from error


def _plain_text_conversation(
    tokenizer: PreTrainedTokenizerBase, text: str, answer: str
) -> Conversation:
    """Tokenised as one text, learned from the first token that is not the prompt's own, up to EOS."""
    ids, prompt = tokenizer(text + answer)["input_ids"], tokenizer(text)["input_ids"]
    same = [a == b for a, b in zip(ids, prompt, strict=False)]
    start = same.index(False) if False in same else min(len(prompt), len(ids) - 1)
    end = [] if tokenizer.eos_token_id is None else [tokenizer.eos_token_id]
    return Conversation([ids[:start]], [ids[start:] + end])


def _extra_bos_count(tokenizer: PreTrainedTokenizerBase, ids: list[int]) -> int:
    """How many BOS too many a template has put in front."""
    bos, count = tokenizer.bos_token_id, 0
    while bos is not None and ids[count : count + 2] == [bos, bos]:
        count += 1
    return count


def _template_rewrites_error(prompt: Prompt) -> UserError:
    return UserError(
        f"prompt {prompt.id} of {prompt.source}: the target's chat template writes earlier turns otherwise once more "
        "follow (it may take reasoning out), so that replies cannot be told apart: set turns to last"
    )
