"""scripts/lab/compare_trainers.py: all trainers that it compares compute the same loss on the same samples."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from decode.model.loading import load_model, load_target
from scripts.lab import cells, reference_trainers
from tests import worlds
from tests.tiny import tiny_prompts
from train.data import batching
from train.data.sample_store import SampleRow
from train.families.alignment import AlignedIndices, Alignment
from train.families.base import FamilyContext
from train.families.eagle import EagleTrainer
from train.families.settings.causal import CausalSettings
from train.families.settings.eagle import Eagle3Settings
from train.losses import divergences
from train.trainer.settings import DistillConfig


class UnshiftedAlignment(Alignment):
    """As public trainers mask: slot t is trained if token t is part of a reply and what it predicts of the same one."""

    def step(self, j: int) -> AlignedIndices:
        places = super().step(j)
        before = torch.zeros_like(self.run_length[:, :1])
        in_reply = torch.cat([before, self.run_length[:, :-1]], 1) > 0
        return replace(places, valid=places.valid & in_reply)


class ReferenceEagleTrainer(EagleTrainer):
    """EagleTrainer with that mask, without positions whose most likely token is not in the draft's vocabulary."""

    alignment = UnshiftedAlignment

    def loss_positions(self, p_logits: torch.Tensor, valid: torch.Tensor) -> torch.Tensor:
        return valid & divergences.argmax_in_vocabulary(p_logits, self.net.ids)[:, None]


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> worlds.World:
    return worlds.build(tmp_path_factory.mktemp("world"), layers=7)  # the fewest of an EAGLE-3 head


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
    settings = DistillConfig(draft=CausalSettings(init=str(world.draft)))
    trainee = settings.draft.build(FamilyContext(settings, own, rows))
    with torch.no_grad():
        sums = trainee.loss(trainee.model, batching.collate(rows, pad_id=0))
        draft, teacher = (
            load_model(str(p), "m", "cpu", "float32") for p in (world.draft, world.target)
        )
        theirs = reference_trainers.kl_loss(draft, teacher, reference_trainers.pad_rows(rows))
    assert float(theirs) == pytest.approx(
        float(sums["loss"]) / batching.supervised_token_count(rows), rel=1e-4
    )


@pytest.mark.parametrize("vocab", [0, 40])
def test_the_plain_loss_of_eagle3_is_that_of_our_trainer(world: worlds.World, vocab: int) -> None:
    """Catches a public recipe that is slower because it computes something else: keys, positions, mask or teacher
    rows. Ours runs supervised slots alone, in chunks, on logits computed once a row."""
    rows = rows_of(20, 9, 15)
    # The plain mask does not know where one reply ends and the next begins.
    rows[0]["loss_spans"] = [[3, 11]]
    own = load_target(str(world.target), "cpu")
    draft = Eagle3Settings(vocab=vocab, steps=3)
    settings = DistillConfig(draft=draft, loss="soft_ce")
    context = FamilyContext(settings, own, rows)
    trainee = settings.draft.build(context)
    ours = trainee.model
    trainee.model = ReferenceEagleTrainer(ours.net, ours.head, ours.embedding, context, draft)
    sums = trainee.loss(trainee.model, batching.collate(rows, pad_id=0))
    sums["loss"].backward()
    want = {name: p.grad.clone() for name, p in ours.net.named_parameters() if p.grad is not None}
    ours.net.zero_grad()
    teacher = load_model(str(world.target), "target", "cpu", "float32")
    plain = reference_trainers.PlainEagle3(ours.net, teacher, 3)
    inputs = reference_trainers.pad_rows(rows)
    loss = reference_trainers.plain_loss(plain, inputs) * inputs["input_ids"].numel()
    loss.backward()
    assert loss.item() == pytest.approx(sums["loss"].item(), rel=1e-4)
    assert want.keys() >= {"fc.weight", "layers.0.self_attn.k_proj.weight"}
    parameters = dict(ours.net.named_parameters())
    for name, grad in want.items():
        torch.testing.assert_close(parameters[name].grad, grad, rtol=1e-3, atol=1e-4)


def test_prompts_for_generation_end_where_the_answer_begins() -> None:
    """Catches prompts padded on the right, after which a model would continue from padding."""
    rows = rows_of(20, 9)
    made = reference_trainers.pad_rows(rows)
    ends = [3, 3]
    for i, (row, end) in enumerate(zip(rows, ends, strict=True)):
        assert made["prompts"][i, -end:].tolist() == row["input_ids"][:end].tolist()
        assert made["prompt_attention_mask"][i].sum() == end


@pytest.mark.slow
def test_all_arms_read_the_same_samples(
    world: worlds.World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Catches a trainer that reads shorter texts, or fewer of them, in the measured time."""
    data = worlds.sampled(world, tmp_path, "--max_new_tokens", 40)
    words: list[object] = [
        "scripts/lab/compare_trainers.py", "--target", world.target, "--draft", world.draft,
        "--data", data, "--steps", 2, "--warm", 1, "--rounds", 1, "--eagle_vocab", 40, "--eagle_steps", 2,
    ]  # fmt: skip

    def measure(script: str, settings: Any, arms: list[str]) -> Any:
        done = worlds.fork(*words, "--arms", json.dumps(arms), "--one", "true").ok()  # type: ignore[arg-type]
        return json.loads(done.out.splitlines()[-1])

    monkeypatch.setattr(cells, "measure_apart", measure)
    arms = "[ours, ours-features, trainer, ours-on-policy, eagle3, eagle3-features, eagle3-trainer]"
    worlds.call(*words, "--arms", arms, "--out", tmp_path / "out.json").ok()  # type: ignore[arg-type]
    result: dict[str, Any] = json.loads((tmp_path / "out.json").read_text())
    arms = {name: arm["median"] for name, arm in result["arms"].items()}
    assert len(arms) == 7
    read = {name: x["tokens_per_second"] * x["seconds_per_step"] for name, x in arms.items()}
    for name in ("ours", "ours-features", "eagle3", "eagle3-features", "eagle3-trainer"):
        assert read[name] == pytest.approx(read["trainer"])
    for name in ("ours-features", "eagle3-features"):
        assert 0 < arms[name]["with_pass_tokens_per_second"] < arms[name]["tokens_per_second"]
    assert all(x["peak_bytes_in_all"] >= x["peak_bytes"] >= 0 for x in arms.values())
