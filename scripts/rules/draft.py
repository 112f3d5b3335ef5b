"""A draft's files as a checker looks at them, whatever is wrong with them, and what a rule is."""

import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig

from decode import formats, published
from decode.drafts.base import draft_sha256, read_facts
from decode.settings import UserError
from decode.target import fingerprint, load_tokenizer

Shape = tuple[int, ...]
REFUSED, SILENT, IGNORED = "refused", "silent", "ignored"
"""What the engine does: it stops; it serves something else than was trained; it takes no notice, and none is due."""


@dataclass(frozen=True)
class Model:
    """What rules need to know of the target."""

    name: str
    config: dict[str, Any]
    fingerprint: str | None


@dataclass(frozen=True)
class Draft:
    """Files read without judging them; `tensors` under the names of our nets, `named` says what the files call them."""

    path: str
    family: str
    raw: dict[str, Any]
    """config.json."""
    config: dict[str, Any]
    """The same without nesting."""
    tensors: dict[str, torch.Tensor]
    named: dict[str, str]
    facts: dict[str, Any]
    target: Model | None

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
    check: Callable[[Draft], Iterable[str]]
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


def read_target(name: str, tokenizer: bool) -> Model:
    """UserError if its config (or tokenizer, if asked for) cannot be read. Loads no weights."""
    try:
        config = AutoConfig.from_pretrained(name).get_text_config(decoder=True)
    except Exception as error:  # any of a dozen kinds, from no network to an unknown model type
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise UserError(f"config of target {name!r} cannot be read: {reason}") from error
    print_ = fingerprint(load_tokenizer(name)) if tokenizer else None
    return Model(name, config.to_dict(), print_)


def read_draft(path: str, target: Model | None = None) -> Draft:
    """UserError for what no engine could open either: no config.json, no tensors, no known family."""
    path = published.local(path)
    raw, facts = formats.read_config(path), read_facts(path)
    tensors = published.raw_tensors(path)
    family = facts.get("family") or published.family_of(tensors)
    config = raw
    layer = raw.get("transformer_layer_config")
    if isinstance(layer, dict):
        outer = {k: raw[k] for k in published.FROM_SPECULATORS if raw.get(k) is not None}
        config = {**layer, **outer}
    named = {_name(family, name): name for name in tensors}
    ours = {_name(family, name): value for name, value in tensors.items()}
    return Draft(path, family, raw, config, ours, named, facts, target)


def _name(family: str, name: str) -> str:
    if family == "causal":
        return name
    if family == "medusa":
        return published.medusa_name(name) or name
    return name.replace("midlayer.", "layers.0.", 1)


def version(text: str) -> tuple[float, ...]:
    """A version as numbers that compare: 0.32.0 -> (0, 32, 0)."""
    try:
        return tuple(float(part) for part in text.split("."))
    except ValueError as error:
        raise UserError(f"engine version {text!r}: give numbers, as 0.32.0") from error


def check(draft: Draft, rules: Iterable[Rule], engine_version: str) -> list[Finding]:
    """All that these rules find, what is refused first."""
    now = version(engine_version)
    found: list[Finding] = []
    for rule in rules:
        if draft.family in rule.families and version(rule.since) <= now < version(rule.before):
            found += [
                Finding(rule.name, rule.effect, what, rule.source) for what in rule.check(draft)
            ]
    order = (REFUSED, SILENT, IGNORED)
    return sorted(found, key=lambda finding: order.index(finding.effect))


# ---- what holds in every engine ----


def changed(d: Draft) -> Iterator[str]:
    """Against the checksum that training left."""
    said = d.facts.get("draft_sha256")
    if said is not None and said != draft_sha256(d.path):
        yield "model.safetensors or config.json is not what draftsmith.json has the checksum of: changed since training"


def not_finite(d: Draft) -> Iterator[str]:
    """NaN and infinity."""
    for name, value in d.tensors.items():
        if value.is_floating_point() and not bool(torch.isfinite(value).all()):
            yield f"{d.named[name]} holds values that are not finite"


def not_floating(d: Draft) -> Iterator[str]:
    """Weights of other types than engines compute in."""
    known = (torch.float32, torch.bfloat16, torch.float16)
    for name, value in d.tensors.items():
        if name not in ("d2t", "t2d", "token_map") and value.dtype not in known:
            yield f"{d.named[name]} is {value.dtype}: engines want float32, bfloat16 or float16"


def other_dtype(d: Draft) -> Iterator[str]:
    """dtype or torch_dtype against the tensors."""
    kinds = {
        str(v.dtype).removeprefix("torch.") for v in d.tensors.values() if v.is_floating_point()
    }
    for key in ("dtype", "torch_dtype"):
        if d.config.get(key) is not None and {d.config[key]} != kinds:
            yield f"{key} says {d.config[key]}, and the tensors are {', '.join(sorted(kinds))}"


def no_vocabulary(d: Draft) -> Iterator[str]:
    """vocab_size against the target's."""
    if d.target is not None and d.config.get("vocab_size") != d.target.config["vocab_size"]:
        yield f"vocab_size is {d.config.get('vocab_size')} and the target's {d.target.config['vocab_size']}"


EVERYWHERE = "the files themselves"
HEADS = ("medusa", "eagle1", "eagle3")
EAGLE = ("eagle1", "eagle3")
ALL = ("causal", *HEADS)
COMMON = (
    Rule("changed-since-training", ALL, SILENT, EVERYWHERE, changed),
    Rule("finite", ALL, SILENT, EVERYWHERE, not_finite),
    Rule("floating", ALL, REFUSED, EVERYWHERE, not_floating),
)


def but(rules: Iterable[Rule], **changes: Any) -> tuple[Rule, ...]:
    """The same rules for another engine: other effects, versions or sources."""
    return tuple(replace(rule, **changes) for rule in rules)


def shapes_differ(d: Draft, shapes: Mapping[str, Shape]) -> Iterator[str]:
    """Tensors of another shape than config.json makes of them."""
    for name, shape in shapes.items():
        if name in d.tensors and tuple(d.tensors[name].shape) != shape:
            yield f"{d.named[name]} is {list(d.tensors[name].shape)} and config.json makes it {list(shape)}"


def missing(d: Draft, names: Iterable[str]) -> Iterator[str]:
    """Names that are not there."""
    for name in names:
        if name not in d.tensors:
            yield f"{name} is missing"


def config_says(key: str, wanted: Any, default: Any = None) -> Callable[[Draft], Iterator[str]]:
    """The rule that a setting has one value."""

    def check_one(d: Draft) -> Iterator[str]:
        if d.get(key, default) != wanted:
            yield f"{key} is {json.dumps(d.get(key, default))} and must be {json.dumps(wanted)}"

    return check_one


def present(*keys: str) -> Callable[[Draft], Iterator[str]]:
    """The rule that settings are there, in whatever value."""

    def check_all(d: Draft) -> Iterator[str]:
        for key in keys:
            if key not in d.config:
                yield f"config.json has no {key}"

    return check_all


def never(why: str) -> Callable[[Draft], Iterator[str]]:
    """The rule that no such draft is served."""

    def check_none(d: Draft) -> Iterator[str]:
        yield why

    return check_none


def has_file(path: str, name: str) -> bool:
    """Whether a draft's folder holds a file."""
    return (Path(path) / name).is_file()
