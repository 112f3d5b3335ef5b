"""Rows that the draft writes itself: it goes on with prompts of the data, and the live target says what it should say.

A draft that only ever reads the target's text never learns what to do behind its own words, which is where it drafts.
Every `every` steps the draft as it then is writes what the next steps will read. What it wrote lies in the run's
folder, so that a run that goes on after a kill reads the very rows that it would have read.
"""

import shutil
from collections.abc import Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from pathlib import Path
from typing import Protocol

import numpy as np
from accelerate import Accelerator

from decode.common.errors import UserError
from decode.engine.engine import decode
from decode.model.loading import Target
from decode.verification.sampling import SamplingParams
from train.data import batching, sample_store
from train.data.mixture import Mixture, source_at
from train.data.sample_store import SampleRow
from train.families.base import TrainableDraft
from train.trainer.loop import LoopConfig

PROMPT_SEED_OFFSET = 1_000_003  # added to the seed: prompts are met in another order than rows


@dataclass
class OnPolicyConfig:
    """What the draft writes itself while it is trained."""

    share: float = 0.0
    """Of a step's rows, those that the draft wrote; 0: none, 1: all, the data only gives prompts."""
    every: int = 100
    """Steps after which the draft, as it then is, writes new ones; each is read once."""
    max_new_tokens: int = 64
    """Longest continuation."""
    batch_size: int = 32
    """Prompts continued together, each process."""
    sampling: SamplingParams = field(default_factory=lambda: SamplingParams(temperature=1.0))
    """How the draft's words are drawn."""

    def __post_init__(self) -> None:
        if not 0 <= self.share <= 1:
            raise UserError(f"on_policy.share {self.share} must be between 0 and 1")
        if min(self.every, self.max_new_tokens, self.batch_size) < 1:
            raise UserError("on_policy: need every, max_new_tokens and batch_size >= 1")


class OnPolicyRunConfig(Protocol):
    """The settings of train/distill.py that are read here."""

    on_policy: OnPolicyConfig
    loop: LoopConfig
    seed: int
    out: str


def check_supported(s: OnPolicyConfig, family: str, features: str, sharded: bool) -> None:
    """UserError where there is no draft that could write, or nobody to say what it should have said."""
    if s.share > 0 and sharded:
        raise UserError(
            "on_policy.share: under FSDP no process has the whole draft to write with: set it to 0 or use plain data "
            "parallelism (configs/accelerate/ddp8.yaml)"
        )
    if s.share > 0 and family != "causal":
        raise UserError(
            f"on_policy.share: {family} heads cannot write without their target: set it to 0 or train a causal draft"
        )
    if s.share > 0 and features:
        raise UserError(
            "on_policy.share: stored features know nothing of texts that the draft writes: leave `features` empty"
        )


class OnPolicyBuffer:
    """The order of rows in which those that the draft wrote have their share, as `Mixture` is one without them.

    A function of the seed, the step and the draft at the beginning of its round, whatever the processes and kills.
    """

    def __init__(
        self,
        s: OnPolicyRunConfig,
        rows: Mixture,
        trainee: TrainableDraft,
        target: Target,
        accelerator: Accelerator,
        max_length: int,
    ):
        self.s, self.rows, self.trainee, self.target = s.on_policy, rows, trainee, target
        self.accelerator, self.folder = accelerator, Path(s.out) / "on_policy"
        self.max_length, self.seed = max_length, s.seed
        self.batch, self.steps = s.loop.batch_size, s.loop.steps
        share = Fraction(str(s.on_policy.share))
        self.shares = [1 - share, share]
        self.round = -1
        self.written: dict[str, SampleRow] = {}
        self.new: list[SampleRow] = []

    def global_batch(self, step: int) -> list[SampleRow]:
        """The global batch of `step`; with the first one of a round the draft writes, all processes together."""
        if self.round < 0:
            self._discard_rounds_after(step)
        if self.round != step // self.s.every:
            self.round = step // self.s.every
            self.written = self._write()
        chosen = []
        for place in range(step * self.batch, (step + 1) * self.batch):
            source, number = source_at(self.shares, place)
            own = source == 1
            chosen.append(
                self.written[draft_row_id(number)] if own else self.rows.row_at(number, self.seed)
            )
        return chosen

    def fresh(self) -> list[SampleRow]:
        """Rows that this run's processes have written in this round, once: asked again, none."""
        new, self.new = self.new, []
        return new

    def _discard_rounds_after(self, step: int) -> None:
        """Rounds of steps that are trained again go: other settings may lead to another draft there."""
        if self.accelerator.is_main_process:
            for folder in self.folder.glob("step-*-*"):
                if int(folder.name.split("-")[1]) > step:
                    shutil.rmtree(folder)
        self.accelerator.wait_for_everyone()

    def _write(self) -> dict[str, SampleRow]:
        """{id: row} of this round: what is in its folder, and what is missing there written now."""
        first = self.round * self.s.every
        end = min(first + self.s.every, self.steps)
        before = [int(step * self.batch * self.shares[1]) for step in (first, end)]
        wanted = range(*before)
        if len(wanted) == 0:
            return {}
        folder = self.folder / f"step-{first:06d}-{len(wanted)}"
        done = sample_store.done_ids(folder)
        self.accelerator.wait_for_everyone()  # nobody writes before everybody has read what is done
        todo = [number for number in wanted if draft_row_id(number) not in done]
        mine = todo[self.accelerator.process_index :: self.accelerator.num_processes]
        if len(mine) > 0:
            sample_store.add_shard(folder, self._generate_rows(mine))
        self.accelerator.wait_for_everyone()
        rows = {
            row["id"]: batching.truncate_row(row, self.max_length)
            for row in sample_store.read_shards(folder)
        }
        self.new = [rows[draft_row_id(number)] for number in todo]
        return rows

    def _generate_rows(self, numbers: Sequence[int]) -> list[SampleRow]:
        """What the draft as it is makes of the prompts of these numbers."""
        draft = self.trainee.draft()
        author = Target(draft.decoder, None, "draft", None, "", self.target.eos)  # type: ignore[attr-defined]
        room = min(self.max_length, author.decoder.context) - self.s.max_new_tokens
        sources = [self.rows.row_at(number, self.seed + PROMPT_SEED_OFFSET) for number in numbers]
        prompts = [
            prompt_from_row(row, max(1, room), np.random.default_rng([self.seed, number]))
            for row, number in zip(sources, numbers, strict=True)
        ]
        outputs = decode(
            author,
            None,
            prompts,
            sampling=self.s.sampling,
            max_new_tokens=self.s.max_new_tokens,
            rows=self.s.batch_size,
            seeds=[(self.seed << 31) + number for number in numbers],
        )
        self.trainee.model.train()
        return [
            {
                "id": draft_row_id(number),
                "source": row["source"],
                "origin": "draft",
                "input_ids": [*output.prompt_ids, *output.output_ids],
                "loss_spans": [
                    [len(output.prompt_ids), len(output.prompt_ids) + len(output.output_ids)]
                ],
                "finish_reason": output.finish_reason,
            }
            for number, row, output in zip(numbers, sources, outputs, strict=True)
        ]


def draft_row_id(number: int) -> str:
    """Of the rows that the draft writes in a run, the so manieth."""
    return f"draft/{number}"


def prompt_from_row(row: SampleRow, longest: int, rng: np.random.Generator) -> list[int]:
    """The beginning of a row for the draft to go on with, `longest` tokens at most.

    It ends where one of its replies begins; a text that is learned from its first word on ends in its first half.
    """
    starts = [start for start, _ in row["loss_spans"] if start > 1]
    half = max(2, len(row["input_ids"]) // 2)
    end = int(rng.choice(starts)) if starts else int(rng.integers(1, half))
    return [int(token) for token in row["input_ids"][: min(end, longest)]]
