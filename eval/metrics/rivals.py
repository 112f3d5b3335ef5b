"""How much faster a method is than another engine: than the engine's best arm, on the same prompts."""

from collections.abc import Mapping

from decode.common.typed_json import Estimate
from eval.metrics.bootstrap import Ratio, paired_ratio

Arm = Mapping[tuple[str, str], tuple[float, int]]
"""{(task, id): (seconds, tokens)} of the requests that count."""


def over_best_arm(own: Arm, arms: Mapping[str, Arm], seed: int) -> tuple[str, int, Estimate]:
    """(the engine's fastest arm, prompts, its seconds per token ÷ ours), on the prompts that all have. Which arm is
    best is seen on the same prompts: in the other engine's favour. ("", 0, no value) without such prompts."""
    shared = [key for key in own if all(key in arm for arm in arms.values())]
    if not shared or not arms:
        return "", 0, Estimate()

    def rate(arm: Arm) -> Ratio:
        return Ratio(*zip(*(arm[key] for key in shared), strict=True))

    best = min(arms, key=lambda name: rate(arms[name]).value or float("inf"))
    return best, len(shared), paired_ratio(rate(arms[best]), rate(own), seed)
