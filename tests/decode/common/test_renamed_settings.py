"""Settings under their old names: in YAML, on the command line and in the run.yaml of a folder that is resumed."""

import dataclasses
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, ClassVar

import pytest

from decode.common.errors import UserError
from decode.common.files import RUN_FILE
from decode.common.ranges import OneOf
from decode.common.run_dir import FolderSettings, open_run
from decode.common.settings import parse_settings, setting_names, to_dict, to_yaml


@dataclass
class Loss:
    top: int = 0
    """Leaves."""
    kind: str = "kl"
    """Formula."""


@dataclass
class Draft:
    init_config: dict[str, Any] = field(default_factory=dict)
    """Random weights."""
    target_lora_rank: int = 16
    """Adapters."""
    heads: int = 4
    """Heads."""
    RENAMED_SETTINGS: ClassVar[dict[str, str]] = {"rank": "target_lora_rank"}


@dataclass
class Train(FolderSettings):
    draft: Draft = field(default_factory=Draft)
    """The draft."""
    divergence: Loss = field(default_factory=Loss)
    """What is minimised."""
    tasks: list[str] = field(default_factory=list)
    """Tasks."""
    RENAMED_SETTINGS: ClassVar[dict[str, str]] = {
        "draft.scratch": "draft.init_config",
        "compare": "divergence",
        "domains": "tasks",
    }


OLD = "draft: {scratch: {hidden_size: 8}, rank: 4}\ncompare: {top: 3}\ndomains: [a]\n"
WANT = Train(draft=Draft({"hidden_size": 8}, 4), divergence=Loss(3), tasks=["a"])
NAMES = [("draft.scratch", "draft.init_config"), ("draft.rank", "draft.target_lora_rank"),
         ("compare", "divergence"), ("domains", "tasks")]  # fmt: skip


def read(*argv: str) -> Train:
    return parse_settings(Train, "A command.", list(argv))


def advice(capsys: pytest.CaptureFixture[str]) -> list[str]:
    """The lines on stderr, sorted."""
    return sorted(capsys.readouterr().err.splitlines())


def expected(source: str) -> list[str]:
    return sorted(f"{source}: setting {a} is now called {b}: use the new name" for a, b in NAMES)


@pytest.mark.parametrize("joined", [False, True])
def test_old_names_in_yaml(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], joined: bool
) -> None:
    """Catches an old file that is refused or read as defaults, and advice that is missing or given twice."""
    file = tmp_path / "old.yaml"
    file.write_text(OLD)
    argv = [f"--config={file}"] if joined else ["--config", str(file)]
    assert read(*argv) == WANT
    assert advice(capsys) == expected(str(file))
    assert read(*argv, "--divergence.kind", "tv", "--divergence.top=5") == dataclasses.replace(
        WANT, divergence=Loss(5, "tv")
    )


def test_old_names_on_the_command_line(capsys: pytest.CaptureFixture[str]) -> None:
    """Catches `--old=value` and `--old value` treated differently, groups, lists, and dicts as values."""
    got = read(
        "--draft.scratch", "{hidden_size: 8}", "--draft.rank=4", "--compare.top", "3",
        "--domains", "[a]",
    )  # fmt: skip
    assert got == WANT
    assert advice(capsys) == expected("the command line")
    assert read("--draft", "{rank: 4}", "--compare={top: 3}").draft.target_lora_rank == 4
    assert read("--compare.top=3", "--compare.kind", "tv").divergence == Loss(3, "tv")


def test_new_names_give_no_advice(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Catches advice for settings that are right, and values that are taken for names."""
    file = tmp_path / "new.yaml"
    file.write_text(to_yaml(WANT))
    assert read("--config", str(file), "--out", "draft.rank") == dataclasses.replace(
        WANT, out="draft.rank"
    )
    assert advice(capsys) == []


@pytest.mark.parametrize(
    "text", ["draft: {rank: 4, target_lora_rank: 4}", "compare: {top: 3}\ndivergence: {kind: tv}"]
)
def test_both_names_in_one_file_are_an_error(tmp_path: Path, text: str) -> None:
    """Catches one of two values that is dropped in silence."""
    file = tmp_path / "both.yaml"
    file.write_text(text)
    with pytest.raises(UserError, match=f"{file} sets both .*: leave out"):
        read("--config", str(file))


@pytest.mark.parametrize(
    "argv",
    [
        ["--draft.rank", "4", "--draft.target_lora_rank=4"],
        ["--compare.top", "3", "--divergence.kind", "tv"],
    ],
)
def test_both_names_on_the_command_line_are_an_error(argv: list[str]) -> None:
    """Catches the same on the command line."""
    with pytest.raises(UserError, match="command line sets both .* its new name: leave out"):
        read(*argv)


def test_the_table_is_no_setting(capsys: pytest.CaptureFixture[str]) -> None:
    """Catches a flag, or a key of run.yaml, made from the table itself, and old names listed in --help."""
    assert not any("RENAMED" in name for name in setting_names(Train))
    assert "RENAMED_SETTINGS" not in str(to_dict(Train()))
    with pytest.raises(SystemExit):
        read("--help")
    text = capsys.readouterr().out
    assert "RENAMED" not in text
    assert "scratch" not in text


def test_a_folder_with_old_names_is_the_same_run(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Catches a run that can no longer be resumed because its settings have new names, and any run that matches."""
    out = tmp_path / "run"
    settings = dataclasses.replace(WANT, out=str(out))

    def resumes(settings: Train) -> bool:
        with open_run(settings, "train.py", ["draft"]) as run:
            return run.resumes

    assert not resumes(settings)
    (out / RUN_FILE).write_text(
        "draft: {scratch: {hidden_size: 8}, rank: 4, heads: 4}\n"
        f"compare: {{top: 3, kind: kl}}\ndomains: [a]\nout: {out}\noverwrite: false\n"
    )
    with pytest.raises(UserError, match=r"another run \(different: divergence\)"):
        resumes(dataclasses.replace(settings, divergence=Loss(4)))
    capsys.readouterr()
    assert resumes(settings)
    assert advice(capsys) == expected(str(out / RUN_FILE))
    assert (out / RUN_FILE).read_text() == "# command: train.py\n" + to_yaml(settings)
    assert resumes(settings)
    assert advice(capsys) == []


@dataclass
class Family:
    family: str = ""


@dataclass
class Lora(Family):
    family: str = "lora"
    target_lora_rank: int = 16
    RENAMED_SETTINGS: ClassVar[dict[str, str]] = {"rank": "target_lora_rank"}


@dataclass
class Table(Family):
    family: str = "table"
    rank: int = 64


FAMILIES: dict[str, type] = {"lora": Lora}


@dataclass
class Trained:
    draft: Annotated[Family, OneOf("family", FAMILIES)] = field(default_factory=Lora)


def test_a_new_family_may_have_a_setting_with_an_old_name(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Catches a registered family whose setting is taken for another family's old one, and then refused."""
    old, table = "{family: lora, rank: 4}", "{family: table, rank: 8}"
    assert parse_settings(Trained, "", ["--draft", old]).draft == Lora(target_lora_rank=4)
    assert "draft.rank is now called draft.target_lora_rank" in capsys.readouterr().err
    monkeypatch.setitem(FAMILIES, "table", Table)
    assert parse_settings(Trained, "", ["--draft", table]).draft == Table(rank=8)
    assert not capsys.readouterr().err
    with pytest.raises(
        UserError, match=r"draft\.rank is a setting of table, and draft\.family is lora"
    ):
        parse_settings(Trained, "", ["--draft", old])
