"""`draftsmith NAME` is the command of that name; its list, its version and its help."""

import subprocess
import sys
import time

import pytest
import yaml

from decode.drafts.registry import DRAFT_FAMILIES
from scripts import draftsmith
from tests import worlds


def run(*words: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "scripts.draftsmith", *words]
    return subprocess.run(command, cwd=worlds.ROOT, capture_output=True, text=True)


def test_every_command_is_there() -> None:
    """Bug: a command was moved or has got another name."""
    for file, about in draftsmith.COMMANDS.values():
        assert (worlds.ROOT / file).is_file(), file
        assert about in draftsmith.usage()


def test_help_is_short_and_quick() -> None:
    begin = time.process_time()
    done = run("--help")
    assert done.returncode == 0
    assert len(done.stdout.splitlines()) <= 32
    assert "torch" not in subprocess.run(
        [sys.executable, "-c", "import sys; from scripts import draftsmith; print(*sys.modules)"],
        cwd=worlds.ROOT, capture_output=True, text=True, check=True,
    ).stdout.split()  # fmt: skip
    assert time.process_time() - begin < 1


def test_a_command_gets_its_words() -> None:
    """Bug: the name of the command is taken for a setting, or packages are not found from another folder."""
    done = run("eval", "--k", "7", "--tasks", "code", "--print_config")
    assert done.returncode == 0, done.stderr
    assert yaml.safe_load(done.stdout)["k"] == 7


@pytest.mark.parametrize(
    ("what", "one"),
    [
        ("tasks", "humaneval"),
        ("recipes", "configs/distill/qwen3-8b-eagle3.yaml"),
    ],
)
def test_lists(what: str, one: str) -> None:
    assert one in draftsmith.listed(what)


def test_families_have_a_line_each_and_recipes_are_recipes() -> None:
    """Catches a family that is in no list or has no words, and launchers or evaluations among the recipes."""
    lines = [line.split(maxsplit=1) for line in draftsmith.listed("families")]
    assert {name for name, _ in lines} == {*DRAFT_FAMILIES}
    assert len({about for _, about in lines}) == len(lines)
    recipes = [yaml.safe_load((worlds.ROOT / x).read_text()) for x in draftsmith.listed("recipes")]
    assert all({"target", "data", "draft"} <= recipe.keys() for recipe in recipes)


def test_engines_have_versions() -> None:
    assert any(line.startswith("vllm ") for line in draftsmith.listed("engines"))


@pytest.mark.parametrize(
    ("words", "said"), [(["evaluate"], "no such command"), (["ls", "x"], "ls families")]
)
def test_other_words_are_refused(words: list[str], said: str) -> None:
    done = run(*words)
    assert done.returncode == 2
    assert said in done.stderr


def test_the_version_is_the_package_s() -> None:
    assert (
        f'version = "{run("--version").stdout.strip()}"'
        in (worlds.ROOT / "pyproject.toml").read_text()
    )
