"""Prompts, and step 2 of 3 from sources to tokens: Conversations, the token ids of prompt segments and replies.

The id of a Prompt is a hash of its content, so ids are the same on every machine and in every run; resuming and
decontamination rely on that. A sampled set stores the token ids that were generated, never text that was tokenised
again. So the turns of a chat are joined as ids, and what a chat template puts between them is found by rendering it.
"""

import contextlib
import hashlib
import itertools
import json
from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from decode.common.chat.choice import Arguments, Messages, Tools
from decode.common.chat.probe import assistant, user
from decode.common.chat.render import ChatTemplate
from decode.common.errors import UserError
from eval.tasks.images import names_in
from eval.tasks.row_forms import Content, message_text
from train.settings.data import TurnSelection

INSTRUCTING = ("system", "developer")
"""Roles of messages by which a service tells the model what to do."""


@dataclass(frozen=True, slots=True)
class Prompt:
    """Plain `text`, the `messages` of a chat, or `tokens`; the others are None."""

    id: str
    source: str
    """Name of the source, without the folder that it lies in, which stays private."""
    text: str | None
    messages: Messages | None
    sample: int
    """0 .. samples - 1: several answers may be generated for one content."""
    answer: str | None = None
    """The answer to `text`, for origin text if the source has one."""
    tools: Tools | None = None
    """What the chat may call."""
    location: str = ""
    """Where its row stands, for messages."""
    arguments: Arguments | None = None
    """Its own arguments of the chat template, which stand above those of the command."""
    tokens: "Conversation | None" = None
    """A rollout as token ids, which has neither text nor messages."""

    @property
    def content_id(self) -> str:
        """The part of the id that all samples of a content have in common."""
        return self.id.rpartition("#")[0]

    @property
    def asked(self) -> str | Messages:
        return self.text if self.text is not None else self.messages or ""

    @property
    def given(self) -> dict[str, Any]:
        """What its chat template is given beside what is asked."""
        return {"tools": self.tools, "arguments": self.arguments}

    @property
    def images(self) -> list[str]:
        """The names of the images in its messages."""
        return names_in(self.messages or [])

    @property
    def texts_asked(self) -> list[str]:
        """The text, or the messages that the target did not write."""
        asked = [m for m in self.messages or [] if m["role"] != "assistant"]
        return [self.text or "", *map(message_text, asked)]


def make_prompt(
    source: str,
    content: "Content | Conversation",
    tools: Tools | None = None,
    arguments: Arguments | None = None,
    location: str = "",
) -> Prompt:
    """The first sample of a content; its id is the hash of content, tools and arguments, and the sample's number."""
    if isinstance(content, Conversation):
        name = f"{_digest([content.prompt_segments, content.replies], {})}#0"
        return Prompt(name, source, None, None, 0, location=location, tokens=content)
    others = {"tools": tools, "arguments": arguments}
    name = f"{_digest(content, {key: value for key, value in others.items() if value})}#0"
    text, answer, messages = None, None, None
    if isinstance(content, list):
        messages = content
    else:
        text, answer = (content, None) if isinstance(content, str) else content
    return Prompt(name, source, text, messages, 0, answer, tools, location, arguments)


def _digest(content: Any, others: dict[str, Any]) -> str:
    """The first 16 hex digits of the SHA-256 of a text, or of the JSON with sorted keys of anything else."""
    hashed = {"content": content, **others} if others else content
    text = hashed if isinstance(hashed, str) else json.dumps(hashed, sort_keys=True)
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()[:16]


def prompt_text(prompt: Prompt) -> str:
    """The prompt's text, replies and answer included, for comparing prompts.

    Instructions to the system are left out where anything else is said: one prompt of a service is like no other for
    having the same ones.
    """
    if prompt.messages is not None:
        said = [m for m in prompt.messages if m.get("role") not in INSTRUCTING]
        return "\n".join(map(message_text, said or prompt.messages))
    return "\n".join(text for text in (prompt.text, prompt.answer) if text)


@contextlib.contextmanager
def named(prompt: Prompt) -> Iterator[None]:
    """A UserError in the block names the prompt."""
    try:
        yield
    except UserError as error:
        raise UserError(f"prompt {prompt.id} of {prompt.source}: {error}") from error


def encode_prompt(template: ChatTemplate, prompt: Prompt) -> list[int]:
    """The token ids that the target continues."""
    with named(prompt):
        return template.encode(prompt.asked, **prompt.given)


def encode_prompts(template: ChatTemplate, prompts: Sequence[Prompt]) -> list[list[int]]:
    """`encode_prompt` of each, many times faster for thousands of them."""
    try:
        return template.encode_all([(p.asked, p.tools, p.arguments) for p in prompts])
    except UserError:
        return [encode_prompt(template, prompt) for prompt in prompts]  # names the prompt


@dataclass(frozen=True, slots=True)
class Conversation:
    """prompt_segments[0], replies[0], prompt_segments[1], replies[1], …

    Each segment holds the token ids between two replies. `replies` is empty before generation, otherwise there are as
    many replies as segments.
    """

    prompt_segments: Sequence[Sequence[int]]
    replies: Sequence[Sequence[int]]

    def packed(self) -> "Conversation":
        """The same conversation in a tenth of the memory: 4 bytes a token."""
        segments, replies = (
            tuple(array("i", ids) for ids in one) for one in (self.prompt_segments, self.replies)
        )
        return Conversation(segments, replies)


def join_turns(
    prompt_segments: Sequence[Sequence[int]], replies: Sequence[Sequence[int]]
) -> tuple[list[int], list[list[int]]]:
    """(all token ids up to the end of the last reply, [start, end) of each reply in them)."""
    ids: list[int] = []
    spans = []
    for segment, reply in zip(prompt_segments, replies, strict=False):
        ids += segment
        spans.append([len(ids), len(ids) + len(reply)])
        ids += reply
    return ids, spans


def cut_at_labels(ids: Sequence[int], labels: Sequence[bool]) -> Conversation:
    """The conversation whose replies are the labels, of which the first token is none."""
    runs: tuple[list[Sequence[int]], list[Sequence[int]]] = [], []
    at = 0
    for label, group in itertools.groupby(labels):
        end = at + sum(1 for _ in group)
        runs[label].append(ids[at:end])
        at = end
    segments, replies = runs
    return Conversation(segments[: len(replies)], replies)


def skip_repeated_turn_end(reply: Sequence[int], segment: Sequence[int]) -> Sequence[int]:
    """The prompt segment after `reply`, without its first token if that repeats the end-of-turn token of the reply."""
    return segment[1:] if list(segment[:1]) == list(reply[-1:]) else segment


def conversations_without_replies(
    template: ChatTemplate, prompts: Sequence[Prompt], turns: TurnSelection
) -> list[Conversation]:
    """The prompt segments of conversations whose replies the target will generate.

    With `turns` all the target's replies replace every reply of a chat. UserError for a template that would change the
    target's earlier replies when it renders later turns.
    """

    def has_one_turn(prompt: Prompt) -> bool:
        return turns == "last" or all(m["role"] != "assistant" for m in prompt.messages or [])

    together = iter(encode_prompts(template, list(filter(has_one_turn, prompts))))
    return [
        Conversation([next(together)] if has_one_turn(prompt) else _segments(template, prompt), [])
        for prompt in prompts
    ]


def _segments(template: ChatTemplate, prompt: Prompt) -> list[list[int]]:
    """What stands before each reply of a chat of several turns."""
    by_role = itertools.groupby(prompt.messages or [], lambda m: m["role"] == "assistant")
    first, *later = [list(messages) for replies, messages in by_role if not replies] or [[]]
    begin = encode_prompt(template, replace(prompt, messages=first))
    with named(prompt):
        texts = template.between_replies(first, later, **prompt.given)
    encoded = (template.tokenizer(text, add_special_tokens=False) for text in texts)
    return [begin, *(one["input_ids"] for one in encoded)]


def conversation_with_replies(
    template: ChatTemplate, prompt: Prompt, turns: TurnSelection, eos: frozenset[int]
) -> Conversation:
    """The conversation of a chat, or of a prompt with its answer, with the given replies: the last one, or all.

    A reply includes the end-of-turn token if that is one of `eos`. UserError for a template whose rendering of the
    first turns is not a prefix of its rendering of the whole chat.
    """
    messages, tokenizer = prompt.messages, template.tokenizer
    if messages is None:
        if tokenizer.chat_template is None and not prompt.tools:
            return _plain_text_conversation(tokenizer, prompt.text or "", prompt.answer or "")
        messages = [user(prompt.text), assistant(prompt.answer or "")]
    if tokenizer.chat_template is None:
        encode_prompt(template, prompt)  # raises the UserError about the missing template
    # A chat may begin with a greeting, which answers nobody: it is only read.
    replies = [i for i, m in enumerate(messages) if i > 0 and m["role"] == "assistant"]
    with named(prompt):
        text, places = template.locate_replies(
            messages, replies if turns == "all" else replies[-1:], **prompt.given
        )
    ids, offsets = _with_offsets(tokenizer, text, "finding replies in a chat")
    bos, previous_end = tokenizer.bos_token_id, 0
    while bos is not None and ids[previous_end : previous_end + 2] == [bos, bos]:
        previous_end += 1  # template and tokenizer both add one
    segments, spoken = [], []
    for begin, upto in places:
        start = next(n for n, (_, end) in enumerate(offsets) if end > begin)
        end = next((n for n, (at, _) in enumerate(offsets) if at >= upto), len(ids))
        reply_end = next((n + 1 for n in range(start, end) if ids[n] in eos), end)
        segments.append(ids[previous_end:start])
        spoken.append(ids[start:reply_end])
        previous_end = reply_end
    return Conversation(segments, spoken)


def encoder_pair(template: ChatTemplate, prompt: Prompt) -> Conversation:
    """A prompt and its answer for an encoder-decoder: two texts, each ended as the tokenizer ends them.

    UserError for a text without an answer.
    """
    if prompt.text is None or prompt.answer is None:
        raise UserError(
            f"prompt {prompt.id} of {prompt.source} has no answer, and an encoder-decoder learns pairs: name the "
            "columns of both (`column` and `response` of the source)"
        )
    answer = template.tokenizer(prompt.answer)["input_ids"]
    return Conversation([encode_prompt(template, prompt)], [answer])


def split_into_windows(
    tokenizer: Any, prompt: Prompt, size: int
) -> list[tuple[Prompt, Conversation]]:
    """A text cut into windows of up to `size` tokens, each with its own id and trained on as a whole.

    Each token is a label once. If the tokenizer starts texts with BOS, each window starts with BOS; otherwise it starts
    with the last token of the previous window, and then the first token of a text is never a label.
    """
    if size < 2:
        raise UserError(f"window {size}: need at least 2 tokens")
    text = prompt.text or ""
    ids, offsets = _with_offsets(tokenizer, text, "cutting texts into windows")
    bos = tokenizer.bos_token_id
    adds_bos = bos is not None and tokenizer("a")["input_ids"][:1] == [bos]
    first = 0 if adds_bos else 1
    windows = []
    for at in range(first, len(ids), size - 1):
        body = ids[at : at + size - 1]
        head = [bos] if adds_bos else [ids[at - 1]]
        start = offsets[at][0] if at > first else 0
        window = make_prompt(prompt.source, text[start : offsets[at + len(body) - 1][1]])
        windows.append((window, Conversation([head], [body])))
    return windows


def _with_offsets(
    tokenizer: Any, text: str, purpose: str
) -> tuple[list[int], list[tuple[int, int]]]:
    """(the ids of the text, the [start, end) of each in it)."""
    if not tokenizer.is_fast:
        raise UserError(f"{purpose} needs a fast tokenizer (tokenizer.json)")
    encoded = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True, verbose=False)
    return encoded["input_ids"], encoded["offset_mapping"]


def _plain_text_conversation(tokenizer: Any, text: str, answer: str) -> Conversation:
    """Prompt and answer tokenised as one text; the reply begins at the first token that differs from the prompt's."""
    ids, prompt = tokenizer(text + answer)["input_ids"], tokenizer(text)["input_ids"]
    same = [a == b for a, b in zip(ids, prompt, strict=False)]
    start = same.index(False) if False in same else min(len(prompt), len(ids) - 1)
    end = [] if tokenizer.eos_token_id is None else [tokenizer.eos_token_id]
    return Conversation([ids[:start]], [ids[start:] + end])
