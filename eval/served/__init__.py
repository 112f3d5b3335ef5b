"""What another engine makes of a draft, beside ours.

- logs: reads outputs.jsonl and /metrics dumps; scoring: τ, α and acceptance rate, pooled and as a mean over requests,
  and whether two logs are apart; rescoring: what eval/rescore.py does with it.
- parity: the same draft and prompts there and here, prompt by prompt. referee, llamacpp: what scripts/referee.py and
  scripts/llamacpp_parity.py do.
- audit: which way of reading a draft's files gives what an engine serves; auditing: what scripts/audit.py does.
  reading: one way, and edits of files; suspects: those of each family.

May import eval.settings, eval.metrics, eval.tasks, eval.reporting and decode.
"""
