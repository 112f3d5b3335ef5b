"""From settings to drafts, and what a report says of them."""

from collections.abc import Sequence
from typing import Any

from decode.drafts.base import Draft, draft_sha256, load_draft
from decode.drafts.layerskip import EarlyExitDraft
from decode.drafts.lookup import NgramDraft
from decode.drafts.suffix import SuffixDraft
from decode.settings import UserError
from decode.target import Target
from decode.tree import DynamicTree, Shape, StaticTree, from_paths
from eval.options import MethodSettings, Settings, TreeSettings
from eval.shapes import described
from eval.simulated import SimulatedDraft
from eval.speed import Method
from eval.tasks import Item


def build_methods(s: Settings, target: Target) -> list[Method]:
    """All but plain decoding, in their order. UserError for a draft that is missing or not the target's."""
    return [
        Method(m.name, build_draft(m, target, s.dtype), depth_of(m, s.k), m.rule, s.mode)
        for m in s.methods
    ]


def shape_of(tree: TreeSettings) -> Shape:
    """How the settings lay out a proposal; None: a chain. UserError for paths that make no tree."""
    if tree.paths:
        return from_paths(tree.paths)
    return DynamicTree(tree.width, tree.nodes) if tree.nodes > 0 else None


def depth_of(m: MethodSettings, k: int) -> int:
    """Positions that a round can accept: a fixed tree has its own depth."""
    shape = shape_of(m.tree)
    return shape.depth if isinstance(shape, StaticTree) else m.k or k


def build_draft(m: MethodSettings, target: Target, dtype: str) -> Draft:
    """The draft that the settings name."""
    shape = shape_of(m.tree)
    if m.alpha:
        cost = load_draft(m.draft, target, m.device or None, dtype) if m.draft else None
        return SimulatedDraft(m.alpha, target.decoder.vocab_size, cost)
    if m.draft:
        return load_draft(m.draft, target, m.device or None, dtype, shape)
    if m.name == "ngram":
        return NgramDraft()
    if m.name == "suffix":
        return SuffixDraft()
    if m.name == "early-exit":
        draft = EarlyExitDraft(target, m.layers, shape)
        target.decoder.first_layers(m.layers)  # refuses
        return draft
    if m.name == "simulated":
        raise UserError("method 'simulated' needs `alpha`, the acceptance to simulate: [0.8, 0.7]")
    raise UserError(f"method {m.name!r} needs `draft`, the folder of a saved draft")


def teach(methods: Sequence[Method], target: Target, items: Sequence[Item], tokens: int) -> None:
    """Simulated drafts learn what the target answers; others need nothing."""
    for method in methods:
        if isinstance(method.draft, SimulatedDraft):
            prompts = [item.prompt_ids for item in items]
            method.draft.learn(target, prompts, tokens + method.k + 1, rows=16)


def checksums(methods: Sequence[MethodSettings]) -> dict[str, str | None]:
    """{method: checksum of its weights} of those with a draft on disk; None for one from the hub."""
    return {m.name: draft_sha256(m.draft) for m in methods if m.draft}


def simulated(method: Method) -> list[float] | None:
    """The acceptance that a method simulates; None: it is real."""
    return method.draft.alpha if isinstance(method.draft, SimulatedDraft) else None


def verification(method: Method, temperature: float) -> str:
    """The rule that a report names."""
    if method.draft is None:
        return "none"
    if simulated(method) is not None:
        return "simulated"
    if method.rule != "exact":
        return method.rule
    shape = "tree" if tree_of(method.draft) else "chain"
    return "greedy" if temperature == 0 and shape == "chain" else shape


def tree_of(draft: Draft | None) -> dict[str, Any] | None:
    """Its tree as the report has it; None for a chain."""
    return None if draft is None else described(draft.shape)
