"""Finds the fastest draft length, tree and batch size for each domain and temperature, and what was foreseeable.

    python eval/tune.py --target T --methods '[{name: causal, draft: DIR}, {name: ngram}]' --out outputs/tune
    python eval/run.py --config outputs/tune/tuned.yaml

Every setting is timed on the same prompts, interleaved; speed-ups are of rounds, prefill aside. Half of the prompts
predict the other half from two draft lengths alone. Writes tuned.json and tuned.md, tuned.yaml (the first temperature,
all domains, batch 1) and settings/*.yaml (each temperature, batch size and domain) into --out. A run that was stopped
goes on.
"""

import json
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

if not __package__:
    sys.path[0] = str(Path(__file__).resolve().parents[1])

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table as RichTable
from rich.text import Text

from decode import runs
from decode.settings import dump, run_command
from decode.target import load_target
from eval import options, tasks
from eval.checklist import tuned_table
from eval.choose import ALL, cells, chosen, half, predictions, summary
from eval.evaluate import open_journal
from eval.grid import as_markdown
from eval.journal import Journal
from eval.methods import checksums
from eval.metrics import tau
from eval.options import TreeSettings
from eval.roofline import measured_bandwidth
from eval.sweep import PLAIN, Arm, Load, Stage, Swept, sweep
from eval.tuning import Settings, batches, chains, check, load_of, run_settings, trees
from eval.wording import NONE, markdown, percent

SCHEMA = 1


def tune(s: Settings, load: Load, journal: Journal, progress: Progress) -> dict[str, Any]:
    """tuned.json."""
    done: list[tuple[Stage, Swept]] = []
    foreseen, fixed = [], []

    def run(stage: Stage) -> Swept:
        title = f"{stage.name}, temperature {stage.temperature:g}, batch {stage.batch_size}"
        bar = progress.add_task(title, total=len(load.batches(stage.batch_size)))
        swept = sweep(load, stage, journal, lambda: progress.advance(bar))
        done.append((stage, swept))
        return swept

    for temperature in s.temperatures:
        stages = [
            chains(s, temperature),
            *(batches(s, temperature, b) for b in s.batch_sizes if b > 1),
        ]
        for stage in stages:
            foreseen += foresee(s, stage, run(stage))
        if s.tree_nodes:
            stage, expected = trees(s, load, temperature, journal)
            if stage.arms:
                fixed += tree_lengths(stage, run(stage), expected)
    return {
        "schema": SCHEMA,
        "target": {"name": load.target.name, "tokenizer": load.target.fingerprint},
        "tasks": [tasks.version(task) for task in s.tasks],
        "drafts": checksums(s.methods),
        **runs.provenance(),
        "seed": s.seed,
        "bandwidth": journal.once(
            ["bandwidth"], lambda: measured_bandwidth(load.target.decoder.device)
        ),
        "chosen": chosen(done, s.seed),
        "predictions": summary(foreseen),
        "trees": fixed,
        "cells": [cell for stage, swept in done for cell in cells(stage, swept, s.seed)],
        "refused": {arm.label: why for _, swept in done for arm, why in swept.refused.items()},
        "settings": dump(s),
    }


def foresee(s: Settings, stage: Stage, swept: Swept) -> list[dict[str, Any]]:
    """Predictions of every method's chains in a stage, on all prompts and on each domain."""
    found = []
    for method in dict.fromkeys(arm.method for arm in swept.samples if arm != PLAIN):
        by_k = {arm.k: own for arm, own in swept.samples.items() if arm.method == method}
        by_k[0] = swept.samples[PLAIN]
        for task in [ALL, *dict.fromkeys(sample.task for sample in by_k[0])]:
            own = {k: [x for x in xs if task in (ALL, x.task)] for k, xs in by_k.items()}
            place = {
                "method": method, "task": task, "temperature": stage.temperature,
                "batch_size": stage.batch_size,
            }  # fmt: skip
            found += [{**place, **cell} for cell in predictions(own, s.calibrate, s.seed)]
    return found


def tree_lengths(stage: Stage, swept: Swept, expected: dict[Arm, float]) -> list[dict[str, Any]]:
    """Tokens a round of fixed trees: foretold from one half of the prompts, measured on the other."""
    test = half(swept.samples, 1)
    return [
        {
            "method": arm.method,
            "setting": arm.setting,
            "temperature": stage.temperature,
            "predicted_tau": expected[arm],
            "tau": tau(test[arm]),
        }
        for arm in swept.samples
        if arm in expected
    ]


def write_settings(s: Settings, load: Load, tuned: dict[str, Any], out: Path) -> None:
    """A configuration of eval/run.py for each temperature, batch size and domain: every method at its fastest."""
    folder = out / "settings"
    folder.mkdir(exist_ok=True)
    places = dict.fromkeys((c["temperature"], c["batch_size"], c["task"]) for c in tuned["chosen"])
    for place in places:
        temperature, batch, task = place
        own = [
            c for c in tuned["chosen"] if (c["temperature"], c["batch_size"], c["task"]) == place
        ]
        best = max(own, key=lambda c: c["speedup"])
        text = (
            "# command: eval/run.py\n"
            f"# Written by eval/tune.py: {task}, temperature {temperature:g}, batch {batch}. "
            f"Fastest: {best['method']}, {best['setting']}, {best['speedup']:.2f}x in rounds.\n"
            + dump(tuned_settings(s, load, own, temperature, batch, task))
        )
        name = f"T{temperature:g}-B{batch}-{task}.yaml"
        runs.write_atomically(folder / name.replace("/", "_"), text)
        if place == (s.temperatures[0], 1, ALL) or len(places) == 1:
            runs.write_atomically(out / "tuned.yaml", text)


def tuned_settings(
    s: Settings,
    load: Load,
    own: Sequence[dict[str, Any]],
    temperature: float,
    batch: int,
    task: str,
) -> options.Settings:
    """eval/run.py's settings with these choices in them."""
    by_name = {m.name: m for m in s.methods}
    methods = [
        replace(by_name[c["method"]], k=c["k"], tree=TreeSettings(**(c["tree"] or {}))) for c in own
    ]
    holding = {item.task for item in load.items if task in (ALL, item.domain or item.task)}
    return replace(
        run_settings(s), methods=methods, tasks=[x for x in s.tasks if x.name in holding], temperatures=[temperature],
        batch_size=batch, out=f"{s.out}/report",
    )  # fmt: skip


def as_text(tuned: dict[str, Any]) -> str:
    """tuned.md: what was chosen, and how well the other half of the prompts foretold it."""
    foretold = tuned["predictions"]
    error = NONE if foretold["median_error"] is None else percent(foretold["median_error"])
    parts = [
        f"# Tuned speculative decoding of {markdown(tuned['target']['name'])}",
        as_markdown(tuned_table(tuned)),
        "Held out: chosen on one half of the prompts, measured on the other. Median error of predictions from other "
        f"prompts at other draft lengths: {error} (n = {foretold['counted']} that were measured closely enough).",
    ]
    return "\n\n".join(parts) + "\n"


def shown(tuned: dict[str, Any]) -> RichTable:
    """The same table for the console, batch 1 alone."""
    table = tuned_table({"chosen": [c for c in tuned["chosen"] if c["batch_size"] == 1]})
    rich = RichTable(*table.header, title=table.title)
    for row in table.rows:
        rich.add_row(*map(Text, row))  # Text: no markup in names
    return rich


def main(s: Settings) -> None:
    check(s)
    target = load_target(s.target, s.device, s.dtype, s.revision)
    load = load_of(s, target)  # every mistake shows before the folder is touched
    runs.claim(s.out, s)
    out = Path(s.out)
    journal = open_journal(out, s.methods)
    console = Console(stderr=True)
    columns = TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn()
    try:
        with Progress(*columns, TimeRemainingColumn(), console=console) as progress:
            tuned = tune(s, load, journal, progress)
    except KeyboardInterrupt:
        console.print(f"stopped; what is finished is kept in {out}: the same command goes on")
        sys.exit(130)
    runs.write_atomically(
        out / "tuned.json", json.dumps(tuned, indent=1, ensure_ascii=False) + "\n"
    )
    write_settings(s, load, tuned, out)
    runs.write_atomically(out / "tuned.md", as_text(tuned))
    console.print(shown(tuned))
    foretold = tuned["predictions"]
    line = {
        "tuned": str(out / "tuned.json"),
        "counted": foretold["counted"],
        "median_error": foretold["median_error"],
    }
    sys.stdout.write(json.dumps(line) + "\n")


if __name__ == "__main__":
    run_command(main, Settings, __doc__)
