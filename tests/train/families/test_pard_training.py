"""PARD in training: a slot learns from exactly what it reads in decoding, and only what the target wrote."""

from typing import Any

import pytest
import torch
from torch import Tensor

from tests.params import rotated
from tests.tiny import FEW, VOCAB, reference, tiny_model, tiny_target
from tests.train.data.test_packing import SAMPLES
from tests.train.families.test_heads_training import row
from train.data import batching
from train.data.batching import Batch
from train.families.base import FamilyContext
from train.families.block_loss import BlockLoss
from train.families.builders import build_trainable
from train.families.causal import output_projection
from train.families.settings.blocks import PardSettings
from train.families.slots import BlockMask, BlockSlots, Retention, draw_depths
from train.trainer.settings import DistillConfig

K = 4
Slot = tuple[int, int, int]


def trainer_of(model: Any, **settings: Any) -> Any:
    draft = PardSettings(layers=[0, 1], block=K, **settings)
    trainee = build_trainable(
        draft, FamilyContext(DistillConfig(draft=draft), tiny_target(model), SAMPLES)
    )
    trainee.model.eval()  # GPT-2 has dropout
    return trainee


def slot_states(trainee: Any, batch: Batch, monkeypatch: pytest.MonkeyPatch) -> dict[Slot, Tensor]:
    """{(line, anchor, depth): final hidden state} of all slots that are trained."""
    found: dict[Slot, Tensor] = {}
    width = batch.input_ids.shape[1]

    def record(self: BlockLoss, *inputs: Tensor) -> dict[str, Tensor]:
        _, states, _, block, depth, _ = inputs
        for state, at, d in zip(states, block.tolist(), depth.tolist(), strict=True):
            found[at // width, at % width, d] = state.detach()
        return {"loss": states.sum()}

    with monkeypatch.context() as patch:
        patch.setattr(BlockLoss, "__call__", record)
        trainee.loss(trainee.model, batch)
    return found


def logits_of(model: Any, states: Tensor) -> Tensor:
    """[N, Vd] that the PardTrainer `model` computes from final hidden states [N, H]."""
    project, selected = output_projection(model.lm, model.ids)
    return model.finish(project(states, *selected))


def gap(trainee: Any, monkeypatch: pytest.MonkeyPatch, packed: bool) -> float:
    """Largest difference of a slot's logits from those of transformers' pass over text up to the anchor, and masks."""
    batch = (batching.pack if packed else batching.collate)(SAMPLES, 0)
    batch.draw = 3
    found = slot_states(trainee, batch, monkeypatch)
    plain = reference(trainee.lm)
    worst = 0.0
    for i, (line, start) in enumerate(batch.starts):
        ids = list(SAMPLES[i]["input_ids"])
        for anchor in range(len(ids)):
            deepest = max((d for d in range(K) if (line, start + anchor, d) in found), default=-1)
            if deepest < 0:
                continue
            text = torch.tensor([ids[: anchor + 1] + [trainee.mask_token] * deepest])
            with torch.no_grad():
                wanted = plain(text).logits[0, anchor:]
                got = torch.stack([found[line, start + anchor, d] for d in range(deepest + 1)])
                logits = logits_of(trainee.model, got)
            worst = max(worst, float((wanted - logits).abs().max()))
    return worst


@pytest.mark.parametrize(("arch", "packed"), rotated(FEW, [False, True]))
def test_slots_read_what_decoding_reads(
    arch: str, packed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Catches a slot that sees tokens after its anchor, other masks or another sample, and wrong positions."""
    assert gap(trainer_of(tiny_model(arch)), monkeypatch, packed) < 1e-3


VISIBLE = BlockMask.visible


def leaking_mask(self: BlockMask, row: Any, query: Any, key: Any, window: Any) -> Tensor:
    later = (query >= self.length) & (key < self.length) & (key > 0)
    return VISIBLE(self, row, query, key, window) | later & VISIBLE(
        self, row, query, (key - 1).clamp_min(0), window
    )


def masks_of_all_blocks(self: BlockMask, row: Any, query: Any, key: Any, window: Any) -> Tensor:
    return VISIBLE(self, row, query, key, window) | (key >= self.length)


@pytest.mark.parametrize("bug", [leaking_mask, masks_of_all_blocks])
def test_a_wrong_mask_is_seen(bug: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The test above is blind if one of these goes unseen: the token after the anchor leaks, blocks see each other."""
    monkeypatch.setattr(BlockMask, "visible", bug)
    assert gap(trainer_of(tiny_model("llama")), monkeypatch, False) > 0.05


def test_positions_one_off_are_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    positions = BlockSlots.positions.func  # type: ignore[attr-defined]

    def one_on(self: BlockSlots) -> Tensor:
        found: Tensor = positions(self).clone()
        found[:, self.depths.shape[1] :] += 1
        return found

    monkeypatch.setattr(BlockSlots, "positions", property(one_on))
    assert gap(trainer_of(tiny_model("llama")), monkeypatch, False) > 0.05


def test_golden_slots() -> None:
    """Anchors, depths and labels of a toy chat, written by hand: tokens 3 and 4, then 7 are the target's."""
    sample = row([10, 11, 12, 13, 14, 15, 16, 17], (3, 5), (7, 8))
    batch = batching.collate([sample], 0, 1)
    depths = draw_depths(batch, 3, Retention(1.0, 1.0))
    assert depths.tolist() == [[0, 0, 2, 1, 0, 0, 1, 0]]
    made = BlockSlots(batch, depths, 3)
    line, column, anchor, depth = made.supervised
    table = sorted(zip(anchor.tolist(), depth.tolist(), column.tolist(), strict=True))
    assert table == [(2, 0, 2), (2, 1, 8), (3, 0, 3), (6, 0, 6)]
    assert batch.input_ids[line, anchor + depth + 1].tolist() == [13, 14, 17, 14]
    assert made.positions.tolist() == [[0, 1, 2, 3, 4, 5, 6, 7, 3]]


def test_dropped_depths_are_nested_and_their_shares_right() -> None:
    """Catches a slot without the shallower ones that it attends to, and a share of another depth."""
    sample = row(list(range(1, 101)), (0, 100))
    depths = draw_depths(batching.collate([sample], 0, 1), 6, Retention(0.7, 0.2))[0]
    counts = [int((depths > d).sum()) for d in range(6)]
    # 99 positions, of which the last d cannot reach depth d
    for d, count in enumerate(counts):
        wanted = 99 * max(0.7**d, 0.2)
        assert wanted - d - 1 <= count <= wanted + 1, (d, counts)


def test_draws_depend_on_row_and_step_alone() -> None:
    """Catches packing, neighbours or another process changing what is trained; each step draws anew."""
    retention = Retention(0.5, 0.1)

    def drawn(batch: Batch, draw: int) -> dict[str, list[int]]:
        batch.draw = draw
        depths = draw_depths(batch, K, retention)
        return {
            batch.ids[i]: depths[line, start : start + len(SAMPLES[i]["input_ids"])].tolist()
            for i, (line, start) in enumerate(batch.starts)
        }

    whole = drawn(batching.collate(SAMPLES, 0), 5)
    assert drawn(batching.pack(SAMPLES, 0), 5) == whole
    assert drawn(batching.collate(SAMPLES[:2], 0), 5) == {k: whole[k] for k in list(whole)[:2]}
    assert drawn(batching.collate(SAMPLES, 0), 6) != whole


def test_the_mask_token_is_the_rarest() -> None:
    """Catches a mask that the text is full of."""
    model = tiny_model("llama")
    trainee = trainer_of(model)
    used = []
    for sample in SAMPLES:
        ((start, end),) = sample["loss_spans"]
        used += list(sample["input_ids"])[start:end]
    counts = [used.count(token) for token in range(VOCAB)]
    least = min(counts)
    assert trainee.mask_token == max(i for i, count in enumerate(counts) if count == least)
    assert trainee.lm.config.pard_token == trainee.mask_token
    assert trainer_of(model, mask_token=7).mask_token == 7


def test_without_drops_every_depth_has_the_loss_of_its_rows(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Catches teacher rows or weights of another depth, against a loss written out from the definitions."""
    model = tiny_model("llama")
    trainee = trainer_of(model, retention=1.0)
    batch = batching.collate(SAMPLES, 0)
    output = trainee.teacher.get_output(batch)
    sums = trainee.loss(trainee.model, batch)
    found = slot_states(trainee, batch, monkeypatch)
    p = output.head_inputs
    total = 0.0
    with torch.no_grad():
        for (line, anchor, d), state in found.items():
            log_p = trainee.teacher.head(p[line, anchor + d]).log_softmax(-1)
            log_q = logits_of(trainee.model, state).log_softmax(-1)
            total += 0.8**d * float((log_p.exp() * (log_p - log_q)).sum())
    assert float(sums["loss"]) == pytest.approx(total, rel=1e-4)
    written = batch.loss_mask.sum()
    assert int(sums["count_1"]) == int(written)
