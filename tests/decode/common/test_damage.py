"""Damaged files are moved aside under names that are free, and are this run's where the files were."""

from pathlib import Path

from decode.common import damage, run_dir


def test_nothing_that_was_moved_aside_is_lost(tmp_path: Path) -> None:
    """Bug: the second damaged file of a name replaces the first, or is somebody else's in the eyes of --overwrite."""
    for content in "abc":
        (tmp_path / "x.parquet").write_text(content)
        damage.move_aside(tmp_path / "x.parquet")
    names = ["x.parquet.damaged", "x.parquet.damaged-2", "x.parquet.damaged-3"]
    assert sorted(path.name for path in tmp_path.iterdir()) == names
    assert [(tmp_path / name).read_text() for name in names] == ["a", "b", "c"]
    assert all(run_dir.owns("*.parquet", Path(name)) for name in names)
    assert not run_dir.owns("*.parquet", Path("x.damaged.txt"))


def test_the_checksum_is_that_of_the_content(tmp_path: Path) -> None:
    """Bug: a checksum that does not depend on the last bytes of a file."""
    (tmp_path / "x").write_bytes(b"abc")
    assert damage.sha256(tmp_path / "x").startswith("ba7816bf8f01cfea")
