"""What the target says about the samples, kept on disk: it reads each sample once and not at every step.

    <folder>/taps-2-6-9/  final/  tapped states of every token: fp8, and a scale for each token and tap
    <folder>/top-64/              the likeliest tokens and their probabilities, at supervised positions alone

With features_top 0, the default, laws are what the target's head makes of final/: as exact as fp8 states are. A law of
K tokens is smaller, but what lies behind them is known by its sum alone and spread evenly. Where the target is flat
that teaches another law than its own (train/criterion.py: compare.top of K or less leaves it out).

Each of these kinds has a manifest.json, which says whose states they are, and shards/*.safetensors. A draft adds the
kinds that are missing, so drafts of several families share a folder. Which samples a shard holds depends on the
samples alone: a pass that was killed goes on by shard, and several processes give the files that one gives. Shards
are mapped into memory and only rows that a batch needs are read; checksums go by sample, at its first reading.
"""

import contextlib
import fcntl
import functools
import hashlib
import itertools
import json
import math
import shutil
import time
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import numpy as np
import torch
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor

from decode import runs
from decode.settings import UserError
from decode.taps import Taps
from decode.target import Target
from train import batches, losses
from train.batches import Batch
from train.shards import Row, sweep, write_atomically
from train.teacher import Look, Teacher

FINAL = "final"
FORMAT = 1
"""Of files and of what each holds: folders of another one are refused."""
SHARD_TOKENS = 2**15
"""Tokens of a shard; small sets have shorter ones, so that there are about SHARDS."""
SHARDS = 16
PASS_TOKENS = 2**12
"""Tokens of a forward pass over the samples, padding included, where a single sample has not more."""
OPEN = 1024
"""Shards mapped at once."""
LARGEST = 448.0
"""Of torch.float8_e4m3fn."""
LEAST = 1e-10
"""For a probability that fp16 takes for 0, so that no logit is -inf."""
LOCK = "lock"
"""A file of no content, held while shards are made."""
DTYPES = {
    torch.float8_e4m3fn: "F8_E4M3",
    torch.bfloat16: "BF16",
    torch.float16: "F16",
    torch.uint16: "U16",
    torch.int32: "I32",
}
"""Their names in a safetensors header."""


@dataclass(frozen=True)
class Kind:
    """One kind of content: tensors that have a row for each token, or for each supervised position."""

    name: str
    supervised: bool
    fields: Mapping[str, tuple[torch.dtype, tuple[int, ...]]]
    """Type and shape of a row of each tensor."""

    @property
    def row_bytes(self) -> int:
        return sum(dtype.itemsize * math.prod(shape) for dtype, shape in self.fields.values())


def states_kind(taps: Taps, hidden: int) -> Kind:
    """The states that a draft with these taps reads: tapped layers if there are any, else the final one."""
    count = len(taps.layers) or 1
    return Kind(
        "-".join(["taps", *map(str, taps.layers)]) if taps.layers else FINAL,
        False,
        {
            "states": (torch.float8_e4m3fn, (count, hidden)),
            "scale": (torch.bfloat16, (count,)),  # the range of fp32 in the bytes of fp16
        },
    )


def law_kind(top: int, vocab: int) -> Kind:
    """The target's `top` likeliest tokens, falling, and their probabilities with that of all others behind them.

    The rest is stored and not implied: behind probabilities rounded to fp16 it would be lost in their rounding.
    """
    ids = torch.uint16 if vocab <= 2**16 else torch.int32
    return Kind(
        f"top-{top}", True, {"ids": (ids, (top,)), "probabilities": (torch.float16, (top + 1,))}
    )


def packed_states(states: Tensor) -> dict[str, Tensor]:
    """Of states [N, taps, H]; each value keeps 3 bits behind its first."""
    states = states.float()
    scale = (states.abs().amax(-1) / LARGEST).to(torch.bfloat16)
    scale = scale.masked_fill(scale == 0, 1.0)
    values = (states / scale.float()[..., None]).clamp(-LARGEST, LARGEST)
    return {"states": values.to(torch.float8_e4m3fn), "scale": scale}


def unpacked_states(states: Tensor, scale: Tensor) -> Tensor:
    """[..., taps, H] fp32 of what `packed_states` gave."""
    bits = states.view(torch.int8).to(torch.int16)
    # fp8's bits are those of an fp16 that is 2^8 times smaller; torch's own conversion is five times slower on a CPU.
    half = ((bits & 0x7F) << 7 | bits & -0x8000).view(torch.float16)
    return half.float().mul_(256.0 * scale.float()[..., None])


def packed_law(logits: Tensor, top: int) -> dict[str, Tensor]:
    """Of logits [N, V], top <= V."""
    p = logits.float().softmax(-1)
    best, ids = p.topk(top, dim=-1)
    rest = (1 - best.sum(-1, keepdim=True)).clamp_min(0)
    kind = law_kind(top, logits.shape[-1])
    return {
        "ids": ids.int().cpu().to(kind.fields["ids"][0]),
        "probabilities": torch.cat([best, rest], -1).half(),
    }


def law_logits(payload: Tensor, top: int, vocab: int) -> Tensor:
    """Log-probabilities [N, V] of payload [N, 2 top + 1]: ids and probabilities of `top` tokens, and of all others.

    These share what is left evenly. Each row sums to 1, and none of it is -inf.
    """
    ids, p = payload[:, :top].long(), payload[:, top:].clamp_min(LEAST)
    if top == vocab:
        p = p[:, :-1]
    logs = (p / p.sum(-1, keepdim=True)).log()
    rest = logs[:, -1:] - math.log(max(1, vocab - top))
    return rest.expand(-1, vocab).scatter(1, ids, logs[:, :top])


@dataclass(frozen=True)
class Folder:
    """Where features are kept, and how."""

    path: Path
    top: int
    """Tokens kept of each law; 0: its final state, which the target's head reads."""
    max_length: int
    """To which samples were cut."""


class Cache:
    """The folder, for these samples in this order: where each of them lies, and what is there."""

    def __init__(self, folder: Path, kinds: Sequence[Kind], rows: Sequence[Row], key: dict):
        """`key` is what a folder must have been made for. UserError if it was made for something else."""
        self.folder, self.kinds, self.rows = folder, kinds, rows
        self.key = {"format": FORMAT, **key, "samples": digest(rows), "count": len(rows)}
        for kind in kinds:
            self._refuse_others(kind)
        tokens = np.array([len(row["input_ids"]) for row in rows])
        learned = np.array([len(batches.learned(row)) for row in rows])
        self.counts = {False: tokens, True: learned}  # rows of each sample, by Kind.supervised
        self.plan = plan_of(tokens)
        self.shard = np.empty(len(rows), np.int64)
        self.place = np.empty(len(rows), np.int64)  # within its shard
        self.start = {which: np.empty(len(rows), np.int64) for which in self.counts}
        for number, members in enumerate(self.plan):
            self.shard[members], self.place[members] = number, np.arange(len(members))
            for which, counts in self.counts.items():
                self.start[which][members] = np.cumsum(counts[members]) - counts[members]
        self.number = {row["id"]: i for i, row in enumerate(rows)}
        self.checked = {kind.name: np.zeros(len(rows), bool) for kind in kinds}
        self._opened = functools.lru_cache(OPEN)(self._open)

    def path(self, kind: Kind, shard: int) -> Path:
        return self.folder / kind.name / "shards" / f"{shard:06d}.safetensors"

    def size(self, kind: Kind, shard: int | None = None) -> int:
        """Bytes of the tensors of a shard, or of all."""
        members = np.arange(len(self.rows)) if shard is None else self.plan[shard]
        return kind.row_bytes * int(self.counts[kind.supervised][members].sum()) + 8 * len(members)

    def missing(self) -> list[tuple[int, list[Kind]]]:
        """Shards that are not there, with the kinds they are missing in."""
        found = [
            (shard, [kind for kind in self.kinds if not self.path(kind, shard).is_file()])
            for shard in range(len(self.plan))
        ]
        return [(shard, kinds) for shard, kinds in found if kinds]

    def claim(self) -> IO[bytes]:
        """Says in the folder what it is for, and keeps other commands from filling it until what it returns is closed.

        The system lets go of it when a process ends, however that ends. UserError while another command fills it.
        """
        self.folder.mkdir(parents=True, exist_ok=True)
        lock = (self.folder / LOCK).open("ab")
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            lock.close()
            raise UserError(
                f"another command is filling features in {self.folder}: start this one when that is done"
            ) from error
        sweep(self.folder)
        for kind in self.kinds:
            text = json.dumps({"kind": kind.name, **self.key}, indent=1) + "\n"
            write_atomically(self.folder / kind.name / "manifest.json", text.encode())
        return lock

    def write(self, kind: Kind, shard: int, tensors: dict[str, Tensor]) -> None:
        """The shard of `kind` from tensors whose rows are those of its samples, one after the other."""
        members = self.plan[shard]
        ends = np.cumsum(self.counts[kind.supervised][members])
        pieces = [
            {name: tensors[name][start:end] for name in kind.fields}
            for start, end in zip([0, *ends], ends, strict=False)
        ]
        sums = torch.tensor([checksum(piece) for piece in pieces])
        write_atomically(self.path(kind, shard), save({**tensors, "checksum": sums}))

    def read(self, kind: Kind, sample: int) -> dict[str, Tensor]:
        """The rows of one sample, views of the mapped shard. UserError names the shard if it is damaged."""
        shard, which = int(self.shard[sample]), kind.supervised
        start = int(self.start[which][sample])
        end = start + int(self.counts[which][sample])
        file = self._opened(kind.name, shard)
        found = {name: file.get_slice(name)[start:end] for name in kind.fields}
        if not self.checked[kind.name][sample]:
            if checksum(found) != int(file.get_tensor("checksum")[self.place[sample]]):
                raise self._damaged(kind, shard, f"sample {self.rows[sample]['id']} was altered")
            self.checked[kind.name][sample] = True
        return found

    def check(self) -> None:
        """UserError unless every shard is there whole; what it holds is checked when it is read."""
        for kind in self.kinds:
            for shard in range(len(self.plan)):
                self._opened(kind.name, shard)

    def _open(self, name: str, shard: int) -> Any:
        kind = next(kind for kind in self.kinds if kind.name == name)
        try:
            file = safe_open(self.path(kind, shard), "pt")
            found = {key: file.get_slice(key) for key in file.keys()}  # noqa: SIM118
        except (OSError, SafetensorError) as error:
            raise self._damaged(kind, shard, str(error)) from error
        members = self.plan[shard]
        count = int(self.counts[kind.supervised][members].sum())
        wanted: dict[str, tuple[str, list[int]]] = {"checksum": ("I64", [len(members)])}
        for key, (dtype, shape) in kind.fields.items():
            wanted[key] = DTYPES[dtype], [count, *shape]
        if {key: (x.get_dtype(), x.get_shape()) for key, x in found.items()} != wanted:
            raise self._damaged(kind, shard, "it holds other tensors")
        return file

    def _damaged(self, kind: Kind, shard: int, why: str) -> UserError:
        return UserError(
            f"features {self.path(kind, shard)} cannot be used ({why:.80}): delete this file, and the same "
            "command makes it again"
        )

    def _refuse_others(self, kind: Kind) -> None:
        path = self.folder / kind.name / "manifest.json"
        if not (path.parent / "shards").exists():
            return
        found = runs.read_json(path)
        differ = [
            f"{name} {found.get(name)} there, {value} here"
            for name, value in self.key.items()
            if found.get(name) != value
        ]
        if differ:
            raise UserError(
                f"features in {path.parent} were made for something else ({'; '.join(differ)}): name another "
                "folder with --features, or delete this one"
            )


class Stored:
    """A teacher whose states and laws come from disk; in place of `Teacher`."""

    def __init__(
        self,
        target: Target,
        taps: Taps | None,
        rows: Sequence[Row],
        where: Folder,
    ):
        """Without `taps` the law alone is kept. Nothing is written before `fill`."""
        if where.top < 0:
            raise UserError(f"features_top {where.top}: give tokens of each law to keep, or 0")
        self.live = Teacher(target, taps or Taps())
        self.vocab, self.device = target.decoder.vocab_size, target.decoder.device
        self.hidden = self.live.hidden
        self.top = min(where.top, self.vocab)
        final = states_kind(Taps(final=True), self.hidden)
        self.law = law_kind(self.top, self.vocab) if self.top else final
        self.states = None if taps is None else states_kind(taps, self.hidden)
        kinds = {kind.name: kind for kind in (self.states, self.law) if kind is not None}
        key = {
            "target": target.name,
            "revision": target.revision,
            "weights": weights_digest(target.decoder.model),
            "dtype": str(target.decoder.model.dtype).removeprefix("torch."),
            "tokenizer": target.fingerprint,
            "max_length": where.max_length,
        }
        self.cache = Cache(where.path, list(kinds.values()), rows, key)

    def head(self, payload: Tensor) -> Tensor:
        """Logits [N, V] of rows of `Look.teacher` [N, P]."""
        return law_logits(payload, self.top, self.vocab) if self.top else self.live.head(payload)

    def look(self, batch: Batch) -> Look:
        """What `Teacher.look` gives, with zeros at padding."""
        features = self._states(self.states, batch)
        if self.top:
            return Look(features, self._laws(batch))
        same = self.states == self.law
        return Look(features, features if same else self._states(self.law, batch))

    def _states(self, kind: Kind | None, batch: Batch) -> Tensor:
        """[B, T, F]; F is 0 without a kind."""
        shape = batch.input_ids.shape
        if kind is None:
            return torch.zeros(*shape, 0, device=self.device)
        (_, row), (dtype, scales) = kind.fields["states"], kind.fields["scale"]
        values = torch.zeros(*shape, *row, dtype=torch.uint8)
        scale = torch.zeros(*shape, *scales, dtype=dtype)
        for name, (line, column) in zip(batch.ids, batch.starts, strict=True):
            found = self.cache.read(kind, self.cache.number[name])
            here = slice(column, column + len(found["states"]))
            values[line, here] = found["states"].view(torch.uint8)
            scale[line, here] = found["scale"]
        # as bytes to the device, and widened there
        return unpacked_states(values.to(self.device), scale.to(self.device)).flatten(2)

    def _laws(self, batch: Batch) -> Tensor:
        """[B, T, 2 top + 1]: ids, probabilities, what is left; at supervised positions."""
        shape, samples = batch.input_ids.shape, [self.cache.number[name] for name in batch.ids]
        found = [self.cache.read(self.law, sample) for sample in samples]
        places = [batches.learned(self.cache.rows[sample]) for sample in samples]
        starts = [line * shape[1] + column for line, column in batch.starts]
        flat = torch.cat([at + start for at, start in zip(places, starts, strict=True)])  # [M]
        laws = [torch.cat([x["ids"].float(), x["probabilities"].float()], -1) for x in found]
        payload = torch.zeros(shape.numel(), 2 * self.top + 1, device=self.device)
        payload[flat.to(self.device)] = torch.cat(laws).to(self.device)
        return payload.unflatten(0, shape)

    def fill(
        self,
        console: Console,
        rank: int = 0,
        world: int = 1,
        wait: Callable[[], None] = lambda: None,
    ) -> None:
        """Makes the shards that are missing, those of process `rank` of `world`; `wait` lets all processes catch up.

        UserError when the disk has no room for them, or when a shard that is there is damaged.
        """
        todo, cache = self.cache.missing(), self.cache
        if todo:
            size = sum(cache.size(kind, shard) for shard, kinds in todo for kind in kinds)
            console.print(
                f"features: {len(todo)} of {len(cache.plan)} shards to make in {cache.folder}, {amount(size)}; "
                f"{self.token_bytes():,.0f} bytes a token "
                f"(bf16 taps and final state: 8 H = {8 * self.hidden:,})"
            )
            refuse_without_room(cache.folder, size)
            with cache.claim() if rank == 0 else contextlib.nullcontext():
                wait()  # nobody writes a shard before everybody has seen what is missing
                self._make_shards(todo[rank::world], console, rank == 0)
                wait()
        cache.check()

    def _make_shards(
        self, todo: Sequence[tuple[int, list[Kind]]], console: Console, shown: bool
    ) -> None:
        cache = self.cache
        tokens = [int(cache.counts[False][cache.plan[shard]].sum()) for shard, _ in todo]
        began, done = time.perf_counter(), 0
        with progress_of(console, shown) as progress:
            bar = progress.add_task("features", total=sum(tokens), speed="")
            for (shard, kinds), count in zip(todo, tokens, strict=True):
                made = self.make([cache.rows[i] for i in cache.plan[shard]], kinds)
                for kind in kinds:
                    cache.write(kind, shard, made[kind.name])
                done += count
                speed = f"{done / (time.perf_counter() - began):,.0f} tok/s"
                progress.update(bar, advance=count, speed=speed)

    def token_bytes(self) -> float:
        """Of the tensors on disk, for each token of the samples."""
        return sum(map(self.cache.size, self.cache.kinds)) / int(self.cache.counts[False].sum())

    @torch.no_grad()
    def make(self, rows: Sequence[Row], kinds: Sequence[Kind]) -> dict[str, dict[str, Tensor]]:
        """Tensors of each kind for these samples, one after the other."""
        made: dict[str, list[dict[str, Tensor]]] = {kind.name: [] for kind in kinds}
        for some in forwards(rows):
            batch = batches.collate(some, pad_id=0).to(self.device)
            look = self.live.look(batch)
            ends = torch.tensor([len(row["input_ids"]) for row in some], device=self.device)
            inside = torch.arange(batch.input_ids.shape[1], device=self.device) < ends[:, None]
            for kind in kinds:
                if kind.supervised:
                    for piece in look.teacher[batch.loss_mask].split(losses.rows_for(self.vocab)):
                        made[kind.name].append(packed_law(self.live.head(piece), self.top))
                else:
                    states = look.teacher if kind.name == FINAL else look.features
                    states = states[inside].unflatten(-1, (-1, self.hidden))
                    made[kind.name].append(packed_states(states))
        return {name: joined(pieces) for name, pieces in made.items()}


def teacher_of(
    where: Folder | None, target: Target, taps: Taps | None, rows: Sequence[Row]
) -> Teacher | Stored:
    """The live target, or what a folder holds of it. Without `taps` its law alone is wanted."""
    return Teacher(target, taps or Taps()) if where is None else Stored(target, taps, rows, where)


def plan_of(tokens: np.ndarray) -> list[np.ndarray]:
    """Numbers of the samples in each shard. Those of one length lie together: they pad each other least."""
    limit = min(SHARD_TOKENS, -(-int(tokens.sum()) // SHARDS))
    order = np.argsort(tokens, kind="stable")
    shard = (np.cumsum(tokens[order]) - tokens[order]) // limit
    return [order[shard == number] for number in np.unique(shard)]


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


def checksum(tensors: Mapping[str, Tensor]) -> int:
    """CRC-32 of their bytes, in the order of their names."""
    data = [
        tensors[name].contiguous().view(torch.uint8).numpy().reshape(-1) for name in sorted(tensors)
    ]
    return functools.reduce(lambda before, x: zlib.crc32(x.data, before), data, 0)


def digest(rows: Sequence[Row]) -> str:
    """16 hex digits over ids, tokens and what of them is learned."""
    sha = hashlib.sha256()
    for row in rows:
        sha.update(f"{row['id']} {len(row['input_ids'])} {row['loss_spans']}".encode())
        sha.update(np.ascontiguousarray(row["input_ids"], dtype=np.int32).data)
    return sha.hexdigest()[:16]


def weights_digest(model: Any) -> str:
    """16 hex digits over the first values of every parameter: a target trained on in its folder is another one."""
    sha = hashlib.sha256()
    for name, value in itertools.chain(model.named_parameters(), model.named_buffers()):
        sha.update(name.encode())
        sha.update(value.detach().reshape(-1)[:64].double().cpu().numpy().data)
    return sha.hexdigest()[:16]


def refuse_without_room(folder: Path, size: int) -> None:
    """UserError unless the disk of `folder`, which need not be there yet, has room for `size` bytes."""
    place = folder.absolute()
    while not place.exists():
        place = place.parent
    free = shutil.disk_usage(place).free
    if free < size:
        raise UserError(
            f"features in {folder} need {amount(size)} and the disk has {amount(free)} left: name a folder on "
            "another disk with --features, lower features_top or train on fewer samples"
        )


def amount(size: float) -> str:
    """Bytes for people."""
    for unit in ("bytes", "kB", "MB", "GB"):
        if size < 1000:
            return f"{size:.3g} {unit}"
        size /= 1000
    return f"{size:,.3g} TB"


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
