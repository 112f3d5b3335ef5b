"""One prompt decoded once, as numbers: what every metric is computed from."""

from dataclasses import dataclass

MS_PER_SECOND = 1000.0


@dataclass(frozen=True)
class DecodeRecord:
    """One prompt decoded by one method once.

    `output_tokens` is len(output_ids), trimmed at EOS, stop string and token limit. `rounds` holds (drafted,
    accepted) for each round after prefill, recorded before trimming: (0, 0) in plain decoding. `seconds` is the wall
    clock of the whole request, prefill included; of a batch of `rows` prompts it is the prompt's even share, while
    `first_token_seconds` and `round_seconds` are those of the whole batch.
    """

    task: str
    id: str
    prompt_tokens: int
    output_tokens: int
    rounds: list[tuple[int, int]]
    seconds: float
    first_token_seconds: float
    round_seconds: list[float]
    rows: int = 1

    def __post_init__(self) -> None:
        for drafted, accepted in self.rounds:
            if not 0 <= accepted <= drafted:
                raise ValueError(f"prompt {self.id!r}: {accepted} of {drafted} drafts accepted")


def ratio_or_none(numerator: float, denominator: float) -> float | None:
    """None where there is nothing to divide by: a report holds no NaN."""
    return None if denominator == 0 else float(numerator) / float(denominator)


ALL_TASKS = "all"
