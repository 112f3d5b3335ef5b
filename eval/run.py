"""Measures what drafts are worth: acceptance, speed-up and losslessness, for each task and temperature.

    python eval/run.py --config configs/quickstart/eval.yaml
    python eval/run.py --target T --methods '[{name: causal, draft: DIR}, {name: ngram}]' --out outputs/eval

Writes report.json, report.md, report.html and outputs.jsonl into --out; the last line on stdout is JSON.
"""

import json
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, Literal

if not __package__:
    sys.path[0] = str(Path(__file__).resolve().parents[1])

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from decode import runs
from decode.drafts.base import Draft, draft_sha256, load_draft
from decode.drafts.layerskip import EarlyExitDraft
from decode.drafts.lookup import NgramDraft
from decode.drafts.suffix import SuffixDraft
from decode.sampling import Sampling
from decode.settings import UserError, dump, run_command
from decode.target import Target, load_model, load_target
from decode.tree import DynamicTree
from eval import lossless, metrics, speed, tasks
from eval.quality import compare_targets
from eval.report import terminal_table, write_report
from eval.speed import Method, Run, measure, phase_ms
from eval.tasks import Item, Task

SCHEMA = 1


@dataclass
class TreeSettings:
    """A tree grown where the draft is confident (EAGLE-2); 0 nodes draft a chain."""

    width: int = 4
    """Nodes expanded a level, and children tried of each."""
    nodes: int = 0
    """Drafted nodes that the target verifies."""


@dataclass
class MethodSettings:
    """A way to draft."""

    name: str
    """ngram, suffix and early-exit need no draft; any other name (causal, causal-base, …) needs one."""
    draft: str = ""
    """Folder or hub name of a saved draft."""
    device: str = ""
    """Where the draft runs; empty: beside the target. cpu or cuda:1 keep it off the target's device."""
    k: int = 0
    """Tokens, or levels of a tree, drafted a round; 0 takes the setting `k`."""
    layers: int = 0
    """early-exit: how many of the target's first layers draft."""
    tree: TreeSettings = field(default_factory=TreeSettings)
    """For causal drafts and early-exit."""
    rule: Literal["exact", "block", "typical"] = "exact"
    """exact and block are lossless; typical (Medusa's) is lossy, and the report says so."""


@dataclass
class Comparison:
    """Whose α is higher: a pass of its own, in batches. Acceptance needs no clock, so more prompts than are timed
    make its interval narrower."""

    pairs: list[list[str]] = field(default_factory=list)
    """Pairs [a, b] of methods; the report gives α of a minus α of b with a paired interval."""
    temperature: float = 1.0
    prompts: int = 0
    """Prompts a task; 0 takes all that the task has, whatever its limit."""
    rows: int = 16
    """Prompts decoded together."""


@dataclass
class Settings:
    target: str = "assets/target"
    """The model to be made faster: folder or hub name."""
    revision: str | None = None
    """Commit, tag or branch of a hub target."""
    original: str = ""
    """What the target was before its heads were trained with it (Medusa-2): the report says how far it has moved."""
    methods: list[MethodSettings] = field(default_factory=lambda: [MethodSettings("ngram")])
    """What to compare with plain decoding, which is always measured."""
    tasks: list[Task] = field(
        default_factory=lambda: [Task("code"), Task("prose"), Task("arithmetic")]
    )
    """Prompt sets; code, prose and arithmetic are bundled."""
    temperatures: list[float] = field(default_factory=lambda: [0.0, 1.0])
    """0 is greedy."""
    top_k: int = 0
    """0 keeps all tokens."""
    top_p: float = 1.0
    """1 keeps all tokens."""
    k: int = 4
    """Tokens drafted a round."""
    max_new_tokens: int = 128
    """Longest answer."""
    batch_size: int = 1
    """Prompts decoded together."""
    mode: Literal["eager", "compiled", "graph"] = "eager"
    """compiled is faster after minutes of compilation, for all methods alike; graph needs a GPU."""
    compare: Comparison = field(default_factory=Comparison)
    """Which methods' acceptance to compare."""
    phase_prompts: int = 2
    """Prompts a task for the separate pass that times draft and verify; 0 skips it."""
    device: str = "auto"
    """auto, cpu, cuda, cuda:1, …"""
    dtype: str = "float32"
    """float32, bfloat16 or float16; losslessness to the token is a property of float32."""
    seed: int = 0
    out: str = "outputs/eval"
    """Folder for the report."""
    overwrite: bool = False
    """Delete an earlier report of other settings in `out`."""


def build_methods(s: Settings, target: Target) -> list[Method]:
    names = [m.name for m in s.methods]
    if len(set(names)) < len(names) or "plain" in names:
        raise UserError("give every method its own name; plain is always there")
    for pair in s.compare.pairs:
        if len(pair) != 2 or not set(pair) <= set(names):
            raise UserError(f"compare {pair}: give pairs of the methods {', '.join(names)}")
    return [
        Method(m.name, build_draft(m, target, s.dtype), m.k or s.k, m.rule, s.mode)
        for m in s.methods
    ]


def build_draft(m: MethodSettings, target: Target, dtype: str) -> Draft:
    shape = DynamicTree(m.tree.width, m.tree.nodes) if m.tree.nodes > 0 else None
    if m.draft:
        return load_draft(m.draft, target, m.device or None, dtype, shape)
    if m.name == "ngram":
        return NgramDraft()
    if m.name == "suffix":
        return SuffixDraft()
    if m.name == "early-exit":
        draft = EarlyExitDraft(target, m.layers, shape)
        target.decoder.first_layers(m.layers)  # refuses
        return draft
    raise UserError(f"method {m.name!r} needs `draft`, the folder of a saved draft")


def verification(method: Method, temperature: float) -> str:
    """The rule that a report names."""
    if method.draft is None:
        return "none"
    if method.rule != "exact":
        return method.rule
    shape = "tree" if tree_of(method.draft) else "chain"
    return "greedy" if temperature == 0 and shape == "chain" else shape


def tree_of(draft: Draft | None) -> dict[str, int] | None:
    """Its dynamic tree as the report has it."""
    shaped = draft is not None and isinstance(draft.shape, DynamicTree)
    return asdict(draft.shape) if shaped else None  # type: ignore[union-attr, arg-type]


def entry(
    s: Settings,
    method: Method,
    path: str,
    task: str,
    temperature: float,
    own: Sequence[Run],
    plain: Sequence[Run],
    verdict: dict[str, Any] | None,
    phases: dict[str, float] | None,
) -> dict[str, Any]:
    """One element of report["methods"]."""
    summary = metrics.summarize(
        [r.sample() for r in own], [r.sample() for r in plain], method.k, s.seed
    )
    return {
        "name": method.name,
        "draft": path or None,
        "k": method.k,
        "tree": tree_of(method.draft),
        "temperature": temperature,
        "top_k": s.top_k,
        "top_p": s.top_p,
        "batch_size": s.batch_size,
        "task": task,
        **summary,
        "draft_sha256": draft_sha256(path) if path else None,
        "mode": s.mode,
        "dtype": s.dtype,
        "verification": verification(method, temperature),
        "lossy": method.rule == "typical",
        "predicted_speedup": None,
        "phase_ms": phases,
        "lossless": verdict or {"greedy_identical": None, "prompts": len(own)},
    }


def evaluate(s: Settings, target: Target, progress: Progress) -> tuple[dict[str, Any], list[str]]:
    """(the report, the lines of outputs.jsonl)."""
    plain = Method("plain", None, 0, "exact", s.mode)
    methods = build_methods(s, target)
    paths = {m.name: m.draft for m in s.methods}
    items = {task.name: tasks.load_items(task, target) for task in s.tasks}
    flat = [item for group in items.values() for item in group]
    judged = 0.0 in s.temperatures
    model = load_model(s.target, "target", str(target.decoder.device), s.dtype, s.revision)
    bar = progress.add_task("references", total=len(flat))
    references = {}
    for item in flat if judged else []:
        references[item.task, item.id] = lossless.reference_greedy(
            model, item.prompt_ids, s.max_new_tokens, target
        )
        progress.advance(bar)
    entries, lines = [], []
    for temperature in s.temperatures:
        sampling = Sampling(temperature, s.top_k, s.top_p)
        bar = progress.add_task(
            f"temperature {temperature:g}",
            total=-(-len(flat) // s.batch_size) * (len(methods) + 2),
        )
        runs_of = measure(
            target, methods, flat, sampling, s.max_new_tokens, s.batch_size, s.seed,
            partial(progress.advance, bar),
        )  # fmt: skip
        timed = [item for group in items.values() for item in group[: s.phase_prompts]]
        for method in [plain, *methods]:
            phases = (
                phase_ms(target, method, timed, sampling, s.max_new_tokens, s.seed)
                if timed
                else None
            )
            for task in ["all", *items]:
                own = [r for r in runs_of[method.name] if task in ("all", r.item.task)]
                base = [r for r in runs_of["plain"] if task in ("all", r.item.task)]
                verdict = (
                    _verdict(target, model, own, references, method.k) if temperature == 0 else None
                )
                entries.append(
                    entry(
                        s, method, paths.get(method.name, ""), task, temperature, own, base, verdict,
                        phases if task == "all" else None,
                    )
                )  # fmt: skip
            lines += [_output_line(method.name, temperature, run) for run in runs_of[method.name]]
    report = {
        "schema": SCHEMA,
        "target": {
            "name": target.name,
            "revision": target.revision,
            "tokenizer": target.fingerprint,
        },
        "tasks": [tasks.version(task) for task in s.tasks],
        **runs.provenance(),
        "seed": s.seed,
        "baseline": {key: entries[0][key] for key in ("tokens_per_second", "ms_per_token")},
        "methods": entries,
        "comparisons": compare(s, target, methods, progress),
    }
    if s.original:
        original = load_target(s.original, s.device, s.dtype)
        report["target_quality"] = compare_targets(
            original, target, flat, s.max_new_tokens, s.compare.rows, s.seed
        )
    return report, lines


def compare(
    s: Settings, target: Target, methods: Sequence[Method], progress: Progress
) -> list[dict[str, Any]]:
    """The report's comparisons: each pair on all tasks together and on each."""
    wanted = [m for m in methods if any(m.name in pair for pair in s.compare.pairs)]
    if not wanted:
        return []
    every = [replace(task, limit=s.compare.prompts) for task in s.tasks]
    items = [item for task in every for item in tasks.load_items(task, target)]
    bar = progress.add_task("comparisons", total=len(wanted) * len(items))
    sampling = Sampling(s.compare.temperature, s.top_k, s.top_p)
    samples = {
        m.name: speed.untimed(
            target, m, items, sampling, s.max_new_tokens, s.compare.rows, s.seed,
            partial(progress.advance, bar),
        )
        for m in wanted
    }  # fmt: skip
    found = []
    for a, b in s.compare.pairs:
        for task in ["all", *(task.name for task in s.tasks)]:
            own, other = ([x for x in samples[name] if task in ("all", x.task)] for name in (a, b))
            difference = metrics.compare_alpha(own, other, s.k, s.seed)
            found.append(
                {"a": a, "b": b, "task": task, "temperature": s.compare.temperature, **difference}
            )
    return found


def _verdict(
    target: Target,
    model: Any,
    own: Sequence[Run],
    references: dict[tuple[str, str], list[int]],
    k: int,
) -> dict[str, Any]:
    items: list[Item] = [run.item for run in own]
    return lossless.judge(
        target,
        model,
        items,
        [references[item.task, item.id] for item in items],
        [run.output.output_ids for run in own],
        k,
    )


def _output_line(method: str, temperature: float, run: Run) -> str:
    return json.dumps(
        {
            "task": run.item.task,
            "id": run.item.id,
            "method": method,
            "temperature": temperature,
            "prompt_ids": run.item.prompt_ids,
            "output_ids": run.output.output_ids,
            "rounds": run.output.rounds,
            "finish_reason": run.output.finish_reason,
            "seconds": run.seconds,
        }
    )


def summary_line(report: dict[str, Any], out: Path) -> str:
    """Compact JSON: the best method of each temperature, pooled over tasks, and the greedy verdict."""
    pooled = [m for m in report["methods"] if m["task"] == "all"]
    best = {}
    for temperature in sorted({m["temperature"] for m in pooled}):
        top = max(
            (m for m in pooled if m["temperature"] == temperature), key=lambda m: m["speedup"]
        )
        shown = ("name", "tau", "alpha", "speedup", "speedup_ci")
        best[f"{temperature:g}"] = {key: top[key] for key in shown}
    exact = [m for m in pooled if m["temperature"] == 0 and not m["lossy"]]
    verdicts = [m["lossless"]["greedy_identical"] for m in exact]
    return json.dumps(
        {
            "report": str(out / "report.json"),
            "best": best,
            "greedy_identical": all(verdicts) if verdicts else None,
        }
    )


def main(s: Settings) -> None:
    if not s.temperatures or not s.tasks:
        raise UserError("give at least one temperature and one task")
    for temperature in s.temperatures:
        Sampling(temperature, s.top_k, s.top_p)  # refuses
    whole = {"k": s.k, "max_new_tokens": s.max_new_tokens, "batch_size": s.batch_size}
    for name, value in {**whole, "compare.rows": s.compare.rows}.items():
        if value < 1:
            raise UserError(f"{name} must be at least 1")
    names = [task.name for task in s.tasks]
    if len(set(names)) < len(names) or "all" in names:
        raise UserError(
            f"tasks {', '.join(names)}: give every task its own name; `all` is the pooled one"
        )
    target = load_target(s.target, s.device, s.dtype, s.revision)
    build_methods(s, target)  # every mistake in the settings shows before the folder is touched
    for task in s.tasks:
        tasks.load_items(task, target)
    runs.claim(s.out, s)
    console = Console(stderr=True)
    with Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeRemainingColumn(),
        console=console,
    ) as progress:
        report, lines = evaluate(s, target, progress)
    out = Path(s.out)
    report["settings"] = dump(s)
    write_report(report, out)
    runs.write_atomically(out / "outputs.jsonl", "\n".join(lines) + "\n")
    Console().print(terminal_table(report))
    print(summary_line(report, out))


if __name__ == "__main__":
    run_command(main, Settings, __doc__)
