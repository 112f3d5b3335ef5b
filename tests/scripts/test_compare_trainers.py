"""scripts/experiments/compare_trainers.py: all trainers that it compares compute the same loss on the same samples."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from decode.model.loading import load_model, load_target
from scripts.experiments import reference_trainers
from tests import worlds
from tests.tiny import tiny_prompts
from train.data import batching
from train.data.sample_store import SampleRow
from train.distill import DistillConfig
from train.families.base import FamilyContext
from train.families.config import DraftConfig
from train.families.registry import family_trainer


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> worlds.World:
    return worlds.build(tmp_path_factory.mktemp("world"))


def rows_of(*lengths: int) -> list[SampleRow]:
    """Prompts of different lengths, and one answer of two spans."""
    rows = [
        SampleRow(
            id=str(i), source="x", origin="target", input_ids=torch.tensor(ids).numpy(),
            loss_spans=[[2 + i, len(ids)]], finish_reason="eos",
        )
        for i, ids in enumerate(tiny_prompts(*lengths))
    ]  # fmt: skip
    rows[0]["loss_spans"] = [[3, 5], [7, 11]]
    return rows


def test_the_loss_beside_ours_is_the_same(world: worlds.World) -> None:
    """Catches a comparison with a trainer that learns other positions, shifted labels or padding."""
    rows = rows_of(20, 9, 15)
    own = load_target(str(world.target), "cpu")
    settings = DistillConfig(draft=DraftConfig(init=str(world.draft)))
    trainee = family_trainer("causal").build(FamilyContext(settings, own, rows))
    with torch.no_grad():
        sums = trainee.loss(trainee.model, batching.collate(rows, pad_id=0))
        draft, teacher = (
            load_model(str(p), "m", "cpu", "float32") for p in (world.draft, world.target)
        )
        theirs = reference_trainers.kl_loss(draft, teacher, reference_trainers.pad_rows(rows))
    assert float(theirs) == pytest.approx(
        float(sums["loss"]) / batching.supervised_token_count(rows), rel=1e-4
    )


def test_prompts_for_generation_end_where_the_answer_begins() -> None:
    """Catches prompts padded on the right, after which a model would continue from padding."""
    rows = rows_of(20, 9)
    made = reference_trainers.pad_rows(rows)
    ends = [3, 3]
    for i, (row, end) in enumerate(zip(rows, ends, strict=True)):
        assert made["prompts"][i, -end:].tolist() == row["input_ids"][:end].tolist()
        assert made["prompt_attention_mask"][i].sum() == end


@pytest.mark.slow
def test_all_arms_read_the_same_samples(world: worlds.World, tmp_path: Path) -> None:
    """Catches a trainer that reads shorter texts, or fewer of them, in the measured time."""
    data = worlds.sampled(world, tmp_path, "--max_new_tokens", 40)
    done = worlds.run(
        "scripts/experiments/compare_trainers.py", "--target", world.target, "--draft", world.draft,
        "--data", data, "--steps", 2, "--warm", 1, "--rounds", 1, "--out", tmp_path / "out.json",
        "--arms", "[ours, ours-features, trainer, ours-on-policy]", "--features", tmp_path / "features",
    )  # fmt: skip
    assert done.code == 0, done.err
    result: dict[str, Any] = json.loads((tmp_path / "out.json").read_text())
    arms = {name: arm["median"] for name, arm in result["arms"].items()}
    assert arms.keys() == {"ours", "ours-features", "trainer", "ours-on-policy"}
    read = {name: x["tokens_per_second"] * x["seconds_per_step"] for name, x in arms.items()}
    assert read["ours"] == pytest.approx(read["trainer"])
    assert read["ours-features"] == pytest.approx(read["trainer"])
    assert (tmp_path / "features").is_dir()
    assert all(x["peak_bytes_in_all"] >= x["peak_bytes"] >= 0 for x in arms.values())
