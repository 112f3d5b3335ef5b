"""The pass of the target over samples that gives their features, and the disk space that they need."""

import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch
from torch import Tensor

from decode.common.errors import UserError
from decode.common.progress import format_bytes
from train.data import batching
from train.data.sample_store import SampleRow
from train.losses import chunked_sums
from train.teacher.feature_codec import (
    FINAL_STATES,
    FeatureSchema,
    pack_distribution,
    pack_hidden_states,
)
from train.teacher.live import LiveTeacher

MICROBATCH_TOKENS, CPU_MICROBATCH_TOKENS = 2**12, 2**10
"""Tokens of a forward pass, padding included; a longer sample has a pass of its own. What a CPU computes from 1,024
tokens stays in its caches: with SmolLM2 that is a sixth faster than 4,096."""


@torch.no_grad()
def extract_features(
    live: LiveTeacher,
    top: int,
    rows: Sequence[SampleRow],
    kinds: Sequence[FeatureSchema],
) -> dict[str, dict[str, Tensor]]:
    """{kind: tensors} computed by the live target, with the rows of these samples concatenated."""
    pieces: dict[str, list[dict[str, Tensor]]] = {kind.name: [] for kind in kinds}
    device, vocab = live.model.device, live.model.get_output_embeddings().weight.shape[0]
    most = CPU_MICROBATCH_TOKENS if device.type == "cpu" else MICROBATCH_TOKENS
    for group in microbatches(rows, most):
        batch = batching.collate(group, pad_id=0).to(device)
        output = live.get_output(batch)
        ends = torch.tensor([len(row["input_ids"]) for row in group], device=device)
        is_token = torch.arange(batch.input_ids.shape[1], device=device) < ends[:, None]
        for kind in kinds:
            if kind.supervised:
                for piece in output.head_inputs[batch.loss_mask].split(
                    chunked_sums.max_chunk_rows(vocab)
                ):
                    pieces[kind.name].append(pack_distribution(live.head(piece), top))
            else:
                states = output.head_inputs if kind.name == FINAL_STATES else output.features
                states = states[is_token].unflatten(-1, (-1, live.hidden))
                pieces[kind.name].append(pack_hidden_states(states))
    return {
        name: {field: torch.cat([part[field].cpu() for part in parts]) for field in parts[0]}
        for name, parts in pieces.items()
    }


def microbatches(rows: Sequence[SampleRow], most: int) -> Iterator[list[SampleRow]]:
    """Consecutive `rows`, which are sorted by length, grouped into forward passes of at most `most` tokens."""
    group: list[SampleRow] = []
    for row in rows:
        if (len(group) + 1) * len(row["input_ids"]) > most and group:
            yield group
            group = []
        group.append(row)
    yield group


def check_disk_space(folder: Path, needed: int) -> None:
    """UserError unless the disk of `folder`, which need not exist yet, has `needed` bytes of free space."""
    existing = next(x for x in (folder.absolute(), *folder.absolute().parents) if x.exists())
    free = shutil.disk_usage(existing).free
    if free < needed:
        raise UserError(
            f"features in {folder} need {format_bytes(needed)} and the disk has {format_bytes(free)} left: name a "
            "folder on another disk with --features, lower features_top or train on fewer samples"
        )
