"""The folder of features: which samples are in which shard, which shards exist, and whether they can be used.

Each kind has a manifest.json, which identifies target and samples, and shards/*.safetensors. Which samples a shard
holds depends on the samples alone. Shards are memory-mapped and only the rows of a batch are read; the checksum of a
sample is verified when it is read for the first time. Damaged shards are made again like missing ones.
"""

import functools
import hashlib
import itertools
import json
import zlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor

from decode.common import files, lock, run_dir
from decode.common.errors import UserError, disk_error, naming
from decode.common.files import write_atomically
from decode.common.target_record import ModelFingerprint, difference
from decode.common.typed_json import from_json, to_json
from train.data import batching
from train.data.sample_store import SampleRow, remove_partial
from train.teacher.feature_codec import FeatureSchema

FORMAT_VERSION = 1
"""Version of the files' layout; a folder of another version raises UserError."""
SHARD_TOKENS = 2**15
"""Most tokens of a shard of several samples."""
TARGET_SHARD_COUNT = 16
"""Small sets get shorter shards, so that there are about this many."""
MAX_OPEN_SHARDS = 1024
"""Shards that are memory-mapped at the same time."""
SAFETENSORS_DTYPES = {
    torch.float8_e4m3fn: "F8_E4M3",
    torch.bfloat16: "BF16",
    torch.float16: "F16",
    torch.uint16: "U16",
    torch.int32: "I32",
}
"""Names of the dtypes in a safetensors header."""


class DamagedShardError(UserError):
    """A shard of features that cannot be used."""


FIRST_FILES = {"manifest.json", "manifest.json.tmp"}
"""In the folder of a kind before its first shard."""


def check_folder(folder: Path) -> None:
    """UserError unless `folder` is absent, empty, or holds features only."""
    if not folder.is_dir() and (folder.exists() or folder.is_symlink()):
        raise UserError(f"features {folder} is no folder: name one with --features")
    for entry in folder.iterdir() if folder.is_dir() else ():
        of_features = entry.is_dir() and (
            (entry / "shards").is_dir() or {x.name for x in entry.iterdir()} <= FIRST_FILES
        )
        if not of_features and entry.name != lock.LOCK_FILE:
            raise UserError(
                f"features {folder} holds {entry.name!r}, which is none: name a new folder with --features"
            )


class FeatureStore:
    """A folder of features for these samples in this order: where each sample is, and which shards exist."""

    def __init__(
        self,
        folder: Path,
        kinds: Sequence[FeatureSchema],
        rows: Sequence[SampleRow],
        key: dict[str, Any],
        target: ModelFingerprint | None = None,
        allow_changed: bool = False,
    ):
        """`key` identifies the settings. UserError if the folder was made with another key, other samples or, unless
        `allow_changed`, another target, or holds something else."""
        self.folder, self.kinds, self.rows = folder, kinds, rows
        self.target, self.allow_changed = target or ModelFingerprint(), allow_changed
        self.key = {
            "format": FORMAT_VERSION,
            **key,
            "samples": samples_digest(rows),
            "count": len(rows),
        }
        check_folder(folder)
        for kind in kinds:
            self._check_manifest(kind)
        tokens = np.array([len(row["input_ids"]) for row in rows])
        supervised = np.array([len(batching.supervised_positions(row)) for row in rows])
        # rows of each sample, by FeatureSchema.supervised
        self.counts = {False: tokens, True: supervised}
        self.shard_members = assign_shards(tokens)
        self.shard = np.empty(len(rows), np.int64)
        self.index_in_shard = np.empty(len(rows), np.int64)
        self.start = {which: np.empty(len(rows), np.int64) for which in self.counts}
        for number, members in enumerate(self.shard_members):
            self.shard[members], self.index_in_shard[members] = number, np.arange(len(members))
            for which, counts in self.counts.items():
                self.start[which][members] = np.cumsum(counts[members]) - counts[members]
        self.sample_index = {row["id"]: i for i, row in enumerate(rows)}
        self.verified = {kind.name: np.zeros(len(rows), bool) for kind in kinds}
        self._opened = functools.lru_cache(MAX_OPEN_SHARDS)(self._open)

    def path(self, kind: FeatureSchema, shard: int) -> Path:
        return self.folder / kind.name / "shards" / f"{shard:06d}.safetensors"

    def size(self, kind: FeatureSchema, shard: int | None = None) -> int:
        """Bytes of the tensors of one shard, or of all shards."""
        members = np.arange(len(self.rows)) if shard is None else self.shard_members[shard]
        return kind.row_bytes * int(self.counts[kind.supervised][members].sum()) + 8 * len(members)

    def bytes_per_token(self) -> float:
        """Bytes on disk of all kinds, per token of the samples."""
        return sum(map(self.size, self.kinds)) / int(self.counts[False].sum())

    def missing_shards(self) -> list[tuple[int, list[FeatureSchema]]]:
        """[(shard, kinds in which it does not exist or cannot be opened)] of every incomplete shard."""
        missing: dict[int, list[FeatureSchema]] = {}
        for shard, kind in itertools.product(range(len(self.shard_members)), self.kinds):
            try:
                self._opened(kind.name, shard)
            except DamagedShardError:
                missing.setdefault(shard, []).append(kind)
        return list(missing.items())

    @contextmanager
    def lock(self, wait: bool = False) -> Iterator[None]:
        """Locks the folder during the block, having deleted partial shards and written the manifests.

        UserError while another command fills the folder (with `wait` it waits for that one), or if it filled it with
        something else meanwhile.
        """
        self.folder.mkdir(parents=True, exist_ok=True)
        with lock.hold(self.folder / lock.LOCK_FILE, f"the features in {self.folder}", wait):
            remove_partial(self.folder)
            for kind in self.kinds:
                targets = self._check_manifest(kind)
                content = {"kind": kind.name, **self.key, "targets": targets}
                text = json.dumps(content, indent=1) + "\n"
                write_atomically(self.folder / kind.name / "manifest.json", text)
            yield

    def write(self, kind: FeatureSchema, shard: int, tensors: dict[str, Tensor]) -> None:
        """Writes the shard of `kind` from tensors that hold the rows of its samples one after the other."""
        members = self.shard_members[shard]
        ends = np.cumsum(self.counts[kind.supervised][members])
        pieces = [
            {name: tensors[name][start:end] for name in kind.fields}
            for start, end in zip([0, *ends], ends, strict=False)
        ]
        sums = torch.tensor([checksum(piece) for piece in pieces])
        write_atomically(self.path(kind, shard), save({**tensors, "checksum": sums}))
        self._forget(kind, shard)

    def read(self, kind: FeatureSchema, sample: int) -> dict[str, Tensor]:
        """The rows of one sample as views of the memory-mapped shard. DamagedShardError names the shard."""
        shard, which = int(self.shard[sample]), kind.supervised
        start = int(self.start[which][sample])
        end = start + int(self.counts[which][sample])
        file = self._opened(kind.name, shard)
        tensors = {name: file.get_slice(name)[start:end] for name in kind.fields}
        if not self.verified[kind.name][sample]:
            if checksum(tensors) != int(file.get_tensor("checksum")[self.index_in_shard[sample]]):
                raise self._damaged(kind, shard, f"sample {self.rows[sample]['id']} was altered")
            self.verified[kind.name][sample] = True
        return tensors

    def is_intact(self, kind: FeatureSchema, shard: int) -> bool:
        """Whether the shard as it is on disk now has the right tensors and checksums; all of it is read."""
        self._forget(kind, shard)
        try:
            for sample in self.shard_members[shard]:
                self.read(kind, int(sample))
        except DamagedShardError:
            return False
        return True

    def check(self) -> None:
        """DamagedShardError unless every shard exists with the right tensors; contents are checked when read."""
        for kind in self.kinds:
            for shard in range(len(self.shard_members)):
                self._opened(kind.name, shard)

    def _forget(self, kind: FeatureSchema, shard: int) -> None:
        """Makes the next read open the file again and verify its checksums."""
        self._opened.cache_clear()
        self.verified[kind.name][self.shard_members[shard]] = False

    def _open(self, name: str, shard: int) -> Any:
        kind = next(kind for kind in self.kinds if kind.name == name)
        with naming(self.path(kind, shard)):
            try:
                file = safe_open(self.path(kind, shard), "pt")
                slices = {key: file.get_slice(key) for key in file.keys()}  # noqa: SIM118
            except (OSError, SafetensorError) as error:
                if disk_error(error):  # the shard may be whole
                    raise
                raise self._damaged(kind, shard, str(error)) from error
        members = self.shard_members[shard]
        count = int(self.counts[kind.supervised][members].sum())
        expected: dict[str, tuple[str, list[int]]] = {"checksum": ("I64", [len(members)])}
        for key, (dtype, shape) in kind.fields.items():
            expected[key] = SAFETENSORS_DTYPES[dtype], [count, *shape]
        if {key: (x.get_dtype(), x.get_shape()) for key, x in slices.items()} != expected:
            raise self._damaged(kind, shard, "it holds other tensors")
        return file

    def _damaged(self, kind: FeatureSchema, shard: int, why: str) -> DamagedShardError:
        return DamagedShardError(
            f"features {self.path(kind, shard)} cannot be used ({why:.80}): delete this file, and the same "
            "command makes it again"
        )

    def _check_manifest(self, kind: FeatureSchema) -> list[dict[str, str]]:
        """The targets whose features are there or are to come; {} is one that is not known."""
        path, here = self.folder / kind.name / "manifest.json", to_json(self.target)
        if not (path.parent / "shards").exists():
            return [here]
        try:
            manifest = files.read_json_object(path, "the manifest of features")
        except UserError as error:
            raise UserError(
                f"nobody knows whose features are in {path.parent} ({error}): delete this folder, and the same command "
                "makes it again"
            ) from error
        differ = [
            f"{name} {manifest.get(name)} there, {value} here"
            for name, value in self.key.items()
            if manifest.get(name) != value
        ]
        if differ:
            raise UserError(
                f"features in {path.parent} were made for something else ({'; '.join(differ)}): name another "
                "folder with --features, or delete this one"
            )
        # earlier versions named a revision and a dtype of torch, and a digest of a few weights
        earlier = {"revision": manifest.get("revision"), "dtype": manifest.get("dtype")}
        targets: list[dict[str, str]] = manifest.get("targets") or [earlier]
        found = difference(from_json(ModelFingerprint, targets[-1]), self.target)
        if found:
            run_dir.refuse_change(
                f"features in {path.parent} were made for another target ({found})",
                self.allow_changed,
                "--features names another folder",
            )
        return targets if here in targets else [*targets, here]


def assign_shards(tokens: np.ndarray) -> list[np.ndarray]:
    """Indices of the samples in each shard. Samples of similar length share a shard, which needs the least padding."""
    limit = min(SHARD_TOKENS, -(-int(tokens.sum()) // TARGET_SHARD_COUNT))
    order = np.argsort(tokens, kind="stable")
    shard = (np.cumsum(tokens[order]) - tokens[order]) // limit
    return [order[shard == number] for number in np.unique(shard)]


def checksum(tensors: Mapping[str, Tensor]) -> int:
    """CRC-32 of the tensors' bytes, in the order of their names."""
    data = [
        tensors[name].contiguous().view(torch.uint8).numpy().reshape(-1) for name in sorted(tensors)
    ]
    return functools.reduce(lambda crc, x: zlib.crc32(x.data, crc), data, 0)


def samples_digest(rows: Sequence[SampleRow]) -> str:
    """16 hex digits of a hash of all samples' ids, tokens and loss spans."""
    sha = hashlib.sha256()
    for row in rows:
        sha.update(f"{row['id']} {len(row['input_ids'])} {row['loss_spans']}".encode())
        sha.update(np.ascontiguousarray(row["input_ids"], dtype=np.int32).data)
    return sha.hexdigest()[:16]
