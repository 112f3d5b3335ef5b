"""The checks of train/doctor.py: what is wrong with a sampled set or with prompts, what it costs, what mends it.

    findings.py       the table of all findings: name, severity, cost, advice; and the tally that counts rows by them
    rows.py           a row of a set with its labels, text and messages
    boundary.py       where each reply's mask begins and ends; rows that the template renders otherwise
    answers.py        truncated and looping answers, rows that training cuts; what the template refuses or drops
    lookup.py         how far answers copy: the τ of an n-gram on them
    examination.py    one pass over sampled sets, or over prompts, with all checks
    rendering.py      samples with their mask and all findings, for a terminal and as an HTML page of the same
    report.py         what train/doctor.py does: samples and findings for a reader, the same as JSON

Imports train.settings, train.data, eval.tasks and decode. No weights are loaded.
"""
