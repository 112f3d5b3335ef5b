"""What a causal draft consists of, and what can be wrong with it in more than one engine."""

from collections.abc import Iterator

import torch
from transformers import AutoConfig, AutoModelForCausalLM

from decode.drafts.base import read_facts
from decode.settings import UserError
from decode.target import fingerprint, load_tokenizer
from scripts.rules.draft import SILENT, Draft, Rule, has_file

HEAD, EMBEDDING = "lm_head.weight", "model.embed_tokens.weight"


def expected(d: Draft) -> dict[str, tuple[int, ...]]:
    """Names and shapes of a model of this config, made without memory for it; tied ones left out."""
    try:
        config = AutoConfig.from_pretrained(d.path)
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(config)
    except (ValueError, TypeError, KeyError, OSError) as error:
        raise UserError(f"config.json of {d.path!r} makes no model: {error}") from error
    return {name: tuple(value.shape) for name, value in model.named_parameters()}


def lacking(d: Draft) -> Iterator[str]:
    for name in expected(d):
        if name not in d.tensors:
            yield f"{name} is missing"


def wrong_shapes(d: Draft) -> Iterator[str]:
    for name, shape in expected(d).items():
        if name in d.tensors and tuple(d.tensors[name].shape) != shape:
            yield f"{name} is {list(d.tensors[name].shape)} and config.json makes it {list(shape)}"


def strangers(d: Draft) -> Iterator[str]:
    for name in sorted(set(d.tensors) - set(expected(d))):
        if name != HEAD:
            yield f"{name} is not part of this model"


def untied(d: Draft) -> Iterator[str]:
    """An output matrix of its own that tie_word_embeddings throws away."""
    held = d.tensors
    tied = d.get("tie_word_embeddings", False) and HEAD in held and EMBEDDING in held
    if tied and not torch.equal(held[HEAD], held[EMBEDDING]):
        yield f"tie_word_embeddings is true, and {HEAD} is another matrix: it is dropped"


def tokens(d: Draft) -> Iterator[str]:
    """Its tokenizer against the target's, or at least against the one it was trained with."""
    if not has_file(d.path, "tokenizer_config.json"):
        yield "there are no tokenizer files: copy the target's"
        return
    own = fingerprint(load_tokenizer(d.path))
    if d.target is not None and d.target.fingerprint not in (None, own):
        yield "its tokenizer reads other text from the same ids than the target's"
    said = read_facts(d.path).get("tokenizer_hash", own)
    if said != own:
        yield f"its tokenizer is {own}, and it was trained with {said}"


def rope_missing(d: Draft) -> Iterator[str]:
    said = (d.get("rope_parameters") or {}).get("rope_theta", d.config.get("rope_theta"))
    if d.get("model_type") in ("llama", "qwen2", "qwen3", "mistral") and said is None:
        yield "neither rope_theta nor rope_parameters is there: engines take their default"


RULES = (
    Rule("unknown-tensor", ("causal",), SILENT, "names of the architecture", strangers),
    Rule("rope", ("causal",), SILENT, "config of the architecture", rope_missing),
)
