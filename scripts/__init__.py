"""Commands around sampling, training, decoding and evaluation; nothing in decode/, eval/ or train/ imports them.

quickstart.sh, reproduce.sh, test.sh, env.sh   the whole pipeline; the README's table; lint and tests; the environment
publish.py        makes a Hub folder of a draft or a sampled set, and uploads it
export.py         writes a draft in another engine's layout
check_draft.py    checks a draft's files against an engine's rules
referee.py        compares vLLM's decoding with ours
audit.py          names what is wrong with a draft that an engine serves
sweep.py          tries settings of a command, in a grid or at random, and ranks them
track_report.py   adds a report to the tracked run of a training
building/         trains the bundled pair and the T5s of docs/seq2seq.md from nothing; tunes a copy of a target
checks/           compares sampled sets; measures the fastest dtype
tables/           tables of documentation pages, from reports
benchmarks/, experiments/, engine_compat/, sweeps/   measurements, comparisons, serving engines, parts of sweep.py

It may import decode/, eval/ and train/.
"""
