"""P-EAGLE in training: a slot learns from exactly what it reads in decoding."""

from typing import Any

import pytest
import torch

from tests.decode.drafts.test_peagle import one_pass
from tests.heads import randomise
from tests.params import rotated
from tests.tiny import FEW, tiny_model, tiny_target
from tests.train.data.test_packing import SAMPLES
from tests.train.families.test_dflash_training import inputs_of
from tests.train.families.test_pard_training import leaking_mask, masks_of_all_blocks
from train.data import batching
from train.families.base import FamilyContext
from train.families.builders import build_trainable
from train.families.settings.blocks import PEagleSettings
from train.families.slots import BlockMask
from train.trainer.settings import DistillConfig

K = 3


@torch.no_grad()
def gap(arch: str, packed: bool, monkeypatch: pytest.MonkeyPatch) -> float:
    """Largest difference of a slot's logits from those of one pass over the text up to its anchor, and masks."""
    draft = PEagleSettings(vocab=60, taps=[0, 1, 2], block=K)
    own = tiny_target(tiny_model(arch))
    trainee: Any = build_trainable(draft, FamilyContext(DistillConfig(draft=draft), own, SAMPLES))
    net = trainee.net
    randomise(net, 5)
    batch = (batching.pack if packed else batching.collate)(SAMPLES, 0)
    with torch.enable_grad():
        _, states, label, block, depth, before = inputs_of(trainee, batch, monkeypatch)
    width, worst, seen = batch.input_ids.shape[1], 0.0, 0
    for i, (line, start) in enumerate(batch.starts):
        ids = list(SAMPLES[i]["input_ids"])
        for t in range(len(ids) - 1):
            own_slots = block == line * width + start + t
            count = int(own_slots.sum())
            if count == 0:
                continue
            order = depth[own_slots].argsort()
            got = net.logits(states[own_slots][order])
            wanted = one_pass(net, own, ids[: t + 2], count)
            worst = max(worst, float((wanted - got).abs().max()))
            assert label[own_slots][order].tolist() == ids[t + 2 : t + 2 + count]
            assert before[own_slots][order].tolist() == ids[t + 1 : t + 1 + count]
            seen += count
    assert seen == len(label) > 100
    return worst


@pytest.mark.parametrize(("arch", "packed"), rotated(FEW, [False, True]))
def test_slots_read_what_decoding_reads(
    arch: str, packed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Catches a slot that sees later pairs or other masks, another sample, wrong states, tokens and labels."""
    assert gap(arch, packed, monkeypatch) < 2e-3


@pytest.mark.parametrize("bug", [leaking_mask, masks_of_all_blocks])
def test_a_wrong_mask_is_seen(bug: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The test above is blind if one of these goes unseen."""
    monkeypatch.setattr(BlockMask, "visible", bug)
    assert gap("llama", False, monkeypatch) > 0.05
