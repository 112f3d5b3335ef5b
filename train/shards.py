"""The sampled set on disk: what the target answered, as token ids, and how it was asked.

`<folder>/shards/*.parquet` hold the rows, `<folder>/manifest.json` tells how they were made. A file
is there whole or not at all, so sampling can be killed at any moment and goes on by the ids.
"""

import dataclasses
import json
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, TypedDict, cast

import pyarrow as pa
import pyarrow.parquet as pq

from decode.settings import UserError

SCHEMA = pa.schema(
    [
        pa.field("id", pa.string(), nullable=False),
        pa.field("source", pa.string(), nullable=False),
        pa.field("origin", pa.string(), nullable=False),
        pa.field("input_ids", pa.list_(pa.int32()), nullable=False),
        pa.field("loss_spans", pa.list_(pa.list_(pa.int32())), nullable=False),
        pa.field("finish_reason", pa.string(), nullable=False),
    ]
)


class Row(TypedDict):
    """One answered prompt. `loss_spans` are [start, end) of the tokens in input_ids to learn."""

    id: str
    source: str
    origin: Literal["target", "draft", "text"]
    input_ids: Sequence[int]  # read_shards gives a numpy int32 view of the shard's memory
    loss_spans: list[list[int]]
    finish_reason: str


@dataclass
class Manifest:
    """How a sampled set was made. `counts` holds asked, answered and failed prompts."""

    target: str
    revision: str | None
    tokenizer_hash: str
    chat_template_hash: str | None
    sampling: dict[str, Any]
    seed: int
    counts: dict[str, int]
    git_sha: str | None
    versions: dict[str, str]


def write_shard(folder: Path, rows: list[Row], name: str) -> Path:
    """Path of the shard `<folder>/shards/<name>.parquet`, which is complete and on disk.

    Raises FileExistsError rather than replace a shard.
    """
    path = folder / "shards" / f"{name}.parquet"
    if path.exists():
        raise FileExistsError(f"{path} holds samples: writing over it would lose them")
    table = pa.Table.from_pylist(rows, schema=SCHEMA)
    sink = pa.BufferOutputStream()
    pq.write_table(table, sink, write_page_checksum=True)
    write_atomically(path, sink.getvalue().to_pybytes())
    return path


def read_shards(folder: Path) -> list[Row]:
    """Every row of the set, shards in name order.

    Raises UserError, naming the file, for an empty set, a damaged shard, missing columns, spans
    outside their tokens, or an id that occurs twice.
    """
    rows: list[Row] = []
    for path in _shard_paths(folder):
        found = _rows(_read(path, SCHEMA.names))
        for row in found:
            _check_spans(row, path)
        rows += found
    _refuse_repeats([row["id"] for row in rows], folder)
    if len(rows) == 0:
        raise UserError(
            f"no samples in {folder / 'shards'}: run train/sample.py with this folder first"
        )
    return rows


def done_ids(folder: Path) -> set[str]:
    """Ids that need no further sampling. Raises UserError for a damaged shard or a repeated id."""
    ids = [name for path in _shard_paths(folder) for name in _read(path, ["id"])["id"].to_pylist()]
    _refuse_repeats(ids, folder)
    return set(ids)


def write_manifest(folder: Path, manifest: Manifest) -> None:
    """`<folder>/manifest.json`, replaced as a whole."""
    text = json.dumps(dataclasses.asdict(manifest), indent=2) + "\n"
    write_atomically(folder / "manifest.json", text.encode())


def read_manifest(folder: Path) -> Manifest:
    """The manifest of a sampled set; fields that we do not know are passed over."""
    path = folder / "manifest.json"
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise UserError(
            f"{path} cannot be read ({error.strerror}): run train/sample.py with this folder first"
        ) from error
    except ValueError as error:
        raise UserError(f"{path} is not JSON: delete it and run train/sample.py again") from error
    names = [field.name for field in dataclasses.fields(Manifest)]
    missing = [name for name in names if name not in data]
    if len(missing) > 0:
        raise UserError(
            f"{path} lacks {', '.join(missing)}: delete it and run train/sample.py again"
        )
    return Manifest(**{name: data[name] for name in names})


def write_atomically(path: Path, data: bytes) -> None:
    """Puts `data` at `path` at once: after a crash there is the old file or the new one."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(path.name + ".tmp")  # not matched by *.parquet
    with temporary.open("wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
    temporary.replace(path)
    folder = os.open(path.parent, os.O_RDONLY)  # the new name must survive a power cut too
    try:
        os.fsync(folder)
    finally:
        os.close(folder)


def _shard_paths(folder: Path) -> list[Path]:
    return sorted((folder / "shards").glob("*.parquet"))


def _read(path: Path, columns: list[str]) -> pa.Table:
    """The columns, in our types, with checksums verified."""
    try:
        with pq.ParquetFile(path, page_checksum_verification=True) as file:
            missing = [name for name in columns if name not in file.schema_arrow.names]
            if len(missing) > 0:
                raise UserError(
                    f"shard {path} has no column {', '.join(missing)}: it is no sampled shard of "
                    "this version; move it away and run train/sample.py again"
                )
            table = file.read(columns=columns).select(columns)
            return table.cast(pa.schema([SCHEMA.field(name) for name in columns]))
    except (pa.ArrowException, OSError) as error:
        raise UserError(
            f"shard {path} cannot be read ({str(error).strip().splitlines()[0]:.80}): delete it "
            "and run train/sample.py again, which only re-does the prompts that were in it"
        ) from error


def _rows(table: pa.Table) -> list[Row]:
    """Rows whose token ids are views: a Python int each would take ten times the memory."""
    rows: list[Row] = []
    for batch in table.to_batches():
        ids = batch.column("input_ids")
        values, offsets = ids.values.to_numpy(), ids.offsets.to_numpy()
        others = batch.drop_columns(["input_ids"]).to_pylist()
        for other, start, end in zip(others, offsets, offsets[1:], strict=False):
            rows.append(cast(Row, {**other, "input_ids": values[start:end]}))
    return rows


def _check_spans(row: Row, path: Path) -> None:
    length = len(row["input_ids"])
    for span in row["loss_spans"]:
        if len(span) != 2 or not 0 <= span[0] < span[1] <= length:
            raise UserError(
                f"shard {path}: loss span {span} of id {row['id']} does not lie within its "
                f"{length} tokens: delete the shard and run train/sample.py again"
            )


def _refuse_repeats(ids: list[str], folder: Path) -> None:
    seen: set[str] = set()
    for name in ids:
        if name in seen:
            raise UserError(
                f"id {name} occurs twice in {folder / 'shards'}: delete one of the shards that "
                "hold it and run train/sample.py again"
            )
        seen.add(name)
