"""The pass of the target over the samples that writes missing feature shards.

After a kill it resumes with the shards that are missing. Several processes write the same files as one.
"""

import contextlib
import shutil
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import torch
from rich.console import Console
from torch import Tensor

from decode.common import damage
from decode.common.errors import UserError
from decode.common.memory import keep_freed_memory
from decode.common.progress import ProgressBars, progress_bars
from eval.reporting.formatting import format_bytes
from train.data import batching
from train.data.sample_store import SampleRow
from train.losses import chunked_sums
from train.teacher.feature_codec import (
    FINAL_STATES,
    FeatureSchema,
    pack_distribution,
    pack_hidden_states,
)
from train.teacher.feature_store import FeatureStore
from train.teacher.live import LiveTeacher
from train.teacher.served import ServedTeacher

MICROBATCH_TOKENS, CPU_MICROBATCH_TOKENS = 2**12, 2**10
"""Tokens of a forward pass, padding included; a longer sample has a pass of its own. What a CPU computes from 1,024
tokens stays in its caches: with SmolLM2 that is a sixth faster than 4,096."""


def fill_missing_shards(
    cache: FeatureStore,
    live: LiveTeacher | ServedTeacher,
    top: int,
    console: Console,
    rank: int,
    world: int,
    wait: Callable[[], None],
) -> None:
    """Writes missing shards as process `rank` of `world`, computed by `live`; `wait` is a barrier over all ranks.

    Of each distribution the `top` likeliest tokens are stored. Shards that cannot be opened are written again, with a
    warning. UserError if the disk has too little space or if another command is filling the folder.
    """
    todo = cache.missing_shards()
    for path in (cache.path(kind, shard) for shard, kinds in todo for kind in kinds):
        if rank == 0 and path.exists():
            damage.warn(f"features {path} are damaged and made again")
    if todo:
        needed = sum(cache.size(kind, shard) for shard, kinds in todo for kind in kinds)
        console.print(
            f"features: {len(todo)} of {len(cache.shard_members)} shards to make in {cache.folder}, "
            f"{format_bytes(needed)}; {cache.bytes_per_token():,.0f} bytes a token "
            f"(bf16 taps and final state: 8 H = {8 * live.hidden:,})"
        )
        check_disk_space(cache.folder, needed)
        if live.model.device.type == "cpu":
            keep_freed_memory()
        with cache.lock() if rank == 0 else contextlib.nullcontext():
            wait()  # no rank writes a shard before every rank has listed the missing ones
            with progress_bars(console, ("speed",), disable=rank != 0) as bars:
                write_shards(cache, live, top, todo[rank::world], bars)
            wait()
    cache.check()


def remake_shard(
    cache: FeatureStore,
    live: LiveTeacher | ServedTeacher,
    top: int,
    kind: FeatureSchema,
    shard: int,
) -> None:
    """Writes a shard again that was found damaged when it was read, with a warning; once if several processes ask."""
    with cache.lock(wait=True):
        if cache.is_intact(kind, shard):  # another process has made it again
            return
        damage.warn(f"features {cache.path(kind, shard)} are damaged and made again")
        rows = [cache.rows[i] for i in cache.shard_members[shard]]
        cache.write(kind, shard, extract_features(live, top, rows, [kind])[kind.name])


def write_shards(
    cache: FeatureStore,
    live: LiveTeacher | ServedTeacher,
    top: int,
    todo: Sequence[tuple[int, list[FeatureSchema]]],
    bars: ProgressBars,
) -> None:
    """Computes and writes these (shard, missing kinds)."""
    tokens = [int(cache.counts[False][cache.shard_members[shard]].sum()) for shard, _ in todo]
    began, done = time.perf_counter(), 0
    bar = bars.add_task("features", total=sum(tokens), speed="")
    for (shard, kinds), count in zip(todo, tokens, strict=True):
        features = extract_features(
            live, top, [cache.rows[i] for i in cache.shard_members[shard]], kinds
        )
        for kind in kinds:
            cache.write(kind, shard, features[kind.name])
        done += count
        bars.update(bar, speed=f"{done / (time.perf_counter() - began):,.0f} tokens/s")
        bars.advance(bar, count)


@torch.no_grad()
def extract_features(
    live: LiveTeacher | ServedTeacher,
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
    return {name: concat_pieces(tensors) for name, tensors in pieces.items()}


def microbatches(rows: Sequence[SampleRow], most: int) -> Iterator[list[SampleRow]]:
    """Consecutive `rows`, which are sorted by length, grouped into forward passes of at most `most` tokens."""
    group: list[SampleRow] = []
    for row in rows:
        if (len(group) + 1) * len(row["input_ids"]) > most and group:
            yield group
            group = []
        group.append(row)
    yield group


def concat_pieces(pieces: list[dict[str, Tensor]]) -> dict[str, Tensor]:
    """{name: tensor} with the rows of all pieces concatenated, in CPU memory."""
    return {name: torch.cat([piece[name].cpu() for piece in pieces]) for name in pieces[0]}


def check_disk_space(folder: Path, needed: int) -> None:
    """UserError unless the disk of `folder`, which need not exist yet, has `needed` bytes of free space."""
    existing = folder.absolute()
    while not existing.exists():
        existing = existing.parent
    free = shutil.disk_usage(existing).free
    if free < needed:
        raise UserError(
            f"features in {folder} need {format_bytes(needed)} and the disk has {format_bytes(free)} left: name a "
            "folder on another disk with --features, lower features_top or train on fewer samples"
        )
