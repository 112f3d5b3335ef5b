"""Checks a draft's files against the rules of a serving engine, without that engine."""

from dataclasses import dataclass

from decode.common.errors import UserError
from scripts.engine_compat.rules import hf, sglang, trtllm, vllm
from scripts.engine_compat.rules.checkpoint import (
    COMMON_RULES,
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
    "transformers": EngineRules(hf.DEFAULT_VERSION, hf.RULES),
}


def check_draft_files(
    path: str, engine: str, engine_version: str = "", target: str = ""
) -> list[Finding]:
    """The rules of an engine that a draft's files break; [] for a draft that it serves as it was trained.

    Without a `target` (folder or Hub name), what depends on it is not checked. UserError for an unknown engine, or
    for files that no engine could open.
    """
    if engine not in ENGINES:
        raise UserError(f"no engine {engine!r}: give one of {', '.join(ENGINES)}")
    known = ENGINES[engine]
    draft = read_draft(path)
    own = [rule for rule in known.rules if rule not in COMMON_RULES]
    if not any(draft.family in rule.families for rule in own):
        what = f"there are no rules for drafts of family {draft.family!r}: whether {engine} serves them is not known"
        return [Finding("unchecked", SILENT, what, "this project")]
    if target:
        model = read_target(target, tokenizer=draft.family == "causal")
        draft = read_draft(path, model)
    return check_rules(draft, known.rules, engine_version or known.default_version)
