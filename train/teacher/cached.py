"""The target's hidden states and distributions read from disk: the target runs once per sample, not at every step.

    <folder>/taps-2-6-9/  final/  hidden states of every token: fp8, with a scale for each token and tap
    <folder>/top-64/              the likeliest tokens and their probabilities, at supervised positions only

With features_top 0, the default, distributions are computed by the target's LM head from final/, as exactly as fp8
states allow. With features_top K only the K likeliest tokens are stored; of the tail its sum is known, which is spread
evenly over the other tokens. Where the target's distribution is flat this trains the draft on a different distribution
(setting divergence.top to K or less leaves the tail's shape out of the loss).

A draft adds the kinds of features that are missing, so drafts of several families share a folder. feature_codec.py
defines the tensors of a row, feature_store.py the files, and feature_extraction.py the pass that fills them.
"""

import contextlib
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from rich.console import Console
from torch import Tensor

from decode.common import damage
from decode.common.errors import UserError
from decode.common.machine import keep_freed_memory
from decode.common.progress import ProgressBars, format_bytes, progress_bars
from decode.model.hidden_states import HiddenStateSpec
from decode.model.loading import Target
from train.data import batching
from train.data.batching import Batch
from train.data.sample_store import SampleRow
from train.settings.data import StatesServerConfig
from train.teacher.feature_codec import (
    FeatureSchema,
    distribution_schema,
    hidden_state_schema,
    unpack_hidden_states,
    unpack_log_probs,
)
from train.teacher.feature_extraction import check_disk_space, extract_features
from train.teacher.feature_store import DamagedShardError, FeatureStore
from train.teacher.live import LiveTeacher, TeacherOutput
from train.teacher.served import ServedTeacher


@dataclass(frozen=True)
class FeatureFolder:
    """The settings of a folder of features."""

    path: Path
    top: int
    """Tokens stored of each distribution; 0: the final hidden state is stored, from which the LM head makes logits."""
    max_length: int
    """Tokens to which samples were cut."""
    allow_changed: bool = False
    """Use features of another target all the same."""


class CachedTeacher:
    """A teacher with the interface of LiveTeacher that reads hidden states and distributions from disk."""

    def __init__(
        self,
        target: Target,
        taps: HiddenStateSpec | None,
        rows: Sequence[SampleRow],
        folder: FeatureFolder,
        states: StatesServerConfig | None = None,
    ):
        """Without `taps` only distributions are stored. Nothing is written before `fill_store`."""
        if folder.top < 0:
            raise UserError(
                f"features_top {folder.top}: give the number of tokens to store of each distribution, or 0"
            )
        self.live = running_teacher(target, taps, states)
        self.vocab, self.device = target.runner.vocab_size, target.runner.device
        self.hidden = self.live.hidden
        self.top = min(folder.top, self.vocab)
        final = hidden_state_schema(HiddenStateSpec(final=True), self.hidden)
        self.distribution_schema = distribution_schema(self.top, self.vocab) if self.top else final
        self.states_schema = None if taps is None else hidden_state_schema(taps, self.hidden)
        schemas = (self.states_schema, self.distribution_schema)
        kinds = {kind.name: kind for kind in schemas if kind is not None}
        key = {"tokenizer": target.fingerprint, "max_length": folder.max_length}
        self.cache = FeatureStore(
            folder.path, list(kinds.values()), rows, key, target.identity, folder.allow_changed
        )

    def head(self, rows: Tensor) -> Tensor:
        """Logits [N, V] of rows [N, P] of `TeacherOutput.head_inputs`."""
        return unpack_log_probs(rows, self.top, self.vocab) if self.top else self.live.head(rows)

    def get_output(self, batch: Batch) -> TeacherOutput:
        """The output of `LiveTeacher.get_output`, up to the precision of storage, with zeros at padding."""
        features = self._read_hidden_states(self.states_schema, batch)
        if self.top:
            return TeacherOutput(features, self._read_distributions(batch))
        same = self.states_schema == self.distribution_schema
        final = features if same else self._read_hidden_states(self.distribution_schema, batch)
        return TeacherOutput(features, final)

    def _read_hidden_states(self, kind: FeatureSchema | None, batch: Batch) -> Tensor:
        """Hidden states [B, T, F] of one kind; F is 0 if `kind` is None."""
        shape = batch.input_ids.shape
        if kind is None:
            return torch.zeros(*shape, 0, device=self.device)
        (_, row), (dtype, scales) = kind.fields["states"], kind.fields["scale"]
        values = torch.zeros(*shape, *row, dtype=torch.uint8)
        scale = torch.zeros(*shape, *scales, dtype=dtype)
        for name, (line, column) in zip(batch.ids, batch.starts, strict=True):
            tensors = self._read_sample(kind, self.cache.sample_index[name])
            columns = slice(column, column + len(tensors["states"]))
            values[line, columns] = tensors["states"].view(torch.uint8)
            scale[line, columns] = tensors["scale"]
        # moved to the device as bytes and converted there
        return unpack_hidden_states(values.to(self.device), scale.to(self.device)).flatten(2)

    def _read_sample(self, kind: FeatureSchema, sample: int) -> dict[str, Tensor]:
        """The rows of one sample; the target makes their shard again first if it is damaged."""
        try:
            return self.cache.read(kind, sample)
        except DamagedShardError:
            shard = int(self.cache.shard[sample])
        with self.cache.lock(wait=True):
            if not self.cache.is_intact(kind, shard):  # else another process has made it again
                damage.warn(f"features {self.cache.path(kind, shard)} are damaged and made again")
                self._write(shard, [kind])
        return self.cache.read(kind, sample)

    def _read_distributions(self, batch: Batch) -> Tensor:
        """[B, T, 2 top + 1] at supervised positions: token ids, their probabilities, and the sum of the others."""
        shape = batch.input_ids.shape
        samples = [self.cache.sample_index[name] for name in batch.ids]
        stored = [self._read_sample(self.distribution_schema, sample) for sample in samples]
        positions = [batching.supervised_positions(self.cache.rows[sample]) for sample in samples]
        starts = [line * shape[1] + column for line, column in batch.starts]
        flat = torch.cat([at + start for at, start in zip(positions, starts, strict=True)])  # [M]
        rows = [torch.cat([x["ids"].float(), x["probabilities"].float()], -1) for x in stored]
        payload = torch.zeros(shape.numel(), 2 * self.top + 1, device=self.device)
        payload[flat.to(self.device)] = torch.cat(rows).to(self.device)
        return payload.unflatten(0, shape)

    def fill_store(
        self,
        console: Console,
        rank: int = 0,
        world: int = 1,
        wait: Callable[[], None] = lambda: None,
    ) -> None:
        """Computes and writes missing shards as process `rank` of `world`; `wait` is a barrier over all ranks.

        After a kill it goes on with those that are missing. Shards that cannot be opened are written again, with a
        warning. UserError if the disk has too little space or if another command is filling the folder.
        """
        cache, todo = self.cache, self.cache.missing_shards()
        for path in (cache.path(kind, shard) for shard, kinds in todo for kind in kinds):
            if rank == 0 and path.exists():
                damage.warn(f"features {path} are damaged and made again")
        if todo:
            needed = sum(cache.size(kind, shard) for shard, kinds in todo for kind in kinds)
            console.print(
                f"features: {len(todo)} of {len(cache.shard_members)} shards to make in {cache.folder}, "
                f"{format_bytes(needed)}; {cache.bytes_per_token():,.0f} bytes a token "
                f"(bf16 taps and final state: 8 H = {8 * self.hidden:,})"
            )
            check_disk_space(cache.folder, needed)
            if self.device.type == "cpu":
                keep_freed_memory()
            with cache.lock() if rank == 0 else contextlib.nullcontext():
                wait()  # no rank writes a shard before every rank has listed the missing ones
                with progress_bars(console, ("speed",), disable=rank != 0) as bars:
                    self._write_all(todo[rank::world], bars)
                wait()
        cache.check()

    def _write_all(
        self, todo: Sequence[tuple[int, list[FeatureSchema]]], bars: ProgressBars
    ) -> None:
        """Computes and writes these (shard, missing kinds)."""
        members, counts = self.cache.shard_members, self.cache.counts[False]
        tokens = [int(counts[members[shard]].sum()) for shard, _ in todo]
        began, done = time.perf_counter(), 0
        bar = bars.add_task("features", total=sum(tokens), speed="")
        for (shard, kinds), count in zip(todo, tokens, strict=True):
            self._write(shard, kinds)
            done += count
            bars.update(bar, speed=f"{done / (time.perf_counter() - began):,.0f} tokens/s")
            bars.advance(bar, count)

    def _write(self, shard: int, kinds: Sequence[FeatureSchema]) -> None:
        rows = [self.cache.rows[i] for i in self.cache.shard_members[shard]]
        features = extract_features(self.live, self.top, rows, kinds)
        for kind in kinds:
            self.cache.write(kind, shard, features[kind.name])


Teacher = LiveTeacher | CachedTeacher
"""What gives the target's hidden states and logits for a batch."""


def running_teacher(
    target: Target, taps: HiddenStateSpec | None, states: StatesServerConfig | None
) -> LiveTeacher:
    """The target that is run for every batch: here, or by the server that `states` names."""
    taps = taps or HiddenStateSpec()
    if states is not None and states.url:
        return ServedTeacher(target, taps, states)
    return LiveTeacher(target, taps)
