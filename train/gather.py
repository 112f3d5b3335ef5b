"""From sources to what is asked: read, put into turns, cleaned; nothing is dropped without being counted."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from transformers import AutoConfig, GenerationConfig

from decode import support
from decode.settings import UserError
from decode.target import Target, check_path, fingerprint, load_tokenizer
from train import dialogue, prompts
from train.dialogue import Script
from train.filters import Filters, drop_near_duplicates, drop_overlaps, wrong_length
from train.prompts import Prompt
from train.sources import Source


class Wishes(Protocol):
    """The settings of train/sample.py that are read here."""

    origin: Any
    sources: list[Source]
    decontaminate: str | list[str]
    filters: Filters
    turns: dialogue.Turns
    window: int
    seed: int


@dataclass(frozen=True)
class Reader:
    """What of a target reads text: it takes no weights."""

    name: str
    revision: str | None
    tokenizer: Any
    fingerprint: str
    context: int
    eos: frozenset[int]

    @classmethod
    def of(cls, target: Target) -> "Reader":
        """That of a loaded target."""
        context = target.decoder.context
        return cls(
            target.name, target.revision, target.tokenizer, target.fingerprint, context, target.eos
        )


@dataclass(frozen=True)
class Asked:
    """A prompt and its turns."""

    prompt: Prompt
    script: Script

    def tokens(self) -> int:
        """What has to fit: the first prompt, or with replies everything."""
        if not self.script.replies:
            return len(self.script.given[0])
        return len(dialogue.joined(self.script.given, self.script.replies)[0])


def reader_of(name: str, revision: str | None) -> Reader:
    """The tokenizer, context and end-of-text ids of a model folder or hub name, without its weights."""
    check_path(name, "target")
    tokenizer = load_tokenizer(name, revision)
    try:
        config = AutoConfig.from_pretrained(name, revision=revision)
    except Exception as error:  # any of a dozen kinds
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise UserError(f"target {name!r} cannot be loaded: {reason}") from error
    try:
        eos = GenerationConfig.from_pretrained(name, revision=revision or "main").eos_token_id
    except OSError:  # a model may do without one
        eos = config.eos_token_id
    listed = eos if isinstance(eos, list) else [eos]
    return Reader(
        name=name,
        revision=vars(config).get("_commit_hash") or revision,
        tokenizer=tokenizer,
        fingerprint=fingerprint(tokenizer),
        context=support.context(config.get_text_config(decoder=True)),
        eos=frozenset({*listed, tokenizer.eos_token_id} - {None}),
    )


def gathered(s: Wishes, reader: Reader) -> tuple[list[Asked], dict[str, int]]:
    """(what is asked, {why something was dropped: how often}). UserError if nothing is left."""
    found, repeats = prompts.load(s.sources, s.seed, s.origin == "text")
    if len(found) == 0:
        raise UserError("the sources hold no prompts: add a source or raise a limit")
    everything = [asked for prompt in found for asked in scripts(s, prompt, reader)]
    asked: dict[str, Asked] = {}
    for one in everything:  # two texts may have pieces in common
        asked.setdefault(one.prompt.id, one)
    repeats += len(everything) - len(asked)
    clean, overlapping = drop_overlaps([a.prompt for a in asked.values()], evaluation_texts(s))
    right = [prompt for prompt in clean if fits(s, asked[prompt.id])]
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


def scripts(s: Wishes, prompt: Prompt, reader: Reader) -> list[Asked]:
    """The prompt in turns; a text to be learned as it stands in windows."""
    if s.origin == "target":
        return [Asked(prompt, dialogue.questions(reader.tokenizer, prompt, s.turns))]
    if asks(prompt):
        return [Asked(prompt, dialogue.answers(reader.tokenizer, prompt, s.turns, reader.eos))]
    return [Asked(*piece) for piece in dialogue.windows(reader.tokenizer, prompt, s.window)]


def fits(s: Wishes, asked: Asked) -> bool:
    """Whether its prompt has the wanted length; a window of a text has none."""
    whole = s.origin == "text" and not asks(asked.prompt)
    return whole or not wrong_length(len(asked.script.given[0]), s.filters)


def asks(prompt: Prompt) -> bool:
    """Whether it is a question with its answer, not a text that is learned whole."""
    return prompt.messages is not None or prompt.answer is not None


def evaluation_texts(s: Wishes) -> list[str]:
    """The bundled evaluation prompts and those of the files that the user names."""
    named = [s.decontaminate] if isinstance(s.decontaminate, str) else s.decontaminate
    own = [text for name in named if name for text in prompts.prompt_texts(Path(name))]
    return [*prompts.evaluation_texts(), *own]
