"""Compares a forecast of eval/forecast.py with what vLLM then accepts, and how fast it is.

    python scripts/experiments/forecast_check.py --target T --drafts '[DIR, vllm-ngram]' --vllm_python P

For each draft the forecast is made from our measurement with the largest K; vLLM then serves the same prompts, greedily
and at a temperature, with each K of --k and with its default rule (and once each with drawn drafts at the largest K).
Milliseconds of vLLM's rounds come from other prompts (the last --calibration ones) and other K (--calibration_k).
Answers do not end at EOS, so that all are equally long. Writes forecast_check.json into --out; each engine's answers
are kept, and the same command goes on with a run that was stopped.
"""

import json
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

if not __package__:
    sys.path[0] = str(Path(__file__).resolve().parents[2])

from rich.console import Console
from rich.table import Table

from decode.common import files, provenance, run_dir
from decode.common.command import run_command
from decode.common.errors import UserError
from decode.common.ranges import Count, DraftLength, Seed, Temperature
from decode.drafts.base import Draft, draft_sha256
from decode.model.loading import Target, load_target
from eval.benchmark import vllm_client
from eval.benchmark.journal import Journal, open_journal
from eval.forecast import ForecastConfig, load, measure_texts, speculative_config
from eval.forecasting.chains import LOOKUPS
from eval.forecasting.rounds import RULES, TextChains
from eval.forecasting.served import Answer, compare, served_figures, summarize, vllm_cost
from eval.tasks.loading import Task, TaskPrompt, load_fitting_prompts, task_version

COMMAND = "scripts/experiments/forecast_check.py"
OWNED_FILES = ("journal.jsonl", "forecast_check.json")


@dataclass
class ForecastCheckConfig:
    target: str = "assets/target"
    drafts: list[str] = field(default_factory=lambda: ["assets/draft", "vllm-ngram"])
    """Folders of drafts, or vllm-ngram."""
    k: list[DraftLength] = field(default_factory=lambda: [2, 4])
    """Draft lengths that vLLM serves for the comparison."""
    calibration_k: list[DraftLength] = field(default_factory=lambda: [1, 5])
    """Two draft lengths whose rounds are timed on other prompts: milliseconds of others are on a line through them."""
    temperatures: list[Temperature] = field(default_factory=lambda: [0.0, 1.0])
    tasks: list[Task] = field(
        default_factory=lambda: [Task(x, limit=5) for x in ("code", "prose", "arithmetic")]
    )
    calibration: Count = 3
    """Prompts for the milliseconds of rounds, the last ones of the tasks in turn; they are not compared."""
    answers: Count = 2
    """Answers to each prompt in the forecast above temperature 0; vLLM gives one."""
    max_new_tokens: Count = 48
    vllm_python: str = ""
    """Interpreter with vLLM; empty: $VLLM_PYTHON or .venv-vllm/bin/python."""
    seed: Seed = 0
    out: str = "outputs/forecast_check"
    allow_changed: bool = False
    """Go on in `out` although the target (its weights or dtype) or a draft is another one than before. Right if you
    know that both decode alike."""
    overwrite: bool = False


def split_prompts(
    items: Sequence[TaskPrompt], calibration: int
) -> tuple[list[TaskPrompt], list[TaskPrompt]]:
    """(prompts that are compared, prompts for the costs): one of each task in turn, from its end."""
    by_task: dict[str, list[TaskPrompt]] = {}
    for item in items:
        by_task.setdefault(item.task, []).append(item)
    tasks = list(by_task.values())
    apart = [tasks[i % len(tasks)].pop() for i in range(calibration) if tasks[i % len(tasks)]]
    compared = [item for task in tasks for item in task]
    if not compared:
        raise UserError("calibration takes all prompts: give fewer, or tasks with more prompts")
    return compared, apart


def forecast_config(s: ForecastCheckConfig, draft: str) -> ForecastConfig:
    """The settings of eval/forecast.py for one draft."""
    return ForecastConfig(
        target=s.target,
        draft=draft,
        engines=["vllm"],
        k=s.k,
        temperatures=s.temperatures,
        answers=s.answers,
        max_new_tokens=s.max_new_tokens,
        seed=s.seed,
    )


@dataclass(frozen=True)
class Served:
    """One engine of vLLM: its draft ("" for plain decoding), K and how it drafts."""

    draft: str
    k: int
    drawn: bool = False

    @property
    def key(self) -> list[Any]:
        return ["served", self.draft, self.k, self.drawn]


def engines(s: ForecastCheckConfig, draft: str) -> list[Served]:
    """The engines that one draft is compared with, and plain decoding."""
    found = [Served("", 0), *(Served(draft, k) for k in sorted({*s.k, *s.calibration_k}))]
    if draft != "vllm-ngram" and max(s.temperatures) > 0:
        found.append(Served(draft, max(s.k), drawn=True))
    return found


def requests(
    s: ForecastCheckConfig,
    one: Served,
    compared: Sequence[TaskPrompt],
    apart: Sequence[TaskPrompt],
) -> tuple[list[float], list[list[int]], int]:
    """(temperatures, prompts, how many of the prompts are for the costs) of one engine.

    At each temperature the first prompt is not counted, then come those for the costs, then those that are compared.
    """
    timed = one.k in (0, *s.calibration_k) and not one.drawn
    costs = [item.prompt_ids for item in apart] if timed else []
    others = [item.prompt_ids for item in compared] if one.k in (0, *s.k) else []
    temperatures = [t for t in s.temperatures if t > 0 or not one.drawn]
    return temperatures, [apart[0].prompt_ids, *costs, *others], len(costs)


def build_job(
    s: ForecastCheckConfig, one: Served, temperatures: list[float], prompts: list[list[int]]
) -> dict[str, Any]:
    """The job of one engine for vLLM."""
    config = None
    if one.draft:
        config = speculative_config(forecast_config(s, one.draft), one.k)
        config |= {"draft_sample_method": "probabilistic"} if one.drawn else {}
    return vllm_client.build_job(
        s.target,
        prompts * len(temperatures),
        speculative=config,
        max_new_tokens=s.max_new_tokens,
        max_model_len=vllm_client.context_length(prompts, one.k, s.max_new_tokens),
        temperatures=[t for t in temperatures for _ in prompts],
        seed=s.seed,
        repair=True,
    )


def serve(
    s: ForecastCheckConfig,
    engines: Sequence[Served],
    compared: Sequence[TaskPrompt],
    apart: Sequence[TaskPrompt],
) -> Iterator[dict[str, Any]]:
    """{vllm, repaired, answers: {temperature: {costs, compared}}} of each engine as soon as it is done.

    UserError with vLLM's message if it fails.
    """
    asked = [requests(s, one, compared, apart) for one in engines]
    jobs = [build_job(s, one, *ask[:2]) for one, ask in zip(engines, asked, strict=True)]
    results = vllm_client.run_jobs(s.vllm_python, jobs) if jobs else iter(())
    for one, (temperatures, prompts, costs), result in zip(engines, asked, results, strict=True):
        if "error" in result:
            raise UserError(f"vLLM failed with {one}: {result['error'][:600]}")
        found = {}
        for number, temperature in enumerate(temperatures):
            own = result["answers"][number * len(prompts) + 1 : (number + 1) * len(prompts)]
            found[str(temperature)] = {"costs": own[:costs], "compared": own[costs:]}
        yield {"vllm": result["vllm"], "repaired": result["repaired"], "answers": found}


def check_draft_cells(
    s: ForecastCheckConfig,
    name: str,
    family: str,
    texts: dict[float, list[TextChains]],
    served: dict[Served, dict[str, Any]],
) -> list[dict[str, Any]]:
    """The cells of one draft: each temperature and K, and drawn drafts where vLLM has them."""

    def answers(one: Served, temperature: float) -> dict[str, list[Answer]]:
        found: dict[str, list[Answer]] = served[one]["answers"][str(temperature)]
        return found

    cells = []
    for temperature in s.temperatures:
        plain = answers(Served("", 0), temperature)
        timed = {k: answers(Served(name, k), temperature)["costs"] for k in s.calibration_k}
        cost = vllm_cost({0: plain["costs"], **timed})
        place = {"draft": name, "family": family, "temperature": temperature}
        rules = [] if family in LOOKUPS or temperature == 0 else list(RULES)
        for k in s.k:
            own = served_figures(
                answers(Served(name, k), temperature)["compared"], plain["compared"]
            )
            others = [rule for rule in rules if rule != "greedy"]
            cell = compare(texts[temperature], "greedy", k, own, cost, s.seed, others)
            cells.append(place | cell | {"cost": asdict(cost)})
        drawn = Served(name, max(s.k), drawn=True)
        if rules and drawn in served:
            own = served_figures(answers(drawn, temperature)["compared"], plain["compared"])
            others = [rule for rule in rules if rule != "probabilistic"]
            cell = compare(texts[temperature], "probabilistic", max(s.k), own, None, s.seed, others)
            cells.append(place | cell)
    return cells


def print_cells(cells: Sequence[dict[str, Any]]) -> None:
    """The cells as a table on stderr."""
    table = Table("draft", "T", "rule", "K", "forecast", "vLLM", "inside", "speed-up", "vLLM")
    for c in cells:
        row, served = c["forecast"], c["served"]
        low, high = row["mean_accept_length_ci"] or (0, 0)
        table.add_row(
            Path(c["draft"]).name, f"{c['temperature']:g}", c["rule"], str(c["k"]),
            f"{row['mean_accept_length']:.3f} [{low:.3f}, {high:.3f}]", f"{served['mean_accept_length']:.3f}",
            str(c["inside"]), f"{row['speedup']:.2f}" if "speedup" in row else "–", f"{served['speedup']:.2f}",
        )  # fmt: skip
    Console(stderr=True).print(table)


def run(
    s: ForecastCheckConfig, target: Target, drafts: dict[str, Draft], journal: Journal
) -> dict[str, Any]:
    """forecast_check.json of these {name: draft}."""
    compared, apart = split_prompts(load_fitting_prompts(s.tasks, target), s.calibration)
    served: dict[Served, dict[str, Any]] = {}
    cells = []
    for name, draft in drafts.items():
        config = forecast_config(s, name)
        texts = measure_texts(config, target, draft, compared, journal, [name])
        missing = [one for one in engines(s, name) if journal.get(one.key) is None]
        for one, answers in zip(missing, serve(s, missing, compared, apart), strict=True):
            journal.put(one.key, answers)
        served |= {one: journal.get(one.key) for one in engines(s, name)}
        cells += check_draft_cells(s, name, draft.name, texts, served)
    first = served[Served("", 0)]
    return {
        "target": target.describe(),
        "drafts": {name: draft_sha256(name) for name in s.drafts},
        "tasks": [task_version(task) for task in s.tasks],
        "prompts": len(compared),
        "calibration_prompts": len(apart),
        "max_new_tokens": s.max_new_tokens,
        "vllm": first["vllm"],
        "repaired": first["repaired"],
        "summary": summarize(cells),
        "cells": cells,
        "seed": s.seed,
        **provenance.collect(),
    }


def main(s: ForecastCheckConfig) -> None:
    """Runs what the journal lacks, prints the comparison and writes forecast_check.json."""
    vllm_client.find_interpreter(s.vllm_python)
    if len(set(s.calibration_k)) != 2:
        raise UserError("calibration_k must be two different draft lengths")
    out = Path(s.out)
    inputs = [s.target, *s.drafts, *(task.path for task in s.tasks)]
    target = replace(load_target(s.target, "cpu"), eos=frozenset())
    drafts = {name: load(forecast_config(s, name), target) for name in s.drafts}
    with run_dir.open_run(s.out, s, COMMAND, OWNED_FILES, inputs):
        checksums = {name: draft_sha256(name) for name in s.drafts}
        journal = open_journal(out, target.identity, checksums, s.allow_changed)
        result = run(s, target, drafts, journal)
        text = json.dumps(result, indent=1, ensure_ascii=False, allow_nan=False)
        files.write_atomically(out / "forecast_check.json", text + "\n")
    print_cells(result["cells"])
    print(json.dumps(result["summary"]))


if __name__ == "__main__":
    run_command(main, ForecastCheckConfig, __doc__)
