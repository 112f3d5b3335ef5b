"""The rules of transformers' `assistant_model=`, which takes causal LMs only."""

from scripts.engine_compat.rules import causal
from scripts.engine_compat.rules.checkpoint import (
    COMMON_RULES,
    HEAD_FAMILIES,
    IGNORED,
    REFUSED,
    SILENT,
    Rule,
    Unsupported,
    dtype_mismatch,
    vocab_size_mismatch,
)

DEFAULT_VERSION = "5.23"
UTILS = "transformers/generation/utils.py (_validate_assistant), 5.23"
MODELING = "transformers/modeling_utils.py, 5.23"

RULES = (
    *COMMON_RULES,
    Rule("heads", HEAD_FAMILIES, REFUSED, UTILS, Unsupported("assistant_model takes causal LMs, not heads")),
    Rule("dtype", ("causal",), IGNORED, MODELING, dtype_mismatch),
    Rule("vocabulary", ("causal",), REFUSED, f"{UTILS}: other sizes need both tokenizers", vocab_size_mismatch),
    *causal.RULES,
    Rule("missing-tensor", ("causal",), SILENT, f"{MODELING}: random, with a warning", causal.missing_tensors),
    Rule("shapes", ("causal",), REFUSED, MODELING, causal.wrong_shapes),
    Rule("tied", ("causal",), SILENT, MODELING, causal.dropped_lm_head),
    Rule("tokenizer", ("causal",), SILENT, f"{UTILS}: equal sizes pass for equal tokenizers", causal.wrong_tokenizer),
)  # fmt: skip
