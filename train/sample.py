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

from decode.common import run_dir
from decode.common.cli import run_command
from decode.common.errors import UserError
from decode.drafts.base import Draft
from decode.drafts.registry import pick_draft
from decode.engine.engine import speculate
from decode.engine.records import DecodeRecord, add_record
from decode.model.loading import Target, load_target
from decode.verification.sampling import SamplingParams
from train.data import sample_store
from train.data.conversations import Conversation, TurnSelection, join_turns, skip_repeated_turn_end
from train.data.filters import FilterConfig
from train.data.prompt_pipeline import (
    TargetTokenizer,
    TokenizedPrompt,
    load_prompts,
    load_target_tokenizer,
)
from train.data.prompts import Prompt
from train.data.sources import PromptSource
from train.trainer import collective


@dataclass
class SampleConfig:
    target: str = "assets/target"
    """The model that answers: folder or hub name."""
    revision: str | None = None
    """Commit, tag or branch of a hub target."""
    origin: Literal["target", "text"] = "target"
    """target: it answers the prompts; text: answers and texts are taken as they stand, and the target only gives its
    tokenizer and chat template."""
    sources: list[PromptSource] = field(default_factory=lambda: [PromptSource("bundled", "all")])
    """Where prompts come from; what overlaps the bundled evaluation prompts is dropped."""
    decontaminate: str | list[str] = ""
    """Files of your own evaluation prompts (jsonl, one or a list): what overlaps them is dropped as well."""
    filters: FilterConfig = field(default_factory=FilterConfig)
    turns: TurnSelection = "last"
    """Of a chat, last: only its last reply is asked for and learned; all: every reply is, the target's own replies
    taking the place of those that are there. For templates that leave earlier turns as they were."""
    window: int = 512
    """text: tokens of the pieces that texts without a prompt are cut into."""
    sampling: SamplingParams = field(default_factory=lambda: SamplingParams(temperature=1.0))
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


def reply_seed(prompt_id: str, seed: int) -> int:
    """The sample's own randomness: the same in any batch, process or attempt."""
    return int(hashlib.sha256(f"{seed}:{prompt_id}".encode()).hexdigest()[:15], 16)


class ConversationState:
    """A prompt on its way through its turns."""

    def __init__(self, prompt: Prompt, script: Conversation):
        self.prompt, self.prompt_segments = prompt, script.prompt_segments[:1]
        self.pending_turns = script.prompt_segments[1:]
        self.replies: list[list[int]] = []
        self.reason = ""

    def prompt_ids(self) -> list[int]:
        """What has been given and said, up to where the next reply begins."""
        return [*join_turns(self.prompt_segments, self.replies)[0], *self.prompt_segments[-1]]

    def add_reply(self, output: DecodeRecord, context: int) -> bool:
        """Takes a reply; True if another one is to come.

        A chat ends early with a reply that did not end by itself, or that left no room for another.
        """
        self.replies.append(output.output_ids)
        self.reason = output.finish_reason
        if not self.pending_turns or output.finish_reason != "eos":
            return False
        self.prompt_segments.append(
            skip_repeated_turn_end(output.output_ids, self.pending_turns.pop(0))
        )
        if len(self.prompt_ids()) < context:
            return True
        self.prompt_segments.pop()
        return False

    def seed_key(self) -> str:
        """Of the next reply, for its randomness."""
        return f"{self.prompt.id}/{len(self.replies)}" if self.replies else self.prompt.id


def generate_answers(
    s: SampleConfig,
    target: Target,
    draft: Draft | None,
    mine: Sequence[TokenizedPrompt],
    bar: Progress,
) -> None:
    """Answers `mine` and writes a shard whenever `shard_rows` answers are ready.

    Rows that are done take the next prompt, and neighbours in length sit together, so that buffers stay short. Chats of
    several turns go `shard_rows` at a time, all first turns before all second ones.
    """
    task = bar.add_task("answering", total=len(mine), speed="")
    mine = sorted(
        mine,
        key=lambda a: (
            len(a.conversation.prompt_segments),
            len(a.conversation.prompt_segments[0]),
            a.prompt.id,
        ),
    )
    single = [a for a in mine if len(a.conversation.prompt_segments) == 1]
    several = mine[len(single) :]
    groups = [several[i : i + s.shard_rows] for i in range(0, len(several), s.shard_rows)]
    ready: list[sample_store.SampleRow] = []
    tokens, start = 0, time.perf_counter()
    for group in filter(None, [single, *groups]):
        talks = [ConversationState(asked.prompt, asked.conversation) for asked in group]
        while talks:
            outputs, next_turn = [DecodeRecord(talk.prompt_ids()) for talk in talks], []
            for record in speculate(
                target,
                draft,
                [output.prompt_ids for output in outputs],
                k=s.k,
                rows=s.batch_size,
                sampling=s.sampling,
                max_new_tokens=s.max_new_tokens,
                seeds=[reply_seed(talk.seed_key(), s.seed) for talk in talks],
            ):
                add_record(outputs[record.prompt], record)
                tokens += len(record.tokens)
                if record.finished is None:
                    continue
                talk = talks[record.prompt]
                if talk.add_reply(outputs[record.prompt], target.decoder.context):
                    next_turn.append(record.prompt)
                    continue
                ready.append(
                    make_row(
                        s,
                        talk.prompt,
                        Conversation(talk.prompt_segments, talk.replies),
                        talk.reason,
                    )
                )
                if len(ready) >= s.shard_rows:
                    sample_store.add_shard(Path(s.out), ready)
                    ready = []
                speed = f"{tokens / (time.perf_counter() - start):,.0f} tokens/s"
                bar.update(task, advance=1, speed=speed)
            talks = [talks[i] for i in sorted(next_turn)]
    if ready:
        sample_store.add_shard(Path(s.out), ready)


def write_texts(s: SampleConfig, mine: Sequence[TokenizedPrompt], bar: Progress) -> None:
    """Writes texts as they stand."""
    task = bar.add_task("writing", total=len(mine), speed="")
    for at in range(0, len(mine), s.shard_rows):
        some = mine[at : at + s.shard_rows]
        rows = [make_row(s, asked.prompt, asked.conversation, "") for asked in some]
        sample_store.add_shard(Path(s.out), rows)
        bar.update(task, advance=len(some))


def make_row(
    s: SampleConfig, prompt: Prompt, script: Conversation, reason: str
) -> sample_store.SampleRow:
    """A finished script as a row of the sampled set; of replies that are too short nothing is learned."""
    ids, spans = join_turns(script.prompt_segments, script.replies)
    enough = sum(map(len, script.replies)) >= s.filters.min_answer
    return {
        "id": prompt.id,
        "source": prompt.source,
        "origin": s.origin,
        "input_ids": ids,
        "loss_spans": spans if enough else [],
        "finish_reason": reason or "text",
    }


def write_manifest(s: SampleConfig, reader: TargetTokenizer, counts: dict[str, int]) -> None:
    template = reader.tokenizer.chat_template
    drawn = {**asdict(s.sampling), "max_new_tokens": s.max_new_tokens}
    sample_store.write_manifest(
        Path(s.out),
        sample_store.Manifest(
            target=reader.name,
            revision=reader.revision,
            tokenizer_hash=reader.fingerprint,
            chat_template_hash=template and hashlib.sha256(template.encode()).hexdigest()[:16],
            sampling=drawn if s.origin == "target" else {},
            seed=s.seed,
            counts=counts,
            git_sha=run_dir.git_sha(),
            versions=run_dir.versions(),
        ),
    )


def main(s: SampleConfig) -> None:
    state = PartialState(cpu=parse_flag_from_env("ACCELERATE_USE_CPU"))
    write: Callable[..., None]
    if s.origin == "text":
        reader = load_target_tokenizer(s.target, s.revision)
        write = partial(write_texts, s)
    else:
        device = str(state.device) if s.device == "auto" else s.device
        target = load_target(s.target, device, s.dtype, s.revision)
        draft = pick_draft(s.draft, target, dtype=s.dtype)
        reader = TargetTokenizer.from_target(target)
        write = partial(generate_answers, s, target, draft)
    asked, dropped = load_prompts(s, reader)
    fitting = [a for a in asked if 0 < a.tokens() < reader.context + (s.origin == "text")]
    if len(fitting) == 0:
        raise UserError(
            f"no prompt fits the context of {reader.name}, which holds {reader.context} tokens"
        )
    with collective.raise_on_all_ranks(state):
        if state.is_main_process:
            run_dir.claim_run_dir(s.out, s)
            sample_store.remove_partial(Path(s.out))
    done = sample_store.done_ids(Path(s.out))
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
        learned = sample_store.supervised_by_id(Path(s.out))
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
    run_command(main, SampleConfig, __doc__)
