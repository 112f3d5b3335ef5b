"""The rows of a sampled set on disk: prompts and answers as token ids, in `<folder>/shards/*.parquet`.

Shards are written atomically, so sampling can be killed at any moment and resumes from the ids that are there. Rows
are read from disk when they are indexed, so a set may be larger than memory. train/data/manifest.py knows which shards
a finished set has.
"""

import contextlib
import functools
import hashlib
import itertools
import json
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, Literal, NotRequired, TypedDict, cast, overload

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from decode.common.errors import UserError, disk_error, first_line, naming
from decode.common.files import write_atomically
from decode.common.target_record import ModelFingerprint
from decode.common.typed_json import from_json, to_json

OPTIONAL = {
    "chat_template_kwargs": pa.string(),
    "shared_prefix": pa.int32(),
    "images": pa.list_(pa.string()),
    "image_spans": pa.list_(pa.list_(pa.int32())),
}
"""Columns that most rows leave empty, and that shards of earlier versions do not have."""
OF_IMAGES = ("images", "image_spans")
"""Columns that shards without images do not have."""
SCHEMA = pa.schema(
    [
        *(pa.field(name, pa.string(), nullable=False) for name in ("id", "source", "origin")),
        pa.field("input_ids", pa.list_(pa.int32()), nullable=False),
        pa.field("loss_spans", pa.list_(pa.list_(pa.int32())), nullable=False),
        pa.field("finish_reason", pa.string(), nullable=False),
        *OPTIONAL.items(),
    ]
)
TARGET_KEY = b"draftsmith.target"
"""Key of the metadata of a shard that says which target answered."""
ROW_GROUP_SIZE = 64
"""Rows that are read together; reading one row costs as much as reading its group."""
MAX_OPEN_FILES, MAX_CACHED_GROUPS = 64, 16  # shards kept open, row groups kept in memory


class SampleRow(TypedDict):
    """One conversation. `loss_spans` are the [start, end) ranges of input_ids that are labels in training."""

    id: str
    source: str
    origin: Literal["target", "draft", "text"]
    input_ids: Sequence[int]  # read_shards gives a numpy int32 view of the shard's memory
    loss_spans: list[list[int]]
    finish_reason: str
    chat_template_kwargs: NotRequired[str]  # JSON: the row's own arguments of the chat template
    # tokens that it begins with as another row does, which has those of its labels that lie in them
    shared_prefix: NotRequired[int]
    images: NotRequired[list[str]]  # names of files of the set's folder images, in their order
    image_spans: NotRequired[list[list[int]]]  # the [start, end) of their placeholders


class Rows(Sequence[SampleRow]):
    """Rows that are read when they are indexed."""

    def read(self, index: int) -> SampleRow:
        """The row at 0 <= index < len(self)."""
        raise NotImplementedError

    @overload
    def __getitem__(self, index: int) -> SampleRow: ...
    @overload
    def __getitem__(self, index: slice) -> list[SampleRow]: ...
    def __getitem__(self, index: int | slice) -> SampleRow | list[SampleRow]:
        found = range(len(self))[index]  # of a range, for negative indices and IndexError
        return self.read(found) if isinstance(found, int) else [self.read(i) for i in found]


class SampleStore(Rows):
    """The rows of a set, shards in the order of their names, read from disk one row group at a time.

    Memory holds a few bytes per group and the groups read last. Raises the errors of `read_shards`.
    """

    def __init__(self, folder: Path):
        self.paths = shard_paths(folder)
        self._file = functools.lru_cache(MAX_OPEN_FILES)(_open)
        self._group = functools.lru_cache(MAX_CACHED_GROUPS)(self._read_group)
        self.groups: list[tuple[int, int]] = []  # (shard, row group in it) of each group
        counts, ids = [0], []
        for number, path in enumerate(self.paths):
            for group in range(self._file(path).num_row_groups):
                batch = self._read_group(number, group)
                _check_spans(batch, path)
                self.groups.append((number, group))
                counts.append(batch.num_rows)
                ids.append(batch.column("id"))
        _check_unique_ids(ids, folder)
        # rows before each group, and at the end the number of all rows
        self.start = np.cumsum(counts)

    def __len__(self) -> int:
        return int(self.start[-1])

    def __iter__(self) -> Iterator[SampleRow]:
        for number, group in self.groups:
            yield from _rows_of_batch(self._read_group(number, group))

    def read(self, index: int) -> SampleRow:
        at = int(np.searchsorted(self.start, index, side="right")) - 1
        batch = self._group(*self.groups[at])
        return _rows_of_batch(batch.slice(index - int(self.start[at]), 1))[0]

    def _read_group(self, number: int, group: int) -> pa.RecordBatch:
        path = self.paths[number]
        return _read(path, SCHEMA.names, self._file(path), group)


class Subset(Rows):
    """The rows at `indices`, in that order, each passed through `transform` when it is read."""

    def __init__(
        self,
        rows: Sequence[SampleRow],
        indices: Sequence[int] | np.ndarray,
        transform: Callable[[SampleRow], SampleRow] = lambda row: row,
    ):
        self.rows, self.transform = rows, transform
        self.indices = np.asarray(indices, dtype=np.int64)

    def __len__(self) -> int:
        return len(self.indices)

    def read(self, index: int) -> SampleRow:
        return self.transform(self.rows[int(self.indices[index])])


def write_shard(
    folder: Path, rows: list[SampleRow], name: str = "", target: ModelFingerprint | None = None
) -> Path:
    """Writes the shard `<folder>/shards/<name>.parquet` atomically and returns its path.

    It knows the `target` that gave the answers. Without a name it gets a hash of its ids, so that processes and
    attempts cannot collide. FileExistsError if the shard exists: it is never replaced.
    """
    digest = hashlib.sha256(" ".join(row["id"] for row in rows).encode()).hexdigest()[:16]
    path = folder / "shards" / f"{name or digest}.parquet"
    if path.exists():
        raise FileExistsError(f"{path} holds samples: overwriting it would lose them")
    with_images = any("images" in row for row in rows)
    columns = [field for field in SCHEMA if with_images or field.name not in OF_IMAGES]
    table = pa.Table.from_pylist(rows, schema=pa.schema(columns, target_metadata(target)))
    sink = pa.BufferOutputStream()
    pq.write_table(table, sink, row_group_size=ROW_GROUP_SIZE, write_page_checksum=True)
    write_atomically(path, sink.getvalue().to_pybytes())
    return path


def targets_in(folder: Path) -> list[ModelFingerprint | None]:
    """The targets that the shards' answers are of, each once; None for shards that name none. Damaged ones are left
    out."""
    found: list[ModelFingerprint | None] = []
    for path in shard_paths(folder):
        with contextlib.suppress(UserError):
            target = target_of(_open(path).schema_arrow)
            if target not in found:
                found.append(target)
    return found


def target_metadata(target: ModelFingerprint | None) -> dict[bytes, bytes] | None:
    return None if target is None else {TARGET_KEY: json.dumps(to_json(target)).encode()}


def target_of(schema: pa.Schema) -> ModelFingerprint | None:
    """The target that a shard's metadata name; None for none, and for damaged metadata."""
    try:
        return from_json(ModelFingerprint, json.loads((schema.metadata or {})[TARGET_KEY]))
    except (KeyError, ValueError):
        return None


def rows_digest(rows: Iterable[SampleRow]) -> str:
    """16 hex digits of the rows' ids, tokens, loss spans and images, in whatever order and shards they are."""
    total = 0
    for row in rows:
        sha = hashlib.sha256(f"{row['id']} {len(row['input_ids'])} {row['loss_spans']}".encode())
        sha.update(np.ascontiguousarray(row["input_ids"], dtype=np.int32).data)
        sha.update(" ".join(row.get("images", ())).encode())
        total += int.from_bytes(sha.digest()[:8], "little")
    return f"{total % 2**64:016x}"


def read_shards(folder: Path) -> SampleStore:
    """All rows of the set, shards in the order of their names; every row is read once to check it.

    UserError that names the file for an empty set, a damaged shard, missing columns, spans outside their tokens, or an
    id that occurs twice.
    """
    rows = SampleStore(folder)
    if len(rows) == 0:
        raise UserError(
            f"no samples in {folder / 'shards'}: run train/sample.py with this folder first"
        )
    return rows


def row_ends(folder: Path) -> dict[str, tuple[bool, str]]:
    """{id: (whether the row has loss spans, why its last reply ended)} for every row of the set, whose prompts are
    therefore done.

    UserError for a damaged shard or a repeated id.
    """
    ends: dict[str, tuple[bool, str]] = {}
    ids = []
    for path in shard_paths(folder):
        batch = _read(path, ["id", "loss_spans", "finish_reason"])
        ids.append(batch.column("id"))
        spans = pc.greater(pc.list_value_length(batch.column("loss_spans")), 0).to_pylist()
        reasons = map(sys.intern, batch.column("finish_reason").to_pylist())
        ends |= zip(ids[-1].to_pylist(), zip(spans, reasons, strict=True), strict=True)
    _check_unique_ids(ids, folder)
    return ends


def row_arguments(folder: Path) -> Iterator[dict[str, Any]]:
    """Each row's own arguments of the chat template. UserError for a damaged shard."""
    for path in shard_paths(folder):
        for text in _read(path, ["chat_template_kwargs"]).column(0).to_pylist():
            yield json.loads(text or "{}")


def image_names(folder: Path) -> set[str]:
    """The names of all images of the set. UserError for a damaged shard."""
    rows = (_read(path, ["images"]).column(0).to_pylist() for path in shard_paths(folder))
    return {name for names in itertools.chain.from_iterable(rows) for name in names or ()}


def ids_in(path: Path, check_rows: bool = False) -> list[str]:
    """The ids of a shard. UserError if they cannot be read; with `check_rows` all rows are read, and spans must lie
    within their tokens."""
    batch = _read(path, SCHEMA.names if check_rows else ["id"])
    if check_rows:
        _check_spans(batch, path)
    return batch.column("id").to_pylist()


def shard_paths(folder: Path) -> list[Path]:
    return sorted((folder / "shards").glob("*.parquet"))


def remove_partial(folder: Path) -> None:
    """Deletes shards below `folder` that a kill left half written. To be called by one process before any writes."""
    for partial in folder.rglob("shards/*.tmp"):
        partial.unlink()


def _open(path: Path) -> pq.ParquetFile:
    """The opened shard, whose checksums are verified when it is read."""
    with _errors_named(path):
        file = pq.ParquetFile(path, page_checksum_verification=True)
    missing = [n for n in SCHEMA.names if n not in (*OPTIONAL, *file.schema_arrow.names)]
    if len(missing) > 0:
        raise UserError(
            f"shard {path} has no column {', '.join(missing)}: it is not a shard of this "
            "version; run train/sample.py again, which sets it aside"
        )
    return file


def _read(
    path: Path, columns: list[str], opened: pq.ParquetFile | None = None, group: int | None = None
) -> pa.RecordBatch:
    """The columns of one row group of a shard, or of all (None), cast to SCHEMA, as one record batch."""
    schema = pa.schema([SCHEMA.field(name) for name in columns])
    file = opened or _open(path)
    with _errors_named(path):
        table = file.read(columns) if group is None else file.read_row_group(group, columns)
        for name in OPTIONAL.keys() & {*columns} - {*table.column_names}:
            table = table.append_column(name, pa.nulls(len(table), OPTIONAL[name]))
        batches = table.select(columns).cast(schema).combine_chunks().to_batches()
    return batches[0] if batches else pa.RecordBatch.from_pylist([], schema)


@contextlib.contextmanager
def _errors_named(path: Path) -> Iterator[None]:
    """UserError for a damaged shard; an error of its disk stays one, and names it: the shard may be whole."""
    with naming(path):
        try:
            yield
        except (pa.ArrowException, OSError) as error:
            if disk_error(error):
                raise
            raise UserError(
                f"shard {path} cannot be read ({first_line(error):.80}): run train/sample.py again, which only re-does "
                "the prompts that were in it"
            ) from error


def _rows_of_batch(batch: pa.RecordBatch) -> list[SampleRow]:
    """Rows whose token ids are numpy views; Python ints would take ten times the memory."""
    ids = batch.column("input_ids")
    # `to_numpy` would import pandas.
    values, offsets = np.from_dlpack(ids.values), np.from_dlpack(ids.offsets)
    others = batch.drop_columns(["input_ids"]).to_pylist()
    for other in others:
        for name in [name for name in OPTIONAL if other[name] is None]:
            del other[name]
    return [
        cast(SampleRow, {**other, "input_ids": values[start:end]})
        for other, start, end in zip(others, offsets, offsets[1:], strict=False)
    ]


def _check_spans(batch: pa.RecordBatch, path: Path) -> None:
    """UserError for a row with a loss span outside its tokens."""
    for row in _rows_of_batch(batch):
        length = len(row["input_ids"])
        for span in row["loss_spans"]:
            if len(span) != 2 or not 0 <= span[0] < span[1] <= length:
                raise UserError(
                    f"shard {path}: loss span {span} of id {row['id']} does not lie within its "
                    f"{length} tokens: run train/sample.py again, which re-does this shard"
                )


def _check_unique_ids(columns: list[pa.Array], folder: Path) -> None:
    counts = pc.value_counts(pa.chunked_array(columns, pa.string()))
    repeated = np.from_dlpack(counts.field("counts")) > 1
    if repeated.any():
        first = counts[int(repeated.argmax())]["values"]
        raise UserError(
            f"id {first} occurs twice in {folder / 'shards'}: run train/sample.py again, which sets one "
            "of the shards that hold it aside"
        )
