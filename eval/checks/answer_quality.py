"""Scores answers: exact match of numbers, ROUGE-L, whether code passes its tests, and whether an answer is JSON."""

import json
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from eval.checks import sandbox
from eval.metrics.bootstrap import Ratio, paired_difference
from eval.results.report import QualityScore
from eval.tasks.loading import TaskPrompt

NUMBER_PATTERN = re.compile(r"-?\d[\d,]*(?:\.\d+)?")
WORD_PATTERN = re.compile(r"\w+")
CODE_BLOCK_PATTERN = re.compile(r"```(?:[Pp]ython)?[^\n]*\n(.*?)(?:```|\Z)", re.DOTALL)


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
    row = [0] * (len(b) + 1)  # of each beginning of b: the longest with what was read of a
    for x in a:
        corner = 0
        for j, y in enumerate(b, 1):
            above = row[j]
            row[j] = corner + 1 if x == y else max(above, row[j - 1])
            corner = above
    return 2 * row[-1] / (len(a) + len(b)) if row[-1] else 0.0


def is_json(answer: str) -> float:
    """1 if the whole answer is one JSON value, else 0."""
    try:
        json.loads(answer)
    except ValueError:
        return 0.0
    return 1.0


def build_test_program(answer: str, prefix: str, tests: str, stop: Sequence[str]) -> str:
    """The program to run: the answer's fenced code block, else `prefix` with the answer after it; then the tests. The
    answer is cut at its first stop string."""
    fenced = CODE_BLOCK_PATTERN.findall(answer)
    if fenced:
        return f"{prefix}\n\n{fenced[0]}\n\n{tests}\n"
    ends = [answer.find(text) for text in stop if text in answer]
    return f"{prefix}{answer[: min(ends)] if ends else answer}\n\n{tests}\n"


def passes_tests(answer: str, item: TaskPrompt) -> float:
    program = build_test_program(answer, item.prefix, item.reference, item.stop)
    return float(sandbox.run(program).passed)


METRICS: dict[str, tuple[str, Callable[[str, TaskPrompt], float]]] = {
    "number": ("exact match", lambda answer, item: exact_match(answer, item.reference)),
    "rouge-l": ("ROUGE-L", lambda answer, item: rouge_l(answer, item.reference)),
    "code": ("pass@1", passes_tests),
    "json": ("valid JSON", lambda answer, item: is_json(answer)),
}
"""(name in a report, how an answer is scored) by `metric` of a task."""


def score_answer(
    item: TaskPrompt, output_ids: list[int], tokenizer: Any, run_code: bool
) -> float | None:
    """The answer's score, 0 to 1; None if the prompt has no reference, or if it asks for code and `run_code` is off."""
    if not item.metric or (item.metric == "code" and not run_code):
        return None
    return METRICS[item.metric][1](tokenizer.decode(output_ids, skip_special_tokens=True), item)


def compare_answer_quality(
    items: Sequence[TaskPrompt],
    scores: Mapping[tuple[str, str], float | None],
    plain_scores: Mapping[tuple[str, str], float | None],
    seed: int,
) -> list[QualityScore]:
    """One for each metric. Scores are by (task, id) of a prompt, of the method and of plain decoding. Intervals are
    paired for the difference: a lossless method has 0 at temperature 0 and an interval around 0 above it."""
    rows = []
    for kind, (name, _) in METRICS.items():
        keys = [(item.task, item.id) for item in items if item.metric == kind]
        pairs = [(scores.get(key), plain_scores.get(key)) for key in keys]
        both = [(a, b) for a, b in pairs if a is not None and b is not None]
        if not both:
            continue
        ones = [1.0] * len(both)
        own, base = (Ratio(side, ones) for side in zip(*both, strict=True))
        plain, difference = sum(base.numerators) / len(both), paired_difference(own, base, seed)
        rows.append(QualityScore(name, len(both), own.estimate(seed), plain, difference))
    return rows
