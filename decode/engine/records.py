"""What decoding one prompt gave: a record of each round, and the record of the whole request that they add up to."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class RoundRecord:
    """What one round did to one prompt. `drafted` and `accepted` are counted before trimming at EOS and the limit."""

    prompt: int  # its index in the list of prompts
    prefill: bool  # the first token, which prefill gives before any round
    drafted: int  # tokens of a chain, or nodes of a tree
    accepted: int
    proposed: list[int]  # the drafted ids
    tokens: list[int]  # the ids that were emitted: accepted ones and the bonus token, trimmed
    finished: str | None  # "eos" | "length" | "grammar" | None
    seconds: float  # of the whole batch's round
    forced: tuple[int, int] = (0, 0)  # of drafted and accepted: a grammar allowed no others


@dataclass
class DecodeRecord:
    """One prompt decoded once: what the engine emits, what the journal keeps and what every metric is computed from.

    The engine fills the first six fields and `forced`. Evaluation adds which prompt it was (`task`, `id`, `domain`) and
    how long the request took. asdict() is the JSON form, read_record reads it back. Raises ValueError for a
    round that accepted more tokens than it drafted.
    """

    prompt_ids: list[int]
    output_ids: list[int] = field(default_factory=list)
    """Trimmed at EOS (which is kept), stop string and token limit."""
    rounds: list[tuple[int, int]] = field(default_factory=list)
    """(drafted, accepted) of each round after prefill, counted before trimming; (0, 0) in plain decoding. Tokens that a
    grammar forced are in `forced` instead, since they cannot be rejected: α leaves them out, τ counts them."""
    finish_reason: str = ""
    """eos, length, stop, or grammar (it allows no token of the vocabulary here); empty while the request runs."""
    first_token_seconds: float = 0.0
    """Prefill of the whole batch."""
    round_seconds: list[float] = field(default_factory=list)
    """Seconds of each round, of the whole batch."""
    task: str = ""
    id: str = ""
    """Unique within its task."""
    domain: str = ""
    seconds: float = 0.0
    """Wall clock of the whole request, prefill included; in a batch of `rows` prompts, this prompt's even share."""
    rows: int = 1
    """Prompts that were decoded together."""
    forced: list[int] = field(default_factory=list)
    """Accepted forced tokens of each round; empty if there were none in any."""
    untimed: str = ""
    """Why its seconds count for nothing, such as a busy machine; "" if they do. Evaluation says so."""

    def __post_init__(self) -> None:
        self.rounds = [(drafted, accepted) for drafted, accepted in self.rounds]  # JSON has lists
        for drafted, accepted in self.rounds:
            if not 0 <= accepted <= drafted:
                raise ValueError(f"prompt {self.id!r}: {accepted} of {drafted} drafts accepted")

    @property
    def prompt_tokens(self) -> int:
        return len(self.prompt_ids)

    @property
    def output_tokens(self) -> int:
        return len(self.output_ids)

    @property
    def committed(self) -> list[int]:
        """Tokens that each round committed before trimming: accepted and forced ones and the bonus token."""
        forced = self.forced or [0] * len(self.rounds)
        return [a + f + 1 for (_, a), f in zip(self.rounds, forced, strict=True)]


def read_record(values: Mapping[str, Any]) -> DecodeRecord:
    """The record of its JSON form, also of earlier versions."""
    return DecodeRecord(**{name: x for name, x in values.items() if name != "measured_seconds"})


def add_record(output: DecodeRecord, record: RoundRecord) -> None:
    """Appends a round of this prompt to its record."""
    output.output_ids += record.tokens
    output.finish_reason = record.finished or ""
    if record.prefill:
        output.first_token_seconds = record.seconds
    else:
        drafted, accepted = record.forced
        output.rounds.append((record.drafted - drafted, record.accepted - accepted))
        output.round_seconds.append(record.seconds)
        if accepted > 0 or output.forced:
            output.forced += [0] * (len(output.rounds) - 1 - len(output.forced)) + [accepted]


def collect_outputs(
    prompts: Iterable[list[int]], rounds: Iterable[RoundRecord]
) -> list[DecodeRecord]:
    """One record for each prompt, in order, once all rounds have run."""
    outputs = [DecodeRecord(prompt) for prompt in prompts]
    for record in rounds:
        add_record(outputs[record.prompt], record)
    return outputs
