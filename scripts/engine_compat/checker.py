"""Checks a draft's files against the rules of a serving engine, without that engine."""

import warnings
from dataclasses import dataclass

from decode.common.errors import UserError
from decode.drafts.target_outline import load_without_target
from scripts.engine_compat.rules import hf, llamacpp, sglang, trtllm, vllm
from scripts.engine_compat.rules.checkpoint import (
    COMMON_RULES,
    REFUSED,
    SILENT,
    Finding,
    Rule,
    check_rules,
    read_draft,
    read_target,
)


@dataclass(frozen=True)
class EngineRules:
    """The rules of one engine."""

    default_version: str
    """The newest version that the rules describe (vLLM: that they were run against)."""
    rules: tuple[Rule, ...]


ENGINES: dict[str, EngineRules] = {
    "vllm": EngineRules(vllm.DEFAULT_VERSION, vllm.RULES),
    "sglang": EngineRules(sglang.DEFAULT_VERSION, sglang.RULES),
    "trtllm": EngineRules(trtllm.DEFAULT_VERSION, trtllm.RULES),
    "llamacpp": EngineRules(llamacpp.DEFAULT_VERSION, llamacpp.RULES),
    "transformers": EngineRules(hf.DEFAULT_VERSION, hf.RULES),
}


DECODER_RULE, UNCHECKED = "decoder", "unchecked"
"""Names of findings that no table of rules has."""


def check_draft_files(
    path: str, engine: str, engine_version: str = "", target: str = ""
) -> list[Finding]:
    """The rules of an engine that a draft's files break, and why this project's decoder refuses it, if it does; [] for
    a draft that both decode as it was trained.

    Without a `target` (folder or Hub name), what depends on it is not checked. UserError for an unknown engine, or
    for files that no engine could open.
    """
    findings = check_engine_rules(path, engine, engine_version, target)
    if any(finding.rule == UNCHECKED for finding in findings):
        return findings
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of what decodes all the same
            load_without_target(path, target)
    except UserError as error:
        findings.append(Finding(DECODER_RULE, REFUSED, str(error), "decode/drafts, which loads it"))
    return findings


def check_engine_rules(
    path: str, engine: str, engine_version: str = "", target: str = ""
) -> list[Finding]:
    """`check_draft_files` by the rules of the engine alone."""
    if engine not in ENGINES:
        raise UserError(f"no engine {engine!r}: give one of {', '.join(ENGINES)}")
    known = ENGINES[engine]
    draft = read_draft(path)
    own = [rule for rule in known.rules if rule not in COMMON_RULES]
    if not any(draft.family in rule.families for rule in own):
        what = f"there are no rules for drafts of family {draft.family!r}: whether {engine} serves them is not known"
        return [Finding(UNCHECKED, SILENT, what, "this project")]
    if target:
        model = read_target(target, tokenizer=draft.family == "causal")
        draft = read_draft(path, model)
    return check_rules(draft, known.rules, engine_version or known.default_version)
