"""The README: its commands, read in order, are accepted and continue from files that earlier ones wrote. All pages:
what they link to is there."""

import re
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests import worlds

README = worlds.ROOT / "README.md"
SCRIPT = re.compile(r"(?:decode|eval|train|scripts)/\S+\.(?:py|sh)")


def commands(text: str) -> list[list[str]]:
    """The words of each command in the text's bash blocks, in order."""
    blocks = re.findall(r"^```bash\n(.*?)^```$", text, re.DOTALL | re.MULTILINE)
    lines = "".join(blocks).replace("\\\n", " ").splitlines()
    return [words for line in lines if (words := shlex.split(line, comments=True))]


def texts(value: Any, key: str = "") -> Iterator[tuple[str, str]]:
    """(name of its setting, text) of every text in the settings."""
    if isinstance(value, dict):
        for name, inner in value.items():
            yield from texts(inner, str(name))
    elif isinstance(value, list):
        for inner in value:
            yield from texts(inner, key)
    elif isinstance(value, str):
        yield key, value


def settings_of(words: list[str]) -> dict[str, Any]:
    """The settings of a command of ours, by its own --print_config."""
    at = next(i for i, word in enumerate(words) if SCRIPT.fullmatch(word))
    done = worlds.call(words[at], *words[at + 1 :], "--print_config")
    assert done.code == 0, (words, done.err)
    settings: dict[str, Any] = yaml.safe_load(done.out)
    return settings


def unwritten(commands: list[list[str]]) -> list[tuple[str, str]]:
    """(script, path) of each output folder that a command reads and none before it has written."""
    written: list[str] = []
    found = []
    for words in commands:
        script = next((word for word in words if SCRIPT.fullmatch(word)), "")
        if not script.endswith(".py"):
            continue
        settings = settings_of(words)
        for key, text in texts(settings):
            below = any(Path(text).is_relative_to(folder) for folder in written)
            if key != "out" and text.startswith("outputs/") and not below:
                found.append((script, text))
        written += [settings["out"]] if settings.get("out") else []
    return found


PAGES = sorted((worlds.ROOT / "docs" / "guides").glob("*.md"))
EARLIER = {"serving.md": ["outputs/qwen3-8b/eagle3"]}
"""What a page takes for granted: it says so in its words."""


def test_commands_continue_from_each_other() -> None:
    """Bug: a setting that is gone, or a folder that no command before has written."""
    listed = commands(README.read_text())
    assert len(listed) > 12
    assert unwritten(listed) == []


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_guides_are_short_and_their_commands_continue(page: Path) -> None:
    text = page.read_text()
    assert len(text.split()) <= 900
    given = EARLIER.get(page.name, [])
    found = {
        path for _, path in unwritten(commands(text)) if not path.startswith("outputs/smollm2/")
    }
    assert sorted(found) == given


def test_a_folder_that_nobody_wrote_is_seen() -> None:
    """Bug: the test above cannot fail."""
    text = README.read_text().replace("--out outputs/qwen3-8b/report", "--out outputs/other", 1)
    found = unwritten(commands(text))
    assert {path for _, path in found} == {"outputs/qwen3-8b/report/report.json"}


def test_every_path_in_the_readme_is_there() -> None:
    """Bug: a file was moved and the README still names it."""
    text = README.read_text()
    links = re.findall(r"\]\(([^)#]+)", text) + SCRIPT.findall(text)
    links += re.findall(r"`((?:docs|assets|configs)/[\w./*-]*)", text)
    gone = [link for link in links if "://" not in link and not any(worlds.ROOT.glob(link))]
    assert gone == []


def test_the_readme_is_short() -> None:
    assert len(README.read_text().splitlines()) <= 150


def test_pages_link_to_what_is_there() -> None:
    """Bug: a page or a picture was moved, or a page is in no index."""
    docs = worlds.ROOT / "docs"
    pages = [page for page in sorted(docs.rglob("*.md")) if page.parent != docs / "results"]
    links = {
        (page, link)
        for page in pages
        for link in re.findall(r"\]\(([^)#\s]+)", page.read_text())
        if "://" not in link
    }
    assert len(links) > 20
    assert [(page.name, link) for page, link in links if not (page.parent / link).exists()] == []
    indexed = {(page.parent / link).resolve() for page, link in links if page.name == "README.md"}
    assert [page.name for page in pages if page not in indexed and page.name != "README.md"] == []
