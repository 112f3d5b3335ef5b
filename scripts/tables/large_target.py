"""What the same acceptance would gain with a large target, where reading weights is all that decoding costs.

A pass of the target reads all its weights and verifies the drafted tokens at no further cost; a drafted token reads the
draft's. Communication, attention and sampling are left out, so these are bounds. The acceptance is that of the small
target of the report, which a large target's draft need not have.
"""

from dataclasses import dataclass
from typing import Any

from decode.common.ranges import Share


@dataclass(frozen=True)
class LargeTarget:
    """A target's numbers of weights; the default is Llama-3.1-70B's (its config.json)."""

    name: str = "Llama-3.1-70B"
    layers: int = 80
    hidden: int = 8192
    intermediate: int = 28672
    kv_width: int = 1024
    vocab: int = 128256

    @property
    def layer_weights(self) -> int:
        """Projections of attention and MLP of one layer."""
        attention = 2 * self.hidden * (self.hidden + self.kv_width)
        return attention + 3 * self.hidden * self.intermediate

    @property
    def weights(self) -> int:
        """What a step reads: all layers and the LM head."""
        return self.layers * self.layer_weights + self.vocab * self.hidden


@dataclass
class DraftReads:
    """The weights that one drafted token reads, as shares of the target's."""

    layers: Share = 0.0
    """Share of the target's layers, or layers' worth of a draft of the same width."""
    head: Share = 0.0
    """Share of the rows of the LM head."""

    def cost(self, target: LargeTarget) -> float:
        """A drafted token's reading over that of a step of the target."""
        read = self.layers * target.layers * target.layer_weights
        return (read + self.head * target.vocab * target.hidden) / target.weights


def speedup(m: dict[str, Any], reads: DraftReads, target: LargeTarget) -> float:
    """Tokens a round over its cost in target steps, with the drafted tokens and τ of the report's entry `m`."""
    counts = m["counts"]
    drafted = counts["drafted"] / counts["rounds"]
    return float(m["tau"] / (1 + drafted * reads.cost(target)))
