"""From sources to what is asked: read, put into turns, cleaned; nothing is dropped without being counted."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from transformers import AutoConfig, GenerationConfig

from decode.common.errors import UserError, first_line
from decode.model import compatibility
from decode.model.loading import Target, check_model_path, load_tokenizer, tokenizer_fingerprint
from train.data import conversations, prompts
from train.data.conversations import Conversation
from train.data.filters import FilterConfig, drop_near_duplicates, drop_overlaps, has_wrong_length
from train.data.prompts import Prompt
from train.data.sources import PromptSource


class PromptConfig(Protocol):
    """The settings of train/sample.py that are read here."""

    origin: Any
    sources: list[PromptSource]
    decontaminate: str | list[str]
    filters: FilterConfig
    turns: conversations.TurnSelection
    window: int
    seed: int


@dataclass(frozen=True)
class TargetTokenizer:
    """What of a target reads text: it takes no weights."""

    name: str
    revision: str | None
    tokenizer: Any
    fingerprint: str
    context: int
    eos: frozenset[int]

    @classmethod
    def from_target(cls, target: Target) -> "TargetTokenizer":
        """That of a loaded target."""
        context = target.decoder.context
        return cls(
            target.name, target.revision, target.tokenizer, target.fingerprint, context, target.eos
        )


@dataclass(frozen=True)
class TokenizedPrompt:
    """A prompt and its turns."""

    prompt: Prompt
    conversation: Conversation

    def tokens(self) -> int:
        """What has to fit: the first prompt, or with replies everything."""
        if not self.conversation.replies:
            return len(self.conversation.prompt_segments[0])
        return len(
            conversations.join_turns(self.conversation.prompt_segments, self.conversation.replies)[
                0
            ]
        )


def load_target_tokenizer(name: str, revision: str | None) -> TargetTokenizer:
    """The tokenizer, context and end-of-text ids of a model folder or hub name, without its weights."""
    check_model_path(name, "target")
    tokenizer = load_tokenizer(name, revision)
    try:
        config = AutoConfig.from_pretrained(name, revision=revision)
    except Exception as error:  # any of a dozen kinds
        reason = first_line(error)
        raise UserError(f"target {name!r} cannot be loaded: {reason}") from error
    try:
        eos = GenerationConfig.from_pretrained(name, revision=revision or "main").eos_token_id
    except OSError:  # a model may do without one
        eos = config.eos_token_id
    listed = eos if isinstance(eos, list) else [eos]
    return TargetTokenizer(
        name=name,
        revision=vars(config).get("_commit_hash") or revision,
        tokenizer=tokenizer,
        fingerprint=tokenizer_fingerprint(tokenizer),
        context=compatibility.context_length(config.get_text_config(decoder=True)),
        eos=frozenset({*listed, tokenizer.eos_token_id} - {None}),
    )


def load_prompts(
    s: PromptConfig, reader: TargetTokenizer
) -> tuple[list[TokenizedPrompt], dict[str, int]]:
    """(what is asked, {why something was dropped: how often}). UserError if nothing is left."""
    found, repeats = prompts.read_prompts_with_duplicates(s.sources, s.seed, s.origin == "text")
    if len(found) == 0:
        raise UserError("the sources hold no prompts: add a source or raise a limit")
    everything = [asked for prompt in found for asked in build_conversations(s, prompt, reader)]
    asked: dict[str, TokenizedPrompt] = {}
    for one in everything:  # two texts may have pieces in common
        asked.setdefault(one.prompt.id, one)
    repeats += len(everything) - len(asked)
    clean, overlapping = drop_overlaps([a.prompt for a in asked.values()], evaluation_texts(s))
    right = [prompt for prompt in clean if has_wanted_length(s, asked[prompt.id])]
    kept, near = drop_near_duplicates(right, s.filters.near_duplicates)
    if len(kept) == 0:
        raise UserError(
            f"of {len(everything)} prompts none is left ({overlapping} overlap evaluation prompts, "
            f"{len(clean) - len(right)} are of the wrong length): add others or loosen `filters`"
        )
    return [asked[prompt.id] for prompt in kept], {
        "dropped_as_repeats": repeats,
        "dropped_as_evaluation": overlapping,
        "dropped_by_length": len(clean) - len(right),
        "dropped_as_near_duplicates": near,
    }


def build_conversations(
    s: PromptConfig, prompt: Prompt, reader: TargetTokenizer
) -> list[TokenizedPrompt]:
    """The prompt in turns; a text to be learned as it stands in windows."""
    if s.origin == "target":
        return [
            TokenizedPrompt(
                prompt,
                conversations.conversation_without_replies(reader.tokenizer, prompt, s.turns),
            )
        ]
    if is_question_with_answer(prompt):
        return [
            TokenizedPrompt(
                prompt,
                conversations.conversation_with_replies(
                    reader.tokenizer, prompt, s.turns, reader.eos
                ),
            )
        ]
    return [
        TokenizedPrompt(*piece)
        for piece in conversations.split_into_windows(reader.tokenizer, prompt, s.window)
    ]


def has_wanted_length(s: PromptConfig, asked: TokenizedPrompt) -> bool:
    """Whether its prompt has the wanted length; a window of a text has none."""
    whole = s.origin == "text" and not is_question_with_answer(asked.prompt)
    return whole or not has_wrong_length(len(asked.conversation.prompt_segments[0]), s.filters)


def is_question_with_answer(prompt: Prompt) -> bool:
    """Whether it is a question with its answer, not a text that is learned whole."""
    return prompt.messages is not None or prompt.answer is not None


def evaluation_texts(s: PromptConfig) -> list[str]:
    """The bundled evaluation prompts and those of the files that the user names."""
    named = [s.decontaminate] if isinstance(s.decontaminate, str) else s.decontaminate
    own = [text for name in named if name for text in prompts.read_prompt_texts(Path(name))]
    return [*prompts.evaluation_texts(), *own]
