"""Forecasts acceptance and speed of a draft as an engine would serve it, for every K, from one measurement.

    python eval/forecast.py --target T --draft DIR --out outputs/forecast
    python eval/forecast.py --target T --draft DIR --costs vllm --vllm_python P --batches '[1, 4, 16]'

The target writes its answers once at each temperature, and the draft is asked behind each of their tokens for a chain
of the largest K. The rounds that an engine would run along these answers follow exactly, for every smaller K and for
each engine's verification rule (docs/forecast.md). Speed-ups and the best K by batch size come from the milliseconds of
rounds: --costs measures them with our engine or with vLLM, or reads them from a file. Writes forecast.json and
forecast.md into --out; the same command goes on with a run that was stopped.

Drafts: chains of causal, EAGLE, Medusa, MTP, early-exit and layerskip drafts; `ngram` and `vllm-ngram` need no folder.
"""

import sys
from pathlib import Path

if not __package__:
    sys.path[0] = str(Path(__file__).resolve().parents[1])

from decode.common.command import run_command
from eval.settings.evaluation import ForecastConfig


def main(s: ForecastConfig) -> None:
    from eval.forecasting.forecast import write_forecast  # loads torch: --help does without

    write_forecast(s)


if __name__ == "__main__":
    run_command(main, ForecastConfig, __doc__)
