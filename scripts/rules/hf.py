"""What transformers' `assistant_model=` wants: an ordinary causal LM."""

from scripts.rules import causal
from scripts.rules.draft import (
    COMMON,
    HEADS,
    IGNORED,
    REFUSED,
    SILENT,
    Rule,
    never,
    no_vocabulary,
    other_dtype,
)

NEWEST = "5.23"
UTILS = "transformers/generation/utils.py (_validate_assistant), 5.23"
MODELING = "transformers/modeling_utils.py, 5.23"

RULES = (
    *COMMON,
    Rule("heads", HEADS, REFUSED, UTILS, never("transformers decodes with a causal LM, not with heads")),
    Rule("dtype", ("causal",), IGNORED, MODELING, other_dtype),
    Rule("vocabulary", ("causal",), REFUSED, f"{UTILS}: other sizes need both tokenizers", no_vocabulary),
    *causal.RULES,
    Rule("missing-tensor", ("causal",), SILENT, f"{MODELING}: filled at random, with a warning", causal.lacking),
    Rule("shapes", ("causal",), REFUSED, MODELING, causal.wrong_shapes),
    Rule("tied", ("causal",), SILENT, MODELING, causal.untied),
    Rule("tokenizer", ("causal",), SILENT, f"{UTILS}: equal sizes pass for equal tokenizers", causal.tokens),
)  # fmt: skip
