"""What another engine makes of a draft, beside ours.

- scoring: τ, α and acceptance rate of an engine's log, pooled and as a mean over requests; whether two logs are apart.
- parity: the same draft and prompts there and here, prompt by prompt (scripts/referee.py, scripts/llamacpp_parity.py).
- audit: which way of reading a draft's files gives what an engine serves (scripts/audit.py). reading: one way, and
  edits of files; suspects: those of each family.
- mistakes: known mistakes of exporters, with the rules that find them and the suspects that name them.

May import eval.metrics, eval.tasks and decode.
"""
