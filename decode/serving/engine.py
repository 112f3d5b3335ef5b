"""What another engine reads of a draft, and how it is called: one value of ServingEngine for each engine."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from decode.serving.rules import Rule


@dataclass(frozen=True)
class Served:
    """How an engine is told to decode with the drafts of one family."""

    method: str
    """The method's name there."""
    options: Mapping[str, int | bool] = field(default_factory=dict)
    """Further fields of its settings, or flags of its command."""
    versions: str = ""
    """The versions that serve it, for people to read; empty: the engine's `versions`."""


@dataclass(frozen=True)
class ServingEngine:
    """A serving engine."""

    name: str
    """As people write it."""
    version: str
    """The newest version that `rules` describe or that they were run against."""
    versions: str
    """The versions to which `methods` belong, for people to read."""
    methods: Mapping[str, Served]
    """By `family` in draftsmith.json; a family that is not here has no method there."""
    rules: tuple[Rule, ...] = ()
    """What it requires of a draft's files."""

    def method(self, family: str) -> str:
        """The name of the method that decodes with drafts of this family; empty if there is none."""
        return self.methods[family].method if family in self.methods else ""

    def versions_for(self, family: str) -> str:
        """The versions that serve drafts of this family."""
        return self.methods[family].versions or self.versions
