"""Where a causal draft starts: resized to the target's vocabulary, from random weights, with LoRA adapters."""

import copy
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from decode.checkpoints.draft_vocab import resize_vocabulary
from decode.common.errors import UserError
from decode.drafts.causal import CausalDraft
from decode.drafts.registry import load_draft
from decode.engine.engine import decode
from decode.model.loading import Target, load_target
from decode.model.runner import ModelRunner
from tests import worlds
from tests.decode.engine import test_engine_distribution
from tests.decode.verification.test_exact_distribution import small
from tests.tiny import noisy, tiny_config, tiny_model, tiny_prompts
from train.data import batching
from train.data.sample_store import SampleRow
from train.families.base import FamilyContext, TrainableDraft
from train.families.builders import build_trainable
from train.families.causal import build_causal_lm, random_init_config
from train.families.settings.base import FamilySettings
from train.families.settings.causal import CausalSettings
from train.settings.training import LoopConfig
from train.trainer.loop import build_optimizers
from train.trainer.settings import DistillConfig

WEIGHTS = "model.safetensors"
PADDED = 280  # logits of the target: more than the tokenizer's 268 tokens


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A target whose vocabulary is padded, and drafts of its tokenizer with fewer and more logits."""
    folder, tokenizer = tmp_path_factory.mktemp("place"), worlds.byte_tokenizer()
    common: dict[str, Any] = {"max_position_embeddings": worlds.CONTEXT, "num_hidden_layers": 2}
    for name, rows in (("target", PADDED), ("fewer", len(tokenizer)), ("more", PADDED + 9)):
        for tied in (False, True):
            changes = common | {"vocab_size": rows, "tie_word_embeddings": tied}
            model = tiny_model("llama", seed=3, **changes)
            worlds.save(folder / (name + "-tied" * tied), model, tokenizer)
    return folder


@pytest.fixture(scope="module")
def own(place: Path) -> Target:
    return load_target(str(place / "target"), "cpu")


def logits_of(model: Any, ids: list[int]) -> torch.Tensor:
    with torch.no_grad():
        return model(input_ids=torch.tensor([ids])).logits[0]


TEXT = list(range(20, 60))


# ---- a vocabulary of another size ----


@pytest.mark.parametrize("tied", ["", "-tied"])
@pytest.mark.parametrize("name", ["fewer", "more"])
def test_the_vocabulary_becomes_the_targets(
    place: Path, own: Target, name: str, tied: str, tmp_path: Path
) -> None:
    """Catches a resize that moves a token, leaves the config behind, or unties the weights."""
    path = str(place / (name + tied))
    before = AutoModelForCausalLM.from_pretrained(path)
    model = build_causal_lm(CausalSettings(init=path), own, "cpu")
    rows = min(PADDED, before.config.vocab_size)
    assert torch.equal(logits_of(model, TEXT)[:, :rows], logits_of(before, TEXT)[:, :rows])
    assert model.get_output_embeddings().weight.shape[0] == model.config.vocab_size == PADDED
    embeddings = model.get_input_embeddings().weight, model.get_output_embeddings().weight
    assert (embeddings[0] is embeddings[1]) == bool(tied)
    model.save_pretrained(tmp_path)
    worlds.byte_tokenizer().save_pretrained(tmp_path)
    assert isinstance(load_draft(str(tmp_path), own), CausalDraft)


@pytest.mark.parametrize("arch", ["llama", "gpt2", "phi", "gemma2"])
def test_padded_rows_never_win(arch: str) -> None:
    """Catches zero rows, which win wherever all other logits are negative, and a bias that has none. A draft of which
    every logit is below zero is the case in which zero wins."""
    model = tiny_model(arch, vocab_size=40)
    head = model.get_output_embeddings()
    if head.bias is not None:
        torch.nn.init.constant_(head.bias, -100.0)
    before = logits_of(model, list(range(30)))
    resize_vocabulary(model, 64)
    after = logits_of(model, list(range(30)))
    assert torch.equal(after[:, :40], before)
    assert (after[:, 40:] < before.max(-1, keepdim=True).values).all()
    assert (after.softmax(-1)[:, 40:] < 1 / 40).all()
    if arch == "phi":
        assert (before < 0).all()


@pytest.mark.parametrize("rows", [2, 5])
def test_a_resized_draft_keeps_the_targets_law(rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches a decoder that takes a padded draft for exact without its laws being over the target's tokens."""

    def resized(target: Target) -> CausalDraft:
        model = small(num_hidden_layers=2, vocab_size=rows)
        resize_vocabulary(model, 3)
        return CausalDraft(ModelRunner(model))

    case = (resized, "block", test_engine_distribution.BLOCK)
    monkeypatch.setitem(test_engine_distribution.CASES, "resized", case)
    assert test_engine_distribution.law_distances("resized", 2).max() < 1e-7


# ---- random weights ----


def test_a_draft_from_scratch_is_the_targets_kind(own: Target, tmp_path: Path) -> None:
    """Catches another class, another tokenizer's size, or a head size that belongs to the target's width."""
    changes = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    changes |= {"num_key_value_heads": 1, "intermediate_size": 24}
    model = build_causal_lm(CausalSettings(init_config=changes), own, "cpu")
    assert type(model) is type(own.runner.model)
    assert {name: getattr(model.config, name) for name in changes} == changes
    assert model.config.head_dim == 8
    assert model.get_output_embeddings().weight.shape == (PADDED, 16)
    assert model.dtype == torch.float32
    assert own.runner.config.hidden_size != 16
    outputs = decode(own, CausalDraft(ModelRunner(model)), [TEXT], k=2, max_new_tokens=8)
    plain = decode(own, None, [TEXT], max_new_tokens=8)
    assert outputs[0].output_ids == plain[0].output_ids


@pytest.mark.parametrize("arch", ["gemma3_text", "gpt_oss", "gpt2", "gemma2"])
def test_other_depths_of_layered_configs(arch: str) -> None:
    """Catches a list with an entry for each layer that keeps the target's length."""
    depth = "n_layer" if arch == "gpt2" else "num_hidden_layers"
    config = random_init_config({depth: 2}, tiny_config(arch), 50)
    model = AutoModelForCausalLM.from_config(config)
    assert logits_of(model.eval(), [1, 2, 3]).shape == (3, 50)


@pytest.mark.parametrize(
    ("settings", "named"),
    [
        ({}, "give one of"),
        ({"init_config": {"hidden": 3}}, "hidden is no field of llama's config"),
        ({"init_config": {"vocab_size": 300}}, "vocab_size is the target's"),
        ({"init_config": {"hidden_size": 30, "num_attention_heads": 4}}, "makes no model"),
        ({"init_config": {"num_hidden_layers": -1}}, "init_config has num_hidden_layers -1"),
        ({"init_config": {"intermediate_size": 0}}, "init_config has intermediate_size 0"),
        ({"init_config": {"hidden_size": 32}, "layers": [0]}, "give one of"),
        ({"lora_rank": 4, "init_config": {"hidden_size": 32}}, "lora_rank"),
    ],
)
def test_what_cannot_be_made_is_said(own: Target, settings: dict[str, Any], named: str) -> None:
    """Catches tracebacks from deep inside a model, and settings that are passed over in silence."""
    with pytest.raises(UserError, match=named) as found:
        build_causal_lm(CausalSettings(**settings), own, "cpu")
    assert "\n" not in str(found.value)


def test_heads_are_no_small_lm(own: Target, tmp_path: Path) -> None:
    """Catches a traceback where a draft directory of heads is given as a small LM."""
    (tmp_path / "draftsmith.json").write_text(json.dumps({"family": "medusa"}))
    with pytest.raises(UserError, match="heads of family 'medusa'"):
        build_causal_lm(CausalSettings(init=str(tmp_path)), own, "cpu")


# ---- LoRA ----


def rows_of(*lengths: int) -> list[SampleRow]:
    return [
        SampleRow(
            id=str(i), source="x", origin="target", input_ids=ids, loss_spans=[[2, len(ids)]],
            finish_reason="eos",
        )
        for i, ids in enumerate(tiny_prompts(*lengths))
    ]  # fmt: skip


def trained(own: Target, draft: FamilySettings, steps: int = 3) -> TrainableDraft:
    """After a few steps that move whatever is trained."""
    rows = rows_of(12, 20, 9)
    settings = DistillConfig(draft=draft, loop=LoopConfig(lr=0.05))
    trainee = build_trainable(settings.draft, FamilyContext(settings, own, rows))
    (optimizer,) = build_optimizers(trainee, settings.loop)
    for _ in range(steps):
        trainee.loss(trainee.model, batching.collate(rows, pad_id=0))["loss"].backward()
        optimizer.step()
        optimizer.zero_grad()
    return trainee


def test_lora_is_saved_merged_and_as_an_adapter(place: Path, own: Target, tmp_path: Path) -> None:
    """Catches adapters that are not in the servable model, frozen weights that move, and a merge that ends training."""
    init = str(place / "fewer")
    trainee = trained(own, CausalSettings(init=init, lora_rank=3))
    learned = [name for name, p in trainee.model.named_parameters() if p.requires_grad]
    assert len(learned) == 2 * 2 * 7  # two layers of seven matrices
    assert all("lora_" in name for name in learned)
    trainee.save(tmp_path)
    assert all("lora" not in name for name in load_file(tmp_path / WEIGHTS))
    merged = AutoModelForCausalLM.from_pretrained(tmp_path)
    base = AutoModelForCausalLM.from_pretrained(init)
    resize_vocabulary(base, PADDED)
    for name in ("model.embed_tokens.weight", "lm_head.weight", "model.norm.weight"):
        assert torch.equal(merged.state_dict()[name], base.state_dict()[name])
    name = "model.layers.0.mlp.up_proj.weight"
    assert not torch.equal(merged.state_dict()[name], base.state_dict()[name])
    config = json.loads((tmp_path / "adapter" / "adapter_config.json").read_text())
    assert config["base_model_name_or_path"] == init
    adapted = PeftModel.from_pretrained(copy.deepcopy(base), str(tmp_path / "adapter"))
    torch.testing.assert_close(logits_of(adapted, TEXT), logits_of(merged, TEXT), atol=1e-3, rtol=0)
    draft = load_draft(str(tmp_path), own)
    live = trainee.to_draft()
    outputs = [decode(own, one, [TEXT, TEXT[:5]], k=3, max_new_tokens=12) for one in (draft, live)]
    assert [o.rounds for o in outputs[0]] == [o.rounds for o in outputs[1]]
    still = [name for name, p in trainee.model.named_parameters() if p.requires_grad]
    assert still == learned


def test_lora_on_layers_of_the_target(own: Target, tmp_path: Path) -> None:
    """Catches an adapter that claims a base which lies nowhere, and adapters that end up in the target itself."""
    before = copy.deepcopy(own.runner.model.state_dict())
    trained(own, CausalSettings(layers=[1], lora_rank=2)).save(tmp_path)
    assert not (tmp_path / "adapter").exists()
    assert AutoModelForCausalLM.from_pretrained(tmp_path).config.num_hidden_layers == 1
    after = own.runner.model.state_dict()
    assert before.keys() == after.keys()
    assert all(torch.equal(value, after[name]) for name, value in before.items())


def test_full_training_of_a_noisy_copy_still_saves_alone(
    own: Target, place: Path, tmp_path: Path
) -> None:
    """Catches an adapter folder, or names with `lora` in them, where none was asked for."""
    worlds.save(tmp_path / "init", noisy(own.runner.model, 0.1), worlds.byte_tokenizer())
    trained(own, CausalSettings(init=str(tmp_path / "init"))).save(tmp_path / "out")
    assert not (tmp_path / "out" / "adapter").exists()
    assert (
        load_file(tmp_path / "out" / WEIGHTS).keys()
        == load_file(tmp_path / "init" / WEIGHTS).keys()
    )
