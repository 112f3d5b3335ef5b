"""The rules of transformers' `assistant_model=`, which takes causal LMs only."""

from collections.abc import Iterator

from decode.model.loading import load_config
from scripts.engine_compat.rules import causal
from scripts.engine_compat.rules.checkpoint import (
    COMMON_RULES,
    HEAD_FAMILIES,
    IGNORED,
    REFUSED,
    SILENT,
    ContextAtLeastTargets,
    DraftFiles,
    Rule,
    Unsupported,
    dtype_mismatch,
    vocab_size_mismatch,
)

DEFAULT_VERSION = "5.23"
UTILS = "transformers/generation/utils.py (_validate_assistant), 5.23"
CANDIDATES = (
    "transformers/generation/candidate_generator.py, 5.23: no length of the assistant is read"
)
MODELING = "transformers/modeling_utils.py, 5.23"


def learned_positions(d: DraftFiles) -> bool:
    """Whether positions are rows of a table, which ends."""
    return "rope_parameters" not in load_config(d.path, "draft").to_dict()


def overrun(d: DraftFiles) -> Iterator[str]:
    """A table of positions that is shorter than the target's texts."""
    end = ContextAtLeastTargets("generation ends with an IndexError beyond it")
    return end(d) if learned_positions(d) else iter(())


def stretched(d: DraftFiles) -> Iterator[str]:
    """RoPE that goes on beyond what the draft was made for."""
    far = ContextAtLeastTargets("it drafts on beyond it, and few tokens are accepted there")
    return iter(()) if learned_positions(d) else far(d)


RULES = (
    *COMMON_RULES,
    Rule("heads", HEAD_FAMILIES, REFUSED, UTILS, Unsupported("assistant_model takes causal LMs, not heads")),
    Rule("dtype", ("causal",), IGNORED, MODELING, dtype_mismatch),
    Rule("vocabulary", ("causal",), REFUSED, f"{UTILS}: other sizes need both tokenizers", vocab_size_mismatch),
    Rule("context", ("causal",), REFUSED, CANDIDATES, overrun),
    Rule("context-rope", ("causal",), SILENT, CANDIDATES, stretched),
    *causal.RULES,
    Rule("missing-tensor", ("causal",), SILENT, f"{MODELING}: random, with a warning", causal.missing_tensors),
    Rule("shapes", ("causal",), REFUSED, MODELING, causal.wrong_shapes),
    Rule("tied", ("causal",), SILENT, MODELING, causal.dropped_lm_head),
    Rule("tokenizer", ("causal",), SILENT, f"{UTILS}: equal sizes pass for equal tokenizers", causal.wrong_tokenizer),
)  # fmt: skip
