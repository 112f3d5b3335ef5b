"""Methods: a draft at one setting, under a name. Built from the settings, and described for reports."""

import difflib
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from decode.checkpoints.draft_folder import draft_sha256, is_altered, trained_for
from decode.common.errors import UserError
from decode.drafts.base import Draft
from decode.drafts.mirror import MirrorConfig
from decode.drafts.registry import DRAFT_FAMILIES, create_draft, find_family, load_draft
from decode.drafts.swift import open_search
from decode.drafts.wrappers import CrossDeviceDraft
from decode.engine.composing import add_confidence, add_learning, add_lookup, make_mirror
from decode.engine.request_checks import check_draft_length
from decode.model.loading import Target
from decode.model.names import recorded_name
from decode.verification.registry import find_rule
from decode.verification.tree import DynamicTree, StaticTree, TreeShape, tree_from_paths
from eval.results.report import AdaptiveRecord, LookupRecord, MirrorRecord, TreeRecord
from eval.settings.evaluation import EvalConfig, MethodConfig, TreeConfig


@dataclass(frozen=True)
class Method:
    """A draft at one setting, under the name that reports use. Methods are equal whatever object their draft is."""

    name: str
    draft: Draft | None = field(default=None, compare=False, repr=False)  # None: plain decoding
    k: int = 0  # tokens of a chain or levels of a tree, drafted a round; 0 for plain decoding
    rule: str = "exact"  # verification rule (decode/verification/registry.py)
    shape: TreeShape = None  # token tree; None: a chain
    confidence: float = 0.0
    """Where its chains end before K tokens (`MethodConfig.confidence`); 0: they do not."""
    layers: int = 0
    """First layers of the target that draft, where their number is tuned; 0: it is not."""
    mirror: MirrorConfig = MirrorConfig()
    """Drafting while the target verifies; exit_layer 0: after it."""

    @property
    def description(self) -> str:
        """The setting in words, for tables. Plain decoding is K = 1 there."""
        exit_ = f"E = {self.layers}, " if self.layers else ""
        if isinstance(self.shape, DynamicTree):
            return f"{exit_}tree of {self.shape.nodes}, width {self.shape.width}, K = {self.k}"
        if isinstance(self.shape, StaticTree):
            return f"{exit_}static tree of {len(self.shape.parents)}, depth {self.shape.depth}"
        if self.confidence:
            return f"K up to {self.k} by confidence"
        if self.mirror.exit_layer:
            return f"{exit_}K = {self.k}, mirror at layer {self.mirror.exit_layer} with {self.mirror.branches} branches"
        return f"{exit_}K = {max(1, self.k)}"

    @property
    def label(self) -> str:
        """Its key in the journal."""
        return f"{self.name}, {self.description}, {self.rule}"

    @property
    def depth(self) -> int:
        """Positions that a round can accept; a fixed tree has its own depth."""
        return self.shape.depth if isinstance(self.shape, StaticTree) else self.k


PLAIN_DECODING = Method("plain")


def build_methods(s: EvalConfig, target: Target) -> list[Method]:
    """All methods but plain decoding, in their order. UserError for a draft that is missing or not the target's."""
    methods = []
    for m in s.methods:
        shape = tree_shape(m.tree)
        depth = shape.depth if isinstance(shape, StaticTree) else m.k or s.k
        check_draft_length(target, depth, f"k of method {m.name!r}")
        draft = build_draft(m, target, s.dtype)
        if shape is not None and not drafts_trees(m):
            raise UserError(f"method {m.name!r} drafts chains only: give it no tree")
        methods.append(
            Method(m.name, draft, depth, m.rule, draft.shape, m.confidence, mirror=m.mirror)
        )
    return methods


def tree_shape(tree: TreeConfig) -> TreeShape:
    """The token tree of the settings; None: a chain. UserError for paths that make no tree."""
    if tree.paths:
        return tree_from_paths(tree.paths)
    return DynamicTree(tree.width, tree.nodes) if tree.nodes > 0 else None


def build_draft(m: MethodConfig, target: Target, dtype: str) -> Draft:
    draft = _build_draft_alone(m, target, dtype)
    if m.learn:
        draft = add_learning(draft, m.learn_rate, target)
    if m.lookup:
        draft = add_lookup(draft, m.lookup, m.min_match, target)
    if m.mirror.exit_layer:
        return make_mirror(draft, m.mirror, target)
    return add_confidence(draft, m.confidence) if m.confidence else draft


def _build_draft_alone(m: MethodConfig, target: Target, dtype: str) -> Draft:
    shape = tree_shape(m.tree)
    if m.draft:
        return load_draft(m.draft, target, m.device or None, m.dtype or dtype, shape)
    if m.dtype:
        raise UserError(
            f"method {m.name!r} has no `draft` whose dtype could be {m.dtype!r}: leave `dtype` out"
        )
    if m.name == "swift":
        config = replace(m.swift, min_layers=m.layers or m.swift.min_layers)
        return open_search(target, config, m.state)
    draft = create_draft(m.name, target, m.layers, shape)
    if draft is not None:
        return draft
    own = [family.name for family in DRAFT_FAMILIES.values() if family.create is not None]
    near = difflib.get_close_matches(m.name, own, n=1)
    hint = f" (did you mean {near[0]!r}?)" if near else f"; without one there are {', '.join(own)}"
    raise UserError(f"method {m.name!r} needs `draft`, the folder of a saved draft{hint}")


def follows_tree_shape(m: MethodConfig, draft: Draft) -> bool:
    """Whether the method's draft, built for `m`, can propose trees of a given shape."""
    # of a draft on another device the shape would not reach the draft inside
    return not isinstance(draft, CrossDeviceDraft) and drafts_trees(m)


def drafts_trees(m: MethodConfig) -> bool:
    """Whether the method's drafts can propose trees: those of its family, if nothing changes their chains."""
    family = find_family(m.draft) if m.draft else DRAFT_FAMILIES[m.name]
    as_it_is = not (m.lookup or m.confidence or m.mirror.exit_layer or m.learn)
    return family.supports_trees and as_it_is


def draft_checksums(methods: Sequence[MethodConfig]) -> dict[str, str | None]:
    """{method: sha256 of its draft's weights} of methods with a saved draft; None for a draft from the Hub."""
    return {m.name: draft_sha256(m.draft) for m in methods if m.draft}


def verification_name(method: Method, temperature: float) -> str:
    """The report's `verification`: none, greedy, chain or tree for rule exact, else the rule's name."""
    if method.draft is None:
        return "none"
    if method.rule != "exact":
        return method.rule
    if method.shape is not None:
        return "tree"
    return "greedy" if temperature == 0 else "chain"


def describe_method(
    s: EvalConfig, method: Method, mirror: Mapping[str, Any] | None
) -> dict[str, Any]:
    """The fields of a MethodResult that say what drafts and how; `mirror` is what `measure_steps` found."""
    m = next((m for m in s.methods if m.name == method.name), MethodConfig(method.name))
    sha256, family = None, m.name if m.name in DRAFT_FAMILIES else None
    if m.draft:
        sha256, family = draft_sha256(m.draft), find_family(m.draft).name
    return {
        "name": method.name,
        "draft": recorded_name(m.draft)[0] if m.draft else None,
        "family": family,
        "draft_sha256": sha256,
        "draft_altered": is_altered(m.draft, sha256),
        "trained_for": trained_for(m.draft) if m.draft else None,
        "draft_dtype": m.dtype or s.dtype,
        "tree": describe_tree(method.shape),
        "lookup": LookupRecord(m.lookup, m.min_match) if m.lookup else None,
        "adaptive": AdaptiveRecord("confidence", m.confidence) if m.confidence else None,
        "learned": True if m.learn else None,
        "mirror": MirrorRecord(**asdict(method.mirror), **(mirror or {}))
        if method.mirror.exit_layer
        else None,
        "lossy": not find_rule(method.rule).lossless,
    }


def describe_tree(shape: TreeShape) -> TreeRecord | None:
    """Of a fixed tree its nodes as rank paths, from which `tree_from_paths` makes it again; None for a chain."""
    if not isinstance(shape, StaticTree):
        return None if shape is None else TreeRecord(shape.width, shape.nodes)
    paths: list[list[int]] = [[]]
    for parent, rank in zip(shape.parents, shape.ranks, strict=True):
        paths.append([*paths[parent], rank])
    return TreeRecord(paths=paths[1:])
