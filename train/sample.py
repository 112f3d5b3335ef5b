"""The target answers prompts: the data that a draft is distilled on.

    accelerate launch train/sample.py --config configs/quickstart/sample.yaml
    accelerate launch train/sample.py --target T --sources '[{kind: file, path: prompts.jsonl}]' --out DIR

Several processes share the prompts. Killed at any moment, the same command goes on: nothing is lost, nothing
is sampled twice, and each answer is the one it would have been, since its randomness hangs on its id.
"""

import hashlib
import sys
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path

if not __package__:
    sys.path[0] = str(Path(__file__).resolve().parents[1])

from accelerate import PartialState
from accelerate.utils import parse_flag_from_env
from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TextColumn,
    TimeRemainingColumn,
)

from decode import runs
from decode.drafts.base import Draft, pick_draft
from decode.sampling import Sampling
from decode.settings import UserError, run_command
from decode.speculate import Output, add, speculate
from decode.target import Target, load_target
from train import shards
from train.prompts import Prompt, Source, drop_overlaps, encode, evaluation_texts, load_prompts


@dataclass
class Settings:
    target: str = "assets/target"
    """The model that answers: folder or hub name."""
    revision: str | None = None
    """Commit, tag or branch of a hub target."""
    sources: list[Source] = field(default_factory=lambda: [Source("bundled", "all")])
    """Where prompts come from; prompts that overlap the bundled evaluation prompts are dropped."""
    sampling: Sampling = field(default_factory=lambda: Sampling(temperature=1.0))
    """How answers are drawn; temperature 1 shows the draft the target's own law."""
    max_new_tokens: int = 256
    """Longest answer."""
    batch_size: int = 32
    """Prompts decoded together, each process; a row that is done takes the next one."""
    draft: str = "none"
    """none, ngram, or a draft's folder: answers come faster from small batches and follow the same law, since
    speculation is lossless."""
    k: int = 4
    """Tokens drafted a round."""
    shard_rows: int = 128
    """Answers a file; at most this much work is done again after a kill."""
    device: str = "auto"
    """auto, cpu, cuda; with several processes each takes its own GPU."""
    dtype: str = "float32"
    """float32, bfloat16 or float16."""
    seed: int = 0
    out: str = "outputs/samples"
    """Folder of the sampled set."""
    resume: bool = False
    """Go on in `out` although the settings differ (an equal run goes on by itself)."""
    overwrite: bool = False
    """Delete what another run left in `out`."""


def seed_of(prompt_id: str, seed: int) -> int:
    """The sample's own randomness: the same in any batch, process or attempt."""
    return int(hashlib.sha256(f"{seed}:{prompt_id}".encode()).hexdigest()[:15], 16)


def sample(
    s: Settings,
    target: Target,
    draft: Draft | None,
    mine: list[tuple[Prompt, list[int]]],
    bar: Progress,
) -> None:
    """Answers `mine` and writes a shard whenever `shard_rows` answers are ready.

    Rows that are done take the next prompt. Neighbours in length sit together, so that buffers stay short.
    """
    task = bar.add_task("sampling", total=len(mine), speed="")
    mine = sorted(mine, key=lambda pair: (len(pair[1]), pair[0].id))
    outputs = [Output(ids) for _, ids in mine]
    ready: list[shards.Row] = []
    tokens, start = 0, time.perf_counter()
    for record in speculate(
        target,
        draft,
        [ids for _, ids in mine],
        k=s.k,
        rows=s.batch_size,
        sampling=s.sampling,
        max_new_tokens=s.max_new_tokens,
        seeds=[seed_of(prompt.id, s.seed) for prompt, _ in mine],
    ):
        add(outputs[record.prompt], record)
        tokens += len(record.tokens)
        if record.finished is None:
            continue
        ready.append(row_of(mine[record.prompt][0], outputs[record.prompt]))
        if len(ready) >= s.shard_rows:
            flush(s, ready)
            ready = []
        speed = f"{tokens / (time.perf_counter() - start):,.0f} tokens/s"
        bar.update(task, advance=1, speed=speed)
    flush(s, ready)


def row_of(prompt: Prompt, output: Output) -> shards.Row:
    """The finished answer as a row of the sampled set."""
    begin = len(output.prompt_ids)
    return {
        "id": prompt.id,
        "source": prompt.source,
        "origin": "target",
        "input_ids": [*output.prompt_ids, *output.output_ids],
        "loss_spans": [[begin, begin + len(output.output_ids)]],
        "finish_reason": output.finish_reason,
    }


def flush(s: Settings, rows: list[shards.Row]) -> None:
    """A shard named by its ids: processes and attempts cannot collide."""
    if len(rows) > 0:
        digest = hashlib.sha256(" ".join(row["id"] for row in rows).encode()).hexdigest()[:16]
        shards.write_shard(Path(s.out), rows, digest)


def write_manifest(s: Settings, target: Target, counts: dict[str, int]) -> None:
    template = target.tokenizer.chat_template
    shards.write_manifest(
        Path(s.out),
        shards.Manifest(
            target=target.name,
            revision=target.revision,
            tokenizer_hash=target.fingerprint,
            chat_template_hash=template and hashlib.sha256(template.encode()).hexdigest()[:16],
            sampling={**asdict(s.sampling), "max_new_tokens": s.max_new_tokens},
            seed=s.seed,
            counts=counts,
            git_sha=runs.git_sha(),
            versions=runs.versions(),
        ),
    )


def main(s: Settings) -> None:
    state = PartialState(cpu=parse_flag_from_env("ACCELERATE_USE_CPU"))
    device = str(state.device) if s.device == "auto" else s.device
    target = load_target(s.target, device, s.dtype, s.revision)
    draft = pick_draft(s.draft, target, dtype=s.dtype)
    prompts, dropped = drop_overlaps(load_prompts(s.sources, s.seed), evaluation_texts())
    if len(prompts) == 0:
        raise UserError("the sources hold no prompts: add a source or raise a limit")
    encoded = [(prompt, encode(target.tokenizer, prompt)) for prompt in prompts]
    room = target.decoder.context
    fitting = [(prompt, ids) for prompt, ids in encoded if 0 < len(ids) < room]
    if len(fitting) == 0:
        raise UserError(f"no prompt fits the context of {target.name}, which holds {room} tokens")
    if state.is_main_process:
        runs.claim(s.out, s)
    state.wait_for_everyone()
    done = shards.done_ids(Path(s.out))
    todo = [pair for pair in fitting if pair[0].id not in done]
    state.wait_for_everyone()  # nobody writes a shard before everybody has read what is done
    mine = todo[state.process_index :: state.num_processes]
    console = Console(stderr=True)
    say = console.print if state.is_main_process else (lambda *_: None)
    say(f"{len(prompts)} prompts ({dropped} dropped as evaluation prompts), {len(todo)} to answer")
    with Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("{task.fields[speed]}"),
        TimeRemainingColumn(),
        console=console,
        disable=not state.is_main_process,
    ) as bar:
        if len(mine) > 0:
            sample(s, target, draft, mine, bar)
    state.wait_for_everyone()
    if state.is_main_process:
        answered = len(shards.done_ids(Path(s.out)) & {prompt.id for prompt in prompts})
        counts = {
            "asked": len(prompts),
            "answered": answered,
            "failed": len(prompts) - answered,
            "dropped_as_evaluation": dropped,
        }
        write_manifest(s, target, counts)
        say(f"{answered} answered, {counts['failed']} failed (too long for the context): {s.out}")


if __name__ == "__main__":
    run_command(main, Settings, __doc__)
