"""The checker on drafts that propose blocks and on MTP layers: good ones pass, each damage is found by its own rule."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from decode.checkpoints import importers, layouts
from decode.checkpoints.draft_folder import METADATA_FILE
from decode.model.loading import load_target
from decode.serving.checker import check_draft_files
from tests.tiny import tiny_model, tiny_target
from tests.train.data.test_packing import SAMPLES
from train.families.base import FamilyContext
from train.families.builders import build_trainable
from train.families.settings.blocks import (
    DFlashSettings,
    DSparkSettings,
    PardSettings,
    PEagleSettings,
)
from train.families.settings.heads import MtpSettings
from train.trainer.settings import DistillConfig

ASSETS = Path(__file__).resolve().parents[2] / "assets"
TAPS = [2, 6, 9]
DRAFTS = {
    "pard": PardSettings(layers=[0, 1], block=4),
    "peagle": PEagleSettings(block=4, vocab=60, taps=TAPS),
    "dflash": DFlashSettings(depth=2, block=4, vocab=60, taps=TAPS),
    "dspark": DSparkSettings(depth=2, block=4, vocab=0, taps=TAPS, markov_rank=8),
    "mtp": MtpSettings(steps=2),
}
Config = dict[str, Any]
Tensors = dict[str, torch.Tensor]
Damage = tuple[str, str, str, Callable[[Config, Tensors], Any]]


def _nested(config: Config, key: str, value: Any) -> None:
    config["dflash_config"] = {**config["dflash_config"], key: value}


def _speculators(config: Config, tensors: Tensors) -> None:
    inner = {k: v for k, v in config.items() if k not in ("dflash_config", "architectures")}
    outer = {k: config[k] for k in ("block_size", "draft_vocab_size", "dflash_config")}
    taps = config["eagle_aux_hidden_state_layer_ids"]
    config.clear()
    config |= {"transformer_layer_config": inner, **outer, "aux_hidden_state_layer_ids": taps}


DAMAGE: dict[str, Damage] = {
    "no mask token": ("pard", "vllm", "mask-token", lambda c, t: c.pop("pard_token")),
    "the mask token is no token": ("dflash", "vllm", "mask-token", lambda c, t: _nested(c, "mask_token_id", 10**6)),
    "no mask state": ("peagle", "vllm", "mask-state", lambda c, t: t.pop("mask_hidden")),
    "EAGLE-3's mask token": ("peagle", "vllm", "mask-token", lambda c, t: c.pop("mask_token_id")),
    "SpecForge's name": ("peagle", "vllm", "architecture", lambda c, t: c.update(architectures=["PEagle"])),
    "another architecture": ("dflash", "vllm", "architecture", lambda c, t: c.update(architectures=["X"])),
    "a Llama's layers": ("dspark", "vllm", "architecture", lambda c, t: c.update(model_type="llama")),
    "another width": ("dflash", "vllm", "shapes", lambda c, t: t.update({"norm.weight": torch.ones(3)})),
    "a layer is missing": ("dspark", "vllm", "missing-tensor", lambda c, t: t.pop("layers.0.self_attn.k_norm.weight")),
    "a bias": ("dflash", "vllm", "unknown-tensor", lambda c, t: t.update({"fc.bias": torch.ones(3)})),
    "speculators' default": ("dflash", "vllm", "nested-causality", _speculators),
    "causal blocks": ("dflash", "vllm", "causality", lambda c, t: _nested(c, "causal", True)),
    "from the anchor": ("dflash", "vllm", "anchor", lambda c, t: c.update(sample_from_anchor=True)),
    "ids of outputs": ("dspark", "vllm", "taps", lambda c, t: c.update(eagle_aux_hidden_state_layer_ids=[1, 5, 8])),
    "ids for offsets": ("dflash", "vllm", "map", lambda c, t: t.update(d2t=t["d2t"] + torch.arange(60))),
    "offsets as floats": ("dflash", "vllm", "map-dtype", lambda c, t: t.update(d2t=t["d2t"].float())),
    "another corrector": ("dspark", "vllm", "corrector", lambda c, t: c.update(markov_head_type="rnn")),
    "a nested corrector": (
        "dspark", "vllm", "corrector-size", lambda c, t: _nested(c, "markov_rank", c.pop("markov_rank"))
    ),
    "gelu": ("dflash", "llamacpp", "activation", lambda c, t: c.update(hidden_act="gelu")),
    "YaRN": ("dspark", "llamacpp", "rope-type", lambda c, t: c["rope_parameters"].update(rope_type="yarn", factor=2.0)),
    "a window": ("dflash", "llamacpp", "window", lambda c, t: c.update(sliding_window=64)),
    "from the anchor (llama.cpp)": ("dflash", "llamacpp", "anchor", lambda c, t: c.update(sample_from_anchor=True)),
    "no mask token (llama.cpp)": ("dspark", "llamacpp", "mask-token", lambda c, t: _nested(c, "mask_token_id", 10**6)),
    "causal blocks (llama.cpp)": ("dspark", "llamacpp", "causality", lambda c, t: _nested(c, "causal", True)),
    "ids of outputs (llama.cpp)": (
        "dflash", "llamacpp", "taps", lambda c, t: c.update(eagle_aux_hidden_state_layer_ids=[1, 5, 8])
    ),
    "another width (llama.cpp)": (
        "dflash", "llamacpp", "shapes", lambda c, t: t.update({"norm.weight": torch.ones(3)})
    ),
    "a norm is missing (llama.cpp)": (
        "dspark", "llamacpp", "missing-tensor", lambda c, t: t.pop("layers.0.self_attn.k_norm.weight")
    ),
    "ids for offsets (llama.cpp)": (
        "dflash", "llamacpp", "map", lambda c, t: t.update(d2t=t["d2t"] + torch.arange(60))
    ),
    "a bias (llama.cpp)": ("dspark", "llamacpp", "unknown-tensor", lambda c, t: t.update({"fc.bias": torch.ones(3)})),
    "no such layers": ("mtp", "vllm", "missing-tensor", lambda c, t: c.pop("num_nextn_predict_layers")),
}  # fmt: skip
"""(family, engine, the rule that must find it, what is done to config.json and to the tensors)."""


@pytest.fixture(scope="module")
def good(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A draft of each family, as training saves it for the bundled target."""
    home, own = tmp_path_factory.mktemp("drafts"), load_target(str(ASSETS / "target"))
    for family, draft in DRAFTS.items():
        config = DistillConfig(draft=draft)
        trainee = build_trainable(config.draft, FamilyContext(config, own, SAMPLES))
        trainee.save(home / family)
        facts = {"family": family, "tokenizer_hash": own.fingerprint}
        facts |= {"training": {"draft": {"taps": vars(draft).get("taps", [])}}}
        (home / family / METADATA_FILE).write_text(json.dumps(facts))
    return {family: home / family for family in DRAFTS}


def rules(path: Path, engine: str) -> list[str]:
    return [f.rule for f in check_draft_files(str(path), engine, "", str(ASSETS / "target"))]


@pytest.mark.parametrize("family", ["pard", "peagle", "dflash", "dspark"])
def test_a_good_draft_has_nothing_to_report(family: str, good: dict[str, Path]) -> None:
    assert rules(good[family], "vllm") == []
    if family in ("dflash", "dspark"):
        assert rules(good[family], "llamacpp") == []


def test_what_an_engine_does_not_have_is_said(good: dict[str, Path]) -> None:
    """Catches a family passed as served: MTP layers of another kind of target, blocks where there are none."""
    assert rules(good["mtp"], "vllm") == ["mtp-target"]
    assert rules(good["pard"], "sglang") == ["parallel"]
    assert rules(good["dflash"], "transformers") == ["unchecked"]
    for family, rule in {"pard": "parallel", "peagle": "peagle", "mtp": "mtp"}.items():
        assert rules(good[family], "llamacpp") == [rule]


@pytest.mark.parametrize("name", DAMAGE)
def test_every_damage_is_seen(name: str, good: dict[str, Path], tmp_path: Path) -> None:
    """Catches a mistake that would be served in silence, named by its own rule and not by chance by another."""
    family, engine, rule, change = DAMAGE[name]
    folder = tmp_path / "draft"
    shutil.copytree(good[family], folder)
    config = json.loads((folder / "config.json").read_text())
    tensors = importers.raw_tensors(str(folder))
    before = set(rules(folder, engine))
    change(config, tensors)
    layouts.write_checkpoint(folder, config, tensors)
    assert rule in set(rules(folder, engine)) - before


def test_an_mtp_layer_of_a_known_target_has_nothing_to_report(tmp_path: Path) -> None:
    own = tiny_target(tiny_model("deepseek_v3"))
    config = DistillConfig(draft=DRAFTS["mtp"])
    build_trainable(config.draft, FamilyContext(config, own, SAMPLES)).save(tmp_path / "d")
    (tmp_path / "d" / METADATA_FILE).write_text(
        json.dumps({"family": "mtp", "tokenizer_hash": own.fingerprint})
    )
    assert [f.rule for f in check_draft_files(str(tmp_path / "d"), "vllm")] == []
