"""The whole way from sources to tokenised prompts, one prompt after the other; every dropped prompt is counted.

1. sources.py          reads Prompts; limits apply, and equal ones are dropped
2. conversations.py    Prompt -> Conversation: token ids of each turn
3. filters.py          overlaps with evaluation, wrong lengths, near duplicates are dropped; of origin text what
                       answered rows have in common is learned once
"""

import itertools
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, Protocol

from decode.common.chat.choice import Arguments, TemplateSetting
from decode.common.chat.render import ChatTemplate
from decode.common.errors import UserError
from decode.common.target_record import ModelFingerprint
from decode.engine.image_prompts import ImageReader
from decode.model import compatibility
from decode.model.loading import (
    check_tokenizer_size,
    end_ids,
    load_config,
    load_tokenizer,
    tokenizer_fingerprint,
)
from decode.model.vision import image_token, is_vision_language
from decode.model.vocabularies import check_embedded
from eval.tasks.images import FoundImages
from train.data import conversations
from train.data.conversations import Conversation, Prompt, join_turns, named, prompt_text
from train.data.filters import (
    FILTERS,
    OVERLAPS,
    PREFIXES,
    REPEATED,
    WRONG_LENGTHS,
    PromptFilter,
    learn_once,
)
from train.data.sources import (
    ANSWER_ADVICE,
    NO_PROMPTS,
    REPEATS,
    UNANSWERED,
    ReadLog,
    evaluation_texts,
    stream_prompts,
)
from train.settings.data import FilterConfig, PromptSource

TOKENIZED_TOGETHER = 256
"""Prompts in one call of the tokenizer."""


class PromptConfig(Protocol):
    """The settings of train/sample.py that loading prompts depends on."""

    origin: Any
    sources: list[PromptSource]
    decontaminate: str | list[str]
    filters: FilterConfig
    turns: conversations.TurnSelection
    window: int
    seed: int


@dataclass(frozen=True)
class TargetTokenizer:
    """The tokenizer, context length and EOS ids of a target; loading them needs no weights."""

    name: str
    revision: str | None
    tokenizer: Any
    fingerprint: str
    context: int
    eos: frozenset[int]
    encoder_decoder: bool = False
    """Prompts are read by an encoder, which ends them as the tokenizer does (T5: with EOS)."""
    identity: ModelFingerprint | None = None
    """Of the model that answers; None where nobody does."""
    template: dict[str, Any] = field(default_factory=dict)
    """Which chat template the tokenizer renders with, and its arguments (`read_setting`)."""
    embedded: int | None = None
    """Tokens that the target embeds; None: not known."""
    image_token: int | None = None
    """The token that stands for a piece of an image; None: the target reads text only."""

    def check_embedded(self, conversation: Conversation) -> None:
        """UserError for a token that was added to the tokenizer and that the target does not embed."""
        if self.embedded is not None:
            for ids in (*conversation.prompt_segments, *conversation.replies):
                check_embedded(self.tokenizer, ids, self.embedded)

    @cached_property
    def chat(self) -> ChatTemplate:
        return ChatTemplate(self.tokenizer, self.template)

    @cached_property
    def images(self) -> ImageReader:
        """Of a target that reads images. UserError if its processor cannot be loaded."""
        assert self.image_token is not None
        return ImageReader.load(self.name, self.revision, self.image_token, self.template)

    def find_images(self) -> FoundImages | None:
        """Where the images of prompts will be; None for a target that reads text only."""
        return None if self.image_token is None else FoundImages(lambda: self.images)

    def with_template(self, setting: TemplateSetting | None) -> "TargetTokenizer":
        """The same with the chat template that `ChatTemplate.chosen` gives."""
        chat = ChatTemplate.chosen(self.tokenizer, setting)
        return replace(self, tokenizer=chat.tokenizer, template=chat.setting)


@dataclass(frozen=True, slots=True)
class TokenizedPrompt:
    """A prompt as token ids, which are all that is needed once it has passed the filters."""

    id: str
    source: str
    conversation: Conversation
    arguments: Arguments | None = None
    """Its own arguments of the chat template."""
    shared: int = 0
    """Tokens that it begins with as another one does, which has those of its labels that lie in them; 0 for none."""
    images: tuple[str, ...] = ()
    """The names of its images."""
    image_spans: list[list[int]] = field(default_factory=list)
    """The [start, end) of the placeholders of its images."""

    def tokens(self) -> int:
        """How many tokens must fit the context: those of the first prompt segment, or with replies all."""
        segments, replies = self.conversation.prompt_segments, self.conversation.replies
        return sum(map(len, [*segments, *replies])) if replies else len(segments[0])


def load_target_tokenizer(name: str, revision: str | None) -> TargetTokenizer:
    """The tokenizer, context length and EOS ids of a model folder or Hub name. UserError if it cannot be loaded."""
    config = load_config(name, "target", revision)
    tokenizer = load_tokenizer(name, revision)
    text = config.get_text_config(decoder=True)
    check_tokenizer_size(tokenizer, text.vocab_size, name)
    listed = end_ids(name, config, revision)
    return TargetTokenizer(
        name=name,
        revision=vars(config).get("_commit_hash") or revision,
        tokenizer=tokenizer,
        fingerprint=tokenizer_fingerprint(tokenizer),
        context=compatibility.context_length(text),
        eos=frozenset({*listed, tokenizer.eos_token_id} - {None}),
        encoder_decoder=config.is_encoder_decoder,
        embedded=text.vocab_size,
        image_token=image_token(config) if is_vision_language(config) else None,
    )


def load_prompts(
    s: PromptConfig, reader: TargetTokenizer, log: ReadLog
) -> tuple[list[TokenizedPrompt], dict[str, int]]:
    """(tokenised prompts, {reason: number of prompts dropped for it}). UserError if none is left.

    `log` is told how the sources were read. Prompts pass all steps one after the other, and only the token ids of those
    that are kept stay in memory.
    """
    dropped = log.dropped
    dropped.update(dict.fromkeys((REPEATS, *FILTERS), 0))
    if s.origin != "text":
        log.images = reader.find_images()
    read = stream_prompts(s.sources, s.seed, log, s.origin == "text")
    filters = PromptFilter(s.filters, evaluation_texts(s.decontaminate))
    marks = reader.chat.marks
    kept: list[TokenizedPrompt] = []
    windows: list[TokenizedPrompt] = []
    reason = ""
    for prompt, conversation in tokenize(s, read, reader, log):
        if prompt.sample == 0:  # the others have the same content, and are kept or dropped with it
            if mark := marks.found_in(*prompt.texts_asked):
                log.rendered.append(f"{prompt.location or prompt.id} ({mark!r})")
            is_window = s.origin == "text" and not has_replies(prompt)  # these may be of any length
            tokens = None if is_window else len(conversation.prompt_segments[0])
            text = prompt_text(prompt)
            if prompt.tokens is not None:
                ids, _ = join_turns(conversation.prompt_segments, conversation.replies)
                text = reader.tokenizer.decode(ids, skip_special_tokens=True)
            reason = filters.why_dropped(text, tokens)
            packed = conversation.packed()
        if reason:
            dropped[reason] += 1
        else:
            one = TokenizedPrompt(prompt.id, prompt.source, packed, prompt.arguments)
            if images := prompt.images:
                spans = reader.images.spans(packed.prompt_segments[0])
                one = replace(one, images=tuple(images), image_spans=spans)
            (windows if is_window else kept).append(one)
    log.check_share()
    if s.origin == "text" and not reader.encoder_decoder:
        kept = _learn_once(kept, reader.context, log)
    kept += windows
    total = len(kept) + sum(dropped[name] for name in FILTERS)
    if total == 0:
        rows = dropped[UNANSWERED]
        said = f"none of {rows} rows has an answer, such as {log.unanswered}: {ANSWER_ADVICE}"
        raise UserError(said if rows else NO_PROMPTS)
    if len(kept) == 0:
        raise UserError(
            f"of {total} prompts none is left ({dropped[OVERLAPS]} overlap evaluation prompts, "
            f"{dropped[WRONG_LENGTHS]} are of the wrong length): add others or loosen `filters`"
        )
    return kept, dict(dropped)


def _learn_once(
    prompts: list[TokenizedPrompt], context: int, log: ReadLog
) -> list[TokenizedPrompt]:
    """What `learn_once` leaves of those that fit the context; the others are as they were. `log` says what went."""
    fitting = [prompt for prompt in prompts if prompt.tokens() <= context]
    left, counts, unread = learn_once([prompt.conversation for prompt in fitting])
    log.dropped.update(counts)
    if counts:
        log.joined = (
            f"rows begin alike: {counts.get(PREFIXES, 0)} that others begin with are left out ({unread:,} tokens), and "
            f"{counts.get(REPEATED, 0):,} labels that several rows hold are learned in one of them"
        )
    return [
        *(
            replace(prompt, conversation=one[0].packed(), shared=one[1])
            for prompt, one in zip(fitting, left, strict=True)
            if one is not None
        ),
        *(prompt for prompt in prompts if prompt.tokens() > context),
    ]


def tokenize(
    s: PromptConfig, read: Iterator[Prompt], reader: TargetTokenizer, log: ReadLog
) -> Iterator[tuple[Prompt, Conversation]]:
    """Prompts with their conversations. `log` counts refused prompts, and windows that texts have in common."""
    together = 1 if s.origin == "text" else TOKENIZED_TOGETHER
    seen: set[str] = set()
    while some := list(itertools.islice(read, together)):
        for prompt, conversation in _convert(s, some, reader, log):
            if prompt.id in seen:
                log.dropped[REPEATS] += 1
                continue
            if s.origin == "text":
                seen.add(prompt.id)
            yield prompt, conversation


def _convert(
    s: PromptConfig, prompts: list[Prompt], reader: TargetTokenizer, log: ReadLog
) -> list[tuple[Prompt, Conversation]]:
    """The prompts as token ids, for origin text with their replies: a text without one becomes several windows. Of a
    refused prompt nothing becomes, and `log` counts its row once."""
    found: list[tuple[Prompt, Conversation]] = []
    first = prompts[0]
    try:
        if s.origin != "text":
            of_text = [prompt for prompt in prompts if not prompt.images]
            asked = iter(conversations.conversations_without_replies(reader.chat, of_text, s.turns))
            found = [(p, _encode_images(s, p, log) if p.images else next(asked)) for p in prompts]
        elif reader.encoder_decoder:
            found = [(first, conversations.encoder_pair(reader.chat, first))]
        elif first.tokens is not None:
            found = [(first, first.tokens)]
        elif has_replies(first):
            whole = conversations.conversation_with_replies(reader.chat, first, s.turns, reader.eos)
            found = [(first, whole)]
        else:
            found = conversations.split_into_windows(reader.tokenizer, first, s.window)
        for prompt, conversation in found:
            if not prompt.images:  # a placeholder of an image may be no token of the target
                reader.check_embedded(conversation)
    except UserError as error:
        if len(prompts) > 1:  # tokenised one by one, only the refused one is lost
            return [pair for one in prompts for pair in _convert(s, [one], reader, log)]
        if first.sample == 0:
            log.refuse(f"{first.location}: {error}" if first.location else str(error))
        return []
    return found


def _encode_images(s: PromptConfig, prompt: Prompt, log: ReadLog) -> Conversation:
    """The prompt segment of a chat with images. UserError for one of which several replies are asked."""
    assert log.images is not None
    messages = prompt.messages or []
    if s.turns == "all" and any(message["role"] == "assistant" for message in messages):
        raise UserError("a chat with images gets its last reply alone: set turns to last")
    with named(prompt):
        return Conversation([log.images.encode(messages, **prompt.given)], [])


def has_replies(prompt: Prompt) -> bool:
    """Whether a prompt read for origin text has replies to train on; otherwise its whole text is trained on."""
    return any(one is not None for one in (prompt.messages, prompt.answer, prompt.tokens))
