import functools
import subprocess
import sys
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from decode.common.errors import UserError
from tests.rows import sample_row
from tests.train.data.test_manifest import MANIFEST
from train.data.manifest import write_manifest
from train.data.sample_store import (
    OPTIONAL,
    ROW_GROUP_SIZE,
    SCHEMA,
    SampleRow,
    SampleStore,
    read_shards,
    row_ends,
    write_shard,
)


def row(name: str, spans: list[list[int]] | None = None) -> SampleRow:
    return sample_row([5, 6, 7, 8], [[1, 2], [3, 4]] if spans is None else spans, name)


def listed(rows: list[SampleRow]) -> list[dict]:
    return [{**found, "input_ids": list(found["input_ids"])} for found in rows]


def test_rows_come_back_as_written(tmp_path: Path) -> None:
    """Bug: views of a shard's memory are cut at the wrong offsets or in the wrong order."""
    short: SampleRow = {**row("c"), "input_ids": [9], "loss_spans": []}
    write_shard(tmp_path, [row("b"), short], "00001")
    write_shard(tmp_path, [row("a")], "00000")
    assert listed(read_shards(tmp_path)) == listed([row("a"), row("b"), short])
    assert set(row_ends(tmp_path)) == {"a", "b", "c"}


def test_truncated_shard_is_named(tmp_path: Path) -> None:
    """Bug: a shard cut off by a full disk is passed over and its samples silently vanish."""
    write_shard(tmp_path, [row("a")], "00000")
    path = write_shard(tmp_path, [row("b")], "00001")
    path.write_bytes(path.read_bytes()[:-40])
    for read in (read_shards, row_ends):
        with pytest.raises(
            UserError, match="00001.parquet cannot be read.*run train/sample.py"
        ) as caught:
            read(tmp_path)
        assert "\n" not in str(caught.value)


def test_flipped_bits_in_a_shard_are_found(tmp_path: Path) -> None:
    """Bug: damage inside a data page goes unnoticed and trains on other tokens."""
    path = write_shard(tmp_path, [row("a"), row("needle"), row("z")], "00000")
    data = path.read_bytes()
    assert data.count(b"needle") == 1
    path.write_bytes(data.replace(b"needle", b"noodle"))
    with pytest.raises(UserError, match="00000.parquet cannot be read"):
        read_shards(tmp_path)


def test_kill_before_the_rename_leaves_no_half_shard(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Bug: a kill in mid-write leaves a half shard under its final name."""
    write_shard(tmp_path, [row("a")], "00000")

    def killed(self: Path, target: Path) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(Path, "replace", killed)
        with pytest.raises(KeyboardInterrupt):
            write_shard(tmp_path, [row("b")], "00001")
    assert set(row_ends(tmp_path)) == {"a"}
    write_shard(tmp_path, [row("b")], "00001")
    assert set(row_ends(tmp_path)) == {"a", "b"}
    assert list(tmp_path.rglob("*.tmp")) == []


def test_a_shard_is_never_written_over(tmp_path: Path) -> None:
    """Bug: a resumed run counts shards from 0 again and destroys the first ones."""
    write_shard(tmp_path, [row("a")], "00000")
    with pytest.raises(FileExistsError, match="would lose them"):
        write_shard(tmp_path, [row("b")], "00000")


def test_incomplete_rows_are_refused(tmp_path: Path) -> None:
    """Bug: a forgotten field is written as null and fails hours later, in training."""
    broken = {k: v for k, v in row("a").items() if k != "finish_reason"}
    with pytest.raises(pa.ArrowException, match="finish_reason"):
        write_shard(tmp_path, [broken], "00000")  # type: ignore[list-item]


def test_missing_columns_are_named(tmp_path: Path) -> None:
    """Bug: somebody else's parquet file ends in a KeyError."""
    (tmp_path / "shards").mkdir()
    pq.write_table(pa.table({"id": ["a"]}), tmp_path / "shards" / "x.parquet")
    with pytest.raises(UserError, match=r"x.parquet has no column source, .*input_ids"):
        read_shards(tmp_path)


def test_other_columns_and_wider_types_are_read(tmp_path: Path) -> None:
    """Bug: a set with teacher top-k, or with int64 ids from another writer, is refused."""
    (tmp_path / "shards").mkdir()
    table = pa.Table.from_pylist([{**row("a"), "topk": [1, 2]}])
    pq.write_table(table, tmp_path / "shards" / "x.parquet")
    assert listed(read_shards(tmp_path)) == listed([row("a")])


def test_empty_set_says_what_to_run(tmp_path: Path) -> None:
    """Bug: training on a folder without samples divides by zero."""
    for folder in (tmp_path, tmp_path / "missing"):
        assert set(row_ends(folder)) == set()
        with pytest.raises(UserError, match="run train/sample.py"):
            read_shards(folder)


def test_repeated_ids_are_named(tmp_path: Path) -> None:
    """Bug: two runs into one folder weigh some prompts twice."""
    write_shard(tmp_path, [row("a"), row("twin")], "00000")
    write_shard(tmp_path, [row("twin")], "00001")
    for read in (read_shards, row_ends):
        with pytest.raises(UserError, match="id twin occurs twice"):
            read(tmp_path)


@pytest.mark.parametrize("spans", [[[2, 9]], [[3, 2]], [[-1, 2]], [[1]]])
def test_spans_outside_the_tokens_are_refused(tmp_path: Path, spans: list[list[int]]) -> None:
    """Bug: numpy slices clip bad spans silently and the wrong tokens are learned."""
    write_shard(tmp_path, [row("odd", spans)], "00000")
    with pytest.raises(UserError, match="00000.parquet: loss span .* of id odd"):
        read_shards(tmp_path)


def test_any_row_is_read_by_its_number(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Bug: rows at the seams of groups and shards are missed or mixed up when read one by one."""
    monkeypatch.setattr("train.data.sample_store.ROW_GROUP_SIZE", 4)
    monkeypatch.setattr("train.data.sample_store.MAX_CACHED_GROUPS", 2)
    names = [f"{i:02d}" for i in range(23)]
    for shard, (start, end) in enumerate([(0, 9), (9, 10), (10, 23)]):
        some: list[SampleRow] = [
            {**row(name), "input_ids": [int(name), *range(9)[: int(name) % 5]], "loss_spans": []}
            for name in names[start:end]
        ]
        write_shard(tmp_path, some, f"{shard:05d}")
    rows = read_shards(tmp_path)
    assert [found["id"] for found in rows] == names
    for i in [*range(23), *reversed(range(23)), -1, -23]:
        assert listed([rows[i]]) == listed([list(rows)[i]])
        assert rows[i]["input_ids"][0] == i % 23
    assert [found["id"] for found in rows[3:11:2]] == names[3:11:2]
    with pytest.raises(IndexError):
        rows[23]


def test_one_row_costs_one_group(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Bug: reading a row decodes its whole shard, or the same group again for its neighbour."""
    write_shard(tmp_path, [row(f"{i:04d}") for i in range(1000)], "00000")
    rows = read_shards(tmp_path)
    read: list[int] = []
    whole = SampleStore._read_group

    def counted(self: SampleStore, number: int, group: int) -> pa.RecordBatch:
        batch = whole(self, number, group)
        read.append(batch.num_rows)
        return batch

    monkeypatch.setattr(SampleStore, "_read_group", counted)
    rows._group = functools.lru_cache(2)(rows._read_group)  # type: ignore[assignment]
    assert [rows[i]["id"] for i in (500, 501, 500)] == ["0500", "0501", "0500"]
    assert read == [ROW_GROUP_SIZE]


MEASURE = """
import re, sys
from pathlib import Path
from train.data import mixture
for folder in sys.argv[1:]:
    rows, _ = mixture.load(folder, 256)
    seen = sum(len(row["input_ids"]) for step in range(50) for row in rows.global_batch(16, 0, step))
    # ru_maxrss of a child begins with what its parent held when it forked
    peak = int(re.search(r"VmHWM:\\s+(\\d+)", Path("/proc/self/status").read_text())[1])
    print(len(rows), seen, peak // 1024)
"""


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc/self/status")
def test_memory_does_not_grow_with_the_set(tmp_path: Path) -> None:
    """Bug: the tokens of a set are all held in memory, so that a set larger than memory cannot be trained on. 16 MB
    and 96 MB of tokens, one after the other: what the larger set may take more is its index and its order, not its
    tokens."""
    counts = 8_000, 48_000
    folders = [tmp_path / str(count) for count in counts]
    for count, folder in zip(counts, folders, strict=True):
        (folder / "shards").mkdir(parents=True)
        ids = np.random.default_rng(0).integers(0, 30_000, (count, 500), dtype=np.int32)
        for start in range(0, count, 8_000):
            some = ids[start : start + 8_000]
            offsets = pa.array(np.arange(0, some.size + 1, 500, dtype=np.int32))
            columns = {name: ["x"] * len(some) for name in ("source", "origin", "finish_reason")}
            columns |= {"id": [f"{start + i:016x}" for i in range(len(some))]}
            columns |= {"loss_spans": [[[100, 250]]] * len(some)}
            columns |= dict.fromkeys(OPTIONAL, [None] * len(some))
            columns |= {"input_ids": pa.ListArray.from_arrays(offsets, some.reshape(-1))}
            table = pa.table({name: columns[name] for name in SCHEMA.names}, schema=SCHEMA)
            path = folder / "shards" / f"{start:06d}.parquet"
            pq.write_table(table, path, row_group_size=ROW_GROUP_SIZE)
        write_manifest(folder, MANIFEST)
    done = subprocess.run(
        [sys.executable, "-c", MEASURE, *map(str, folders)],
        cwd=Path(__file__).parents[3], capture_output=True, text=True, check=True,
    )  # fmt: skip
    found = [list(map(int, line.split())) for line in done.stdout.splitlines()]
    assert [two for *two, _ in found] == [[count, 50 * 16 * 256] for count in counts]
    small, large = (peak for *_, peak in found)
    assert large < small + 45, found  # MB; the tokens alone are 80 MB more
