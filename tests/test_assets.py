"""The EAGLE-3 head that ships for SmolLM2-135M-Instruct: what a stranger gets is what was measured."""

import json
import re

from decode.checkpoints.draft_folder import draft_sha256, read_metadata
from decode.serving.checker import check_draft_files
from eval.reporting.formatting import format_estimate
from eval.results.report import read_report
from tests import worlds
from train.hub import redaction

HEAD = worlds.ROOT / "assets" / "eagle3-smollm2"


def test_the_shipped_head_is_the_measured_one() -> None:
    """Bug: weights or metadata of another run in the folder, or a table in the README of another head."""
    saved = draft_sha256(str(HEAD))
    assert saved == read_metadata(str(HEAD)).draft_sha256
    report = json.loads((worlds.ROOT / "docs/results/smollm2.json").read_text())
    heads = [m for m in report["methods"] if m["name"].startswith("eagle3")]
    assert heads
    assert {m["draft_sha256"] for m in heads} == {saved}


def test_the_shipped_head_may_be_published() -> None:
    """Bug: a secret, a local path, a pickle, or a folder that no longer fits into the repository."""
    redaction.check_folder(HEAD, {read_metadata(str(HEAD)).draft_sha256})
    assert sum(path.stat().st_size for path in HEAD.rglob("*") if path.is_file()) < 25e6


def test_engines_would_load_the_shipped_head() -> None:
    """Bug: names, sizes or the vocabulary's map in another form than engines read."""
    for engine in ("vllm", "sglang"):
        findings = check_draft_files(str(HEAD), engine)
        assert findings == [], engine


def test_the_shipped_head_has_one_headline_figure() -> None:
    """Bug: README, card and docs give the head's speed-up from different measurements."""
    report = read_report(worlds.ROOT / "docs/results/smollm2.json")
    (head,) = [m for m in report.pooled if m.name == "eagle3" and m.temperature == 0]
    figure = format_estimate(head.speedup, 2, "×")
    card = (HEAD / "README.md").read_text()
    listed = re.findall(r"^- (\S+ \[.*?\]) the speed of plain decoding", card, re.MULTILINE)
    own = [m.speedup for m in report.of_draft(head.draft_sha256) if m.is_pooled]
    assert sorted(listed) == sorted(format_estimate(speedup, 2, "×") for speedup in own)
    for page, words in {
        "README.md": f"shipped EAGLE-3 head decodes SmolLM2-135M {figure}",
        "docs/families.md": f"**What ships is the EAGLE-3 head**: {figure}",
        "docs/guides/laptop.md": f"the shipped head gains {figure.split()[0]}",
    }.items():
        assert words in " ".join((worlds.ROOT / page).read_text().split()), page
