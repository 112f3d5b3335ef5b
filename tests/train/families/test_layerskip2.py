"""LayerSkip's own recipe: which layers are dropped, what the exits learn, what is saved, how far the target moved."""

import copy
import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from decode.checkpoints.draft_folder import read_metadata
from decode.common.errors import UserError
from decode.drafts.early_exit import EarlyExitDraft
from decode.drafts.registry import load_draft
from decode.engine.engine import decode
from decode.model.loading import Target, load_target
from eval.checks.target_drift import measure_target_drift
from eval.tasks.loading import TaskPrompt
from tests import worlds
from tests.tiny import noisy, reference, tiny_model, tiny_prompts, tiny_target
from tests.train.data.test_packing import SAMPLES
from tests.train.families.test_heads_training import assert_same, learned, row
from tests.train.families.test_layerskip_training import accepted, drafted_logits
from tests.worlds import World
from train.data import batching
from train.data.batching import Batch
from train.families import layerskip2
from train.families.base import FamilyContext
from train.families.builders import build_trainable
from train.families.layerskip2 import (
    LayerSkip2Trainer,
    draw_dropped_layers,
    dropout_rates,
    enabled_exits,
    exit_weights,
)
from train.families.lora_target import LoraTarget
from train.families.settings.heads import LayerSkip2Settings
from train.trainer.settings import DistillConfig

LAYERS = 4
STEP = 6
"""The number of a step that trains exits 2, which drafts, 3 and 4."""


def trainee_of(own: Target, rows: Any = SAMPLES, **settings: Any) -> Any:
    """A trainee whose adapters have moved already; loss forward KL."""
    chosen = {
        "exit_layer": 2, "target_lora_rank": 2, "exit_period": 3, "layer_dropout": 0.8,
    } | settings  # fmt: skip
    config = DistillConfig(draft=LayerSkip2Settings(**chosen), loss="forward_kl")
    torch.manual_seed(0)
    trainee = build_trainable(config.draft, FamilyContext(config, own, rows))
    with torch.no_grad():  # LoRA's second matrix starts at zero
        for value in trainee.model.parameters():
            value.add_(0.1 * torch.randn(value.shape))
    return trainee


def batch_of(draw: int = STEP, packed: bool = False) -> Batch:
    batch: Batch = (batching.pack if packed else batching.collate)(SAMPLES, 0)
    batch.draw = draw
    return batch


def merged(own: Target) -> Any:
    """The new target in transformers' own attention, adapters merged into a copy."""
    model = copy.deepcopy(own.runner.model)
    for module in model.modules():
        for name, child in list(module.named_children()):
            if hasattr(child, "merge"):
                child.merge()
                setattr(module, name, child.get_base_layer())
    return reference(model)


# ---- the schedule ----


def test_dropout_rises_exponentially_from_0_to_the_highest() -> None:
    assert dropout_rates(5, 0.2) == pytest.approx(
        [0, 0.0378414, 0.0828427, 0.1363586, 0.2], abs=1e-6
    )
    assert dropout_rates(1, 0.2) == [0]


def test_exits_rotate() -> None:
    assert [enabled_exits(8, 2, 3, t) for t in range(4)] == [
        [2, 3, 6, 8],
        [1, 2, 4, 7, 8],
        [2, 5, 8],
        [2, 3, 6, 8],
    ]
    assert enabled_exits(4, 1, 1, 5) == [1, 2, 3, 4]


def test_deep_exits_weigh_more_and_the_last_layer_most() -> None:
    assert exit_weights(4, [1, 2, 3, 4], 0.5) == pytest.approx([0.5 / 12, 1.5 / 12, 3 / 12, 7 / 12])
    assert exit_weights(4, [2, 4], 0.5) == pytest.approx([1.5 / 8.5, 7 / 8.5])
    assert exit_weights(4, [2, 4], 0.0) == [0.0, 1.0]


def test_samples_are_dropped_whole_each_by_itself_and_anew_in_each_step() -> None:
    """Catches one draw for a batch, tokens of a sample that part ways, a first layer that is left out, a fixed draw."""
    rows = [{**row([1] * 5, (2, 5)), "id": f"sample {i}"} for i in range(800)]
    batch, rates = batching.collate(rows, 0), dropout_rates(LAYERS, 0.6)
    dropped = draw_dropped_layers(batch, rates)
    assert torch.equal(dropped, dropped[..., :1].expand_as(dropped))
    assert dropped[..., 0].float().mean(1).tolist() == pytest.approx(rates, abs=0.06)
    assert not dropped[0].any()
    again = draw_dropped_layers(batch, rates)
    batch.draw = 1
    assert torch.equal(dropped, again)
    assert not torch.equal(dropped, draw_dropped_layers(batch, rates))


def test_packed_samples_learn_the_same() -> None:
    """Catches dropout that reaches the next sample of a line, and adapters that read over a seam."""
    trainee = trainee_of(tiny_target(tiny_model("llama", num_hidden_layers=LAYERS)))
    whole = learned(trainee, batch_of())
    assert_same(learned(trainee, batch_of(packed=True)), whole)
    assert abs(learned(trainee, batch_of(STEP + 3))[0]["loss"] - whole[0]["loss"]) > 1e-2


# ---- the loss ----


def exit_logits(model: Any, kept: list[int], sample: Any) -> Tensor:
    """[T, V]: the logits of a model that has only the layers `kept`, by transformers alone."""
    cut = copy.deepcopy(model)
    cut.model.layers = nn.ModuleList([cut.model.layers[i] for i in kept])
    return cut(torch.tensor([sample["input_ids"]]), use_cache=False).logits[0]


@torch.no_grad()
def loss_by_hand(original: Any, new: Any, batch: Batch, rates: list[float]) -> float:
    """The weighted KL of exits 2, 3 and 4, sample by sample."""
    dropped = draw_dropped_layers(batch, rates)[..., 0]
    total = 0.0
    for i, sample in enumerate(SAMPLES):
        at = batching.supervised_positions(sample)
        log_p = exit_logits(original, list(range(LAYERS)), sample)[at].log_softmax(-1)
        for depth, weight in zip((2, 3, 4), exit_weights(LAYERS, [2, 3, 4], 1.0), strict=True):
            kept = [layer for layer in range(depth) if not dropped[layer, i]]
            log_q = exit_logits(new, kept, sample)[at].log_softmax(-1)
            total += weight * float((log_p.exp() * (log_p - log_q)).sum())
    return total


def loss_gap(training: bool = True) -> float:
    """Relative difference of the trainee's loss from `loss_by_hand`."""
    model = tiny_model("llama", num_hidden_layers=LAYERS)
    own = tiny_target(model)
    trainee = trainee_of(own)
    trainee.model.train(training)
    loss = float(learned(trainee, batch_of())[0]["loss"])
    rates = dropout_rates(LAYERS, 0.8 if training else 0.0)
    by_hand = loss_by_hand(reference(model), merged(own), batch_of(), rates)
    return abs(loss / by_hand - 1)


@pytest.mark.parametrize("training", [True, False], ids=["training", "eval"])
def test_the_loss_is_that_of_a_computation_by_hand(training: bool) -> None:
    """Catches exits of another layer, without the norm, of another weight, and a teacher that moved or drops layers."""
    assert loss_gap(training) < 1e-4


def one_draw_for_all(batch: Batch, rates: list[float]) -> Tensor:
    dropped = draw_dropped_layers(batch, rates)
    return dropped[:, :1].expand_as(dropped)


STATES = LoraTarget.states


def a_layer_early(self: LoraTarget, batch: Batch, layers: tuple[int, ...] = ()) -> Tensor:
    return STATES(self, batch, tuple(layer - 1 for layer in layers))


def teacher_moves(self: LoraTarget) -> Any:
    return torch.no_grad()


@pytest.mark.parametrize(
    ("place", "name", "bug"),
    [
        (layerskip2, "draw_dropped_layers", one_draw_for_all),
        (LoraTarget, "states", a_layer_early),
        (layerskip2, "final_norm", lambda model: nn.Identity()),
        (layerskip2, "exit_weights", lambda layers, exits, scale: [1 / len(exits)] * len(exits)),
        (LoraTarget, "adapters_disabled", teacher_moves),
    ],
)
def test_planted_bugs_change_the_loss(
    place: Any, name: str, bug: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The test above is blind if one of these goes unseen."""
    monkeypatch.setattr(place, name, bug)
    assert loss_gap() > 1e-2


def test_gradients_reach_the_layers_that_ran_and_nothing_else() -> None:
    """Catches a dropped layer that learns, an exit that teaches layers behind it, and weights that are not adapters."""
    own = tiny_target(tiny_model("llama", num_hidden_layers=LAYERS))
    trainee = trainee_of(own, layer_dropout=1.0)  # nobody passes the last layer
    weights = {name: value.clone() for name, value in own.runner.model.state_dict().items()}
    learned(trainee, batch_of())
    grads = {name: p.grad for name, p in own.runner.model.named_parameters()}
    assert all(grad is None for name, grad in grads.items() if "lora" not in name)
    reached = dict.fromkeys(range(LAYERS), 0.0)
    for name, grad in grads.items():
        if "lora" in name and grad is not None:
            number = int(name.split("layers.")[1].split(".")[0])
            reached[number] = max(reached[number], float(grad.abs().max()))
    assert reached[3] == 0
    assert min(reached[number] for number in (0, 1, 2)) > 0
    assert all(
        torch.equal(value, weights[name]) for name, value in own.runner.model.state_dict().items()
    )


@torch.inference_mode()
def test_training_reads_what_decoding_drafts_with(monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches an exit that decodes from another layer or another norm than it was trained with."""
    own = tiny_target(tiny_model("llama", num_hidden_layers=LAYERS))
    trainee = trainee_of(own)
    trainee.model.eval()
    seen: list[Tensor] = []
    losses = LayerSkip2Trainer.exit_losses

    def watch(self: Any, original: Tensor, states: Tensor, *rest: Any) -> Any:
        norm = layerskip2.final_norm(own.runner.model)
        seen.append(self.lora_target.head(norm(states.chunk(3, -1)[0])))
        return losses(self, original, states, *rest)

    monkeypatch.setattr(LayerSkip2Trainer, "exit_losses", watch)
    sample = SAMPLES[3]
    batch = batching.collate([sample], 0)
    batch.draw = STEP
    trainee.loss(trainee.model, batch)
    at = batching.supervised_positions(sample).tolist()
    ids = list(sample["input_ids"])
    for start in range(at[0], len(ids) - 4, 3):
        drafted = drafted_logits(trainee.to_draft(), ids, start)
        trained = seen[0][start - at[0] : start - at[0] + len(drafted)]
        torch.testing.assert_close(trained, drafted, rtol=1e-3, atol=1e-3)


# ---- what training does to the target ----


def test_training_raises_acceptance_and_keeps_the_target_close() -> None:
    """Catches exits that do not learn, and a last layer that nothing holds."""
    model = tiny_model("llama")
    old, own = tiny_target(model), tiny_target(model)
    prompts = tiny_prompts(5, 8, 6, 9, seed=3)
    answers = decode(old, None, prompts, max_new_tokens=24)
    rows = [
        {
            **row([*o.prompt_ids, *o.output_ids], (len(o.prompt_ids), len(o.prompt_ids) + 24)),
            "id": str(i),
        }
        for i, o in enumerate(answers)
    ]
    before = decode(old, EarlyExitDraft(old, 2), prompts, k=3, max_new_tokens=24)
    trainee = trainee_of(own, rows, target_lora_rank=8, layer_dropout=0.1)
    optimizer = torch.optim.AdamW(trainee.model.parameters(), lr=2e-2, weight_decay=0.0)
    batch = batching.collate(rows, 0, 1)
    for step in range(60):
        batch.draw = step
        optimizer.zero_grad()
        (trainee.loss(trainee.model, batch)["loss"] / 96).backward()
        optimizer.step()
    plain = decode(own, None, prompts, max_new_tokens=24)
    after = decode(own, trainee.to_draft(), prompts, k=3, max_new_tokens=24)
    assert [o.output_ids for o in after] == [o.output_ids for o in plain]
    assert accepted(before) < 40 < 50 < accepted(after)  # of 69 at most
    items = [TaskPrompt("t", str(i), prompt) for i, prompt in enumerate(prompts)]
    drift = measure_target_drift(old, own, items, 24, 4, 0)
    lost = measure_target_drift(old, tiny_target(noisy(model, 0.1)), items, 24, 4, 0)
    assert 0 < drift.kl < lost.kl


# ---- the command ----


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> World:
    return worlds.build(tmp_path_factory.mktemp("world"), prompts=12)


@pytest.fixture(scope="module")
def data(world: World, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return worlds.sampled(world, tmp_path_factory.mktemp("data"), "--max_new_tokens", 20)


def distill(world: World, data: Path, out: Path, *more: object) -> worlds.Done:
    return worlds.call(
        "train/distill.py", "--target", world.target, "--data", data, "--out", out, "--draft.family", "layerskip2",
        "--draft.exit_layer", 1, "--loop.steps", 4, "--loop.batch_size", 4, "--loop.micro_batch", 2, "--loop.lr", 0.02,
        "--loop.warmup", 0, "--loop.eval_every", 4, "--loop.save_every", 2, "--check.prompts", 1,
        "--check.max_new_tokens", 4, "--draft.layer_dropout", 0.5, *more,
    )  # fmt: skip


@pytest.fixture(scope="module")
def trained(world: World, data: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("trained") / "target"
    distill(world, data, out).ok()
    return out


def test_a_resumed_run_is_the_straight_one(
    world: World, data: Path, trained: Path, tmp_path: Path
) -> None:
    """Catches dropout and exits that depend on how often the command was started."""
    out = tmp_path / "target"
    shutil.copytree(trained, out)
    for name in ("model.safetensors", "draftsmith.json", "checkpoints/step-000004"):
        path = out / name
        shutil.rmtree(path) if path.is_dir() else path.unlink()
    (out / "checkpoints" / "latest").write_text("step-000002")
    done = distill(world, data, out, "--resume", "true").ok()
    assert "from step 2" in done.err
    here, there = (load_file(folder / "model.safetensors") for folder in (out, trained))
    assert all(torch.equal(value, there[name]) for name, value in here.items())
    before = load_file(world.target / "model.safetensors")
    assert not all(torch.equal(value, before[name]) for name, value in there.items())


def test_the_saved_folder_is_target_and_draft(world: World, trained: Path) -> None:
    """Catches adapters that are not merged, and a draft that is taken for one of the original target."""
    target = load_target(str(trained), "cpu")
    draft = load_draft(str(trained), target)
    prompts = [list(target.tokenizer(text)["input_ids"]) for text in world.texts[:4]]
    plain = decode(target, None, prompts, max_new_tokens=16)
    drafted = decode(target, draft, prompts, k=3, max_new_tokens=16)
    assert [o.output_ids for o in drafted] == [o.output_ids for o in plain]
    facts = read_metadata(str(trained))
    assert facts.family == "layerskip2"
    assert facts.original_target is not None
    assert facts.original_target.name == str(world.target)
    with pytest.raises(UserError, match="early-exit with `layers: 1`"):
        load_draft(str(trained), load_target(str(world.target), "cpu"))


def test_the_report_says_how_far_the_target_moved(
    world: World, trained: Path, tmp_path: Path
) -> None:
    """Catches a report on the new target that is silent about the old one."""
    prompts = worlds.write_prompts(tmp_path / "few.jsonl", world.texts[:3])
    worlds.call(
        "eval/run.py", "--target", trained, "--original", world.target, "--device", "cpu",
        "--methods", json.dumps([{"name": "layerskip2", "draft": str(trained), "k": 2}]),
        "--tasks", json.dumps([{"name": "few", "path": str(prompts)}]), "--temperatures", "[0.0]",
        "--max_new_tokens", 12, "--phase_prompts", 0, "--out", tmp_path / "out",
    ).ok()  # fmt: skip
    report = json.loads((tmp_path / "out" / "report.json").read_text())
    assert report["target_quality"]["kl"] > 0
    assert report["target_quality"]["old"] == str(world.target)
    own = [m for m in report["methods"] if m["name"] == "layerskip2"]
    assert all(m["lossless"]["greedy_identical"] for m in own)
