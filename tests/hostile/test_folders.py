"""Output folders that hold something else, or an input of the run, or are in use: nothing in them is lost."""
# ruff: noqa: E501 (a case is one row of its table)

from dataclasses import replace
from pathlib import Path

import pytest

from tests.hostile.case import Case, check, difference, params, snapshot
from tests.hostile.files import copy, folder, link, remove, write
from tests.hostile.lab import EARLIER_RUNS, Lab

THESIS = write("out/thesis.tex", "\\documentclass{article}", "a thesis")
DEEPER = write("out/notes/day1.txt", "x", "notes")
RUNS = tuple(EARLIER_RUNS)


def others() -> list[Case]:
    """An earlier run that is another command's, with and without --overwrite."""
    found = []
    for command in RUNS:
        for other, name in EARLIER_RUNS.items():
            if other != command:
                steps = (remove("out"), copy(name, "out"))
                found.append(Case(command, "", (other, "--out"), steps))
                found.append(Case(command, "--overwrite false", (other, "--out"), steps, slow=True))
    return found


FOREIGN = [
    *(Case(command, "", "thesis.tex", (THESIS,)) for command in RUNS),
    *(Case(command, "", "day1.txt", (DEEPER,)) for command in RUNS),
    *(Case(command, "", "photos", (link("out/photos", "/usr"),)) for command in RUNS),
    *(Case(command, "", "out", (remove("out"), THESIS)) for command in RUNS),
    *(Case(command, "--overwrite false", "out", (remove("out"), THESIS)) for command in RUNS),
    *(Case(command, "--overwrite false --resume true", "out", (remove("out"), THESIS)) for command in RUNS[:3]),
    *(Case(command, "", "out", (remove("out/run.yaml"),)) for command in RUNS),
    *(Case(command, "--overwrite false --seed 5", ("seed", "--overwrite"), ()) for command in RUNS),
    *(Case(command, "--out $tmp/one --overwrite true", "one", (folder("one"), write("one/thesis.tex", "x"))) for command in RUNS),
    *(Case(command, "--out $tmp/..", "out") for command in RUNS),
    *(Case(command, "--out /", "/") for command in RUNS),
    *(Case(command, "--out .", "out") for command in RUNS),
    Case("scripts/export.py", "", "out", (THESIS,)),
    Case("scripts/publish.py", "", "out", (THESIS,)),
    Case("scripts/publish.py", "", "out", (write("out/draftsmith.json", "{}"), THESIS)),
    Case("scripts/publish.py", "--out $tmp/..", "out"),
    Case("scripts/export.py", "--out $lab/eagle3", "eagle3"),
    Case("scripts/publish.py", "--out $lab/eagle3/below", "eagle3"),
    Case("scripts/publish.py", "--draft '' --samples $lab/samples --out $lab/samples", "samples"),
]  # fmt: skip

SOURCES = "--sources '[{kind: file, path: $tmp/out/prompts.jsonl}]'"
INPUTS = [
    Case("train/sample.py", SOURCES, "prompts.jsonl", (copy("prompts.jsonl", "out/prompts.jsonl"),)),
    Case("train/sample.py", "--draft $tmp/out/draft", "draft", (copy("causal", "out/draft"),)),
    Case("train/sample.py", "--target $tmp/out/target", "target", (copy("target", "out/target"),)),
    Case("train/sample.py", "--decontaminate $tmp/out/d.txt", "d.txt", (write("out/d.txt", "abc"),)),
    Case("train/write_prompts.py", "--target $tmp/out/chat", "chat", (copy("chat", "out/chat"),)),
    Case("train/write_prompts.py", "--target $tmp/out --overwrite false", "out", (remove("out"), copy("chat", "out"))),
    Case("train/distill.py", "--data $tmp/out", "out", (remove("out"), copy("samples", "out"))),
    Case("train/distill.py", "--data $tmp/out/samples", "samples", (copy("samples", "out/samples"),)),
    Case("train/distill.py", "--draft.init $tmp/out", "out"),
    Case("train/distill.py", "--draft.init $tmp/out/draft", "draft", (copy("draft", "out/draft"),)),
    Case("train/distill.py", "--features $tmp/out/features", "features", (folder("out/features"), write("out/features/x.bin", "x"))),
    Case("train/distill.py", "--target $tmp/out/target", "target", (copy("target", "out/target"),)),
    Case("eval/run.py", "--methods '[{name: causal, draft: $tmp/out/draft}]'", "draft", (copy("causal", "out/draft"),)),
    Case("eval/run.py", "--tasks '[{name: own, path: $tmp/out/prompts.txt}]'", "prompts.txt", (copy("prompts.txt", "out/prompts.txt"),)),
    Case("eval/run.py", "--original $tmp/out/target", "target", (copy("target", "out/target"),)),
    Case("eval/tune.py", "--methods '[{name: causal, draft: $tmp/out/draft}]'", "draft", (copy("causal", "out/draft"),)),
    Case("eval/tune.py", "--tasks '[{name: own, path: $tmp/out/prompts.txt}]'", "prompts.txt", (copy("prompts.txt", "out/prompts.txt"),)),
    Case("eval/advise.py", "--report $tmp/r.json --out $tmp/r.json", "r.json", (copy("report/report.json", "r.json"),)),
    Case("eval/rescore.py", "--log $tmp/a.jsonl --json $tmp/a.jsonl", "--json", (write("a.jsonl", "{}"),)),
    Case("scripts/readme_table.py", "--report $tmp/r.json --readme $tmp/r.json", "r.json", (copy("report/report.json", "r.json"),)),
]  # fmt: skip


def cases() -> list[Case]:
    """All of them; eval/tune.py opens its folder as eval/run.py does."""
    found = [*others(), *FOREIGN, *INPUTS]
    return [replace(case, slow=case.slow or case.command == "eval/tune.py") for case in found]


@pytest.mark.parametrize("case", params(*cases()))
def test_what_is_not_the_runs_own_is_kept(case: Case, lab: Lab, tmp_path: Path) -> None:
    inner = tmp_path / "inner"  # so that --out .. is a folder of the case's own
    inner.mkdir()
    (tmp_path / "outside").write_text("kept")
    before = snapshot(lab.folder)
    check(case, lab, inner)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["inner", "outside"]
    assert difference(before, snapshot(lab.folder)) == []
