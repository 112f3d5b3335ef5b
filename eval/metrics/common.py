"""What every metric shares: the name of the pooled task, and ratios that may have no denominator."""

ALL_TASKS = "all"
"""Stands for all tasks (or domains) together where a report names a task."""
MS_PER_SECOND = 1000.0


def ratio_or_none(numerator: float, denominator: float) -> float | None:
    """None where the denominator is 0: a report holds no NaN."""
    return None if denominator == 0 else float(numerator) / float(denominator)
