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

from decode.sampling import Sampling
from decode.settings import UserError
from decode.speculate import BUCKET, decode
from decode.target import PREFILL_CHUNK, Target
from train import batches, estimate, shards
from train.families import Trainee
from train.loop import LoopSettings
from train.mixture import Mixture, seat
from train.shards import Row
from train.sizes import Shape

OTHER_ORDER = 1_000_003  # added to the seed: prompts are met in another order than rows


@dataclass
class OnPolicy:
    """What the draft writes itself while it is trained."""

    share: float = 0.0
    """Of a step's rows, those that the draft wrote; 0: none, 1: all, the data only gives prompts."""
    every: int = 100
    """Steps after which the draft, as it then is, writes new ones; each is read once."""
    max_new_tokens: int = 64
    """Longest continuation."""
    batch_size: int = 32
    """Prompts continued together, each process."""
    sampling: Sampling = field(default_factory=lambda: Sampling(temperature=1.0))
    """How the draft's words are drawn."""

    def __post_init__(self) -> None:
        if not 0 <= self.share <= 1:
            raise UserError(f"on_policy.share {self.share} must be between 0 and 1")
        if min(self.every, self.max_new_tokens, self.batch_size) < 1:
            raise UserError("on_policy: need every, max_new_tokens and batch_size >= 1")


class Recipe(Protocol):
    """The settings of train/distill.py that are read here."""

    on_policy: OnPolicy
    loop: LoopSettings
    seed: int
    out: str


def refuse(s: OnPolicy, family: str, features: str, sharded: bool) -> None:
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


class OwnTexts:
    """The order of rows in which those that the draft wrote have their share, as `Mixture` is one without them.

    A function of the seed, the step and the draft at the beginning of its round, whatever the processes and kills.
    """

    def __init__(
        self,
        s: Recipe,
        rows: Mixture,
        trainee: Trainee,
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
        self.written: dict[str, Row] = {}
        self.new: list[Row] = []

    def step(self, step: int) -> list[Row]:
        """The global batch of `step`; with the first one of a round the draft writes, all processes together."""
        if self.round < 0:
            self._forget_after(step)
        if self.round != step // self.s.every:
            self.round = step // self.s.every
            self.written = self._write()
        chosen = []
        for place in range(step * self.batch, (step + 1) * self.batch):
            source, number = seat(self.shares, place)
            own = source == 1
            chosen.append(self.written[id_of(number)] if own else self.rows.at(number, self.seed))
        return chosen

    def fresh(self) -> list[Row]:
        """Rows that this run's processes have written in this round, once: asked again, none."""
        new, self.new = self.new, []
        return new

    def _forget_after(self, step: int) -> None:
        """Rounds of steps that are trained again go: other settings may lead to another draft there."""
        if self.accelerator.is_main_process:
            for folder in self.folder.glob("step-*-*"):
                if int(folder.name.split("-")[1]) > step:
                    shutil.rmtree(folder)
        self.accelerator.wait_for_everyone()

    def _write(self) -> dict[str, Row]:
        """{id: row} of this round: what is in its folder, and what is missing there written now."""
        first = self.round * self.s.every
        end = min(first + self.s.every, self.steps)
        before = [int(step * self.batch * self.shares[1]) for step in (first, end)]
        wanted = range(*before)
        if len(wanted) == 0:
            return {}
        folder = self.folder / f"step-{first:06d}-{len(wanted)}"
        done = shards.done_ids(folder)
        self.accelerator.wait_for_everyone()  # nobody writes before everybody has read what is done
        todo = [number for number in wanted if id_of(number) not in done]
        mine = todo[self.accelerator.process_index :: self.accelerator.num_processes]
        if len(mine) > 0:
            shards.add_shard(folder, self._continued(mine))
        self.accelerator.wait_for_everyone()
        rows = {row["id"]: batches.cut(row, self.max_length) for row in shards.read_shards(folder)}
        self.new = [rows[id_of(number)] for number in todo]
        return rows

    def _continued(self, numbers: Sequence[int]) -> list[Row]:
        """What the draft as it is makes of the prompts of these numbers."""
        draft = self.trainee.draft()
        author = Target(draft.decoder, None, "draft", None, "", self.target.eos)  # type: ignore[attr-defined]
        room = min(self.max_length, author.decoder.context) - self.s.max_new_tokens
        sources = [self.rows.at(number, self.seed + OTHER_ORDER) for number in numbers]
        prompts = [
            prompt_of(row, max(1, room), np.random.default_rng([self.seed, number]))
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
                "id": id_of(number),
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


def memory(s: OnPolicy, draft: Shape, load: estimate.Load, max_length: int) -> dict[str, int]:
    """Bytes on each device while the draft writes, weights apart. It writes alone: the target has no cache then.

    `max_length`: to which samples are cut. Weights, and with them all else, are in fp32 then.
    """
    rows = min(s.batch_size, rows_a_round(s, load.samples) // load.processes or 1)
    text = min(load.longest + s.max_new_tokens, max_length)
    slots = -(-(text + 5) // BUCKET) * BUCKET  # the engine looks a few ahead
    read = rows * min(text - s.max_new_tokens, PREFILL_CHUNK) if text > s.max_new_tokens else rows
    return {
        "draft's K/V cache": 4 * rows * slots * draft.layers * draft.kv,
        "states of the draft": 4 * read * (4 * draft.hidden + 3 * draft.inner),
        "logits and probabilities": 2 * 4 * rows * draft.vocab,
    }


def beyond(needs: dict[str, int], step: dict[str, int]) -> int:
    """Bytes of `needs` that go beyond what a step takes, by `estimate.memory`: between steps only weights stay."""
    kept = ("target's weights", "draft's weights, fp32", "AdamW's moments, fp32")
    passing = sum(count for name, count in step.items() if name not in kept)
    return max(0, sum(needs.values()) - passing)


def rows_a_round(s: OnPolicy, batch: int) -> int:
    """Most rows that the draft writes at once, all processes together, for steps of `batch` rows."""
    return int(s.every * batch * Fraction(str(s.share)))


def work(draft: Shape, rows: Sequence[Row]) -> float:
    """Operations of writing these rows: each token is read once, and only those that were written are projected."""
    return sum(
        len(row["input_ids"]) * estimate.forward(draft, len(row["input_ids"]))
        + batches.token_count([row]) * 2 * draft.vocab * draft.hidden
        for row in rows
    )


def id_of(number: int) -> str:
    """Of the rows that the draft writes in a run, the so manieth."""
    return f"draft/{number}"


def prompt_of(row: Row, longest: int, rng: np.random.Generator) -> list[int]:
    """The beginning of a row for the draft to go on with, `longest` tokens at most.

    It ends where one of its replies begins; a text that is learned from its first word on ends in its first half.
    """
    starts = [start for start, _ in row["loss_spans"] if start > 1]
    half = max(2, len(row["input_ids"]) // 2)
    end = int(rng.choice(starts)) if starts else int(rng.integers(1, half))
    return [int(token) for token in row["input_ids"][: min(end, longest)]]
