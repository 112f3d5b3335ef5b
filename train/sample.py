"""Writes the sampled set that drafts are distilled on: the target's answers to prompts, or texts as they stand.

    accelerate launch train/sample.py --config configs/quickstart/sample.yaml
    accelerate launch train/sample.py --target T --sources '[{kind: file, path: prompts.jsonl}]' --out DIR
    python train/sample.py --origin text --target T --sources '[{kind: file, path: chats.jsonl}]' --turns all --out DIR

Several processes share the prompts. After a kill the same command resumes: no answer is lost, no prompt is answered
twice, and each answer is the same as without the kill, because its random numbers depend on its id alone.
"""

import contextlib
import hashlib
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Annotated, Literal

if not __package__:
    sys.path[0] = str(Path(__file__).resolve().parents[1])

from accelerate import PartialState
from accelerate.utils import parse_flag_from_env
from rich.console import Console

from decode.common import provenance
from decode.common.command import run_command
from decode.common.errors import UserError
from decode.common.progress import ProgressBars, progress_bars
from decode.common.ranges import Count, DraftLength, Seed, at_least
from decode.drafts.base import Draft, check_request
from decode.drafts.registry import pick_draft
from decode.engine.active_request import check_draft_length
from decode.engine.engine import speculate
from decode.engine.records import DecodeRecord, add_record
from decode.model.loading import Target, load_target
from decode.verification.sampling import SamplingParams
from train.data import manifest, sample_store
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

COMMAND = "train/sample.py"
OWNED_FILES = ("manifest.json", "shards/*.parquet")
"""Patterns of the files that this command writes into its output folder."""


@dataclass
class SampleConfig:
    target: str = "assets/target"
    """The target model, which generates the answers: a folder or a Hub name."""
    revision: str | None = None
    """Commit, tag or branch of a Hub target."""
    origin: Literal["target", "text"] = "target"
    """target: the target generates the answers; text: answers and texts are stored as they stand, and only the target's
    tokenizer and chat template are used."""
    sources: list[PromptSource] = field(default_factory=lambda: [PromptSource("bundled", "all")])
    """Where prompts come from. Prompts that overlap the bundled evaluation prompts are dropped."""
    decontaminate: str | list[str] = ""
    """Files with further evaluation prompts (jsonl; one path or a list): prompts that overlap them are dropped too."""
    filters: FilterConfig = field(default_factory=FilterConfig)
    turns: TurnSelection = "last"
    """Which replies of a chat are generated and trained on. last: only the last one; all: every reply, the target's own
    replies replacing those of the chat. all needs a chat template that leaves earlier turns unchanged."""
    window: Annotated[int, at_least(2)] = 512
    """origin text: texts without a prompt are cut into pieces of this many tokens."""
    sampling: SamplingParams = field(default_factory=lambda: SamplingParams(temperature=1.0))
    """How answers are sampled. At temperature 1 they follow the target's own distribution."""
    max_new_tokens: Count = 256
    """Tokens of the longest answer. A chat ends with the first reply that was cut off here."""
    batch_size: Count = 32
    """Prompts decoded together by each process. A row that is finished is refilled with the next prompt."""
    draft: str = "none"
    """none, ngram, or a draft's folder. With a draft small batches decode faster; answers follow the same distribution,
    because speculative decoding is lossless."""
    k: DraftLength = 4
    """Tokens drafted per round."""
    shard_rows: Count = 128
    """Answers per file, which is also the most work that is repeated after a kill."""
    device: str = "auto"
    """auto, cpu or cuda; with several processes auto gives each its own GPU."""
    dtype: str = "float32"
    """float32, bfloat16 or float16."""
    seed: Seed = 0
    out: str = "outputs/samples"
    """Folder of the sampled set."""
    resume: bool = False
    """Resume in `out` although the settings differ. A run with the same settings resumes by itself."""
    overwrite: bool = False
    """Delete what an earlier run left in `out`."""


def reply_seed(reply_id: str, seed: int) -> int:
    """The random seed of one reply, the same in every batch, process and attempt."""
    return int(hashlib.sha256(f"{seed}:{reply_id}".encode()).hexdigest()[:15], 16)


class ConversationState:
    """A conversation while its replies are generated turn by turn."""

    def __init__(self, prompt: Prompt, conversation: Conversation):
        self.prompt, self.prompt_segments = prompt, conversation.prompt_segments[:1]
        self.pending_turns = conversation.prompt_segments[1:]
        self.replies: list[list[int]] = []
        self.finish_reason = ""

    def prompt_ids(self) -> list[int]:
        """All token ids before the next reply: prompt segments and replies so far."""
        return [*join_turns(self.prompt_segments, self.replies)[0], *self.prompt_segments[-1]]

    def add_reply(self, output: DecodeRecord, context: int) -> bool:
        """Appends a generated reply; True if another reply follows.

        A chat ends early after a reply that did not end with EOS, or when the next turn does not fit the context.
        """
        self.replies.append(output.output_ids)
        self.finish_reason = output.finish_reason
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
        """The id of the next reply, from which its random seed is made."""
        return f"{self.prompt.id}/{len(self.replies)}" if self.replies else self.prompt.id

    def conversation(self) -> Conversation:
        """The turns so far."""
        return Conversation(self.prompt_segments, self.replies)


class ShardWriter:
    """Collects finished rows and writes a shard whenever `shard_rows` of them are there.

    As a context manager it writes the rest at the end, also when the command is stopped.
    """

    def __init__(self, s: SampleConfig):
        self.s = s
        self.rows: list[sample_store.SampleRow] = []

    def add(self, prompt: Prompt, conversation: Conversation, finish_reason: str) -> None:
        """Adds the row of one finished conversation."""
        self.rows.append(make_row(self.s, prompt, conversation, finish_reason))
        if len(self.rows) >= self.s.shard_rows:
            self.write()

    def write(self) -> None:
        """Writes the collected rows, if there are any."""
        if self.rows:
            # the shard of these very ids is there if a signal came after it was written
            with contextlib.suppress(FileExistsError):
                sample_store.add_shard(Path(self.s.out), self.rows)
        self.rows = []

    def __enter__(self) -> "ShardWriter":
        return self

    def __exit__(self, *error: object) -> None:
        self.write()


def generate_answers(
    s: SampleConfig,
    target: Target,
    draft: Draft | None,
    prompts: Sequence[TokenizedPrompt],
    bars: ProgressBars,
) -> None:
    """Generates the replies to `prompts` and writes them as shards.

    Conversations of one turn are decoded first, in one stream in which finished rows are refilled. Those of several
    turns follow in groups of `shard_rows`; in a group all first turns are decoded before all second ones.
    """
    bar = bars.add_task("answering", total=len(prompts), speed="")
    tokens, start = 0, time.perf_counter()
    with ShardWriter(s) as writer:
        for group in group_by_turns(prompts, s.shard_rows):
            states = [ConversationState(prompt.prompt, prompt.conversation) for prompt in group]
            while states:
                outputs, continued = [DecodeRecord(state.prompt_ids()) for state in states], []
                for record in speculate(
                    target,
                    draft,
                    [output.prompt_ids for output in outputs],
                    k=s.k,
                    rows=s.batch_size,
                    sampling=s.sampling,
                    max_new_tokens=s.max_new_tokens,
                    seeds=[reply_seed(state.seed_key(), s.seed) for state in states],
                ):
                    state, output = states[record.prompt], outputs[record.prompt]
                    add_record(output, record)
                    tokens += len(record.tokens)
                    if record.finished is None:
                        continue
                    if state.add_reply(output, target.decoder.context):
                        continued.append(record.prompt)
                        continue
                    writer.add(state.prompt, state.conversation(), state.finish_reason)
                    speed = tokens / (time.perf_counter() - start)
                    bars.update(bar, speed=f"{speed:,.0f} tokens/s")
                    bars.advance(bar)
                states = [states[i] for i in sorted(continued)]


def group_by_turns(
    prompts: Sequence[TokenizedPrompt], size: int
) -> list[Sequence[TokenizedPrompt]]:
    """All one-turn conversations, then those of several turns in groups of `size`.

    They are sorted by turns and by length of the first prompt, so that rows decoded together have similar lengths and
    buffers stay short.
    """

    def order(prompt: TokenizedPrompt) -> tuple[int, int, str]:
        segments = prompt.conversation.prompt_segments
        return len(segments), len(segments[0]), prompt.prompt.id

    ordered = sorted(prompts, key=order)
    single = [p for p in ordered if len(p.conversation.prompt_segments) == 1]
    several = ordered[len(single) :]
    groups = [several[i : i + size] for i in range(0, len(several), size)]
    return [group for group in (single, *groups) if group]


def write_texts(s: SampleConfig, texts: Sequence[TokenizedPrompt], bars: ProgressBars) -> None:
    """Writes tokenised texts and chats as shards, without generating anything."""
    bar = bars.add_task("writing", total=len(texts), speed="")
    with ShardWriter(s) as writer:
        for text in texts:
            writer.add(text.prompt, text.conversation, "")
            bars.advance(bar)


def make_row(
    s: SampleConfig, prompt: Prompt, conversation: Conversation, finish_reason: str
) -> sample_store.SampleRow:
    """A finished conversation as a row of the sampled set; replies that are too short get no loss spans."""
    ids, spans = join_turns(conversation.prompt_segments, conversation.replies)
    long_enough = sum(map(len, conversation.replies)) >= s.filters.min_answer
    return {
        "id": prompt.id,
        "source": prompt.source,
        "origin": s.origin,
        "input_ids": ids,
        "loss_spans": spans if long_enough else [],
        "finish_reason": finish_reason or "text",
    }


def write_manifest(s: SampleConfig, reader: TargetTokenizer, counts: dict[str, int]) -> None:
    """Writes manifest.json: how the set was made, and how many prompts were answered or dropped."""
    template = reader.tokenizer.chat_template
    sampling = {**asdict(s.sampling), "max_new_tokens": s.max_new_tokens}
    manifest.write_manifest(
        Path(s.out),
        manifest.Manifest(
            target=reader.name,
            revision=reader.revision,
            tokenizer_hash=reader.fingerprint,
            chat_template_hash=template and hashlib.sha256(template.encode()).hexdigest()[:16],
            sampling=sampling if s.origin == "target" else {},
            seed=s.seed,
            counts=counts,
            git_sha=provenance.git_sha(),
            versions=provenance.versions(),
        ),
    )


def unanswered_prompts(
    s: SampleConfig, state: PartialState, prompts: Sequence[TokenizedPrompt]
) -> list[TokenizedPrompt]:
    """The prompts that have no row in `out` yet. Every rank must call it."""
    with collective.raise_on_all_ranks(state):
        if state.is_main_process:
            sample_store.remove_partial(Path(s.out))
            manifest.set_damaged_aside(Path(s.out), {prompt.prompt.id for prompt in prompts})
    done = sample_store.done_ids(Path(s.out))
    state.wait_for_everyone()  # no rank writes a shard before every rank has read which prompts are done
    return [prompt for prompt in prompts if prompt.prompt.id not in done]


def input_paths(s: SampleConfig) -> list[str]:
    """What the run reads: folders and files, or names of other things."""
    evaluation = [s.decontaminate] if isinstance(s.decontaminate, str) else s.decontaminate
    return [s.target, s.draft, *evaluation, *(source.path for source in s.sources)]


def count_answers(
    s: SampleConfig, prompts: Sequence[TokenizedPrompt], dropped: dict[str, int]
) -> dict[str, int]:
    """The manifest's counts: asked = answered + failed + answers_too_short, and why prompts were dropped."""
    supervised = sample_store.supervised_by_id(Path(s.out))
    answered = [supervised[p.prompt.id] for p in prompts if p.prompt.id in supervised]
    return {
        "asked": len(prompts),
        "answered": sum(answered),
        "failed": len(prompts) - len(answered),
        "answers_too_short": len(answered) - sum(answered),
        **dropped,
    }


@collective.process_group()
def main(s: SampleConfig) -> None:
    state = PartialState(cpu=parse_flag_from_env("ACCELERATE_USE_CPU"))
    target, draft = None, None
    if s.origin == "text":
        reader = load_target_tokenizer(s.target, s.revision)
    else:
        device = str(state.device) if s.device == "auto" else s.device
        target = load_target(s.target, device, s.dtype, s.revision)
        check_draft_length(target, s.k)
        draft = pick_draft(s.draft, target, dtype=s.dtype)
        reader = TargetTokenizer.from_target(target)
    prompts, dropped = load_prompts(s, reader)
    longest = reader.context - (s.origin == "target")  # an answer needs room for one token
    fitting = [prompt for prompt in prompts if 0 < prompt.tokens() <= longest]
    if len(fitting) == 0:
        raise UserError(
            f"no prompt fits the context of {reader.name}, which holds {reader.context} tokens"
        )
    if draft is not None:
        check_request(draft, s.k, s.sampling)
    with collective.open_run(state, s.out, s, COMMAND, OWNED_FILES, input_paths(s)):
        todo = unanswered_prompts(s, state, fitting)
        rank_prompts = todo[state.process_index :: state.num_processes]
        console = Console(stderr=True, quiet=not state.is_main_process)
        console.print(
            f"{len(prompts)} prompts ({dropped['dropped_as_evaluation']} dropped as evaluation prompts), "
            f"{len(todo)} to answer"
        )
        with progress_bars(console, ("speed",), disable=not state.is_main_process) as bars:
            if target is None:
                write_texts(s, rank_prompts, bars)
            else:
                generate_answers(s, target, draft, rank_prompts, bars)
        state.wait_for_everyone()
        if state.is_main_process:
            counts = count_answers(s, prompts, dropped)
            write_manifest(s, reader, counts)
            console.print(
                f"{counts['answered']} answered, {counts['failed']} failed (too long for the context), "
                f"{counts['answers_too_short']} with too short an answer: {s.out}"
            )


if __name__ == "__main__":
    run_command(main, SampleConfig, __doc__)
