"""What a MirrorDraft counts and times: how often a branch was used, and how much of the drafting was hidden."""

from dataclasses import dataclass


@dataclass
class OverlapCounts:
    """Sums over rounds; seconds are those of the whole batch, other counts are of rows."""

    rounds: int = 0
    """Rounds after which there were branches to choose from."""
    reused: int = 0
    """Rounds whose (accepted tokens, bonus token) had a branch."""
    positions: int = 0
    """Committed tokens of these rounds."""
    exit_hits: int = 0
    """Those that were among the exit's most probable ones, whether drafted or bonus tokens."""
    passes: int = 0
    """Passes of the target with branches beside them."""
    lower_seconds: float = 0.0
    """The target's time up to the exit layer."""
    upper_seconds: float = 0.0
    """The target's time from there to its logits, as the same cores were shared or not."""
    branch_seconds: float = 0.0
    """Drafting branches, the exit's logits included."""
    wait_seconds: float = 0.0
    """The target had its logits and the branches were not drafted yet."""
    redraft_seconds: float = 0.0
    """Drafting after verification, because a row had no branch."""
    redrafts: int = 0

    def rates(self) -> dict[str, float | None]:
        """{reuse_rate, exit_hit_rate, hidden_share}."""
        return {
            "reuse_rate": self.reuse_rate,
            "exit_hit_rate": self.exit_hit_rate,
            "hidden_share": self.hidden_share,
        }

    @property
    def reuse_rate(self) -> float | None:
        """ρ: rounds that used a branch ÷ rounds that had branches; None before the first."""
        return self.reused / self.rounds if self.rounds else None

    @property
    def exit_hit_rate(self) -> float | None:
        """Committed tokens among the exit's most probable ones ÷ all; None without exit."""
        return self.exit_hits / self.positions if self.positions else None

    @property
    def hidden_share(self) -> float | None:
        """Seconds of drafting beside the target ÷ all seconds of drafting; None where nothing was drafted."""
        total = self.branch_seconds + self.redraft_seconds
        if total == 0:
            return None
        return (self.branch_seconds - self.wait_seconds) / total
