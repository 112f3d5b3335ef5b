"""Advice from a report: the recommendation and its reasons, the rules of thumb, and the production checklist."""

from dataclasses import dataclass

from eval.reporting.checklist import build_checklist
from eval.reporting.decision import (
    GOOD_ACCEPTANCE,
    HARMFUL_ACCEPTANCE,
    IDLE_UTILISATION,
    LONG_REPLY_TOKENS,
    MAX_SIZE_RATIO,
    MIN_SIZE_RATIO,
    DecisionInputs,
    collect_decision_inputs,
    decide,
    format_memory,
    format_reply_length,
    format_size_ratio,
    size_ratio,
)
from eval.reporting.formatting import (
    NOT_MEASURED,
    Table,
    escape_markdown,
    format_number,
    format_percent,
    format_speedup,
    table_markdown,
)
from eval.results.report import LEAST_PROMPTS, EvalReport, MethodResult
from eval.results.tuned import TunedReport

RECOMMENDATION_TEXT = {
    "on": "switch it on",
    "off": "leave it off",
    "batch": "use larger batches instead",
    "measure": "measure more before deciding",
}


@dataclass(frozen=True)
class Advice:
    """The advice of one report, as the HTML page and `eval/advise.py` show it."""

    headline: str
    reasons: list[str]
    tables: list[Table]
    checklist: dict[str, list[str]]  # lines by step of the production checklist


def advise(
    report: EvalReport,
    tuned: TunedReport | None = None,
    memory: float | None = None,
    rows: int | None = None,
    length: int | None = None,
) -> Advice:
    """Advice on the fastest draft at the lowest temperature and smallest batch of the report.

    memory: bytes of the device; None takes that of a known GPU's data sheet. rows, length: planned concurrent requests
    and tokens of prompt and reply of each; None takes the report's batch size and mean reply.
    """
    pooled = report.pooled_sections
    fastest = pooled[0].fastest if pooled else None
    if fastest is None:
        voided = any(m.void for m in report.pooled)
        why = "every speed-up is void, measure again" if voided else "no speed-up was measured"
        return Advice(f"Nothing to advise on: {why}.", [], [], {})
    inputs = collect_decision_inputs(report, fastest, memory, rows, length)
    recommendation, reasons = decide(fastest, inputs)
    name = f"{fastest.name} at K = {fastest.k}" if fastest.k else fastest.name
    return Advice(
        headline=f"{RECOMMENDATION_TEXT[recommendation].capitalize()}: {name}, {pooled[0].setting}.",
        reasons=reasons,
        tables=[_rules_table(report, fastest, inputs)],
        checklist=build_checklist(report, fastest, tuned),
    )


def _rules_table(report: EvalReport, m: MethodResult, inputs: DecisionInputs) -> Table:
    """What decides (the first three), then rules of thumb: (rule, wanted, the report's value, whether it holds)."""
    alpha, ratio = m.alpha.value, size_ratio(report, m)
    busy, reply = inputs.utilisation, inputs.reply_tokens
    rate = format_number(m.acceptance_rate.value, 3)
    accepted = f"α {format_number(alpha, 3)}; accepted ÷ drafted {rate}"
    size = "no weights of its own" if m.draft is None else format_size_ratio(ratio)
    rules: list[tuple[str, str, str, bool | None]] = [
        ("prompts", f"at least {LEAST_PROMPTS}", str(m.prompts), m.prompts >= LEAST_PROMPTS),
        ("speed-up", "an interval above 1", format_speedup(m),
         None if m.valid_speedup.ci is None else m.verdict == "faster"),
        ("acceptance that slows down", "not below 50 %", accepted,
         None if alpha is None else alpha >= HARMFUL_ACCEPTANCE),
        ("acceptance to aim for", "at least 60 %", accepted, None if alpha is None else alpha >= GOOD_ACCEPTANCE),
        ("GPU use below 50 %", "yes", format_percent(busy), None if busy is None else busy < IDLE_UTILISATION),
        ("replies above 100 tokens", "yes", format_reply_length(inputs, m),
         None if reply is None else reply > LONG_REPLY_TOKENS),
        ("the draft fits", "yes", format_memory(inputs), inputs.fits),
        ("size of the draft", "1/50 to 1/10 of the target", size,
         None if ratio is None else MIN_SIZE_RATIO <= ratio <= MAX_SIZE_RATIO),
    ]  # fmt: skip
    answers = {None: "missing", True: "yes", False: "no"}
    rows = [[*texts, answers[holds]] for *texts, holds in rules]
    if m.draft is None:
        rows[-1][-1] = NOT_MEASURED
    return Table("Rules", ["rule", "wants", "here", "holds"], rows, prose=True)


def advice_markdown(advice: Advice, target: str) -> str:
    """The advice as Markdown; `target` is the target's name."""
    parts = [
        f"# Speculative decoding of {escape_markdown(target)}: advice",
        f"**{escape_markdown(advice.headline)}** {escape_markdown(' '.join(advice.reasons))}",
        *(table_markdown(table) for table in advice.tables),
        *(
            f"## {step}\n\n" + "\n".join(f"- {escape_markdown(line)}" for line in lines)
            for step, lines in advice.checklist.items()
        ),
    ]
    return "\n\n".join(parts) + "\n"
