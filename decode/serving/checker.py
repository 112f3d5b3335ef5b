"""Checks a draft's files against the rules of a serving engine, without that engine."""

import warnings

from decode.common.errors import UserError
from decode.serving import rules
from decode.serving.engine import ServingEngine
from decode.serving.hf_engine import TGI, TRANSFORMERS
from decode.serving.llamacpp_engine import LLAMACPP
from decode.serving.rules import REFUSED, SILENT, Finding
from decode.serving.sglang_engine import SGLANG
from decode.serving.target_outline import load_without_target
from decode.serving.trtllm_engine import TRTLLM
from decode.serving.vllm_engine import TRITON, VLLM

ENGINES: dict[str, ServingEngine] = {
    "vllm": VLLM,
    "sglang": SGLANG,
    "trtllm": TRTLLM,
    "llamacpp": LLAMACPP,
    "transformers": TRANSFORMERS,
}
"""The engines whose rules are known, by their names in settings."""
ENGINES_OF_CARD = (VLLM, TRITON, SGLANG, TRTLLM, LLAMACPP, TGI, TRANSFORMERS)
"""Those that a published draft's card has files for, in its order."""

DECODER_RULE, UNCHECKED = "decoder", "unchecked"  # names of findings that no table of rules has


def check_draft_files(
    path: str, engine: str, engine_version: str = "", target: str = ""
) -> list[Finding]:
    """The rules of an engine that a draft's files break, and why this project's decoder refuses it, if it does; [] for
    a draft that both decode as it was trained. Without a `target` (folder or Hub name), what depends on it is not
    checked. UserError for an unknown engine, or for files that no engine could open."""
    findings = check_engine_rules(path, engine, engine_version, target)
    if all(finding.rule != UNCHECKED for finding in findings):
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # of what decodes all the same
                load_without_target(path, target)
        except UserError as error:
            source = "decode/drafts, which loads it"
            findings.append(Finding(DECODER_RULE, REFUSED, str(error), source))
    return findings


def check_engine_rules(
    path: str, engine: str, engine_version: str = "", target: str = ""
) -> list[Finding]:
    """`check_draft_files` by the rules of the engine alone."""
    if engine not in ENGINES:
        raise UserError(f"no engine {engine!r}: give one of {', '.join(ENGINES)}")
    known = ENGINES[engine]
    draft = rules.read_draft(path)
    if not any(draft.family in rule.families for rule in known.rules):
        what = f"there are no rules for drafts of family {draft.family!r}: whether {engine} serves them is not known"
        return [Finding(UNCHECKED, SILENT, what, "this project")]
    if target:
        model = rules.read_target(target, tokenizer=draft.family == "causal")
        draft = rules.read_draft(path, model)
    wanted = (*rules.COMMON_RULES, *known.rules)
    return rules.check_rules(draft, wanted, engine_version or known.version)
