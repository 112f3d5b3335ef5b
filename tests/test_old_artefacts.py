"""What earlier versions wrote still loads: a draft of every family, settings of a run, a sampled set, reports.

tests/golden/old was written once, in November 2026, by the commands of tests/test_goldens.py; of weights it has names
and shapes. WRITE_GOLDENS=1 leaves it alone: a file is added by hand when a format gets a new version.
"""

import json
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from safetensors.torch import save_file

from tests import worlds
from tests.goldens import check, made_tensors
from tests.worlds import ROOT

OLD = ROOT / "tests" / "golden" / "old"
FAMILIES = sorted(path.name for path in (OLD / "drafts").iterdir())
OWN_TARGET = ("layerskip2",)
"""Families whose folder is the target too."""
TOKENIZER = ("tokenizer.json", "tokenizer_config.json")
REPORTS = sorted(
    path.name
    for path in (ROOT / "docs" / "results").glob("*.json")
    if {"schema", "baseline", "methods"} <= json.loads(path.read_text()).keys()
)
QUICK_REPORT = "quickstart_smollm2.json"


@dataclass(frozen=True)
class Old:
    """A folder with the target of the old drafts."""

    folder: Path

    def draft(self, family: str) -> Path:
        """The old draft of a family, with weights of the old names and shapes."""
        out = self.folder / family
        if not out.is_dir():
            shutil.copytree(OLD / "drafts" / family, out)
            kinds = json.loads((out / "tensors.json").read_text())
            (out / "tensors.json").unlink()
            save_file(old_tensors(kinds), out / "model.safetensors", {"format": "pt"})
            for name in TOKENIZER:
                shutil.copy(self.folder / "target" / name, out)
        return out


def old_tensors(kinds: dict[str, Any]) -> dict[str, torch.Tensor]:
    """Whole numbers as they were, such as a map of ids; sines for the weights."""
    state = made_tensors({name: kind for name, kind in kinds.items() if isinstance(kind, str)})
    for name in kinds.keys() - state.keys():
        dtype, _, shape = kinds[name]["kind"].partition(" ")
        values = torch.tensor(kinds[name]["values"]).view(json.loads(shape))
        state[name] = values.to(getattr(torch, dtype))
    return state


@pytest.fixture(scope="module")
def old(tmp_path_factory: pytest.TempPathFactory) -> Old:
    folder = tmp_path_factory.mktemp("old")
    worlds.build(folder, prompts=1, layers=4)
    return Old(folder)


def test_every_family_is_there() -> None:
    assert len(FAMILIES) == 12


@pytest.mark.parametrize("family", FAMILIES)
def test_an_old_draft_decodes(old: Old, family: str) -> None:
    """Bug: a field of config.json or draftsmith.json, or a tensor, that is looked for under a new name alone."""
    draft = old.draft(family)
    target = draft if family in OWN_TARGET else old.folder / "target"
    words = ("--target", target, "--prompt", "abc", "--max_new_tokens", 12, "--device", "cpu")
    plain = worlds.call("decode/generate.py", *words, "--draft", "none")
    drafted = worlds.call("decode/generate.py", *words, "--draft", draft, "--k", 2)
    assert (plain.code, drafted.code) == (0, 0), plain.err + drafted.err
    assert drafted.out == plain.out
    drafts = [line for line in drafted.err.splitlines() if "drafted tokens accepted" in line]
    assert len(drafts) == 1, drafted.err


@pytest.mark.parametrize("family", FAMILIES)
def test_an_old_run_is_read_again(old: Old, family: str, tmp_path: Path) -> None:
    """Bug: settings that another name or another family owns now, and a run.yaml that is refused for them."""
    file = OLD / "drafts" / family / "run.yaml"
    done = worlds.call("train/distill.py", "--config", file, "--print_config").ok()
    before, after = (yaml.safe_load(text) for text in (file.read_text(), done.out))
    assert after["draft"]["family"] == family
    # what a family reads is kept; a field that it never read may be gone
    kept = {key: value for key, value in after["draft"].items() if key in before["draft"]}
    assert kept == {key: before["draft"][key] for key in kept}
    assert len(kept) >= 2
    for part in ("target", "data", "loss", "seed", "out"):
        assert after[part] == before[part]
    assert after["loop"]["steps"] == before["loop"]["steps"] == 3


def test_an_old_sampled_set_trains_a_draft(old: Old, tmp_path: Path) -> None:
    """Bug: a manifest or rows that are read by new names alone."""
    samples = tmp_path / "samples"
    shutil.copytree(OLD / "samples", samples)
    worlds.call(
        "train/distill.py", "--target", old.folder / "target", "--data", samples, "--draft.family", "eagle1",
        "--loop.steps", 1, "--loop.batch_size", 2, "--loop.micro_batch", 2, "--loop.eval_every", 0,
        "--wandb", "disabled", "--allow_changed", "true", "--out", tmp_path / "draft",
    ).ok()  # fmt: skip
    facts = json.loads((tmp_path / "draft" / "draftsmith.json").read_text())
    manifest = json.loads((OLD / "samples" / "manifest.json").read_text())
    assert facts["samples"] == manifest["counts"]["answered"] == 24
    assert facts["data_manifest"]["counts"] == manifest["counts"]
    assert facts["data_manifest"]["tokenizer_hash"] == manifest["tokenizer_hash"]


@pytest.mark.parametrize(
    "name", [r if r == QUICK_REPORT else pytest.param(r, marks=pytest.mark.slow) for r in REPORTS]
)
def test_an_old_report_is_rendered(name: str, tmp_path: Path) -> None:
    """Bug: a field that old reports lack is read without a default."""
    before = (ROOT / "docs" / "results" / name).read_text()
    (tmp_path / "report.json").write_text(before)
    worlds.call("eval/report.py", tmp_path).ok()
    report = json.loads(before)
    page, text = (tmp_path / "report.html").read_text(), (tmp_path / "report.md").read_text()
    for method in report["methods"]:
        assert f"| {method['name']} |" in text
        assert method["name"] in page
    again = json.loads((tmp_path / "report.json").read_text())
    assert json.dumps({key: again[key] for key in report}) == json.dumps(report)
    if name == QUICK_REPORT:
        check("old/report.md", text, tmp_path)


def test_the_old_reports_are_found() -> None:
    assert len(REPORTS) >= 10
    assert QUICK_REPORT in REPORTS


@pytest.mark.slow
def test_an_old_tuning_is_drawn(tmp_path: Path) -> None:
    shutil.copy(ROOT / "docs/results/quickstart.json", tmp_path / "report.json")
    tuned = ROOT / "docs/results/tuned.json"
    worlds.call("eval/report.py", tmp_path, "--tuned", tuned).ok()
    chosen = json.loads(tuned.read_text())["chosen"]
    page = (tmp_path / "report.html").read_text()
    assert {cell["method"] for cell in chosen if cell["method"] in page}


def test_an_old_report_is_advised_on(tmp_path: Path) -> None:
    """eval/advise.py reads every field that a report has on speeds."""
    report = ROOT / "docs/results" / QUICK_REPORT
    worlds.call("eval/advise.py", report, "--out", tmp_path / "advice.md").ok()
    check("old/advice.md", (tmp_path / "advice.md").read_text(), tmp_path)
