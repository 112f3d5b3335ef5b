"""The rules of transformers' `assistant_model=`, which takes causal LMs only."""

from decode.model.loading import load_config
from decode.serving import checks
from decode.serving.engine import Served, ServedDraft, ServingEngine, shell_script
from decode.serving.rules import HEAD_FAMILIES, IGNORED, REFUSED, SILENT, Check, DraftFiles, Rule

UTILS = "transformers/generation/utils.py (_validate_assistant), 5.23"
CANDIDATES = (
    "transformers/generation/candidate_generator.py, 5.23: no length of the assistant is read"
)
MODELING = "transformers/modeling_utils.py, 5.23"


def context(learned: bool, what: str) -> Check:
    """The check of contexts of drafts whose positions are rows of a table, which ends (`learned`), or of the others."""
    short = checks.context_at_least_targets(what)

    def check(d: DraftFiles) -> list[str]:
        is_learned = "rope_parameters" not in load_config(d.path, "draft").to_dict()
        return list(short(d)) if is_learned == learned else []

    return check


RULES = (
    Rule("heads", HEAD_FAMILIES, REFUSED, UTILS, checks.unsupported("assistant_model takes causal LMs, not heads")),
    Rule("dtype", ("causal",), IGNORED, MODELING, checks.dtype_mismatch),
    Rule("vocabulary", ("causal",), REFUSED, f"{UTILS}: other sizes need both tokenizers", checks.vocab_size_mismatch),
    Rule("context", ("causal",), REFUSED, CANDIDATES, context(
        True, "generation ends with an IndexError beyond it"
    )),
    Rule("context-rope", ("causal",), SILENT, CANDIDATES, context(
        False, "it drafts on beyond it, and few tokens are accepted there"
    )),
    *checks.CAUSAL_RULES,
    Rule("missing-tensor", ("causal",), SILENT, f"{MODELING}: random, with a warning", checks.missing_tensors),
    Rule("shapes", ("causal",), REFUSED, MODELING, checks.wrong_shapes),
    Rule("tied", ("causal",), SILENT, MODELING, checks.dropped_lm_head),
    Rule("tokenizer", ("causal",), SILENT, (
        f"{UTILS}: equal sizes pass for equal tokenizers; assistant_tokenizer= translates texts"
    ), checks.wrong_tokenizer),
)  # fmt: skip


def serving_files(d: ServedDraft) -> dict[str, str]:
    """A Python script with assistant_model."""
    revision = f", revision={d.revision!r}" if d.revision else ""
    text = f'''"""Assisted generation with transformers, one prompt at a time."""

from transformers import AutoModelForCausalLM, AutoTokenizer

target = AutoModelForCausalLM.from_pretrained({d.target!r}{revision})
tokenizer = AutoTokenizer.from_pretrained({d.target!r}{revision})
draft = AutoModelForCausalLM.from_pretrained({d.repo!r})
draft.generation_config.num_assistant_tokens = {d.k}
draft.generation_config.num_assistant_tokens_schedule = "constant"
draft.generation_config.assistant_confidence_threshold = 0.0
prompt = tokenizer("Speculative decoding is", return_tensors="pt")
output = target.generate(**prompt, assistant_model=draft, do_sample=False, max_new_tokens=64)
print(tokenizer.decode(output[0]))
'''
    return {"transformers_assistant.py": text}


def tgi_files(d: ServedDraft) -> dict[str, str]:
    words = ["text-generation-launcher", "--model-id", d.repo, "--speculate", str(d.k)]
    return {"tgi.sh": shell_script(words, d.revision)}


TRANSFORMERS = ServingEngine(
    "transformers",
    version="5.23",
    versions="5; batch 1",
    methods={"causal": Served("assistant_model")},
    rules=RULES,
    files=serving_files,
    no_method="assistant_model takes language models, not heads",
)
TGI = ServingEngine(
    "TGI",
    version="3",
    versions="3",
    methods={"medusa": Served("medusa")},
    files=tgi_files,
    note="reads the layout of Medusa's authors: write it first with scripts/export.py --format medusa-legacy and give "
    "its folder as --model-id",
    no_method="speculates with Medusa heads or n-grams only",
)
"""Its files are not checked."""
