"""How a published draft is served: with how many drafted tokens, and a file for each engine that loads its family.

Flags and keys are those of the versions that decode/serving/ names; engines draft chains. Nothing here runs an engine.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from decode.common.errors import UserError
from decode.common.published import WITHHELD
from decode.common.template_choice import NAME
from decode.serving.engine import EngineServingConfig, ServedDraft
from decode.serving.hf_engine import TGI, TRANSFORMERS
from decode.serving.llamacpp_engine import LLAMACPP
from decode.serving.sglang_engine import SGLANG
from decode.serving.trtllm_engine import TRTLLM
from decode.serving.vllm_engine import TRITON, VLLM
from eval.reporting.formatting import format_with_interval
from eval.results.report import setting_title

ReportEntry = Mapping[str, Any]
ENGINES_OF_CARD = (VLLM, TRITON, SGLANG, TRTLLM, LLAMACPP, TGI, TRANSFORMERS)


def build_serving_configs(draft: ServedDraft) -> list[EngineServingConfig]:
    """One for each engine, in the order of the card."""
    return [engine.serving_config(draft) for engine in ENGINES_OF_CARD]


def served_arguments(draft: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments of the chat template for a server of this draft, by its published draftsmith.json: those of most
    training prompts; {} if they are not published, or need one of several templates by name."""
    usual = (draft.get("templates") or [{}])[0]
    return {} if NAME in usual or WITHHELD in usual.values() else dict(usual)


def choose_k(
    entries: Sequence[ReportEntry],
    facts: Mapping[str, Any],
    config: Mapping[str, Any],
    tuned: Sequence[ReportEntry] = (),
) -> tuple[int, str]:
    """(K to serve with, where it comes from): the tuned K, else that of the fastest measured chain, else that of the
    acceptance check in training. UserError if there is none of them.

    Compared are the draft's `entries` of task "all" in one setting, the lowest temperature and the smallest batch.
    `tuned` is the result of eval.tuning.selection.fastest_chains, in which this setting is the first.
    """
    if len(tuned) > 0:
        best = tuned[0]
        speedup = format_with_interval(best["speedup"], best["ci"], 2, "×")
        where = setting_title(best["temperature"], best["batch_size"])
        measured = f"{speedup} in rounds, {where}, n = {best['prompts']}"
        return best["k"], f"the fastest of {best['tried']} that eval/tune.py tried ({measured})"
    chains = [
        m
        for m in entries
        if m["task"] == "all" and m["tree"] is None and not m["lossy"] and m["speedup"] is not None
    ]
    if len(chains) > 0:
        setting = min((m["temperature"], m["batch_size"]) for m in chains)
        rivals = [m for m in chains if (m["temperature"], m["batch_size"]) == setting]
        best = max(rivals, key=lambda m: m["speedup"])
        tried = sorted({m["k"] for m in rivals})
        where = f"at temperature {setting[0]:g}, batch {setting[1]}"
        others = "the only one measured" if len(tried) == 1 else f"the fastest of {tried} measured"
        return best["k"], f"{others}, {where}"
    k = facts.get("training", {}).get("check", {}).get("k")
    if k is None:
        raise UserError(
            "neither report nor draftsmith.json says how many tokens to draft: give --report"
        )
    most = config.get("num_heads") or k  # Medusa drafts no more than it has heads
    return min(k, most), "no speed-up of a chain was measured; this is the recipe's"
