"""A draft's files as the rules read them, what a rule is, and the rules that hold in every engine."""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM

from decode.checkpoints import block_layouts, eagle_layouts, importers, layouts
from decode.checkpoints.draft_folder import DraftMetadata, draft_sha256, read_metadata
from decode.checkpoints.importers import LAYOUTS
from decode.checkpoints.layouts import HeadConfig, Shapes, Tensors
from decode.common.errors import UserError
from decode.drafts.registry import draft_family
from decode.model.loading import load_config, load_tokenizer, stated_config, tokenizer_fingerprint

REFUSED, SILENT, IGNORED = "refused", "silent", "ignored"
"""What the engine does: it stops with an error; it serves another function than was trained, without an error; it
ignores the difference, which is harmless."""


@dataclass(frozen=True)
class TargetInfo:
    """The target's facts that rules need."""

    name: str
    config: HeadConfig
    fingerprint: str | None  # of its tokenizer; None if it was not loaded


@dataclass(frozen=True)
class DraftFiles:
    """A draft's files, read without validation."""

    path: str
    family: str
    raw_config: HeadConfig  # config.json
    config: HeadConfig  # the same without nesting
    tensors: Tensors  # by the names of our modules
    name_in_file: dict[str, str]  # {name in `tensors`: name in the files}
    facts: DraftMetadata
    target: TargetInfo | None

    @cached_property
    def shapes(self) -> Shapes:
        """Every tensor that config.json implies, tied ones left out; {} if it lacks a size. UserError if transformers
        makes no model of the config of a language model."""
        if self.family in LAYOUTS:
            shapes = LAYOUTS[self.family].shapes
            return {} if shapes is None else shapes(self.config)
        try:
            config = stated_config(self.path, "draft")
            with torch.device("meta"):
                model = AutoModelForCausalLM.from_config(config)
        except (ValueError, TypeError, KeyError, OSError) as error:
            raise UserError(f"config.json of {self.path!r} makes no model: {error}") from error
        return {name: tuple(value.shape) for name, value in model.named_parameters()}

    @property
    def is_speculators_format(self) -> bool:
        """Whether config.json is nested as the speculators library writes it."""
        return "transformer_layer_config" in self.raw_config

    @property
    def trained_here(self) -> bool:
        """Whether draftsmith.json records the training settings, beside what config.json contains."""
        return self.facts.training is not None or self.facts.family is not None

    @property
    def target_layers(self) -> int | None:
        return None if self.target is None else self.target.config["num_hidden_layers"]

    def get(self, key: str, default: Any = None) -> Any:
        return self.config.value(key, default)

    def has_file(self, name: str) -> bool:
        return (Path(self.path) / name).is_file()


Check = Callable[[DraftFiles], Iterable[str]]
"""What is wrong, one sentence each; nothing for a draft that keeps the rule."""


@dataclass(frozen=True)
class Rule:
    """One requirement of an engine on the drafts of some families."""

    name: str
    families: tuple[str, ...]
    effect: str
    """REFUSED, SILENT or IGNORED: what the engine does with a draft that breaks the rule."""
    source: str
    """Where the requirement comes from: a source file of the engine, or a section of its documentation."""
    check: Check
    since: str = "0"
    before: str = "inf"


@dataclass(frozen=True)
class Finding:
    """A rule that a draft breaks."""

    rule: str
    effect: str
    what: str
    source: str


def read_target(name: str, tokenizer: bool) -> TargetInfo:
    """UserError if its config (or tokenizer, if asked for) cannot be read. Loads no weights."""
    config = load_config(name, "target").get_text_config(decoder=True)
    fingerprint = tokenizer_fingerprint(load_tokenizer(name)) if tokenizer else None
    return TargetInfo(name, HeadConfig(config.to_dict()), fingerprint)


def read_draft(path: str, target: TargetInfo | None = None) -> DraftFiles:
    """UserError for files that no engine could open either: no config.json, no tensors, no known family."""
    path = importers.resolve_folder(path)
    raw_config, facts = layouts.read_config(path), read_metadata(path)
    tensors = importers.raw_tensors(path)
    family = facts.family or draft_family(path)
    config, layout = raw_config, LAYOUTS.get(family)
    layer = raw_config.get("transformer_layer_config")
    if isinstance(layer, dict):
        keys = (*eagle_layouts.OUTER_KEYS, *block_layouts.OUTER_KEYS)
        outer = {key: raw_config[key] for key in keys if raw_config.get(key) is not None}
        config = HeadConfig(layer | outer)
    own = {name: name if layout is None else layout.name(name) for name in tensors}
    named = {own[name]: value for name, value in tensors.items()}
    in_file = {own[name]: name for name in tensors}
    return DraftFiles(path, family, raw_config, config, named, in_file, facts, target)


def parse_version(text: str) -> tuple[float, ...]:
    """A version as numbers that compare: 0.32.0 -> (0, 32, 0). UserError for anything else."""
    try:
        return tuple(float(part) for part in text.split("."))
    except ValueError as error:
        raise UserError(f"engine version {text!r}: give numbers, as 0.32.0") from error


def check_rules(draft: DraftFiles, rules: Iterable[Rule], engine_version: str) -> list[Finding]:
    """The rules of this version that the draft breaks: refused first, then silent, then ignored."""
    version = parse_version(engine_version)
    findings = [
        Finding(rule.name, rule.effect, what, rule.source)
        for rule in rules
        if draft.family in rule.families
        and parse_version(rule.since) <= version < parse_version(rule.before)
        for what in rule.check(draft)
    ]
    order = (REFUSED, SILENT, IGNORED)
    return sorted(findings, key=lambda finding: order.index(finding.effect))


# ---- checks on every family ----


def changed_since_training(d: DraftFiles) -> Iterator[str]:
    recorded = d.facts.draft_sha256
    if recorded is not None and recorded != draft_sha256(d.path):
        yield "model.safetensors or config.json does not match the checksum in draftsmith.json: changed since training"


def not_finite(d: DraftFiles) -> Iterator[str]:
    for name, value in d.tensors.items():
        if value.is_floating_point() and not bool(torch.isfinite(value.float()).all()):
            yield f"{d.name_in_file[name]} contains values that are not finite"


def not_float_dtype(d: DraftFiles) -> Iterator[str]:
    known = (torch.float32, torch.bfloat16, torch.float16)
    for name, value in d.tensors.items():
        if name not in (*layouts.VOCAB_MAPS, "token_map") and value.dtype not in known:
            yield f"{d.name_in_file[name]} is {value.dtype}: engines want float32, bfloat16 or float16"


FILES_SOURCE = "the files themselves"
EAGLE_FAMILIES = ("eagle1", "eagle3")
HEAD_FAMILIES = ("medusa", *EAGLE_FAMILIES)
COVERED_EVERYWHERE = ("causal", *HEAD_FAMILIES)  # the families that every engine has rules for
BLOCK_FAMILIES = ("pard", "peagle", "dflash", "dflash2", "dspark", "domino")
ALL_FAMILIES = (*COVERED_EVERYWHERE, *BLOCK_FAMILIES, "mtp")
COMMON_RULES = (
    Rule("changed-since-training", ALL_FAMILIES, SILENT, FILES_SOURCE, changed_since_training),
    Rule("finite", ALL_FAMILIES, SILENT, FILES_SOURCE, not_finite),
    Rule("floating", ALL_FAMILIES, REFUSED, FILES_SOURCE, not_float_dtype),
)
"""Rules that hold in every engine, of the files alone."""
