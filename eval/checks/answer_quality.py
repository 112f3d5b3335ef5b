"""Scores answers: exact match of numbers, ROUGE-L, whether code passes its tests, and whether an answer is JSON."""

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

from eval.checks import sandbox
from eval.metrics.bootstrap import Ratio, paired_difference
from eval.results.report import QualityScore
from eval.tasks.loading import TaskPrompt

NUMBER_PATTERN = re.compile(r"-?\d[\d,]*(?:\.\d+)?")
WORD_PATTERN = re.compile(r"\w+")
CODE_BLOCK_PATTERN = re.compile(r"```(?:[Pp]ython)?[^\n]*\n(.*?)(?:```|\Z)", re.DOTALL)
METRIC_NAMES = {
    "number": "exact match",
    "rouge-l": "ROUGE-L",
    "code": "pass@1",
    "json": "valid JSON",
}
"""Names in a report by `metric` of a task."""


def last_number(text: str) -> float | None:
    """The first number after the last ####, or without #### the last number of the text; None if there is no number."""
    numbers = NUMBER_PATTERN.findall(text.split("####")[-1]) or NUMBER_PATTERN.findall(text)
    index = 0 if "####" in text else -1
    return float(numbers[index].replace(",", "")) if numbers else None


def exact_match(answer: str, reference: str) -> float:
    """1 if `last_number` of both is the same number, else 0."""
    number = last_number(answer)
    return float(number is not None and number == last_number(reference))


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


def is_json(answer: str) -> float:
    """1 if the whole answer is one JSON value, else 0."""
    try:
        json.loads(answer)
    except ValueError:
        return 0.0
    return 1.0


def build_test_program(answer: str, prefix: str, tests: str, stop: Sequence[str]) -> str:
    """The program to run: the answer's fenced code block, else `prefix` with the answer after it; then the tests.

    The answer is cut at its first stop string.
    """
    fenced = CODE_BLOCK_PATTERN.findall(answer)
    if fenced:
        return f"{prefix}\n\n{fenced[0]}\n\n{tests}\n"
    ends = [answer.find(text) for text in stop if text in answer]
    return f"{prefix}{answer[: min(ends)] if ends else answer}\n\n{tests}\n"


def score_answer(
    item: TaskPrompt, output_ids: list[int], tokenizer: Any, run_code: bool
) -> float | None:
    """The answer's score, 0 to 1; None if the prompt has no reference, or if it asks for code and `run_code` is off."""
    if not item.metric or (item.metric == "code" and not run_code):
        return None
    answer = tokenizer.decode(output_ids, skip_special_tokens=True)
    if item.metric == "number":
        return exact_match(answer, item.reference)
    if item.metric == "rouge-l":
        return rouge_l(answer, item.reference)
    if item.metric == "json":
        return is_json(answer)
    return float(
        sandbox.run(build_test_program(answer, item.prefix, item.reference, item.stop)).passed
    )


def compare_answer_quality(
    items: Sequence[TaskPrompt],
    scores: Mapping[tuple[str, str], float | None],
    plain_scores: Mapping[tuple[str, str], float | None],
    seed: int,
) -> list[QualityScore]:
    """One for each metric. Scores are by (task, id) of a prompt, of the method and of plain decoding.

    Intervals are paired for the difference: a lossless method has 0 at temperature 0 and an interval around 0 above it.
    """
    rows = []
    for kind, name in METRIC_NAMES.items():
        keys = [(item.task, item.id) for item in items if item.metric == kind]
        pairs = [(scores.get(key), plain_scores.get(key)) for key in keys]
        both = [(a, b) for a, b in pairs if a is not None and b is not None]
        if not both:
            continue
        ones = [1.0] * len(both)
        own, base = (Ratio(side, ones) for side in zip(*both, strict=True))
        rows.append(
            QualityScore(
                metric=name,
                prompts=len(both),
                value=own.estimate(seed),
                plain=sum(base.numerators) / len(both),
                difference=paired_difference(own, base, seed),
            )
        )
    return rows
