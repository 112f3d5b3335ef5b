"""How a published draft is served: with how many drafted tokens, and a file for each engine that loads its family.

Flags and keys are those of the versions that decode/serving/ names; engines draft chains. Nothing here runs an engine.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from decode.checkpoints.draft_folder import DraftMetadata
from decode.common.chat.choice import NAME
from decode.common.errors import UserError
from decode.common.published import WITHHELD
from decode.serving.checker import ENGINES_OF_CARD
from decode.serving.engine import EngineServingConfig, ServedDraft
from eval.reporting.formatting import format_estimate
from eval.results.report import MethodResult, by_setting, setting_title
from eval.results.tuned import TunedChain


def build_serving_configs(draft: ServedDraft) -> list[EngineServingConfig]:
    """One for each engine, in the order of the card."""
    return [engine.serving_config(draft) for engine in ENGINES_OF_CARD]


def served_arguments(draft: DraftMetadata) -> dict[str, Any]:
    """The arguments of the chat template for a server of this draft, by its published draftsmith.json: those of most
    training prompts; {} if they are not published, or need one of several templates by name."""
    usual = (draft.templates or [{}])[0]
    return {} if NAME in usual or WITHHELD in usual.values() else dict(usual)


def choose_k(
    own: Sequence[MethodResult],
    tuned: Sequence[TunedChain],
    draft: DraftMetadata,
    config: Mapping[str, Any],
) -> tuple[int, str]:
    """(K to serve with, where it comes from): the tuned K, else that of the fastest measured chain, else that of the
    acceptance check in training. UserError if there is none of them.

    Compared are the draft's `own` entries of all tasks in one setting, the lowest temperature and the smallest batch.
    """
    if len(tuned) > 0:
        cell, tried = tuned[0].cell, tuned[0].tried
        where = setting_title(cell.temperature, cell.batch_size)
        speedup = format_estimate(cell.speedup, 2, "×")
        measured = f"{speedup} in rounds, {where}, n = {cell.prompts}"
        return cell.k, f"the fastest of {tried} that eval/tune.py tried ({measured})"
    chains = [m for m in own if m.is_pooled and m.tree is None and not m.lossy]
    chains = [m for m in chains if m.valid_speedup.value is not None]
    if len(chains) > 0:
        setting, rivals = next(iter(by_setting(chains).items()))
        best = max(rivals, key=lambda m: m.valid_speedup.value or 0)
        ks = sorted({m.k for m in rivals})
        others = "the only one measured" if len(ks) == 1 else f"the fastest of {ks} measured"
        return best.k, f"{others}, at {setting_title(*setting)}"
    k = (draft.training or {}).get("check", {}).get("k")
    if k is None:
        raise UserError(
            "neither report nor draftsmith.json says how many tokens to draft: give --report"
        )
    most = config.get("num_heads") or k  # Medusa drafts no more than it has heads
    return min(k, most), "no speed-up of a chain was measured; this is the recipe's"
