"""What another engine makes of a draft, beside ours.

- scoring: τ, α and acceptance rate of an engine's log, pooled and as a mean over requests.
- comparison: two logs of the same prompts: difference, interval, p-value and power.

May import eval.metrics, eval.tasks, eval.engine_logs and decode.
"""
