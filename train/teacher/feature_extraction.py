"""The pass over the samples that fills a folder of features: the target reads each sample once, shard by shard.

A pass that was killed goes on by shard, and several processes give the files that one gives.
"""

import contextlib
import shutil
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import torch
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn
from torch import Tensor

from decode.common.errors import UserError
from eval.reporting.formatting import format_bytes
from train.data import batching
from train.data.sample_store import SampleRow
from train.losses import divergences
from train.teacher.feature_codec import (
    FINAL_STATES,
    FeatureSchema,
    pack_distribution,
    pack_hidden_states,
)
from train.teacher.feature_store import FeatureStore
from train.teacher.live import LiveTeacher

MICROBATCH_TOKENS = 2**12
"""Tokens of a forward pass over the samples, padding included, where a single sample has not more."""


def fill_missing_shards(
    cache: FeatureStore,
    live: LiveTeacher,
    top: int,
    console: Console,
    rank: int,
    world: int,
    wait: Callable[[], None],
) -> None:
    """Makes the shards that are missing, those of process `rank` of `world`; `wait` lets all processes catch up.

    `live` says what is in them, and of each law its `top` likeliest tokens are kept.
    UserError when the disk has no room for them, or when a shard that is there is damaged.
    """
    todo = cache.missing_shards()
    if todo:
        needed = sum(cache.size(kind, shard) for shard, kinds in todo for kind in kinds)
        console.print(
            f"features: {len(todo)} of {len(cache.shard_members)} shards to make in {cache.folder}, {format_bytes(needed)}; "
            f"{cache.bytes_per_token():,.0f} bytes a token "
            f"(bf16 taps and final state: 8 H = {8 * live.hidden:,})"
        )
        check_disk_space(cache.folder, needed)
        with cache.lock() if rank == 0 else contextlib.nullcontext():
            wait()  # nobody writes a shard before everybody has seen what is missing
            write_shards(cache, live, top, todo[rank::world], make_progress_bar(console, rank == 0))
            wait()
    cache.check()


def write_shards(
    cache: FeatureStore,
    live: LiveTeacher,
    top: int,
    todo: Sequence[tuple[int, list[FeatureSchema]]],
    progress: Progress,
) -> None:
    """Writes these shards, each in the kinds that it is missing in."""
    tokens = [int(cache.counts[False][cache.shard_members[shard]].sum()) for shard, _ in todo]
    began, done = time.perf_counter(), 0
    with progress:
        bar = progress.add_task("features", total=sum(tokens), speed="")
        for (shard, kinds), count in zip(todo, tokens, strict=True):
            made = extract_features(
                live, top, [cache.rows[i] for i in cache.shard_members[shard]], kinds
            )
            for kind in kinds:
                cache.write(kind, shard, made[kind.name])
            done += count
            speed = f"{done / (time.perf_counter() - began):,.0f} tok/s"
            progress.update(bar, advance=count, speed=speed)


@torch.no_grad()
def extract_features(
    live: LiveTeacher, top: int, rows: Sequence[SampleRow], kinds: Sequence[FeatureSchema]
) -> dict[str, dict[str, Tensor]]:
    """Tensors of each kind for these samples, one after the other, as the live target gives them."""
    made: dict[str, list[dict[str, Tensor]]] = {kind.name: [] for kind in kinds}
    device, vocab = live.model.device, live.model.get_output_embeddings().weight.shape[0]
    for some in microbatches(rows):
        batch = batching.collate(some, pad_id=0).to(device)
        output = live.get_output(batch)
        ends = torch.tensor([len(row["input_ids"]) for row in some], device=device)
        inside = torch.arange(batch.input_ids.shape[1], device=device) < ends[:, None]
        for kind in kinds:
            if kind.supervised:
                for piece in output.head_inputs[batch.loss_mask].split(
                    divergences.max_chunk_rows(vocab)
                ):
                    made[kind.name].append(pack_distribution(live.head(piece), top))
            else:
                states = output.head_inputs if kind.name == FINAL_STATES else output.features
                states = states[inside].unflatten(-1, (-1, live.hidden))
                made[kind.name].append(pack_hidden_states(states))
    return {name: concat_pieces(pieces) for name, pieces in made.items()}


def microbatches(rows: Sequence[SampleRow]) -> Iterator[list[SampleRow]]:
    """Neighbours in `rows`, which rise in length, that make up one forward pass."""
    some: list[SampleRow] = []
    for row in rows:
        if (len(some) + 1) * len(row["input_ids"]) > MICROBATCH_TOKENS and some:
            yield some
            some = []
        some.append(row)
    yield some


def concat_pieces(pieces: list[dict[str, Tensor]]) -> dict[str, Tensor]:
    """The tensors of all pieces, row behind row, in memory of the CPU."""
    return {name: torch.cat([piece[name].cpu() for piece in pieces]) for name in pieces[0]}


def check_disk_space(folder: Path, needed: int) -> None:
    """UserError unless the disk of `folder`, which need not be there yet, has room for `needed` bytes."""
    place = folder.absolute()
    while not place.exists():
        place = place.parent
    free = shutil.disk_usage(place).free
    if free < needed:
        raise UserError(
            f"features in {folder} need {format_bytes(needed)} and the disk has {format_bytes(free)} left: name a folder on "
            "another disk with --features, lower features_top or train on fewer samples"
        )


def make_progress_bar(console: Console, shown: bool) -> Progress:
    """The bar of the pass: tokens, speed and time left."""
    return Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        TextColumn("{task.percentage:.0f} % {task.fields[speed]}"),
        TimeRemainingColumn(),
        console=console,
        disable=not shown,
    )
