"""MTP layers in training: every step learns from exactly what decoding reads; a native layer is trained on."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from decode.checkpoints import importers
from decode.checkpoints.draft_folder import METADATA_FILE
from decode.checkpoints.layouts import read_config
from decode.drafts.mtp import MtpDraft
from decode.drafts.registry import load_draft
from decode.model.masks import SlotMask
from tests.decode.drafts.test_mtp import native_folder, plain_laws
from tests.heads import randomise
from tests.params import rotated
from tests.tiny import tiny_model, tiny_target
from tests.train.data.test_packing import SAMPLES
from train.data import batching
from train.families.alignment import Alignment
from train.families.base import FamilyContext
from train.families.builders import build_trainable
from train.families.head_loss import SupervisedRows
from train.families.settings.heads import MtpSettings
from train.trainer.settings import DistillConfig

STEPS = 3


def trainee_of(own: Any, init: str = "") -> Any:
    config = DistillConfig(draft=MtpSettings(steps=STEPS, init=init))
    return build_trainable(config.draft, FamilyContext(config, own, SAMPLES))


@torch.no_grad()
def gap(arch: str, packed: bool) -> float:
    """Largest difference of a supervised slot's logits at any step from `plain_laws` of the text up to it."""
    own = tiny_target(tiny_model(arch))
    trainee = trainee_of(own)
    net = trainee.net
    randomise(net, 5)
    batch = (batching.pack if packed else batching.collate)(SAMPLES, 0)
    features = trainee.teacher.get_output(batch).features
    places = Alignment(batch.input_ids, batch.loss_mask, STEPS, batch.documents)
    rows = SupervisedRows(places, STEPS)
    states = trainee.model.step_states(batch, features, places, rows)
    worst, seen = 0.0, 0
    for i, (line, start) in enumerate(batch.starts):
        ids = list(SAMPLES[i]["input_ids"])
        inside = (rows.batch == line) & (rows.row >= start) & (rows.row < start + len(ids))
        for n in inside.nonzero()[:, 0].tolist():
            for j in range(STEPS):
                if rows.valid[n, j]:
                    slot = int(rows.row[n]) - start - 1 - j
                    wanted = plain_laws(net, own, ids[: slot + 2], ids[slot + 2 : slot + 2 + j])[-1]
                    worst = max(worst, float((net.logits(states[n, j]) - wanted).abs().max()))
                    seen += 1
    assert seen == int(rows.valid.sum()) > 100
    return worst


@pytest.mark.parametrize(
    ("arch", "packed"), rotated(["llama", "gemma3_text", "deepseek_v3"], [False, True])
)
def test_steps_read_what_decoding_reads(arch: str, packed: bool) -> None:
    """Catches keys of other steps or samples, a window counted in keys, wrong states, tokens and positions."""
    assert gap(arch, packed) < 2e-3


VISIBLE = SlotMask.visible


def first_step_alone(self: SlotMask, row: Any, query: Any, key: Any, window: Any) -> torch.Tensor:
    """Keys of later steps are not attended to."""
    return VISIBLE(self, row, query, key, window) & (key < self.length)


def all_of_a_step(self: SlotMask, row: Any, query: Any, key: Any, window: Any) -> torch.Tensor:
    """Keys of the same step at earlier slots, which do not exist in decoding, are attended to."""
    last = self.shape[2] - self.length
    return VISIBLE(self, row, query, key, window) | (key >= last) & (key - last <= query)


@pytest.mark.parametrize("bug", [first_step_alone, all_of_a_step])
def test_a_wrong_mask_is_seen(bug: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The test above is blind if one of these goes unseen."""
    monkeypatch.setattr(SlotMask, "visible", bug)
    assert gap("llama", False) > 0.02


def test_a_new_layer_begins_as_the_targets_last() -> None:
    """Catches weights shared with the target, which training would then change."""
    own = tiny_target(tiny_model("llama"))
    net = trainee_of(own).net
    last = own.runner.model.model.layers[-1]
    for name, value in net.layers[0].named_parameters():
        original = last.get_parameter(name)
        assert torch.equal(value, original)
        assert value.data_ptr() != original.data_ptr()
    names = {id(p) for p in own.runner.model.parameters()}
    assert not names & {id(p) for p in net.parameters()}


@pytest.mark.parametrize("arch", ["llama", "deepseek_v3"])
def test_a_native_layer_is_trained_on_and_saved_as_it_was(arch: str, tmp_path: Path) -> None:
    """Catches tensors that engines would not find in the saved folder."""
    net, own = native_folder(tmp_path / "native", arch)
    with pytest.warns(UserWarning, match="names no tokenizer"):
        trainee = trainee_of(own, str(tmp_path / "native"))
    for key, value in net.state_dict().items():
        assert torch.equal(value, trainee.net.state_dict()[key]), key
    out = tmp_path / "draft"
    trainee.save(out)
    assert not [
        key for key in read_config(str(out)) if key.startswith("_")
    ]  # a local path among them
    facts = {"family": "mtp", "tokenizer_hash": own.fingerprint}
    (out / METADATA_FILE).write_text(json.dumps(facts))
    draft = load_draft(str(out), own)
    assert isinstance(draft, MtpDraft)
    for key, value in net.state_dict().items():
        assert torch.equal(value, draft.net.state_dict()[key]), key


def test_a_routers_bias_is_saved_as_it_is(tmp_path: Path) -> None:
    """Catches experts chosen by a rounded bias: it is a buffer that the target keeps in fp32 under weights in bf16."""
    trainee = trainee_of(tiny_target(tiny_model("deepseek_v3").to(torch.bfloat16)))
    [bias] = [b for name, b in trainee.net.named_buffers() if "e_score_correction" in name]
    wanted = torch.linspace(0, 1, len(bias)) / 3
    bias.data = wanted.clone()
    trainee.save(tmp_path)
    tensors = importers.raw_tensors(str(tmp_path))
    [saved] = [value for name, value in tensors.items() if "e_score_correction" in name]
    assert torch.equal(saved, wanted)
    assert all(value.dtype == torch.bfloat16 for value in tensors.values() if value is not saved)
