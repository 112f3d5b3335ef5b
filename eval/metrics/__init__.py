"""Numbers from decode records and model files. Nothing here decodes.

- common: what all metrics share. acceptance: τ, α by position, speed-up. latency: of rounds and tokens.
- bootstrap: 95 % intervals over prompts. permutation_test: whether two engines accept alike.
- stalls: what a pass takes without a stall of the machine.
- speculation_profile: a report's acceptance in the fields that NVIDIA Model-Optimizer proposes.
- ks_test: Kolmogorov-Smirnov tests with their power.
- speedup_model: predicts the speed-up of other draft lengths. speedup_prediction: that of whole requests.
- roofline: limits by memory bandwidth and size.

May import decode, and nothing else of eval.
"""
