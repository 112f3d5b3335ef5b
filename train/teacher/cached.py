"""What the target says about the samples, kept on disk: it reads each sample once and not at every step.

    <folder>/taps-2-6-9/  final/  tapped states of every token: fp8, and a scale for each token and tap
    <folder>/top-64/              the likeliest tokens and their probabilities, at supervised positions alone

With features_top 0, the default, laws are what the target's head makes of final/: as exact as fp8 states are. A law of
K tokens is smaller, but what lies behind them is known by its sum alone and spread evenly. Where the target is flat
that teaches another law than its own (train/losses/objective.py: compare.top of K or less leaves it out).

A draft adds the kinds that are missing, so drafts of several families share a folder. What a row consists of is in
train/teacher/feature_codec.py, the files are in train/teacher/feature_store.py, and the pass that makes them in train/teacher/feature_extraction.py.
"""

import hashlib
import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from torch import Tensor

from decode.common.errors import UserError
from decode.model.hidden_states import HiddenStateSpec
from decode.model.loading import Target
from train.data import batching
from train.data.batching import Batch
from train.data.sample_store import SampleRow
from train.teacher import feature_extraction
from train.teacher.feature_codec import (
    FeatureSchema,
    distribution_schema,
    hidden_state_schema,
    unpack_hidden_states,
    unpack_log_probs,
)
from train.teacher.feature_store import FeatureStore
from train.teacher.live import LiveTeacher, TeacherOutput


@dataclass(frozen=True)
class FeatureFolder:
    """Where features are kept, and how."""

    path: Path
    top: int
    """Tokens kept of each law; 0: its final state, which the target's head reads."""
    max_length: int
    """To which samples were cut."""


class CachedTeacher:
    """A teacher whose states and laws come from disk; in place of `Teacher`."""

    def __init__(
        self,
        target: Target,
        taps: HiddenStateSpec | None,
        rows: Sequence[SampleRow],
        where: FeatureFolder,
    ):
        """Without `taps` the law alone is kept. Nothing is written before `fill`."""
        if where.top < 0:
            raise UserError(f"features_top {where.top}: give tokens of each law to keep, or 0")
        self.live = LiveTeacher(target, taps or HiddenStateSpec())
        self.vocab, self.device = target.decoder.vocab_size, target.decoder.device
        self.hidden = self.live.hidden
        self.top = min(where.top, self.vocab)
        final = hidden_state_schema(HiddenStateSpec(final=True), self.hidden)
        self.distribution_schema = distribution_schema(self.top, self.vocab) if self.top else final
        self.states_schema = None if taps is None else hidden_state_schema(taps, self.hidden)
        kinds = {
            kind.name: kind
            for kind in (self.states_schema, self.distribution_schema)
            if kind is not None
        }
        key = {
            "target": target.name,
            "revision": target.revision,
            "weights": weights_digest(target.decoder.model),
            "dtype": str(target.decoder.model.dtype).removeprefix("torch."),
            "tokenizer": target.fingerprint,
            "max_length": where.max_length,
        }
        self.cache = FeatureStore(where.path, list(kinds.values()), rows, key)

    def head(self, payload: Tensor) -> Tensor:
        """Logits [N, V] of rows of `Look.teacher` [N, P]."""
        return (
            unpack_log_probs(payload, self.top, self.vocab) if self.top else self.live.head(payload)
        )

    def get_output(self, batch: Batch) -> TeacherOutput:
        """What `Teacher.look` gives, with zeros at padding."""
        features = self._read_hidden_states(self.states_schema, batch)
        if self.top:
            return TeacherOutput(features, self._read_distributions(batch))
        same = self.states_schema == self.distribution_schema
        return TeacherOutput(
            features,
            features if same else self._read_hidden_states(self.distribution_schema, batch),
        )

    def _read_hidden_states(self, kind: FeatureSchema | None, batch: Batch) -> Tensor:
        """[B, T, F]; F is 0 without a kind."""
        shape = batch.input_ids.shape
        if kind is None:
            return torch.zeros(*shape, 0, device=self.device)
        (_, row), (dtype, scales) = kind.fields["states"], kind.fields["scale"]
        values = torch.zeros(*shape, *row, dtype=torch.uint8)
        scale = torch.zeros(*shape, *scales, dtype=dtype)
        for name, (line, column) in zip(batch.ids, batch.starts, strict=True):
            found = self.cache.read(kind, self.cache.sample_index[name])
            here = slice(column, column + len(found["states"]))
            values[line, here] = found["states"].view(torch.uint8)
            scale[line, here] = found["scale"]
        # as bytes to the device, and widened there
        return unpack_hidden_states(values.to(self.device), scale.to(self.device)).flatten(2)

    def _read_distributions(self, batch: Batch) -> Tensor:
        """[B, T, 2 top + 1]: ids, probabilities, what is left; at supervised positions."""
        shape, samples = (
            batch.input_ids.shape,
            [self.cache.sample_index[name] for name in batch.ids],
        )
        found = [self.cache.read(self.distribution_schema, sample) for sample in samples]
        places = [batching.supervised_positions(self.cache.rows[sample]) for sample in samples]
        starts = [line * shape[1] + column for line, column in batch.starts]
        flat = torch.cat([at + start for at, start in zip(places, starts, strict=True)])  # [M]
        laws = [torch.cat([x["ids"].float(), x["probabilities"].float()], -1) for x in found]
        payload = torch.zeros(shape.numel(), 2 * self.top + 1, device=self.device)
        payload[flat.to(self.device)] = torch.cat(laws).to(self.device)
        return payload.unflatten(0, shape)

    def fill_store(
        self,
        console: Console,
        rank: int = 0,
        world: int = 1,
        wait: Callable[[], None] = lambda: None,
    ) -> None:
        """Makes the shards that are missing, as process `rank` of `world`: what `feature_pass.fill` says."""
        feature_extraction.fill_missing_shards(
            self.cache, self.live, self.top, console, rank, world, wait
        )


def make_teacher(
    where: FeatureFolder | None,
    target: Target,
    taps: HiddenStateSpec | None,
    rows: Sequence[SampleRow],
) -> LiveTeacher | CachedTeacher:
    """The live target, or what a folder holds of it. Without `taps` its law alone is wanted."""
    return (
        LiveTeacher(target, taps or HiddenStateSpec())
        if where is None
        else CachedTeacher(target, taps, rows, where)
    )


def weights_digest(model: Any) -> str:
    """16 hex digits over the first values of every parameter: a target trained on in its folder is another one."""
    sha = hashlib.sha256()
    for name, value in itertools.chain(model.named_parameters(), model.named_buffers()):
        sha.update(name.encode())
        sha.update(value.detach().reshape(-1)[:64].double().cpu().numpy().data)
    return sha.hexdigest()[:16]
