"""What another engine reads of a draft, and how it is called: one value of ServingEngine for each engine."""

import shlex
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from decode.serving.rules import Rule


@dataclass(frozen=True)
class Served:
    """How an engine is told to decode with the drafts of one family."""

    method: str  # the method's name there
    options: Mapping[str, int | bool] = field(default_factory=dict)
    """Further fields of its settings, or flags of its command."""
    versions: str = ""
    """The versions that serve it, for people to read; empty: the engine's `versions`."""


@dataclass(frozen=True)
class ServedDraft:
    """A published draft that is to be served, and its target."""

    family: str
    repo: str
    target: str
    revision: str | None
    k: int
    layers: tuple[int, ...] = ()
    """EAGLE-3: layers whose input hidden states it reads; empty for the default ones."""
    template: Mapping[str, Any] = field(default_factory=dict)
    """Arguments of the chat template that most of its training prompts were rendered with."""


@dataclass(frozen=True)
class EngineServingConfig:
    """One engine and the files that start it; `files` is empty where it cannot load the draft."""

    engine: str
    note: str  # which versions, what to know; or why not
    files: Mapping[str, str]


def shell_script(words: Sequence[str], trained_for: str | None = None) -> str:
    """A shell script of one command, a flag a line; `trained_for` is a revision of the target that no flag names."""
    lines, line = [], ""
    for word in words:
        quoted = shlex.quote(word)
        if word.startswith("--") and line:
            lines.append(line)
            line = quoted
        else:
            line = f"{line} {quoted}".strip()
    body = " \\\n  ".join([*lines, line])
    note = f"# trained for revision {trained_for} of the target\n" if trained_for else ""
    return f"{note}{body}\n"


@dataclass(frozen=True)
class ServingEngine:
    """A serving engine."""

    name: str  # as people write it
    version: str
    """The newest version that `rules` describe (where they were run: that they were run against)."""
    versions: str  # the versions to which `methods` belong, for people to read
    methods: Mapping[str, Served]
    """By `family` in draftsmith.json; a family that is not here has no method there."""
    rules: tuple[Rule, ...] = ()  # what it requires of a draft's files besides COMMON_RULES
    files: Callable[[ServedDraft], Mapping[str, str]] | None = None
    """{path: text} of what starts it with chains of a draft for which it has a method."""
    note: str = "{versions}"  # what to know of these files
    no_method: str = "{name} has no method for drafts of family {family}"
    captures_embedding: bool = True
    """False: it names layers by their output, so it cannot hand out the target's embedding."""

    def method(self, family: str) -> str:
        """The name of the method that decodes with drafts of this family; empty if there is none."""
        return self.methods[family].method if family in self.methods else ""

    def serving_config(self, draft: ServedDraft) -> EngineServingConfig:
        """The files that serve the draft, or why there are none."""
        if 0 in draft.layers and not self.captures_embedding:
            reason = "it names layers by their output and so cannot capture the embedding, which this draft reads"
            return EngineServingConfig(self.name, reason, {})
        if draft.family not in self.methods or self.files is None:
            reason = self.no_method.format(name=self.name, family=draft.family)
            return EngineServingConfig(self.name, reason, {})
        note = self.note.format(versions=self.methods[draft.family].versions or self.versions)
        return EngineServingConfig(self.name, note, self.files(draft))
