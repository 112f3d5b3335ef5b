"""The table of findings and the checks that count for it belong together."""

import re
import string
from pathlib import Path

import pytest

from train.doctor_checks import findings
from train.doctor_checks.findings import KINDS, FindingKind

CHECKS = "".join(
    file.read_text(encoding="utf-8")
    for file in Path(findings.__file__).parent.glob("*.py")
    if file.name != "findings.py"
)


@pytest.mark.parametrize("kind", KINDS.values(), ids=lambda kind: kind.name)
def test_every_text_is_filled_by_a_check(kind: FindingKind) -> None:
    """Bug: a rare finding ends the doctor in a KeyError, or no check ever counts for it."""
    counted = {"share", "rows", "tokens", "tokens_in_words", "token_share"}
    texts = (kind.name, kind.cost, kind.mend)
    names = {name for text in texts for _, name, _, _ in string.Formatter().parse(text) if name}
    for name in {name.split(".")[0] for name in names} - counted:
        assert re.search(rf'"{name}"|\b{name}=', CHECKS), name
    assert f'"{kind.name}"' in CHECKS
    assert kind.of == "" or f'"{kind.of}"' in CHECKS or f"{kind.of}=" in CHECKS
