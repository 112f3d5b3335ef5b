"""The whole way from sources to tokenised prompts; every dropped prompt is counted.

1. sources.py          reads raw contents
2. prompts.py          contents -> Prompts: limits, exact duplicates dropped
3. conversations.py    Prompt -> Conversation: token ids of each turn
4. filters.py          overlaps with evaluation, wrong lengths, near duplicates dropped
"""

import hashlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from decode.common.errors import UserError
from decode.model import compatibility
from decode.model.loading import (
    Target,
    check_tokenizer_size,
    end_ids,
    load_config,
    load_tokenizer,
    tokenizer_fingerprint,
)
from train.data import conversations, prompts
from train.data.conversations import Conversation
from train.data.filters import FilterConfig, drop_near_duplicates, drop_overlaps, has_wrong_length
from train.data.prompts import Prompt
from train.data.sources import PromptSource


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

    @property
    def chat_template_hash(self) -> str | None:
        """What manifests record of the chat template; None without one."""
        template = self.tokenizer.chat_template
        return template and hashlib.sha256(template.encode()).hexdigest()[:16]

    @classmethod
    def from_target(cls, target: Target) -> "TargetTokenizer":
        """The tokenizer of a loaded target."""
        context = target.decoder.context
        return cls(
            target.name, target.revision, target.tokenizer, target.fingerprint, context, target.eos
        )


@dataclass(frozen=True)
class TokenizedPrompt:
    """A prompt and its conversation in token ids."""

    prompt: Prompt
    conversation: Conversation

    def tokens(self) -> int:
        """How many tokens must fit the context: those of the first prompt segment, or with replies all."""
        if not self.conversation.replies:
            return len(self.conversation.prompt_segments[0])
        ids, _ = conversations.join_turns(
            self.conversation.prompt_segments, self.conversation.replies
        )
        return len(ids)


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
    )


def load_prompts(
    s: PromptConfig, reader: TargetTokenizer
) -> tuple[list[TokenizedPrompt], dict[str, int]]:
    """(tokenised prompts, {reason: number of prompts dropped for it}). UserError if none is left."""
    read, duplicates = prompts.read_prompts_with_duplicates(s.sources, s.seed, s.origin == "text")
    if len(read) == 0:
        raise UserError("the sources hold no prompts: add a source or raise a limit")
    tokenized = [item for prompt in read for item in tokenize_prompt(s, prompt, reader)]
    by_id: dict[str, TokenizedPrompt] = {}
    for item in tokenized:  # two texts may share windows
        by_id.setdefault(item.prompt.id, item)
    duplicates += len(tokenized) - len(by_id)
    clean, overlapping = drop_overlaps(
        [x.prompt for x in by_id.values()], evaluation_texts(s.decontaminate)
    )
    fitting = [prompt for prompt in clean if has_allowed_length(s, by_id[prompt.id])]
    kept, near = drop_near_duplicates(fitting, s.filters.near_duplicates)
    if len(kept) == 0:
        raise UserError(
            f"of {len(tokenized)} prompts none is left ({overlapping} overlap evaluation prompts, "
            f"{len(clean) - len(fitting)} are of the wrong length): add others or loosen `filters`"
        )
    return [by_id[prompt.id] for prompt in kept], {
        "dropped_as_repeats": duplicates,
        "dropped_as_evaluation": overlapping,
        "dropped_by_length": len(clean) - len(fitting),
        "dropped_as_near_duplicates": near,
    }


def tokenize_prompt(
    s: PromptConfig, prompt: Prompt, reader: TargetTokenizer
) -> list[TokenizedPrompt]:
    """The prompt as one conversation; for origin text a text without an answer becomes several windows."""
    if s.origin == "text" and not has_replies(prompt):
        windows = conversations.split_into_windows(reader.tokenizer, prompt, s.window)
        return [TokenizedPrompt(window, conversation) for window, conversation in windows]
    if s.origin == "text":
        conversation = conversations.conversation_with_replies(
            reader.tokenizer, prompt, s.turns, reader.eos
        )
    else:
        conversation = conversations.conversation_without_replies(reader.tokenizer, prompt, s.turns)
    return [TokenizedPrompt(prompt, conversation)]


def has_allowed_length(s: PromptConfig, tokenized: TokenizedPrompt) -> bool:
    """Whether the prompt's length is within the filters' limits; windows of a text are not limited."""
    is_window = s.origin == "text" and not has_replies(tokenized.prompt)
    return is_window or not has_wrong_length(
        len(tokenized.conversation.prompt_segments[0]), s.filters
    )


def has_replies(prompt: Prompt) -> bool:
    """Whether a prompt read for origin text has replies to train on; otherwise its whole text is trained on."""
    return prompt.messages is not None or prompt.answer is not None


def evaluation_texts(decontaminate: str | list[str]) -> list[str]:
    """The bundled evaluation prompts and those of the files in `decontaminate`; an empty name is no file."""
    paths = [decontaminate] if isinstance(decontaminate, str) else decontaminate
    texts = [text for path in paths if path for text in prompts.read_prompt_texts(Path(path))]
    return [*prompts.evaluation_texts(), *texts]
