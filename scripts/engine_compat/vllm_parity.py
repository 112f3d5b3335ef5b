"""A saved draft decoded by vLLM and by our engine on the same prompts: the comparison behind scripts/referee.py."""

import json
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Annotated, Any

import numpy as np
from rich.console import Console
from rich.table import Table

from decode.common import provenance
from decode.common.errors import UserError
from decode.common.files import write_atomically
from decode.common.ranges import Count, DraftLength, Seed, Temperature, at_least
from decode.common.run_dir import check_file
from decode.common.typed_json import to_json
from decode.drafts.base import Draft, draft_sha256
from decode.drafts.registry import draft_family, load_draft
from decode.engine.engine import decode
from decode.model.loading import Target, load_target
from decode.serving.running import vllm_client
from decode.verification.sampling import SamplingParams
from decode.verification.tree import tree_from_paths
from eval import forecast
from eval.forecast import ForecastConfig
from eval.forecasting.chains import ChainSettings, measure_chains
from eval.forecasting.rounds import RULES
from eval.forecasting.rows import compare
from eval.metrics.distribution_tests import POWER, run_permutation_test
from eval.reporting.formatting import format_with_interval
from eval.tasks.loading import Task, TaskPrompt
from scripts.engine_compat.greedy_parity import (
    PromptCounts,
    compare_greedy,
    load_prompts,
    records_counts,
    sum_counts,
    totals_table,
)

SIGNIFICANCE_LEVEL = 1e-3
"""At a temperature: the p-value below which the two sides count as different."""
MIN_PROMPTS = 24
"""Prompts at a temperature. With fewer, the permutation test has too few permutations for a small p-value."""
BATCH_ROWS = 16
"""Batch size of our engine at a temperature."""


@dataclass
class VllmParityConfig:
    draft: str = ""
    """A draft's folder; may stand first without --draft."""
    target: str = "assets/target"
    """The target's folder or Hub name."""
    python: str = ""
    """Interpreter with vLLM; empty: $VLLM_PYTHON or .venv-vllm/bin/python."""
    tasks: list[Task] = field(default_factory=list)
    """Empty: the bundled tasks, 4 prompts of each, 16 at a temperature."""
    k: DraftLength = 4
    """Tokens drafted a round."""
    max_new_tokens: Count = 64
    """Tokens decoded for each prompt."""
    margin: Annotated[float, at_least(0)] = 1e-3
    """Greedy: gap of the target's two best logits below which a difference counts as a tie."""
    temperature: Temperature = 0.0
    """0 is greedy."""
    draws: Count = 4
    """At a temperature: how often each prompt is decoded."""
    seed: Seed = 0
    """Of the sampling on both sides and of the permutation test."""
    control: bool = False
    """At a temperature: vLLM drafts greedily and we sample, which the test must detect."""
    repair: bool = True
    """At a temperature: repair the broken sampling of vLLM's CPU build first."""
    forecast: bool = False
    """Also forecast what vLLM accepts, as eval/forecast.py does, and compare."""
    out: str = ""
    """File for the JSON of the last line; empty writes none."""


def run_ours(
    s: VllmParityConfig, target: Target, prompts: Sequence[list[int]], dtype: str = "float32"
) -> list[PromptCounts]:
    """Our engine's counts for each prompt, by the names of vLLM's counters; the draft computes in `dtype`."""
    greedy_drafts = s.temperature > 0 and draft_sampling(s)["ours"] == "likeliest"
    chain = tree_from_paths([[0] * n for n in range(1, s.k + 1)]) if greedy_drafts else None
    rows = BATCH_ROWS if s.temperature else 1
    draft = load_draft(s.draft, target, dtype=dtype, shape=chain)
    return decode_counts(s, target, draft, prompts, rows)


def decode_counts(
    s: VllmParityConfig, target: Target, draft: Draft, prompts: Sequence[list[int]], rows: int
) -> list[PromptCounts]:
    """The counts of each prompt, decoded with `draft` in batches of `rows`."""
    draws = s.draws if s.temperature else 1
    outputs = decode(
        target,
        draft,
        [prompt for prompt in prompts for _ in range(draws)],
        k=s.k,
        max_new_tokens=s.max_new_tokens,
        sampling=SamplingParams(s.temperature),
        rows=rows,
        seed=s.seed,
    )
    return records_counts(outputs, draws, s.k)


def draft_sampling(s: VllmParityConfig) -> dict[str, str]:
    """How each side drafts at a temperature: "drawn" (sampled from q) or "likeliest" (greedy)."""
    medusa = draft_family(s.draft) == "medusa"
    return {
        "ours": "likeliest" if medusa and not s.control else "drawn",
        "vllm": "likeliest" if medusa or s.control else "drawn",
    }


def run_vllm(s: VllmParityConfig, target: Target, prompts: Sequence[list[int]]) -> dict[str, Any]:
    """vLLM's result, {vllm: version, repaired, answers: counts of each prompt}. UserError if it refuses the draft."""
    (result,) = vllm_client.run_jobs(s.python, [build_vllm_job(s, target, prompts)])
    if "error" in result:
        raise UserError(f"vLLM refuses {s.draft!r}: {result['error'][:600]}")
    return result


def build_vllm_job(
    s: VllmParityConfig, target: Target, prompts: Sequence[list[int]], dtype: str = "float32"
) -> dict[str, Any]:
    """The job in which vLLM decodes as `run_ours` does."""
    options = {}
    if s.temperature and draft_sampling(s)["vllm"] == "drawn":
        options = {"draft_sample_method": "probabilistic"}
    return vllm_client.build_job(
        s.target,
        prompts,
        speculative=vllm_client.speculative_config(s.draft, s.k, **options),
        max_new_tokens=s.max_new_tokens,
        max_model_len=context_length(target, prompts, s.k, s.max_new_tokens),
        dtype=dtype,
        sampling=SamplingParams(s.temperature),
        seed=s.seed,
        draws=s.draws if s.temperature else 1,
        repair=s.repair and s.temperature > 0,
    )


def context_length(
    target: Target, prompts: Sequence[list[int]], k: int, max_new_tokens: int
) -> int:
    """The context length that vLLM needs for these prompts, at most the target's."""
    return min(target.runner.context, vllm_client.context_length(prompts, k, max_new_tokens))


def counts_array(side: Sequence[PromptCounts]) -> np.ndarray[Any, Any]:
    """[prompts, 1 + K]: rounds, then accepted drafts by position."""
    return np.array([[x["rounds"], *x["by_position"]] for x in side])


def compare_sampled(
    s: VllmParityConfig, ours: Sequence[PromptCounts], vllm: Sequence[PromptCounts]
) -> dict[str, Any]:
    """At a temperature: the result of the permutation test; `passed` if it detects no difference in acceptance."""
    test = run_permutation_test(
        counts_array(ours), counts_array(vllm), level=SIGNIFICANCE_LEVEL, seed=s.seed
    )
    return {
        "temperature": s.temperature,
        "prompts": len(ours),
        "draws": s.draws,
        "drafts": draft_sampling(s),
        "passed": test.p_value >= SIGNIFICANCE_LEVEL,
        "level": SIGNIFICANCE_LEVEL,
        "power": POWER,
        "statistic": test.statistic,
        "p_value": test.p_value,
        "permutations": test.permutations,
        "parts": [
            {"name": part.name, "ours": part.a, "vllm": part.b}
            | {key: value for key, value in asdict(part).items() if key not in ("name", "a", "b")}
            for part in test.parts
        ],
    }


def check_forecast(
    s: VllmParityConfig, target: Target, items: Sequence[TaskPrompt], served: PromptCounts
) -> dict[str, Any]:
    """The forecast for these prompts beside `served`, the sums of vLLM's counts. UserError for a draft without one."""
    asked = ForecastConfig(target=s.target, draft=s.draft, engines=["vllm"])
    draft = forecast.load(asked, target)
    asked_for = items if s.temperature == 0 else [x for x in items for _ in range(s.draws)]
    chains = ChainSettings(s.k, s.temperature, s.max_new_tokens, BATCH_ROWS)
    texts = measure_chains(target, draft, asked_for, chains, s.seed)
    drawn = s.temperature > 0 and draft_sampling(s)["vllm"] == "drawn"
    rule = "probabilistic" if drawn else "greedy"
    others = [other for other in RULES if other != rule] if s.temperature > 0 else []
    return compare(texts, rule, served, others, s.seed)


def print_comparison(totals: dict[str, PromptCounts], result: dict[str, Any]) -> None:
    """Tables of both sides' counts and of the test's parts, on stderr."""
    console = Console(stderr=True)
    console.print(totals_table(totals))
    if "parts" in result:
        table = Table("", "ours", "vLLM", "p", f"detectable with {result['power']:.0%}")
        for part in result["parts"]:
            rates = [
                "–" if part[side] is None else f"{part[side]:.3f}" for side in ("ours", "vllm")
            ]
            table.add_row(part["name"], *rates, f"{part['p_value']:.4f}", f"{part['detects']:.3f}")
        console.print(table)
        console.print(f"all parts together: p = {result['p_value']:.5f}, level {result['level']}")
    if "forecast" in result:
        row, served = result["forecast"]["forecast"], result["forecast"]["served"]
        length = format_with_interval(row["mean_accept_length"], row["mean_accept_length_ci"], 3)
        console.print(
            f"mean accepted length: forecast {length}, vLLM {served['mean_accept_length']:.3f}"
        )


def main(s: VllmParityConfig) -> None:
    """Decodes on both sides, prints the comparison and its JSON; exit code 1 if the two sides differ."""
    if not s.draft:
        raise UserError("give a draft's folder")
    if s.control and not s.temperature:
        raise UserError("control needs sampling: give --temperature 1")
    check_file(s.out)  # before the work
    vllm_client.find_interpreter(s.python)
    target = replace(load_target(s.target, "cpu"), eos=frozenset())
    items = load_prompts(s.tasks, 16 if s.temperature else 4, target)
    if s.temperature and len(items) < MIN_PROMPTS:
        raise UserError(
            f"give at least {MIN_PROMPTS} prompts: with fewer p < {SIGNIFICANCE_LEVEL} is hardly possible"
        )
    prompts = [item.prompt_ids for item in items]
    ours = run_ours(s, target, prompts)
    served = run_vllm(s, target, prompts)
    vllm = served["answers"]
    if s.temperature:
        found = {"repaired": served["repaired"]} | compare_sampled(s, ours, vllm)
        agree = found["passed"]
    else:
        found = compare_greedy("vllm", s.margin, target, items, ours, vllm)
        agree = not found["differ"]
    totals = {"ours": sum_counts(ours), "vllm": sum_counts(vllm)}
    if s.forecast:
        found["forecast"] = check_forecast(s, target, items, totals["vllm"])
    print_comparison(totals, found)
    result = {
        "draft": s.draft, "draft_sha256": draft_sha256(s.draft),
        "family": draft_family(s.draft), "k": s.k, "vllm": served["vllm"],
        **found, "totals": totals, **to_json(provenance.collect()),
    }  # fmt: skip
    line = json.dumps(result)
    if s.out:
        write_atomically(Path(s.out), line + "\n")
    print(line)
    if not agree:
        sys.exit(1)
