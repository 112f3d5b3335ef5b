"""Trained exits: they learn from the states that decoding drafts with, and only the adapter learns."""

from typing import Any

import pytest
import torch
from torch import Tensor

from decode.common.errors import UserError
from decode.drafts.early_exit import EarlyExitDraft, ExitAdapter
from decode.engine.engine import decode
from decode.engine.records import DecodeRecord
from decode.model.runner import ModelRunner
from tests.decode.drafts.test_exit_adapter import FEW, no_adapter, saved
from tests.heads import randomise
from tests.params import rotated
from tests.tiny import tiny_model, tiny_prompts, tiny_target
from tests.train.data.test_packing import SAMPLES
from tests.train.families.test_heads_training import row
from train.data import batching
from train.data.batching import Batch
from train.families import layerskip
from train.families.base import FamilyContext
from train.families.builders import build_trainable
from train.families.layerskip import ExitTrainer
from train.families.settings.heads import LayerSkipSettings
from train.teacher.live import LiveTeacher, TeacherOutput
from train.trainer.settings import DistillConfig

AHEAD = 3
"""Tokens of the text that follow a position and are drafted as if the draft had chosen them."""


def trainee_of(own: Any, rows: Any = SAMPLES, **settings: Any) -> Any:
    chosen = {"exit_layer": 2, "vocab": 60} | settings
    config = DistillConfig(draft=LayerSkipSettings(**chosen))
    return build_trainable(config.draft, FamilyContext(config, own, rows))


def drafted_logits(draft: EarlyExitDraft, ids: list[int], start: int) -> Tensor:
    """[n, Vd]: what the draft drafts with after ids[: start + 1], and after each of up to AHEAD tokens more, which it
    runs as its own."""
    runner = draft.target.runner
    runner.allocate(1, 64)
    draft.runner.share_kv_cache(runner)
    runner.cache.slots.limit_to(64)
    if start > 0:
        runner.prefill(torch.tensor([ids[:start]]), torch.tensor([start]))
    found = []
    for at in range(start, min(start + 1 + AHEAD, len(ids))):
        found.append(draft.runner.step(torch.tensor([[ids[at]]]), torch.tensor([at]))[0, -1])
    return torch.stack(found)


@torch.inference_mode()
def gap(arch: str, packed: bool = False) -> float:
    """Largest difference between a supervised position's logits in training and those that decoding drafts with."""
    own = tiny_target(tiny_model(arch))
    trainee = trainee_of(own)
    randomise(trainee.net, 5)
    batch: Batch = (batching.pack if packed else batching.collate)(SAMPLES, 0)
    output = trainee.teacher.get_output(batch)
    inputs = trained_states(trainee.model, batch, output)
    valid = layerskip.supervised_positions(batch)
    logits = torch.full((*valid.shape, len(trainee.net.ids)), float("nan"))
    logits[valid] = trainee.model.logits(inputs)
    draft, worst, seen = trainee.to_draft(), 0.0, 0
    for i, (line, begin) in enumerate(batch.starts):
        ids = list(SAMPLES[i]["input_ids"])
        here, known = logits[line, begin:], valid[line, begin:]
        for start in range(0, len(ids) - 1, 3):
            for at, law in enumerate(drafted_logits(draft, ids, start), start):
                if at < len(ids) - 1 and known[at]:
                    worst = max(worst, float((here[at] - law).abs().max()))
                    seen += 1
    assert seen > 100
    return worst


def trained_states(model: ExitTrainer, batch: Batch, output: TeacherOutput) -> Tensor:
    """[N, H]: the states that the loss hands to the adapter, one for each supervised position."""
    seen: list[Tensor] = []
    handle = model.net.register_forward_pre_hook(lambda module, args: seen.append(args[0]))
    try:
        model(batch, output)
    finally:
        handle.remove()
    return torch.cat(seen)


@pytest.mark.parametrize(("arch", "packed"), rotated(FEW, [False, True]))
def test_training_reads_what_decoding_drafts_with(arch: str, packed: bool) -> None:
    """Catches the state of another layer or position, and drafted tokens whose states differ from the text's."""
    assert gap(arch, packed) < 2e-3


OUTPUT = LiveTeacher.get_output


def a_position_early(self: LiveTeacher, batch: Batch) -> TeacherOutput:
    """Every position learns from the state before its own."""
    output = OUTPUT(self, batch)
    return TeacherOutput(output.features.roll(1, 1), output.head_inputs)


INIT = ExitAdapter.__init__


def a_layer_early(self: ExitAdapter, config: Any, *rest: Any) -> None:
    """It reads one layer's input in training and is put in after that layer in decoding."""
    INIT(self, config, *rest)
    self.aux_layers = type(self.aux_layers)((self.layers - 1,))


@pytest.mark.parametrize(
    ("place", "name", "bug"),
    [
        (LiveTeacher, "get_output", a_position_early),
        (ExitAdapter, "__init__", a_layer_early),
        (ModelRunner, "first_layers", no_adapter),
    ],
)
def test_planted_bugs_open_a_gap(
    place: Any, name: str, bug: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The test above is blind if one of these goes unseen."""
    monkeypatch.setattr(place, name, bug)
    assert gap("llama") > 0.05


def accepted(outputs: list[DecodeRecord]) -> int:
    return sum(count for output in outputs for _, count in output.rounds)


def test_training_raises_acceptance_and_leaves_the_target_alone() -> None:
    """Catches a loss that pulls the exit away from the target, and gradients that reach the target's weights."""
    own = tiny_target(tiny_model("llama"))
    prompts = tiny_prompts(5, 8, 6, 9, seed=3)
    answers = decode(own, None, prompts, max_new_tokens=24)
    rows = [
        row([*o.prompt_ids, *o.output_ids], (len(o.prompt_ids), len(o.prompt_ids) + 24))
        for o in answers
    ]
    weights = {name: value.clone() for name, value in own.runner.model.state_dict().items()}
    trainee = trainee_of(own, rows, vocab=0)
    plain = EarlyExitDraft(own, 2)
    before = decode(own, plain, prompts, k=3, max_new_tokens=24)
    start = decode(own, trainee.to_draft(), prompts, k=3, max_new_tokens=24)
    assert [o.rounds for o in start] == [o.rounds for o in before]
    optimizer = torch.optim.AdamW(trainee.model.parameters(), lr=1e-2, weight_decay=0.0)
    batch = batching.collate(rows, 0, 1)
    for _ in range(60):
        optimizer.zero_grad()
        (trainee.loss(trainee.model, batch)["loss"] / 96).backward()
        optimizer.step()
    after = decode(own, trainee.to_draft(), prompts, k=3, max_new_tokens=24)
    assert [o.output_ids for o in after] == [o.output_ids for o in answers]
    assert accepted(before) < 40 < 60 < accepted(after)  # of 69 at most
    assert all(
        torch.equal(value, weights[name]) for name, value in own.runner.model.state_dict().items()
    )
    assert all(value.grad is None for value in own.runner.model.parameters())


def test_a_saved_exit_is_trained_on(tmp_path: Any) -> None:
    """Catches training that starts anew, and settings that contradict the saved exit."""
    own = tiny_target(tiny_model("llama"))
    path = saved(tmp_path / "d", own)
    trainee = trainee_of(own, init=path, exit_layer=0, vocab=None)
    assert trainee.net.layers == 2
    trainee.save(tmp_path / "again")
    again = trainee_of(own, init=path, exit_layer=2, vocab=0).net
    for key, value in trainee.net.state_dict().items():
        assert torch.equal(value, again.state_dict()[key])
    with pytest.raises(UserError, match="exit_layer"):
        trainee_of(own, init=path, exit_layer=1, vocab=None)


@pytest.mark.parametrize("layer", [3, 9])
def test_an_exit_behind_the_last_layer_is_refused(layer: int) -> None:
    with pytest.raises(UserError, match="1 to 2 layers"):
        trainee_of(tiny_target(tiny_model("llama")), exit_layer=layer)


def test_a_quarter_of_the_layers_is_the_default() -> None:
    own = tiny_target(tiny_model("llama", num_hidden_layers=8))
    assert trainee_of(own, exit_layer=0).net.aux_layers.layers == (2,)
