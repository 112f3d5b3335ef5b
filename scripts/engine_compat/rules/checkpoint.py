"""A draft's files as a checker looks at them, whatever is wrong with them, and what a rule is."""

import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig

from decode.checkpoints import importers, layouts
from decode.common.errors import UserError, first_line
from decode.drafts.base import draft_sha256, read_metadata
from decode.model.loading import load_tokenizer, tokenizer_fingerprint

TensorShape = tuple[int, ...]
REFUSED, SILENT, IGNORED = "refused", "silent", "ignored"
"""What the engine does: it stops; it serves something else than was trained; it takes no notice, and none is due."""


@dataclass(frozen=True)
class TargetInfo:
    """What rules need to know of the target."""

    name: str
    config: dict[str, Any]
    fingerprint: str | None


@dataclass(frozen=True)
class DraftFiles:
    """Files read without judging them; `tensors` under the names of our nets, `named` says what the files call them."""

    path: str
    family: str
    raw: dict[str, Any]
    """config.json."""
    config: dict[str, Any]
    """The same without nesting."""
    tensors: dict[str, torch.Tensor]
    name_in_file: dict[str, str]
    facts: dict[str, Any]
    target: TargetInfo | None

    @property
    def nested(self) -> bool:
        """The speculators format."""
        return "transformer_layer_config" in self.raw

    @property
    def ours(self) -> bool:
        """Trained here, so that its settings are known beside what config.json says."""
        return "training" in self.facts or "family" in self.facts

    def get(self, key: str, default: Any = None) -> Any:
        """A setting, or the default where it is absent or null."""
        value = self.config.get(key)
        return default if value is None else value


@dataclass(frozen=True)
class Rule:
    """One thing that an engine wants of a family's drafts."""

    name: str
    families: tuple[str, ...]
    effect: str
    source: str
    """Where the engine says so: a file of its, or a section of an engine's documentation."""
    check: Callable[[DraftFiles], Iterable[str]]
    """What is wrong, a sentence each."""
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
    try:
        config = AutoConfig.from_pretrained(name).get_text_config(decoder=True)
    except Exception as error:  # any of a dozen kinds, from no network to an unknown model type
        reason = first_line(error)
        raise UserError(f"config of target {name!r} cannot be read: {reason}") from error
    print_ = tokenizer_fingerprint(load_tokenizer(name)) if tokenizer else None
    return TargetInfo(name, config.to_dict(), print_)


def read_draft(path: str, target: TargetInfo | None = None) -> DraftFiles:
    """UserError for what no engine could open either: no config.json, no tensors, no known family."""
    path = importers.resolve_folder(path)
    raw, facts = layouts.read_config(path), read_metadata(path)
    tensors = importers.raw_tensors(path)
    family = facts.get("family") or importers.detect_family(tensors)
    config = raw
    layer = raw.get("transformer_layer_config")
    if isinstance(layer, dict):
        outer = {k: raw[k] for k in importers.SPECULATORS_OUTER_KEYS if raw.get(k) is not None}
        config = {**layer, **outer}
    named = {_canonical_name(family, name): name for name in tensors}
    ours = {_canonical_name(family, name): value for name, value in tensors.items()}
    return DraftFiles(path, family, raw, config, ours, named, facts, target)


def _canonical_name(family: str, name: str) -> str:
    if family == "causal":
        return name
    if family == "medusa":
        return importers.canonical_medusa_name(name) or name
    return name.replace("midlayer.", "layers.0.", 1)


def parse_version(text: str) -> tuple[float, ...]:
    """A version as numbers that compare: 0.32.0 -> (0, 32, 0)."""
    try:
        return tuple(float(part) for part in text.split("."))
    except ValueError as error:
        raise UserError(f"engine version {text!r}: give numbers, as 0.32.0") from error


def check_rules(draft: DraftFiles, rules: Iterable[Rule], engine_version: str) -> list[Finding]:
    """All that these rules find, what is refused first."""
    now = parse_version(engine_version)
    found: list[Finding] = []
    for rule in rules:
        if draft.family in rule.families and parse_version(rule.since) <= now < parse_version(
            rule.before
        ):
            found += [
                Finding(rule.name, rule.effect, what, rule.source) for what in rule.check(draft)
            ]
    order = (REFUSED, SILENT, IGNORED)
    return sorted(found, key=lambda finding: order.index(finding.effect))


# ---- what holds in every engine ----


def changed_since_training(d: DraftFiles) -> Iterator[str]:
    """Against the checksum that training left."""
    said = d.facts.get("draft_sha256")
    if said is not None and said != draft_sha256(d.path):
        yield "model.safetensors or config.json is not what draftsmith.json has the checksum of: changed since training"


def not_finite(d: DraftFiles) -> Iterator[str]:
    """NaN and infinity."""
    for name, value in d.tensors.items():
        if value.is_floating_point() and not bool(torch.isfinite(value).all()):
            yield f"{d.name_in_file[name]} holds values that are not finite"


def not_float_dtype(d: DraftFiles) -> Iterator[str]:
    """Weights of other types than engines compute in."""
    known = (torch.float32, torch.bfloat16, torch.float16)
    for name, value in d.tensors.items():
        if name not in ("d2t", "t2d", "token_map") and value.dtype not in known:
            yield f"{d.name_in_file[name]} is {value.dtype}: engines want float32, bfloat16 or float16"


def dtype_mismatch(d: DraftFiles) -> Iterator[str]:
    """dtype or torch_dtype against the tensors."""
    kinds = {
        str(v.dtype).removeprefix("torch.") for v in d.tensors.values() if v.is_floating_point()
    }
    for key in ("dtype", "torch_dtype"):
        if d.config.get(key) is not None and {d.config[key]} != kinds:
            yield f"{key} says {d.config[key]}, and the tensors are {', '.join(sorted(kinds))}"


def vocab_size_mismatch(d: DraftFiles) -> Iterator[str]:
    """vocab_size against the target's."""
    if d.target is not None and d.config.get("vocab_size") != d.target.config["vocab_size"]:
        yield f"vocab_size is {d.config.get('vocab_size')} and the target's {d.target.config['vocab_size']}"


FILES_SOURCE = "the files themselves"
HEAD_FAMILIES = ("medusa", "eagle1", "eagle3")
EAGLE_FAMILIES = ("eagle1", "eagle3")
ALL_FAMILIES = ("causal", *HEAD_FAMILIES)
COMMON_RULES = (
    Rule("changed-since-training", ALL_FAMILIES, SILENT, FILES_SOURCE, changed_since_training),
    Rule("finite", ALL_FAMILIES, SILENT, FILES_SOURCE, not_finite),
    Rule("floating", ALL_FAMILIES, REFUSED, FILES_SOURCE, not_float_dtype),
)


def but(rules: Iterable[Rule], **changes: Any) -> tuple[Rule, ...]:
    """The same rules for another engine: other effects, versions or sources."""
    return tuple(replace(rule, **changes) for rule in rules)


def compare_shapes(d: DraftFiles, shapes: Mapping[str, TensorShape]) -> Iterator[str]:
    """Tensors of another shape than config.json makes of them."""
    for name, shape in shapes.items():
        if name in d.tensors and tuple(d.tensors[name].shape) != shape:
            yield f"{d.name_in_file[name]} is {list(d.tensors[name].shape)} and config.json makes it {list(shape)}"


def require_tensors(d: DraftFiles, names: Iterable[str]) -> Iterator[str]:
    """Names that are not there."""
    for name in names:
        if name not in d.tensors:
            yield f"{name} is missing"


def require_value(
    key: str, wanted: Any, default: Any = None
) -> Callable[[DraftFiles], Iterator[str]]:
    """The rule that a setting has one value."""

    def check_one(d: DraftFiles) -> Iterator[str]:
        if d.get(key, default) != wanted:
            yield f"{key} is {json.dumps(d.get(key, default))} and must be {json.dumps(wanted)}"

    return check_one


def require_keys(*keys: str) -> Callable[[DraftFiles], Iterator[str]]:
    """The rule that settings are there, in whatever value."""

    def check_all(d: DraftFiles) -> Iterator[str]:
        for key in keys:
            if key not in d.config:
                yield f"config.json has no {key}"

    return check_all


def unsupported(why: str) -> Callable[[DraftFiles], Iterator[str]]:
    """The rule that no such draft is served."""

    def check_none(d: DraftFiles) -> Iterator[str]:
        yield why

    return check_none


def has_file(path: str, name: str) -> bool:
    """Whether a draft's folder holds a file."""
    return (Path(path) / name).is_file()
