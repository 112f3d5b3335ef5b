"""Measures what drafts are worth: acceptance, speed-up and losslessness, for each task and temperature.

    python eval/run.py --config configs/quickstart/eval.yaml
    python eval/run.py --target T --methods '[{name: causal, draft: DIR}, {name: ngram}]' --out outputs/eval

Writes report.json, report.md, report.html and outputs.jsonl into --out; the last line on stdout is JSON. A run that was
stopped, by Ctrl-C or a crash, goes on with the same command.
"""

import json
import sys
from pathlib import Path
from typing import Any

if not __package__:
    sys.path[0] = str(Path(__file__).resolve().parents[1])

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from decode.common import files, run_dir
from decode.common.cli import run_command
from decode.model.loading import load_target
from eval.benchmark import baselines, config
from eval.benchmark.config import EvalConfig
from eval.benchmark.methods import build_methods
from eval.benchmark.timing import TimedOutput
from eval.evaluate import evaluate, open_journal
from eval.reporting.render import terminal_table, write_report
from eval.reporting.token_traces import read_outputs, select_traces
from eval.tasks import loading

EXIT_INTERRUPTED = 130


def format_output_line(method: str, temperature: float, run: TimedOutput) -> str:
    """One line of outputs.jsonl."""
    return json.dumps(
        {
            "task": run.item.task,
            "id": run.item.id,
            "domain": run.item.domain,
            "method": method,
            "temperature": temperature,
            "prompt_ids": run.item.prompt_ids,
            "output_ids": run.output.output_ids,
            "rounds": run.output.rounds,
            "finish_reason": run.output.finish_reason,
            "seconds": run.seconds,
        }
    )


def format_summary_line(report: dict[str, Any], out: Path) -> str:
    """Compact JSON: the best method of each temperature, pooled over tasks, the greedy verdict, how many failed."""
    pooled = [m for m in report["methods"] if m["task"] == "all"]
    best = {}
    for temperature in sorted({m["temperature"] for m in pooled}):
        top = max(
            (m for m in pooled if m["temperature"] == temperature), key=lambda m: m["speedup"]
        )
        shown = ("name", "tau", "alpha", "speedup", "speedup_ci")
        best[f"{temperature:g}"] = {key: top[key] for key in shown}
    exact = [
        m for m in pooled if m["temperature"] == 0 and not m["lossy"] and m["simulated"] is None
    ]
    verdicts = [m["lossless"]["greedy_identical"] for m in exact]
    return json.dumps(
        {
            "report": str(out / "report.json"),
            "best": best,
            "greedy_identical": all(verdicts) if verdicts else None,
            "failed": len({(f["task"], f["id"]) for m in pooled for f in m["failed"]}),
            "law": None if report["law"] is None else report["law"]["passed"],
        }
    )


def main(s: EvalConfig) -> None:
    config.check(s)
    target = load_target(s.target, s.device, s.dtype, s.revision)
    methods = build_methods(s, target)  # every mistake shows before the folder is touched
    baselines.check(s, methods)
    for task in s.tasks:
        loading.load_task_prompts(task, target)
    run_dir.claim_run_dir(s.out, s)
    out = Path(s.out)
    journal = open_journal(out, s.methods)
    columns = TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn()
    try:
        with Progress(*columns, TimeRemainingColumn(), console=Console(stderr=True)) as progress:
            report, lines = evaluate(s, target, journal, progress)
    except KeyboardInterrupt:
        print(
            f"stopped; what is finished is kept in {out}: the same command goes on", file=sys.stderr
        )
        sys.exit(EXIT_INTERRUPTED)
    outputs = out / "outputs.jsonl"
    files.write_atomically(outputs, "".join(format_output_line(*line) + "\n" for line in lines))
    write_report(report, out, select_traces(report, read_outputs(outputs), target.tokenizer))
    Console().print(terminal_table(report))
    print(format_summary_line(report, out))


if __name__ == "__main__":
    run_command(main, EvalConfig, __doc__)
