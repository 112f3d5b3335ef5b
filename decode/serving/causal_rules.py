"""The tensors of a causal draft, and checks on it that more than one engine needs."""

from collections.abc import Iterator

import torch
from transformers import AutoModelForCausalLM

from decode.checkpoints.draft_vocab import VOCAB_FILE, read_ids
from decode.common.errors import UserError
from decode.drafts.base import read_metadata
from decode.model.loading import load_tokenizer, stated_config, tokenizer_fingerprint
from decode.model.vocabularies import disagreement
from decode.serving.rules import SILENT, DraftFiles, Rule, has_file

LM_HEAD, EMBEDDING = "lm_head.weight", "model.embed_tokens.weight"


def expected_shapes(d: DraftFiles) -> dict[str, tuple[int, ...]]:
    """Names and shapes of the tensors of a model with this config, made on the meta device; tied ones left out.

    UserError if transformers makes no model of the config.
    """
    try:
        config = stated_config(d.path, "draft")
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(config)
    except (ValueError, TypeError, KeyError, OSError) as error:
        raise UserError(f"config.json of {d.path!r} makes no model: {error}") from error
    return {name: tuple(value.shape) for name, value in model.named_parameters()}


def missing_tensors(d: DraftFiles) -> Iterator[str]:
    """Tensors of the architecture that are not in the files."""
    for name in expected_shapes(d):
        if name not in d.tensors:
            yield f"{name} is missing"


def wrong_shapes(d: DraftFiles) -> Iterator[str]:
    """Tensors whose shape is not the one that config.json implies."""
    for name, shape in expected_shapes(d).items():
        if name in d.tensors and tuple(d.tensors[name].shape) != shape:
            yield f"{name} is {list(d.tensors[name].shape)} and config.json implies {list(shape)}"


def unknown_tensors(d: DraftFiles) -> Iterator[str]:
    """Tensors that the architecture does not have."""
    for name in sorted(set(d.tensors) - set(expected_shapes(d))):
        if name != LM_HEAD:
            yield f"{name} is not part of this model"


def dropped_lm_head(d: DraftFiles) -> Iterator[str]:
    """An lm_head that differs from the embedding and is dropped because of tie_word_embeddings."""
    tied = d.get("tie_word_embeddings", False) and LM_HEAD in d.tensors and EMBEDDING in d.tensors
    if tied and not torch.equal(d.tensors[LM_HEAD], d.tensors[EMBEDDING]):
        yield f"tie_word_embeddings is true, and {LM_HEAD} is another matrix: it is dropped"


def wrong_tokenizer(d: DraftFiles) -> Iterator[str]:
    """The draft's tokenizer against the target's and against the one recorded in training."""
    if not has_file(d.path, "tokenizer_config.json"):
        yield "there are no tokenizer files: copy the target's"
        return
    tokenizer = load_tokenizer(d.path)
    own = tokenizer_fingerprint(tokenizer)
    if d.target is not None and d.target.fingerprint not in (None, own):
        found = disagreement(tokenizer, load_tokenizer(d.target.name))
        if found is not None:
            yield f"its tokenizer decodes the same ids to other text than the target's: {found}"
    recorded = read_metadata(d.path).get("tokenizer_hash", own)
    if recorded != own:
        yield f"its tokenizer is {own}, and it was trained with {recorded}"


def rope_missing(d: DraftFiles) -> Iterator[str]:
    """A config without the base of RoPE."""
    theta = (d.get("rope_parameters") or {}).get("rope_theta", d.config.get("rope_theta"))
    if d.get("model_type") in ("llama", "qwen2", "qwen3", "mistral") and theta is None:
        yield "neither rope_theta nor rope_parameters is set: engines use their default"


def full_head(d: DraftFiles) -> Iterator[str]:
    """A reduced vocabulary, which only this project's decoder reads, and other tokens with rows of their own."""
    if not has_file(d.path, VOCAB_FILE):
        return
    if not others_are_silent(d):
        yield (
            f"{VOCAB_FILE} is not read: the engine also drafts tokens that were left out in training: serve the copy "
            "that scripts/export.py --format hf writes"
        )


def others_are_silent(d: DraftFiles) -> bool:
    """Whether tokens outside the reduced vocabulary share one row of the LM head, as scripts/export.py leaves them."""
    tied = LM_HEAD not in d.tensors or d.get("tie_word_embeddings", False)
    head = d.tensors.get(EMBEDDING if tied else LM_HEAD)
    if head is None:
        return False
    try:
        ids = read_ids(d.path, len(head), {})
    except UserError:  # the rule `decoder` tells
        return False
    assert ids is not None  # the file is there
    others = head[torch.ones(len(head), dtype=torch.bool).index_fill(0, ids, False)]
    return torch.equal(others, others[:1].expand_as(others))


RULES = (
    Rule("unknown-tensor", ("causal",), SILENT, "names of the architecture", unknown_tensors),
    Rule("whole-head", ("causal",), SILENT, "no engine has an option for it", full_head),
    Rule("rope", ("causal",), SILENT, "config of the architecture", rope_missing),
)
"""Rules for causal drafts that hold in every engine."""
