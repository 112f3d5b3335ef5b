"""Which verification rules engines have."""

from collections.abc import Sequence

from decode.common.errors import UserError
from decode.serving.checker import ENGINES
from decode.serving.engine import AcceptanceRule

ENGINE_RULES: dict[str, tuple[AcceptanceRule, ...]] = {
    **{name: engine.accepts for name, engine in ENGINES.items() if engine.accepts},
    "draftsmith": (
        AcceptanceRule("probabilistic", "rule exact"),
        AcceptanceRule("block", "rule block"),
    ),
}


def rules_of(engines: Sequence[str]) -> list[str]:
    """The rules that these engines have. UserError for an unknown engine."""
    for engine in engines:
        if engine not in ENGINE_RULES:
            raise UserError(f"no engine {engine!r}: give some of {', '.join(ENGINE_RULES)}")
    accepts = [x for engine, own in ENGINE_RULES.items() if engine in engines for x in own]
    return list(dict.fromkeys(x.rule for x in accepts))
