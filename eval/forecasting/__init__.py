"""Forecasts of acceptance and speed under an engine's own verification rule, from one measurement along texts.

- forecast: what eval/forecast.py does.
- chains: what the draft gives to the tokens that follow each position of the target's answers.
- rounds: from these the expected rounds and accepted tokens of any K and rule, exactly for the measured text.
- rows: τ, α by position and predicted speed-up with intervals over prompts.
- costs: milliseconds of a round, measured with our engine or with another one, and the best K by batch size from them.
- pages: forecast.json as Markdown.

May import eval.settings, eval.metrics, eval.tasks, eval.benchmark, eval.results and eval.reporting.
docs/forecast.md has the derivation.
"""
