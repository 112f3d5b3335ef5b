"""What the texts are: scripts, code, digits, lengths and sources. Mostly facts; a finding where a set is odd."""

import unicodedata
from collections import Counter
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

from train.doctor_checks.findings import DataFinding, Defect, percent
from train.doctor_checks.seen_rows import SeenRow

FENCE = "```"
LEAST_SHARE = 0.01
"""Scripts with a smaller share of the letters are not listed."""


@dataclass
class MixCheck:
    """Sums over rows. Characters and scripts are those of the replies, of prompts where there is no reply."""

    rows: int = 0
    lengths: Counter[int] = field(default_factory=Counter)
    """{least power of two that is not below a row's tokens: rows}."""
    sources: Counter[str] = field(default_factory=Counter)
    scripts: Counter[str] = field(default_factory=Counter)
    characters: int = 0
    digits: int = 0
    code: int = 0
    fenced: int = 0
    other_script: Defect = field(default_factory=Defect)

    def add(self, row: SeenRow) -> None:
        """Counts one row; its characters only if it is in the chosen sample."""
        self.rows += 1
        self.lengths[1 << max(0, len(row.ids) - 1).bit_length()] += 1
        self.sources[row.row["source"]] += 1
        if not row.chosen:
            return
        said = "\n".join(row.replies) if row.replies else row.asked
        scripts = scripts_of(said)
        self.scripts += scripts
        self.characters += len(said)
        self.digits += sum(character.isdigit() for character in said)
        self.code += sum(map(len, said.split(FENCE)[1::2]))
        self.fenced += FENCE in said
        asked = scripts_of(row.asked)
        if row.replies and scripts and asked and main_script(asked) != main_script(scripts):
            self.other_script.add(row)

    def facts(self) -> dict[str, Any]:
        """Shares and the histogram."""
        letters = sum(self.scripts.values())
        listed = [(s, n) for s, n in self.scripts.most_common() if n >= LEAST_SHARE * letters]
        sources = [(name, n) for name, n in self.sources.most_common(8)]
        return {
            "scripts": ", ".join(f"{s} {percent(n, letters)}" for s, n in listed) or "none",
            "characters in code fences": percent(self.code, self.characters),
            "rows with a code fence": self.fenced,
            "digits": percent(self.digits, self.characters),
            "sources": ", ".join(f"{name} {percent(n, self.rows)}" for name, n in sources),
            "tokens of a row": ", ".join(f"≤{k}: {n:,}" for k, n in sorted(self.lengths.items())),
        }

    def findings(self, looked: int) -> list[DataFinding]:
        """Answers in another script than their prompts, of `looked` rows."""
        found = self.other_script.finding(
            "answer in another script", "note", looked,
            f"{percent(self.other_script.rows, looked)} of the answers looked at are mostly in another script than "
            "their prompt: acceptance differs by language", "prompts in the languages that are served",
        )  # fmt: skip
        return [found] if found.rows > 0 else []


def scripts_of(text: str) -> Counter[str]:
    """{script: letters of it}."""
    found: Counter[str] = Counter()
    for character, number in Counter(text).items():
        if character.isalpha():
            found[script_of(character)] += number
    return found


def main_script(scripts: Counter[str]) -> str:
    """The script of most letters."""
    return scripts.most_common(1)[0][0]


@lru_cache(maxsize=100_000)
def script_of(letter: str) -> str:
    """The first word of the letter's Unicode name, such as "Latin"; Chinese and Japanese characters are "Cjk"."""
    name = unicodedata.name(letter, "Unknown").split()[0].split("-")[0]
    return "Cjk" if name in ("CJK", "HIRAGANA", "KATAKANA") else name.capitalize()
