"""Python's standard library as a text corpus: source modules and help topics, with a held-out part.

Every machine that runs this project has these texts, so the bundled models and part of the training prompts are made
from them. Held-out modules and topics are never used for training or for training prompts.
"""

import re
import sysconfig
from pathlib import Path

# Left out because it is not natural code: test fixtures, generated tables, code pages, and pydoc's topics, which
# `read_help_topics` reads.
EXCLUDED_FOLDERS = {
    "test", "tests", "idle_test", "encodings", "pydoc_data", "site-packages", "dist-packages",
    "__pycache__", "__phello__", "turtledemo", "_vendor", "_bundled",
}  # fmt: skip
EXCLUDED_FILES = re.compile(
    r"(_sysconfigdata.*|.*config-.*|html/entities|stringprep|_pydecimal_tables)"
)

# Chosen by hand across subjects: text, numbers, files, network, mail, concurrency, GUI, testing, XML.
HELD_OUT_MODULES = {
    "textwrap", "fractions", "statistics", "csv", "gzip", "shelve", "sched", "queue", "calendar",
    "ftplib", "bdb", "asyncio/queues", "email/generator", "http/cookies", "logging/handlers",
    "multiprocessing/pool", "tkinter/simpledialog", "unittest/result", "urllib/robotparser",
    "xml/dom/pulldom", "importlib/_abc", "concurrent/futures/thread", "json/encoder", "sqlite3/dump",
}  # fmt: skip
HELD_OUT_TOPICS = {"import", "calls", "objects", "typesmapping", "strings", "operator-summary"}


def read_modules(held_out: bool) -> dict[str, str]:
    """{module path without .py: source} of the running Python, sorted by name."""
    root = Path(sysconfig.get_paths()["stdlib"])
    found = {}
    for path in sorted(root.rglob("*.py")):
        relative = path.relative_to(root)
        name = relative.with_suffix("").as_posix()
        excluded = EXCLUDED_FOLDERS.intersection(relative.parts) or EXCLUDED_FILES.fullmatch(name)
        if not excluded and (name in HELD_OUT_MODULES) == held_out:
            found[name] = path.read_text(encoding="utf-8", errors="replace")
    return {name: text for name, text in found.items() if len(text) > 200}  # no empty __init__.py


def read_help_topics(held_out: bool) -> dict[str, str]:
    """{topic: text} of the language reference that `help()` shows, without topics that repeat a longer one."""
    from pydoc_data import topics as data

    def long_lines(text: str) -> set[str]:
        return {line.strip() for line in text.split("\n") if len(line.strip()) > 30}

    seen: set[str] = set()
    found = {}
    # Lines of held-out topics must not appear inside longer topics either.
    hidden = set() if held_out else long_lines("\n".join(read_help_topics(True).values()))
    for name, text in sorted(data.topics.items(), key=lambda item: (-len(item[1]), item[0])):
        lines, is_held_out = long_lines(text), name in HELD_OUT_TOPICS
        if not is_held_out and len(lines & seen) > 0.5 * len(lines):
            continue  # most lines are in a longer topic that was already taken
        seen |= lines
        if is_held_out == held_out:
            kept = [line for line in text.strip().split("\n") if line.strip() not in hidden]
            found[name] = "\n".join(kept) + "\n"
    return found
