"""On-policy rows: the draft continues prompts of the data itself, and the live target gives the distributions to learn.

A draft that only reads the target's text never learns what follows its own tokens, which is what it meets in drafting.
Every `every` steps the current draft generates the rows of the next steps. They are saved in the run's folder, so that
a run that is resumed after a kill reads the same rows.
"""

import shutil
from collections.abc import Sequence
from fractions import Fraction
from pathlib import Path

import numpy as np
from accelerate import Accelerator

from decode.common.errors import UserError
from decode.engine.engine import decode
from decode.model.loading import Target
from train.data import batching, sample_store
from train.data.manifest import set_damaged_aside
from train.data.mixture import Mixture, source_at
from train.data.sample_store import SampleRow, ids_in
from train.families.base import TrainableDraft
from train.families.registry import family_settings
from train.settings.training import OnPolicyConfig
from train.trainer.settings import DistillConfig

PROMPT_SEED_OFFSET = 1_000_003  # added to the seed, so that prompts come in another order than rows


def check_supported(s: OnPolicyConfig, family: str, features: str, sharded: bool) -> None:
    """UserError if the draft cannot generate text (`sharded`: under FSDP2) or there is no live target to learn from."""
    if s.share > 0 and sharded:
        raise UserError(
            "on_policy.share: under FSDP no process has the whole draft to generate with: set it to 0 or use plain "
            "data parallelism (configs/accelerate/ddp8.yaml)"
        )
    if s.share > 0 and not family_settings(family).decodes_alone:
        raise UserError(
            f"on_policy.share: {family} heads cannot generate text without their target: set it to 0 or train a causal "
            "draft"
        )
    if s.share > 0 and features:
        raise UserError(
            "on_policy.share: stored features do not cover text that the draft generates: leave `features` empty"
        )


def round_rows(s: DistillConfig, step: int) -> tuple[int, range]:
    """(first step of the round that `step` belongs to, numbers of the rows that the draft generates for it)."""
    every = s.on_policy.every
    first = step // every * every
    share = Fraction(str(s.on_policy.share))
    end = min(first + every, s.loop.steps)
    before, after = (int(at * s.loop.batch_size * share) for at in (first, end))
    return first, range(before, after)


def round_folder(s: DistillConfig, first: int, count: int) -> Path:
    """Where the `count` rows of the round that begins with step `first` are kept."""
    return Path(s.out) / "on_policy" / f"step-{first:06d}-{count}"


def find_damage(s: DistillConfig, step: int) -> str:
    """What a run that resumes after `step` steps lacks of the rows of its round, "" for nothing.

    In the middle of a round they cannot be generated again: the weights that the round began with are gone.
    """
    first, numbers = round_rows(s, step)
    if step in (first, s.loop.steps) or len(numbers) == 0:
        return ""
    folder = round_folder(s, first, len(numbers))
    try:
        found = {name for path in sample_store.shard_paths(folder) for name in ids_in(path, True)}
    except UserError:
        return f"a shard of {folder}, which its next steps read, is damaged"
    missing = {draft_row_id(number) for number in numbers} - found
    return f"{len(missing)} rows of {folder}, which its next steps read, are missing" * bool(
        missing
    )


class OnPolicyBuffer:
    """Global batches in which rows that the draft generated have their share; `Mixture` gives batches without them.

    A batch depends only on the seed, the step and the draft at the beginning of its round, not on the number of
    processes or on kills.
    """

    def __init__(
        self,
        s: DistillConfig,
        rows: Mixture,
        trainable: TrainableDraft,
        target: Target,
        accelerator: Accelerator,
        max_length: int,
    ):
        self.run, self.s, self.seed, self.batch = s, s.on_policy, s.seed, s.loop.batch_size
        self.rows, self.trainable, self.target = rows, trainable, target
        self.accelerator, self.folder = accelerator, Path(s.out) / "on_policy"
        self.max_length = max_length
        share = Fraction(str(s.on_policy.share))
        self.shares = [1 - share, share]
        self.round = -1
        self.rows_by_id: dict[str, SampleRow] = {}
        self.new_rows: list[SampleRow] = []

    def global_batch(self, step: int) -> list[SampleRow]:
        """The global batch of `step`; for the first step of a round, all processes generate its rows together."""
        if self.round < 0:
            self._discard_rounds_after(step)
        if self.round != step // self.s.every:
            self.round = step // self.s.every
            self.rows_by_id = self._generate_or_load(step)
        chosen = []
        for place in range(step * self.batch, (step + 1) * self.batch):
            source, number = source_at(self.shares, place)
            chosen.append(
                self.rows_by_id[draft_row_id(number)]
                if source == 1
                else self.rows.row_at(number, self.seed)
            )
        return chosen

    def take_new_rows(self) -> list[SampleRow]:
        """Rows that this run's processes generated since the last call."""
        rows, self.new_rows = self.new_rows, []
        return rows

    def _discard_rounds_after(self, step: int) -> None:
        """Deletes rounds of later steps, which are trained again: the draft may then be another."""
        if self.accelerator.is_main_process:
            for folder in self.folder.glob("step-*-*"):
                if int(folder.name.split("-")[1]) > step:
                    shutil.rmtree(folder)
        self.accelerator.wait_for_everyone()

    def _generate_or_load(self, step: int) -> dict[str, SampleRow]:
        """{id: row} of the round of `step`; rows that are missing in its folder or damaged are generated first."""
        first, wanted = round_rows(self.run, step)
        if len(wanted) == 0:
            return {}
        folder = round_folder(self.run, first, len(wanted))
        if self.accelerator.is_main_process:
            set_damaged_aside(folder, {draft_row_id(number) for number in wanted})
        self.accelerator.wait_for_everyone()
        done = sample_store.row_ends(folder)
        self.accelerator.wait_for_everyone()  # no process writes before all have read what is done
        todo = [number for number in wanted if draft_row_id(number) not in done]
        mine = todo[self.accelerator.process_index :: self.accelerator.num_processes]
        if len(mine) > 0:
            sample_store.write_shard(folder, self._generate_rows(mine))
        self.accelerator.wait_for_everyone()
        rows = {
            row["id"]: batching.truncate_row(row, self.max_length)
            for row in sample_store.read_shards(folder)
        }
        self.new_rows = [rows[draft_row_id(number)] for number in todo]
        return rows

    def _generate_rows(self, numbers: Sequence[int]) -> list[SampleRow]:
        """The current draft's continuations of the prompts with these numbers."""
        runner = self.trainable.language_model()
        draft = Target(runner, None, "draft", None, "", self.target.eos)
        room = min(self.max_length, runner.context) - self.s.max_new_tokens
        sources = [self.rows.row_at(number, self.seed + PROMPT_SEED_OFFSET) for number in numbers]
        prompts = [
            prompt_from_row(row, max(1, room), np.random.default_rng([self.seed, number]))
            for row, number in zip(sources, numbers, strict=True)
        ]
        outputs = decode(
            draft,
            None,
            prompts,
            sampling=self.s.sampling,
            max_new_tokens=self.s.max_new_tokens,
            rows=self.s.batch_size,
            seeds=[(self.seed << 31) + number for number in numbers],
        )
        self.trainable.model.train()
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
    """The id of the row with this number among those that the draft generates in a run."""
    return f"draft/{number}"


def prompt_from_row(row: SampleRow, longest: int, rng: np.random.Generator) -> list[int]:
    """The beginning of a row, `longest` tokens at most, for the draft to continue.

    It ends where one of the row's replies begins, or in the first half of a text that is supervised from the start.
    """
    starts = [start for start, _ in row["loss_spans"] if start > 1]
    half = max(2, len(row["input_ids"]) // 2)
    end = int(rng.choice(starts)) if starts else int(rng.integers(1, half))
    return [int(token) for token in row["input_ids"][: min(end, longest)]]
