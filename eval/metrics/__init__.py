"""Numbers from decode records and model files. Nothing here decodes.

- acceptance: τ, α by position, speed-up, also over another engine. latency: of rounds and tokens.
- bootstrap: ratios and their 95 % intervals over prompts.
- stalls: what a pass takes without a stall of the machine.
- distribution_tests: whether two engines accept alike, whether numbers are uniform.
- round_cost: what a round takes and gives; predicts the speed-up of other draft lengths and of whole requests.
- roofline: limits by memory bandwidth and size.

May import decode, and nothing else of eval.
"""
