"""Is an answer right? Exact match of numbers, ROUGE-L, and whether code passes its tests."""

import re
from collections.abc import Sequence
from typing import Any

from eval.benchmark.timing import TimedOutput
from eval.checks import sandbox
from eval.metrics import bootstrap

NUMBER_PATTERN = re.compile(r"-?\d[\d,]*(?:\.\d+)?")
WORD_PATTERN = re.compile(r"\w+")
CODE_BLOCK_PATTERN = re.compile(r"```(?:[Pp]ython)?[^\n]*\n(.*?)(?:```|\Z)", re.DOTALL)
METRIC_NAMES = {"number": "exact match", "rouge-l": "ROUGE-L", "code": "pass@1"}
"""What a report calls the metrics of recipes."""


def last_number(text: str) -> float | None:
    """The number behind the last #### if there is one, else the last of the text; thousands may have commas."""
    found = NUMBER_PATTERN.findall(text.split("####")[-1]) or NUMBER_PATTERN.findall(text)
    place = 0 if "####" in text else -1
    return float(found[place].replace(",", "")) if found else None


def exact_match(answer: str, reference: str) -> float:
    """1 if both end with the same number, else 0."""
    own = last_number(answer)
    return float(own is not None and own == last_number(reference))


def rouge_l(answer: str, reference: str) -> float:
    """F1 of the longest common subsequence of words (Lin 2004): lower case, no stemming; 0 if either is empty."""
    a, b = WORD_PATTERN.findall(answer.lower()), WORD_PATTERN.findall(reference.lower())
    common = _lcs_length(a, b)
    return 2 * common / (len(a) + len(b)) if common else 0.0


def _lcs_length(a: Sequence[str], b: Sequence[str]) -> int:
    """Length of the longest common subsequence, in O(len(a) · len(b))."""
    row = [0] * (len(b) + 1)
    for x in a:
        corner = 0
        for j, y in enumerate(b, 1):
            above = row[j]
            row[j] = corner + 1 if x == y else max(above, row[j - 1])
            corner = above
    return row[-1]


def build_test_program(answer: str, prefix: str, tests: str, stop: Sequence[str]) -> str:
    """What is run: the answer's fenced block if it has one, else the `prefix` it continues; then the tests.

    The stop string that ended an answer is no part of it.
    """
    fenced = CODE_BLOCK_PATTERN.findall(answer)
    if fenced:
        return f"{prefix}\n\n{fenced[0]}\n\n{tests}\n"
    ends = [answer.find(text) for text in stop if text in answer]
    return f"{prefix}{answer[: min(ends)] if ends else answer}\n\n{tests}\n"


def score_answer(run: TimedOutput, tokenizer: Any, run_code: bool) -> float | None:
    """Between 0 and 1; None where the prompt has no reference, or code may not be run."""
    item = run.item
    if not item.metric or (item.metric == "code" and not run_code):
        return None
    answer = tokenizer.decode(run.output.output_ids, skip_special_tokens=True)
    if item.metric == "number":
        return exact_match(answer, item.reference)
    if item.metric == "rouge-l":
        return rouge_l(answer, item.reference)
    return float(
        sandbox.run(build_test_program(answer, item.prefix, item.reference, item.stop)).passed
    )


def compare_answer_quality(
    runs: Sequence[TimedOutput],
    plain: Sequence[TimedOutput],
    scores: dict[int, float | None],
    seed: int,
) -> list[dict[str, Any]]:
    """The `quality` field of a report: for each metric {metric, prompts, value, ci, plain, difference, difference_ci}.

    `scores` are by id() of the run. Intervals are 95 % bootstrap over prompts, the difference's paired: for a lossless
    method it is 0 at temperature 0 and holds 0 above.
    """
    by_prompt = {(r.item.task, r.item.id): scores.get(id(r)) for r in plain}
    found = []
    for kind, name in METRIC_NAMES.items():
        pairs = [
            (own, other)
            for r in runs
            if r.item.metric == kind
            and (own := scores.get(id(r))) is not None
            and (other := by_prompt.get((r.item.task, r.item.id))) is not None
        ]
        if not pairs:
            continue
        own_scores, others = [a for a, _ in pairs], [b for _, b in pairs]
        ones = [1.0] * len(pairs)
        value, base = sum(own_scores) / len(pairs), sum(others) / len(pairs)
        found.append(
            {
                "metric": name,
                "prompts": len(pairs),
                "value": value,
                "ci": bootstrap.ratio_interval(own_scores, ones, seed),
                "plain": base,
                "difference": value - base,
                "difference_ci": bootstrap.paired_difference_interval(
                    own_scores, ones, others, ones, seed
                ),
            }
        )
    return found
