"""The target answers prompts, or texts are taken as they stand: the data that a draft is distilled on.

    accelerate launch train/sample.py --config configs/quickstart/sample.yaml
    accelerate launch train/sample.py --target T --sources '[{kind: file, path: prompts.jsonl}]' --out DIR
    python train/sample.py --origin text --target T --sources '[{kind: file, path: chats.jsonl}]' --turns all --out DIR

Several processes share the prompts. Killed at any moment, the same command goes on: nothing is lost, nothing
is sampled twice, and each answer is the one it would have been, since its randomness hangs on its id.
"""

import hashlib
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Literal

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
from train import shards, together
from train.dialogue import Script, Turns, followed, joined
from train.filters import Filters
from train.gather import Asked, Reader, gathered, reader_of
from train.prompts import Prompt
from train.sources import Source


@dataclass
class Settings:
    target: str = "assets/target"
    """The model that answers: folder or hub name."""
    revision: str | None = None
    """Commit, tag or branch of a hub target."""
    origin: Literal["target", "text"] = "target"
    """target: it answers the prompts; text: answers and texts are taken as they stand, and the target only gives its
    tokenizer and chat template."""
    sources: list[Source] = field(default_factory=lambda: [Source("bundled", "all")])
    """Where prompts come from; what overlaps the bundled evaluation prompts is dropped."""
    decontaminate: str | list[str] = ""
    """Files of your own evaluation prompts (jsonl, one or a list): what overlaps them is dropped as well."""
    filters: Filters = field(default_factory=Filters)
    turns: Turns = "last"
    """Of a chat, last: only its last reply is asked for and learned; all: every reply is, the target's own replies
    taking the place of those that are there. For templates that leave earlier turns as they were."""
    window: int = 512
    """text: tokens of the pieces that texts without a prompt are cut into."""
    sampling: Sampling = field(default_factory=lambda: Sampling(temperature=1.0))
    """How answers are drawn; temperature 1 shows the draft the target's own law."""
    max_new_tokens: int = 256
    """Longest answer; a chat ends with one that was cut."""
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


class Talk:
    """A prompt on its way through its turns."""

    def __init__(self, prompt: Prompt, script: Script):
        self.prompt, self.given = prompt, script.given[:1]
        self.later = script.given[1:]
        self.replies: list[list[int]] = []
        self.reason = ""

    def ids(self) -> list[int]:
        """What has been given and said, up to where the next reply begins."""
        return [*joined(self.given, self.replies)[0], *self.given[-1]]

    def hear(self, output: Output, context: int) -> bool:
        """Takes a reply; True if another one is to come.

        A chat ends early with a reply that did not end by itself, or that left no room for another.
        """
        self.replies.append(output.output_ids)
        self.reason = output.finish_reason
        if not self.later or output.finish_reason != "eos":
            return False
        self.given.append(followed(output.output_ids, self.later.pop(0)))
        if len(self.ids()) < context:
            return True
        self.given.pop()
        return False

    def name(self) -> str:
        """Of the next reply, for its randomness."""
        return f"{self.prompt.id}/{len(self.replies)}" if self.replies else self.prompt.id


def sample(
    s: Settings, target: Target, draft: Draft | None, mine: Sequence[Asked], bar: Progress
) -> None:
    """Answers `mine` and writes a shard whenever `shard_rows` answers are ready.

    Rows that are done take the next prompt, and neighbours in length sit together, so that buffers stay short. Chats of
    several turns go `shard_rows` at a time, all first turns before all second ones.
    """
    task = bar.add_task("answering", total=len(mine), speed="")
    mine = sorted(mine, key=lambda a: (len(a.script.given), len(a.script.given[0]), a.prompt.id))
    single = [a for a in mine if len(a.script.given) == 1]
    several = mine[len(single) :]
    groups = [several[i : i + s.shard_rows] for i in range(0, len(several), s.shard_rows)]
    ready: list[shards.Row] = []
    tokens, start = 0, time.perf_counter()
    for group in filter(None, [single, *groups]):
        talks = [Talk(asked.prompt, asked.script) for asked in group]
        while talks:
            outputs, next_turn = [Output(talk.ids()) for talk in talks], []
            for record in speculate(
                target,
                draft,
                [output.prompt_ids for output in outputs],
                k=s.k,
                rows=s.batch_size,
                sampling=s.sampling,
                max_new_tokens=s.max_new_tokens,
                seeds=[seed_of(talk.name(), s.seed) for talk in talks],
            ):
                add(outputs[record.prompt], record)
                tokens += len(record.tokens)
                if record.finished is None:
                    continue
                talk = talks[record.prompt]
                if talk.hear(outputs[record.prompt], target.decoder.context):
                    next_turn.append(record.prompt)
                    continue
                ready.append(row_of(s, talk.prompt, Script(talk.given, talk.replies), talk.reason))
                if len(ready) >= s.shard_rows:
                    shards.add_shard(Path(s.out), ready)
                    ready = []
                speed = f"{tokens / (time.perf_counter() - start):,.0f} tokens/s"
                bar.update(task, advance=1, speed=speed)
            talks = [talks[i] for i in sorted(next_turn)]
    if ready:
        shards.add_shard(Path(s.out), ready)


def keep(s: Settings, mine: Sequence[Asked], bar: Progress) -> None:
    """Writes texts as they stand."""
    task = bar.add_task("writing", total=len(mine), speed="")
    for at in range(0, len(mine), s.shard_rows):
        some = mine[at : at + s.shard_rows]
        rows = [row_of(s, asked.prompt, asked.script, "") for asked in some]
        shards.add_shard(Path(s.out), rows)
        bar.update(task, advance=len(some))


def row_of(s: Settings, prompt: Prompt, script: Script, reason: str) -> shards.Row:
    """A finished script as a row of the sampled set; of replies that are too short nothing is learned."""
    ids, spans = joined(script.given, script.replies)
    enough = sum(map(len, script.replies)) >= s.filters.min_answer
    return {
        "id": prompt.id,
        "source": prompt.source,
        "origin": s.origin,
        "input_ids": ids,
        "loss_spans": spans if enough else [],
        "finish_reason": reason or "text",
    }


def write_manifest(s: Settings, reader: Reader, counts: dict[str, int]) -> None:
    template = reader.tokenizer.chat_template
    drawn = {**asdict(s.sampling), "max_new_tokens": s.max_new_tokens}
    shards.write_manifest(
        Path(s.out),
        shards.Manifest(
            target=reader.name,
            revision=reader.revision,
            tokenizer_hash=reader.fingerprint,
            chat_template_hash=template and hashlib.sha256(template.encode()).hexdigest()[:16],
            sampling=drawn if s.origin == "target" else {},
            seed=s.seed,
            counts=counts,
            git_sha=runs.git_sha(),
            versions=runs.versions(),
        ),
    )


def main(s: Settings) -> None:
    state = PartialState(cpu=parse_flag_from_env("ACCELERATE_USE_CPU"))
    write: Callable[..., None]
    if s.origin == "text":
        reader = reader_of(s.target, s.revision)
        write = partial(keep, s)
    else:
        device = str(state.device) if s.device == "auto" else s.device
        target = load_target(s.target, device, s.dtype, s.revision)
        draft = pick_draft(s.draft, target, dtype=s.dtype)
        reader = Reader.of(target)
        write = partial(sample, s, target, draft)
    asked, dropped = gathered(s, reader)
    fitting = [a for a in asked if 0 < a.tokens() < reader.context + (s.origin == "text")]
    if len(fitting) == 0:
        raise UserError(
            f"no prompt fits the context of {reader.name}, which holds {reader.context} tokens"
        )
    with together.agreed(state):
        if state.is_main_process:
            runs.claim(s.out, s)
            shards.sweep(Path(s.out))
    done = shards.done_ids(Path(s.out))
    todo = [a for a in fitting if a.prompt.id not in done]
    state.wait_for_everyone()  # nobody writes a shard before everybody has read what is done
    mine = todo[state.process_index :: state.num_processes]
    console = Console(stderr=True)
    say = console.print if state.is_main_process else (lambda *_: None)
    evaluation = dropped["dropped_as_evaluation"]
    say(f"{len(asked)} prompts ({evaluation} dropped as evaluation prompts), {len(todo)} to answer")
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
            write(mine, bar)
    state.wait_for_everyone()
    if state.is_main_process:
        learned = shards.learned_of(Path(s.out))
        found = [learned[a.prompt.id] for a in asked if a.prompt.id in learned]
        counts = {
            "asked": len(asked),
            "answered": sum(found),
            "failed": len(asked) - len(found),
            "answers_too_short": len(found) - sum(found),
            **dropped,
        }
        write_manifest(s, reader, counts)
        say(
            f"{counts['answered']} answered, {counts['failed']} failed (too long for the context), "
            f"{counts['answers_too_short']} with too short an answer: {s.out}"
        )
    state.destroy_process_group()


if __name__ == "__main__":
    run_command(main, Settings, __doc__)
