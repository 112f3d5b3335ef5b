"""From settings to drafts, and what a report says of them."""

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from decode.common.errors import UserError
from decode.drafts.base import Draft, draft_sha256
from decode.drafts.cross_device import CrossDeviceDraft
from decode.drafts.registry import DRAFT_FAMILIES, create_draft, find_family, load_draft
from decode.model.loading import Target
from decode.verification.tree import DynamicTree, StaticTree, TreeShape, tree_from_paths
from eval.benchmark.config import EvalConfig, MethodConfig, TreeConfig
from eval.benchmark.simulated_draft import SimulatedDraft
from eval.benchmark.timing import Method
from eval.tasks.loading import TaskPrompt


def build_methods(s: EvalConfig, target: Target) -> list[Method]:
    """All but plain decoding, in their order. UserError for a draft that is missing or not the target's."""
    return [
        Method(m.name, build_draft(m, target, s.dtype), draft_depth(m, s.k), m.rule, s.mode)
        for m in s.methods
    ]


def tree_shape(tree: TreeConfig) -> TreeShape:
    """How the settings lay out a proposal; None: a chain. UserError for paths that make no tree."""
    if tree.paths:
        return tree_from_paths(tree.paths)
    return DynamicTree(tree.width, tree.nodes) if tree.nodes > 0 else None


def draft_depth(m: MethodConfig, k: int) -> int:
    """Positions that a round can accept: a fixed tree has its own depth."""
    shape = tree_shape(m.tree)
    return shape.depth if isinstance(shape, StaticTree) else m.k or k


def build_draft(m: MethodConfig, target: Target, dtype: str) -> Draft:
    """The draft that the settings name."""
    shape = tree_shape(m.tree)
    if m.alpha:
        cost = load_draft(m.draft, target, m.device or None, dtype) if m.draft else None
        return SimulatedDraft(m.alpha, target.decoder.vocab_size, cost)
    if m.draft:
        return load_draft(m.draft, target, m.device or None, dtype, shape)
    draft = create_draft(m.name, target, m.layers, shape)
    if draft is not None:
        return draft
    if m.name == "simulated":
        raise UserError("method 'simulated' needs `alpha`, the acceptance to simulate: [0.8, 0.7]")
    raise UserError(f"method {m.name!r} needs `draft`, the folder of a saved draft")


def follows_tree_shape(m: MethodConfig, draft: Draft) -> bool:
    """Whether the method's draft, built for `m`, can propose trees of a given shape."""
    if isinstance(draft, CrossDeviceDraft):  # the shape would not reach the draft inside
        return False
    family = find_family(m.draft) if m.draft else DRAFT_FAMILIES[m.name]
    return family.supports_trees


def fit_simulated_drafts(
    methods: Sequence[Method], target: Target, items: Sequence[TaskPrompt], tokens: int
) -> None:
    """Simulated drafts learn what the target answers; others need nothing."""
    for method in methods:
        if isinstance(method.draft, SimulatedDraft):
            prompts = [item.prompt_ids for item in items]
            method.draft.learn(target, prompts, tokens + method.k + 1, rows=16)


def draft_checksums(methods: Sequence[MethodConfig]) -> dict[str, str | None]:
    """{method: checksum of its weights} of those with a draft on disk; None for one from the hub."""
    return {m.name: draft_sha256(m.draft) for m in methods if m.draft}


def simulated_alpha(method: Method) -> list[float] | None:
    """The acceptance that a method simulates; None: it is real."""
    return method.draft.alpha if isinstance(method.draft, SimulatedDraft) else None


def verification_name(method: Method, temperature: float) -> str:
    """The rule that a report names."""
    if method.draft is None:
        return "none"
    if simulated_alpha(method) is not None:
        return "simulated"
    if method.rule != "exact":
        return method.rule
    shape = "tree" if draft_tree_description(method.draft) else "chain"
    return "greedy" if temperature == 0 and shape == "chain" else shape


def draft_tree_description(draft: Draft | None) -> dict[str, Any] | None:
    """Its tree as the report has it; None for a chain."""
    return None if draft is None else describe_tree(draft.shape)


def describe_tree(shape: TreeShape) -> dict[str, Any] | None:
    """{width, nodes} of a tree grown by confidence, {paths} of a fixed one, None for a chain."""
    if isinstance(shape, StaticTree):
        return {"paths": tree_paths(shape)}
    return None if shape is None else asdict(shape)


def tree_paths(tree: StaticTree) -> list[list[int]]:
    """Its nodes as rank paths: decode.verification.tree.tree_from_paths makes the tree of them again."""
    found: list[list[int]] = [[]]
    for parent, rank in zip(tree.parents, tree.ranks, strict=True):
        found.append([*found[parent], rank])
    return found[1:]
