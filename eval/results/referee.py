"""The greedy result of scripts/referee.py as types: only what is published of it, not the compared token ids."""

from dataclasses import dataclass, field

from decode.common.provenance import Hardware
from decode.common.published import Digest, Name, Place, Private, PromptId, Version, Word


@dataclass(frozen=True)
class Disagreement:
    """A prompt that both sides decoded differently."""

    task: Name
    id: PromptId
    gap: float | None
    """Of the target's two best logits at the first difference; None if the outputs are the same."""


@dataclass(frozen=True)
class SideCounts:
    """What one side drafted and accepted, over all prompts."""

    rounds: int | None
    drafted: int
    accepted: int
    by_position: list[int]


@dataclass(frozen=True)
class RefereeTotals:
    ours: SideCounts
    vllm: SideCounts


@dataclass(frozen=True, kw_only=True)
class RefereeResult:
    """Whether vLLM decodes prompts as this decoder does, with the same draft."""

    draft: Place
    draft_sha256: Digest
    family: Word
    k: int
    vllm: Version
    prompts: int
    same: int
    ties: list[Disagreement]
    differ: list[Disagreement]
    totals: RefereeTotals
    argv: Private[list[str]] = field(default_factory=list)
    git: Digest | None = None
    versions: dict[Word, Version] = field(default_factory=dict)
    hardware: Hardware = Hardware()
