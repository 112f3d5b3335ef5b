"""Mirror speculative decoding by exit layer and number of branches, beside plain decoding and the same draft alone.

    python scripts/experiments/mirror_ablation.py --target T --draft DIR --tasks '[{name: mine, path: prompts.jsonl}]'

Every prompt is decoded by all settings in turn, and once more in which the target waits while branches are drafted:
from these times the latency formula predicts a round in which target and draft have a device each, and it stands
beside the measured round of two threads that share the cores. Prints a table; the last line is JSON, and --out keeps
it. Several runs on other prompts can be pooled by --pool.
"""

import copy
import json
import sys
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

if not __package__:
    sys.path[0] = str(Path(__file__).resolve().parents[2])

from rich.console import Console

from decode.common.command import run_command
from decode.common.files import read_json_object, write_atomically
from decode.common.ranges import Count, CountOrZero, DraftLength, Seed, Temperature
from decode.drafts.mirror.mirror_draft import MirrorConfig
from decode.drafts.mirror.overlap_counts import OverlapCounts
from decode.drafts.registry import load_draft, make_mirror
from decode.engine.engine import SpeculativeEngine
from decode.engine.records import DecodeRecord
from decode.engine.warm_up import run_first_rounds
from decode.model.loading import Target, load_target
from decode.verification.sampling import SamplingParams
from eval.benchmark.methods import Method
from eval.benchmark.timing import decode_batch
from eval.metrics.common import MS_PER_SECOND
from eval.metrics.speedup_model import mirror_round_ms
from eval.tasks.loading import Task, TaskPrompt, load_task_prompts


@dataclass
class MirrorAblationConfig:
    target: str = "assets/target"
    """Folder, GGUF file or Hub name of the target."""
    draft: str = "assets/draft"
    """Folder of a small language model."""
    draft_dtype: str = "float32"
    """Number type of the draft."""
    tasks: list[Task] = field(
        default_factory=lambda: [Task("code", limit=2), Task("prose", limit=2)]
    )
    """Prompts."""
    exit_layers: list[Count] = field(default_factory=list)
    """Exit layers; empty: a quarter, a half and three quarters of the target's layers."""
    branches: list[CountOrZero] = field(default_factory=lambda: [0, 1, 2, 4])
    """Branches at each position; 0 needs no exit and is measured once."""
    k: DraftLength = 3
    """Tokens drafted per round."""
    max_new_tokens: Count = 48
    """Tokens of the longest answer."""
    temperature: Temperature = 0.0
    """0 is greedy."""
    seed: Seed = 0
    out: str = ""
    """A JSON file for the sums and the table, written after each prompt."""
    pool: list[str] = field(default_factory=list)
    """Earlier files of the same settings whose sums are added."""


@dataclass
class SettingSums:
    """What a setting has decoded."""

    tokens: int = 0
    rounds: int = 0
    seconds: float = 0.0
    """Of rounds, without prefill."""
    prompts: int = 0
    same: int = 0
    """Prompts with the text of plain decoding, as all have at temperature 0 but for ties."""
    counts: OverlapCounts = field(default_factory=OverlapCounts)

    def add(self, record: DecodeRecord, same: bool) -> None:
        self.tokens += len(record.output_ids) - 1
        self.rounds += len(record.rounds)
        self.seconds += sum(record.round_seconds)
        self.prompts += 1
        self.same += same


def settings_of(s: MirrorAblationConfig, layers: int) -> dict[str, MirrorConfig | None]:
    """{name: setting} in the order of the table; None: the draft alone. `waits` in a name: the target waits."""
    exits = s.exit_layers or [max(1, layers * part // 4) for part in (1, 2, 3)]
    found: dict[str, MirrorConfig | None] = {"draft alone": None}
    for exit_layer in exits:
        for branches in s.branches:
            config = MirrorConfig(exit_layer, branches)
            name = f"ℓe {exit_layer}, κ {branches}" if branches else "κ 0"
            found[name], found[f"{name}, waits"] = config, replace(config, overlap=False)
    return found


def measure(s: MirrorAblationConfig, target: Target) -> Iterator[dict[str, SettingSums]]:
    """The sums after each prompt, which is decoded by plain decoding and all settings in turn."""
    draft = load_draft(s.draft, target, dtype=s.draft_dtype)
    settings = settings_of(s, target.decoder.config.num_hidden_layers)
    mirror = make_mirror(draft, MirrorConfig(1, max(s.branches)), target)  # slots for all settings
    sampling = SamplingParams(s.temperature)
    engines = {
        name: SpeculativeEngine(target, drafter, k=s.k, sampling=sampling)
        for name, drafter in (("plain", None), ("draft alone", draft), ("mirror", mirror))
    }
    items = [item for task in s.tasks for item in load_task_prompts(task, target)]
    for engine in engines.values():
        run_first_rounds(engine, [items[0].prompt_ids], s.max_new_tokens)
    sums = {name: SettingSums() for name in ["plain", *settings]}
    for number, item in enumerate(items):
        plain: list[int] = []
        for name, config in [("plain", None), *settings.items()]:
            engine = engines["mirror" if config is not None else name]
            if config is not None:
                mirror.config, mirror.counts = config, sums[name].counts
            [record] = decode_one(engine, item, s.seed + number, s.max_new_tokens)
            plain = plain or record.output_ids
            sums[name].add(record, same=record.output_ids == plain)
        yield sums


def decode_one(
    engine: SpeculativeEngine, item: TaskPrompt, seed: int, max_new_tokens: int
) -> list[DecodeRecord]:
    return decode_batch(engine, Method("mirror"), [item], [seed], max_new_tokens)


def pooled(sums: dict[str, SettingSums], files: list[str]) -> dict[str, SettingSums]:
    """The sums with those of earlier files."""
    found = copy.deepcopy(sums)
    for file in files:
        for name, other in read_json_object(Path(file), "what this command writes")["sums"].items():
            own = found.setdefault(name, SettingSums())
            for key in ("tokens", "rounds", "seconds", "prompts", "same"):
                setattr(own, key, getattr(own, key) + other[key])
            for key, value in other["counts"].items():
                setattr(own.counts, key, getattr(own.counts, key) + value)
    return found


def table_rows(sums: dict[str, SettingSums]) -> Iterator[dict[str, Any]]:
    """A row for plain decoding, the draft alone and each overlapping setting; milliseconds are of a round."""
    plain_ms = MS_PER_SECOND * sums["plain"].seconds / sums["plain"].tokens
    for name, own in sums.items():
        if name.endswith(", waits"):
            continue
        tau, round_ms = own.tokens / own.rounds, MS_PER_SECOND * own.seconds / own.rounds
        row: dict[str, Any] = {"setting": name, "same": f"{own.same} of {own.prompts}"}
        row |= {"tau": tau, "round_ms": round_ms}
        row["speedup"] = plain_ms * tau / round_ms
        if (waits := sums.get(f"{name}, waits")) is not None:
            row |= own.counts.rates() | formula(waits)
            row["speedup_two_devices"] = plain_ms * tau / row["two_devices_ms"]
        yield row


def formula(waits: SettingSums) -> dict[str, float]:
    """The latency formula from the rounds in which the target waited: a device each for target and draft."""
    counts, rounds = waits.counts, waits.rounds
    upper, draft, redraft = (
        MS_PER_SECOND * seconds / rounds
        for seconds in (counts.upper_seconds, counts.branch_seconds, counts.redraft_seconds)
    )
    waiting = MS_PER_SECOND * waits.seconds / rounds
    lower = waiting - upper - draft - redraft
    return {
        "waiting_ms": waiting,
        "upper_ms": upper,
        "branches_ms": draft,
        "redraft_ms": redraft,
        "two_devices_ms": mirror_round_ms(lower, upper, draft, redraft),
    }


def main(s: MirrorAblationConfig) -> None:
    target = load_target(s.target, "cpu")
    rows: list[dict[str, Any]] = []
    for measured in measure(s, target):
        sums = pooled(measured, s.pool)
        rows = list(table_rows(sums))
        if s.out:
            found = {"rows": rows, "sums": {name: asdict(own) for name, own in sums.items()}}
            write_atomically(Path(s.out), json.dumps(found, indent=1) + "\n")
    names = list(dict.fromkeys(key for row in rows for key in row))
    lines = [names, ["---"] * len(names)] + [
        [show(row.get(name)) for name in names] for row in rows
    ]
    Console(width=400).print(
        "\n".join("| " + " | ".join(line) + " |" for line in lines), markup=False
    )
    print(json.dumps({"rows": rows}))


def show(value: Any) -> str:
    return "" if value is None else value if isinstance(value, str) else f"{value:.3g}"


if __name__ == "__main__":
    run_command(main, MirrorAblationConfig, __doc__)
