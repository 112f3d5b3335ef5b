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

from decode.settings import UserError
from eval.wording import size
from train import batches, losses
from train.feature_cache import Cache
from train.packed import FINAL, Kind, packed_law, packed_states
from train.shards import Row
from train.teacher import Teacher

PASS_TOKENS = 2**12
"""Tokens of a forward pass over the samples, padding included, where a single sample has not more."""


def fill(
    cache: Cache,
    live: Teacher,
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
    todo = cache.missing()
    if todo:
        needed = sum(cache.size(kind, shard) for shard, kinds in todo for kind in kinds)
        console.print(
            f"features: {len(todo)} of {len(cache.plan)} shards to make in {cache.folder}, {size(needed)}; "
            f"{cache.token_bytes():,.0f} bytes a token "
            f"(bf16 taps and final state: 8 H = {8 * live.hidden:,})"
        )
        refuse_without_room(cache.folder, needed)
        with cache.claim() if rank == 0 else contextlib.nullcontext():
            wait()  # nobody writes a shard before everybody has seen what is missing
            make_shards(cache, live, top, todo[rank::world], progress_of(console, rank == 0))
            wait()
    cache.check()


def make_shards(
    cache: Cache,
    live: Teacher,
    top: int,
    todo: Sequence[tuple[int, list[Kind]]],
    progress: Progress,
) -> None:
    """Writes these shards, each in the kinds that it is missing in."""
    tokens = [int(cache.counts[False][cache.plan[shard]].sum()) for shard, _ in todo]
    began, done = time.perf_counter(), 0
    with progress:
        bar = progress.add_task("features", total=sum(tokens), speed="")
        for (shard, kinds), count in zip(todo, tokens, strict=True):
            made = made_by(live, top, [cache.rows[i] for i in cache.plan[shard]], kinds)
            for kind in kinds:
                cache.write(kind, shard, made[kind.name])
            done += count
            speed = f"{done / (time.perf_counter() - began):,.0f} tok/s"
            progress.update(bar, advance=count, speed=speed)


@torch.no_grad()
def made_by(
    live: Teacher, top: int, rows: Sequence[Row], kinds: Sequence[Kind]
) -> dict[str, dict[str, Tensor]]:
    """Tensors of each kind for these samples, one after the other, as the live target gives them."""
    made: dict[str, list[dict[str, Tensor]]] = {kind.name: [] for kind in kinds}
    device, vocab = live.model.device, live.model.get_output_embeddings().weight.shape[0]
    for some in forwards(rows):
        batch = batches.collate(some, pad_id=0).to(device)
        look = live.look(batch)
        ends = torch.tensor([len(row["input_ids"]) for row in some], device=device)
        inside = torch.arange(batch.input_ids.shape[1], device=device) < ends[:, None]
        for kind in kinds:
            if kind.supervised:
                for piece in look.teacher[batch.loss_mask].split(losses.rows_for(vocab)):
                    made[kind.name].append(packed_law(live.head(piece), top))
            else:
                states = look.teacher if kind.name == FINAL else look.features
                states = states[inside].unflatten(-1, (-1, live.hidden))
                made[kind.name].append(packed_states(states))
    return {name: joined(pieces) for name, pieces in made.items()}


def forwards(rows: Sequence[Row]) -> Iterator[list[Row]]:
    """Neighbours in `rows`, which rise in length, that make up one forward pass."""
    some: list[Row] = []
    for row in rows:
        if (len(some) + 1) * len(row["input_ids"]) > PASS_TOKENS and some:
            yield some
            some = []
        some.append(row)
    yield some


def joined(pieces: list[dict[str, Tensor]]) -> dict[str, Tensor]:
    """The tensors of all pieces, row behind row, in memory of the CPU."""
    return {name: torch.cat([piece[name].cpu() for piece in pieces]) for name in pieces[0]}


def refuse_without_room(folder: Path, needed: int) -> None:
    """UserError unless the disk of `folder`, which need not be there yet, has room for `needed` bytes."""
    place = folder.absolute()
    while not place.exists():
        place = place.parent
    free = shutil.disk_usage(place).free
    if free < needed:
        raise UserError(
            f"features in {folder} need {size(needed)} and the disk has {size(free)} left: name a folder on "
            "another disk with --features, lower features_top or train on fewer samples"
        )


def progress_of(console: Console, shown: bool) -> Progress:
    """The bar of the pass: tokens, speed and time left."""
    return Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        TextColumn("{task.percentage:.0f} % {task.fields[speed]}"),
        TimeRemainingColumn(),
        console=console,
        disable=not shown,
    )
