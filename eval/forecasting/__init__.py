"""Forecasts of acceptance and speed under an engine's own verification rule, from one measurement along texts.

- chains: what the draft gives to the tokens that follow each position of the target's answers.
- rounds: from these the expected rounds and accepted tokens of any K and rule, exactly for the measured text.
- rows: τ, α by position and predicted speed-up with intervals over prompts.
- costs: milliseconds of a round by batch, context and K, measured with our engine or with vLLM.
- schedule: throughput against concurrency, and the best K by batch size in the form that engines read.
- vllm_ngram: vLLM's n-gram matches as a draft of ours.
- served: a forecast beside what vLLM accepted.
- engines: which rule each engine has.
- pages: forecast.json as Markdown.

May import eval.metrics, eval.tasks, eval.benchmark and eval.reporting. docs/forecast.md has the derivation.
"""
