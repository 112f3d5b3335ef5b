"""What scripts/referee.py does: vLLM and our decoder run the same draft on the same prompts."""

import sys
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from rich.console import Console
from rich.table import Table

from decode.checkpoints.draft_folder import draft_sha256
from decode.common.errors import UserError
from decode.common.run_dir import check_file
from decode.drafts.registry import draft_family
from decode.model.loading import load_target
from decode.serving.log_counts import RequestCounts, pool
from decode.serving.running import vllm_client
from eval.served import parity
from eval.served.parity import MIN_PROMPTS
from eval.settings.served import RefereeConfig


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


def referee(s: RefereeConfig) -> None:
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
    print_comparison(totals, found)
    head = {
        "draft": s.draft, "draft_sha256": draft_sha256(s.draft),
        "family": draft_family(s.draft), "k": s.k, "vllm": served["vllm"],
    }  # fmt: skip
    parity.write_comparison(head, found, totals, s.out)
    if not agree:
        sys.exit(1)
