"""How τ and α on held-out prompts grow with the training data, what twice the data would give, and when to stop.

    python scripts/lab/data_curve.py --config configs/compare/data_curve.yaml

Trains one draft on each of several nested parts of a sampled set (for each seed the parts of another permutation of its
rows) and decodes the evaluation prompts with it. A saturating power law is fitted to the results
(eval/scaling/power_law.py) and says what twice the data would give: "stop", "go on" or "not clear", by `worth`.

Each part is read `passes` times, however large it is. With equal steps (`steps`) small parts would be read many times
more often than large ones and overfit, and the curve would show that. But a few rows make too few steps for the
learning rate to warm up and the weights to move, so no run has fewer than `least_steps`. All runs share the stored
features of the whole set (--distill.features).

Stopped at any point, the same command goes on; finished points are kept. --out receives data_curve.json, data_curve.md,
tau.svg, alpha.svg and the drafts. eval/report.py and scripts/publish.py take the JSON as --data_curve. The last line is
JSON.
"""

import sys
from pathlib import Path

if not __package__:
    sys.path[0] = str(Path(__file__).resolve().parents[2])

from decode.common.command import run_command
from scripts.lab.settings import DataCurveConfig


def main(s: DataCurveConfig) -> None:
    from scripts.lab.curve_runs import measure_curve  # loads torch: --help does without

    measure_curve(s)


if __name__ == "__main__":
    run_command(main, DataCurveConfig, __doc__)
