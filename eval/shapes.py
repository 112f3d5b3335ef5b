"""Shapes of trees as settings and reports write them."""

from dataclasses import asdict
from typing import Any

from decode.tree import Shape, StaticTree


def described(shape: Shape) -> dict[str, Any] | None:
    """{width, nodes} of a tree grown by confidence, {paths} of a fixed one, None for a chain."""
    if isinstance(shape, StaticTree):
        return {"paths": paths_of(shape)}
    return None if shape is None else asdict(shape)


def paths_of(tree: StaticTree) -> list[list[int]]:
    """Its nodes as rank paths: decode.tree.from_paths makes the tree of them again."""
    found: list[list[int]] = [[]]
    for parent, rank in zip(tree.parents, tree.ranks, strict=True):
        found.append([*found[parent], rank])
    return found[1:]
