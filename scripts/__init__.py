"""Commands around the three packages, and the shell scripts that run whole pipelines.

quickstart.sh  the whole pipeline on the bundled models      reproduce.sh  the README's table
test.sh        lint, types and tests                         env.sh        makes .venv; sourced by the others
publish.py     folder for the Hugging Face Hub               export.py     a draft in another checkpoint layout
check_draft.py would a serving engine load this draft?       track_report.py  adds a report to its W&B run
readme_table.py  tables of README.md and docs/families.md    build_target.py  trains the bundled models
benchmarks/    speed and memory                              experiments/  comparisons kept in docs/results
engine_compat/ what serving engines do with a draft's files, and vLLM beside this decoder

May import decode, eval and train; nothing imports scripts.
"""
