"""Medusa-2 trains the target along with its heads: what moves, what is saved, and how far the target went."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from peft.tuners.lora import LoraLayer
from transformers import AutoConfig, AutoModelForImageTextToText

from decode.checkpoints.draft_folder import METADATA_FILE
from decode.common.errors import UserError
from decode.drafts import medusa
from decode.drafts.registry import DRAFT_FAMILIES
from decode.engine.engine import decode
from decode.model.layer_stack import layer_stack
from decode.model.loading import Target, load_model
from decode.model.runner import ModelRunner
from eval.checks.target_drift import measure_target_drift
from eval.tasks.loading import TaskPrompt
from tests.tiny import ARCHITECTURES, noisy, tiny_model, tiny_prompts, tiny_target
from train.data import batching
from train.data.sample_store import SampleRow
from train.families.base import FamilyContext
from train.families.builders import build_trainable
from train.families.lora_target import LoraTarget
from train.families.settings.base import FamilySettings
from train.families.settings.heads import Medusa2Settings
from train.settings.training import DivergenceConfig, LossWeights


@dataclass
class Recipe:
    draft: FamilySettings = field(
        default_factory=lambda: Medusa2Settings(heads=2, target_lora_rank=4)
    )
    loss: str = "forward_kl"
    divergence: DivergenceConfig = field(default_factory=DivergenceConfig)
    weights: LossWeights = field(default_factory=LossWeights)
    out: str = "draft"


def samples(count: int = 4, length: int = 12) -> list[SampleRow]:
    return [
        SampleRow(
            id=str(i), source="t", origin="target", input_ids=ids, loss_spans=[[4, length]],
            finish_reason="length",
        )
        for i, ids in enumerate(tiny_prompts(*[length] * count))
    ]  # fmt: skip


def final_logits(target: Target, ids: list[int]) -> torch.Tensor:
    with torch.no_grad():
        text = torch.tensor([ids])
        position = torch.arange(len(ids))[None]
        return target.runner.model(input_ids=text, position_ids=position, use_cache=False).logits


def trained(steps: int, rate: float = 1e-2) -> tuple[Any, Target]:
    target = tiny_target(tiny_model("llama"))
    trainee = build_trainable(Recipe().draft, FamilyContext(Recipe(), target, samples()))
    batch = batching.collate(samples(), pad_id=0)
    moving = [p for p in trainee.model.parameters() if p.requires_grad]
    optimizer = torch.optim.SGD(moving, lr=rate)
    for _ in range(steps):
        trainee.loss(trainee.model, batch)["loss"].backward()
        optimizer.step()
        optimizer.zero_grad()
    return trainee, target


def test_adapters_off_is_the_old_target() -> None:
    """Catches a teacher that drifts along with its student: KL from itself is always 0 and holds nothing."""
    target = tiny_target(tiny_model("llama"))
    ids = tiny_prompts(9)[0]
    old = final_logits(target, ids)
    adapted = LoraTarget(target, 4)
    with torch.no_grad():
        for parameter in adapted.parameters():
            parameter.normal_(std=0.3)
    moved = final_logits(target, ids)
    with adapted.adapters_disabled():
        again = final_logits(target, ids)
    assert not torch.allclose(moved, old, atol=1e-2)
    assert torch.allclose(again, old, atol=1e-5)


def test_heads_and_adapters_learn_and_nothing_else() -> None:
    """Catches a frozen adapter, and a target whose own weights move under the adapters."""
    target = tiny_target(tiny_model("llama"))
    before = {name: p.detach().clone() for name, p in target.runner.model.named_parameters()}
    trainee = build_trainable(Recipe().draft, FamilyContext(Recipe(), target, samples()))
    batch = batching.collate(samples(), pad_id=0)
    start = {name: p.detach().clone() for name, p in trainee.model.named_parameters()}
    optimizer = torch.optim.AdamW(
        [p for p in trainee.model.parameters() if p.requires_grad], lr=1e-2, weight_decay=0.0
    )
    for _ in range(
        2
    ):  # LoRA's second matrix starts at zero, so the first moves from the second step on
        trainee.loss(trainee.model, batch)["loss"].backward()
        optimizer.step()
        optimizer.zero_grad()
    for name, p in trainee.model.named_parameters():
        assert not torch.equal(p, start[name]), name
    now = dict(target.runner.model.named_parameters())
    for name, value in before.items():
        base = now.get(name, now.get(name.replace(".weight", ".base_layer.weight")))
        assert base is not None, name
        assert torch.equal(base, value), name


def test_adapters_are_in_the_layers_that_write_text_and_nowhere_else() -> None:
    """Catches LoRA in a vision tower or an LM head, and layers of GPT-2, whose linear modules are called Conv1D."""
    vision = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
    vision |= {"num_attention_heads": 4, "image_size": 28, "patch_size": 14}
    config = AutoConfig.for_model(
        "gemma3", text_config=ARCHITECTURES["gemma3_text"], vision_config=vision,
        mm_tokens_per_image=4, image_token_id=96,
    )  # fmt: skip
    seeing = AutoModelForImageTextToText.from_config(config)
    for model, count in ((seeing, 7 * 3), (tiny_model("gpt2"), 4 * 3)):
        target = tiny_target(model.eval())
        adapted = LoraTarget(target, 2)
        found = [m for m in adapted.peft.modules() if isinstance(m, LoraLayer)]
        assert len(found) == count
        inside = set(layer_stack(target.runner.model).modules())
        assert inside.issuperset(found)


def test_the_start_costs_nothing_and_the_heads_pull() -> None:
    """Catches a self-distillation loss that is not 0 before anything moved, and one that the heads cannot change."""
    target = tiny_target(tiny_model("llama"))
    trainee = build_trainable(Recipe().draft, FamilyContext(Recipe(), target, samples()))
    sums = trainee.loss(trainee.model, batching.collate(samples(), pad_id=0))
    assert float(sums["kl"]) == pytest.approx(0, abs=1e-4)
    assert float(sums["loss"].detach()) > 1e-3
    sums["loss"].backward()
    pulled = [p.grad for p in trainee.low_lr_parameters if p.grad is not None]
    assert any(float(g.abs().max()) > 0 for g in pulled)


def test_saved_target_is_the_one_that_was_trained(tmp_path: Path) -> None:
    """Catches heads saved for one target beside another: adapters not merged, or merged twice."""
    trainee, target = trained(5, rate=0.5)
    ids = tiny_prompts(9)[0]
    wanted = final_logits(target, ids)
    trainee.save(tmp_path)
    assert DRAFT_FAMILIES["medusa2"].saved_name == "medusa"
    assert trainee.metadata["target"].name == "draft/target"
    model = load_model(str(tmp_path / "target"), "target", "cpu", "float32")
    new = Target(ModelRunner(model), None, "new", None, "fingerprint", frozenset())
    assert torch.allclose(final_logits(new, ids), wanted, atol=1e-4)
    (tmp_path / METADATA_FILE).write_text('{"family": "medusa", "tokenizer_hash": "fingerprint"}')
    draft = medusa.load(str(tmp_path), new, "cpu", "float32")
    prompts = tiny_prompts(7, 3)
    plain = decode(new, None, prompts, max_new_tokens=12)
    heads = decode(new, draft, prompts, k=2, max_new_tokens=12)
    assert [x.output_ids for x in heads] == [x.output_ids for x in plain]


def test_cached_states_are_refused() -> None:
    """Catches heads that learn from the states of a target that no longer exists."""
    target = tiny_target(tiny_model("llama"))
    with pytest.raises(UserError, match="leave `features` empty"):
        build_trainable(Recipe().draft, FamilyContext(Recipe(), target, samples(), "cpu", object()))  # type: ignore[arg-type]


def test_quality_tells_how_far_a_target_moved() -> None:
    """Catches a comparison that scores one model twice, and one whose sign is turned round."""
    model = tiny_model("llama")
    old, same, moved = (tiny_target(m) for m in (model, model, noisy(model, 0.1)))
    items = [TaskPrompt("t", str(i), ids) for i, ids in enumerate(tiny_prompts(6, 9, 4))]
    equal = measure_target_drift(old, same, items, 16, 2, 0)
    assert equal.kl == pytest.approx(0, abs=1e-6)
    assert equal.same_top1 == 1.0
    assert equal.perplexity_old == pytest.approx(equal.perplexity_new)
    assert equal.tokens == 48
    apart = measure_target_drift(old, moved, items, 16, 2, 0)
    assert apart.kl > 0.01
    assert apart.same_top1 < 1.0
    assert apart.perplexity_new > apart.perplexity_old
    change, (low, high) = apart.log_perplexity_change
    assert 0 < low <= change <= high
