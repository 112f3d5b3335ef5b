"""What scripts/llamacpp_parity.py does: llama.cpp and our decoder run the same draft on the same prompts."""

import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from rich.console import Console

from decode.checkpoints.draft_folder import draft_sha256
from decode.common.errors import UserError
from decode.common.run_dir import check_file
from decode.drafts import causal
from decode.drafts.base import Draft
from decode.drafts.registry import draft_family, load_draft
from decode.engine.engine import decode
from decode.model.loading import Target, load_target
from decode.serving import gguf_heads
from decode.serving.gguf_export import write_gguf
from decode.serving.llamacpp_engine import LLAMACPP
from decode.serving.log_counts import EngineLog, pool, round_counts
from decode.serving.running import llama_server
from decode.serving.running.llama_server import ServedAnswer
from eval.served import parity, scoring
from eval.settings.served import LlamaCppParityConfig
from eval.tasks.loading import TaskPrompt


def served_rounds(
    rounds: Sequence[Sequence[int]], tokens: int, limit: int
) -> list[tuple[int, int]]:
    """Our (drafted, accepted) rounds as llama.cpp has them for an answer of `tokens` tokens.

    It stops at the answer's end, and before its limit of `limit` tokens it drafts one fewer than are left. A greedy
    chain that is drafted shorter is accepted as far. An end of the text that the draft proposed counts as the target's
    own token, not as accepted, unless it is the last one of the chain (`common_sampler_sample_and_accept_n`).
    """
    found: list[tuple[int, int]] = []
    emitted = 1
    for drafted, accepted in rounds:
        if emitted >= tokens:
            break
        drafts = min(drafted, limit - emitted - 1)
        end = tokens - emitted - 1  # the place of the answer's last token in this chain
        if tokens < limit and end + 1 < drafts:
            accepted = min(accepted, end)
        found.append((drafts, min(accepted, drafts)))
        emitted += found[-1][1] + 1
    return found


@dataclass(frozen=True)
class OwnAnswer:
    """Our answer to a prompt, cut where llama.cpp's ends."""

    output_ids: list[int]
    rounds: list[tuple[int, int]]
    """(drafted, accepted) of each."""


def run_llamacpp(
    s: LlamaCppParityConfig, target: Target, items: Sequence[TaskPrompt]
) -> list[ServedAnswer]:
    """llama.cpp's answer to each prompt."""
    server = llama_server.find_server(s.server)
    longest = max(len(item.prompt_ids) for item in items) + s.max_new_tokens + s.k + 1
    family = draft_family(s.draft)
    with tempfile.TemporaryDirectory() as folder:
        served = Path(s.target_gguf or f"{folder}/target.gguf")
        draft = Path(folder) / "draft.gguf"
        if not s.target_gguf:
            write_gguf(s.target, served)
        write = write_gguf if family == "causal" else gguf_heads.write_head
        write(s.draft, draft, target=s.target)
        kind, context = LLAMACPP.method(family), min(target.runner.context, longest)
        options = [*llama_server.draft_options(draft, kind, s.k), *llama_server.EXACT]
        with llama_server.llama_server(server, served, context, options) as url:
            return [
                llama_server.answer(url, item.prompt_ids, s.max_new_tokens, s.k) for item in items
            ]


def run_ours(
    s: LlamaCppParityConfig,
    target: Target,
    items: Sequence[TaskPrompt],
    served: Sequence[ServedAnswer],
) -> list[OwnAnswer]:
    """Our answers, cut where llama.cpp's end."""
    if draft_family(s.draft) == "causal":
        draft: Draft = causal.load(s.draft, target, "cpu", "float32")
    else:
        draft = load_draft(s.draft, target, "cpu")
    prompts = [item.prompt_ids for item in items]
    records = decode(target, draft, prompts, k=s.k, max_new_tokens=s.max_new_tokens, rows=1)
    lengths = [len(answer.response["tokens"]) for answer in served]
    return [
        OwnAnswer(record.output_ids[:n], served_rounds(record.rounds, n, s.max_new_tokens))
        for record, n in zip(records, lengths, strict=True)
    ]


def compare_acceptance(
    items: Sequence[TaskPrompt], ours: Sequence[OwnAnswer], served: Sequence[ServedAnswer]
) -> dict[str, Any]:
    """Both sides' figures, as eval/rescore.py has them, and the difference of τ."""
    names = [f"{item.task}/{item.id}" for item in items]
    sides = {
        "ours": [round_counts(x.rounds) for x in ours],
        "llamacpp": [llama_server.response_counts(x.response) for x in served],
    }
    logs = [
        EngineLog(
            side, side, [replace(x, prompt=name) for x, name in zip(counts, names, strict=True)]
        )
        for side, counts in sides.items()
    ]
    scored = {log.path: scoring.score(log).to_json() for log in logs}
    found = scoring.compare(*logs).to_json()
    kept = ("counts", "tau", "acceptance_rate")
    return {
        "figures": {side: {key: one[key] for key in kept} for side, one in scored.items()},
        "difference_of_tau": found["differences"]["tau"],
        "p_value": found["p_value"],
        "verdict": found["verdict"],
    }


def compare_with_llamacpp(s: LlamaCppParityConfig) -> None:
    """Decodes on both sides, prints the comparison and its JSON; exit code 1 if the two sides differ."""
    if not s.draft:
        raise UserError("give a draft's folder")
    family = draft_family(s.draft)
    if not LLAMACPP.method(family):
        raise UserError(f"{s.draft} is of family {family}, with which llama.cpp does not draft")
    check_file(s.out, [s.target_gguf])  # before the work
    if s.target_gguf and not Path(s.target_gguf).is_file():
        raise UserError(f"no file {s.target_gguf}: correct --target_gguf")
    version = llama_server.server_version(llama_server.find_server(s.server))
    target = replace(load_target(s.target, "cpu"), eos=frozenset())
    items = parity.load_prompts(s.tasks, 4, target)
    served = run_llamacpp(s, target, items)
    own = run_ours(s, target, items, served)
    # What llama.cpp's /metrics have: rounds with a draft.
    ours = [
        parity.count_rounds([x.output_ids], [pair for pair in x.rounds if pair[0] > 0], s.k)
        for x in own
    ]
    theirs = [x.counts for x in served]
    found = parity.compare_greedy("llamacpp", s.margin, target, items, ours, theirs, "accepted")
    found |= compare_acceptance(items, own, served)
    totals = {"ours": pool(ours), "llamacpp": pool(theirs)}
    console = Console(stderr=True)
    console.print(parity.totals_table(totals))
    console.print(found["verdict"], markup=False)
    reduced = family == "causal" and causal.load_ids(s.draft, target.runner.vocab_size) is not None
    head = {
        "draft": s.draft, "draft_sha256": draft_sha256(s.draft), "k": s.k, "max_new_tokens": s.max_new_tokens,
        "llamacpp": version, "served_target": s.target_gguf or "float32", "reduced_vocabulary": reduced,
    }  # fmt: skip
    parity.write_comparison(head, found, totals, s.out)
    if found["p_value"] < parity.SIGNIFICANCE_LEVEL if s.target_gguf else found["differ"]:
        sys.exit(1)
