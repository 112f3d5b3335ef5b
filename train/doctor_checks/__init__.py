"""The checks of train/doctor.py: what is wrong with a sampled set or with prompts, what it costs, what mends it.

    findings.py         DataFinding, its severity, and the counter of rows that have a defect
    template.py         what a chat template does, found by rendering placeholders; a row's text back into messages
    seen_rows.py        a row of a set with its labels, text and messages
    boundary.py         where each reply's mask begins and ends; rows that the template renders otherwise
    answers.py          truncated, short and looping answers, special tokens in them, rows that training cuts
    prompt_overlap.py   repeated and nearly repeated prompts, prompts that are evaluated on
    chat_features.py    thinking, tools, system messages, several turns
    text_mix.py         scripts, code, digits, lengths, sources: facts, and what is remarkable in them
    vocab_coverage.py   how much of the labels a reduced draft vocabulary covers
    examination.py      one pass over sampled sets, or over prompts, with all checks
    rendering.py        samples with their mask and all findings, for a terminal and as an HTML page (doctor.html.j2)

Imports train.data, eval.reporting and decode. No weights are loaded.
"""
