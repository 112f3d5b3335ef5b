"""scripts/experiments/reference_eagle3.py: what the usual recipe trains, how recipes are compared, and the command."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch

from scripts.experiments import reference_eagle3
from scripts.experiments.reference_eagle3 import Recipe, UnshiftedAlignment
from tests import worlds
from train.families.alignment import Alignment

COMMAND = "scripts/experiments/reference_eagle3.py"


def test_the_usual_mask_forgets_the_first_draft_of_each_reply() -> None:
    """Bug: the reference trains the slot before a reply after all, or leaves out more, as a crippled baseline."""
    ids = torch.arange(12)[None]
    predicts_reply = torch.zeros(1, 12, dtype=torch.bool)
    predicts_reply[0, 3:7] = predicts_reply[0, 9:11] = True  # replies are 4 to 7, and 10 and 11
    slots = {
        kind: [
            kind(ids, predicts_reply, 3).step(j).valid[0].nonzero()[:, 0].tolist() for j in range(3)
        ]
        for kind in (Alignment, UnshiftedAlignment)
    }
    assert slots == {Alignment: [[3, 4, 5, 9], [3, 4], [3]], UnshiftedAlignment: [[4, 5], [4], []]}


def test_ratios_are_those_of_the_counts() -> None:
    """Bug: seeds or prompts mixed up, or the ratio upside down."""
    rng = np.random.default_rng(0)
    counts: dict[Recipe, list[dict[str, list[list[int]]]]] = {"usual": [], "ours": []}
    for name, more in (("usual", 0), ("ours", 8)):
        for _ in range(2):
            rounds = rng.integers(20, 30, 16)
            emitted = rounds + rng.integers(4, 12, 16) + more
            counts[name].append({"0.0": np.stack([emitted, rounds, rounds, rounds], 1).tolist()})  # type: ignore[index]
    found = reference_eagle3.compare(counts, "0.0")
    for name in reference_eagle3.RECIPES:
        for seed in (0, 1):
            rows = np.array(counts[name][seed]["0.0"])
            assert found["tau"][name][seed] == pytest.approx(rows[:, 0].sum() / rows[:, 1].sum())
    assert found["ratios"] == [
        pytest.approx(a / b)
        for a, b in zip(found["tau"]["ours"], found["tau"]["usual"], strict=True)
    ]
    low, high = found["ratio_ci"]
    assert 1 < low < found["ratio"] < high


def test_both_recipes_are_trained_and_measured(tmp_path: Path) -> None:
    """Bug: one recipe is measured twice, features of one are refused to the other, or a second start trains again."""
    world = worlds.build(tmp_path / "world", 24)
    data = worlds.sampled(world, tmp_path / "data", "--max_new_tokens", 12)
    out = tmp_path / "out"
    command = [
        COMMAND, "--distill.target", world.target, "--distill.data", data, "--distill.supervise", "all",
        "--distill.features", tmp_path / "features", "--distill.features_top", 8, "--distill.draft.vocab", 64,
        "--distill.draft.steps", 2, "--distill.draft.taps", "[0, 1]", "--distill.loop.steps", 2,
        "--distill.loop.batch_size", 4, "--distill.loop.muon_lr", 0.02, "--seeds", "[3]", "--k", 2,
        "--temperatures", "[0.0]", "--tasks", "[{name: code, limit: 3}]", "--max_new_tokens", 6, "--out", out,
    ]  # fmt: skip
    done = worlds.call(*map(str, command))
    assert done.code == 0, done.err
    (result,) = json.loads((out / "reference_eagle3.json").read_text())["results"]
    assert set(result["tau"]) == {"usual", "ours"}
    made = {
        name: json.loads((out / "drafts" / f"{name}-3" / "draftsmith.json").read_text())
        for name in ("usual", "ours")
    }
    said = {
        name: (x["training"]["loss"], x["training"]["supervise"], x["training"]["loop"]["muon_lr"])
        for name, x in made.items()
    }
    assert said == {"usual": ("soft_ce", "answers", 0.0), "ours": ("forward_kl", "all", 0.02)}
    assert made["usual"]["draft_sha256"] != made["ours"]["draft_sha256"]
    files = {path: path.stat().st_mtime_ns for path in out.glob("drafts/*/model.safetensors")}
    assert worlds.call(*map(str, command)).code == 0
    assert files == {
        path: path.stat().st_mtime_ns for path in out.glob("drafts/*/model.safetensors")
    }
