"""Models cut to some of their layers: what they compute, what their config says, and what cannot be cut."""

import copy
import json
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from decode.common.errors import UserError
from decode.model import layer_stack as layer_stack_module
from decode.model.cut_layers import cut_layers, output_counts
from decode.model.layer_stack import layer_stack
from tests.hybrids import HYBRIDS, tiny_hybrid
from tests.params import rotated, slow_except
from tests.tiny import ARCHITECTURES, VOCAB, tiny_model

TEXT = torch.randint(0, VOCAB, (2, 24), generator=torch.Generator().manual_seed(0))  # three windows
KEPT = [(0, 2), (1, 2), (1,)]
CUT = ["llama", "qwen2+window", "gemma3_text", "gpt_oss", "gpt2", "smollm3", "deepseek_v3"]


def logits(model: Any) -> Tensor:
    with torch.inference_mode():
        out: Tensor = model(input_ids=TEXT, use_cache=False).logits
    return out


def without(model: Any, kept: Sequence[int]) -> Any:
    """A copy of the model whose other layers hand on what they get: they keep their numbers, so nothing can move."""
    trial = copy.deepcopy(model)
    layers = list(layer_stack(trial))
    for i, count in enumerate(output_counts(trial, layers)):
        if i not in kept:
            layers[i].forward = partial(handed_on, count)
    return trial


def handed_on(count: int, hidden_states: Tensor, *_: Any, **__: Any) -> Any:
    return (hidden_states, *[None] * (count - 1)) if count else hidden_states


def reloaded(model: Any, folder: Path) -> Any:
    model.save_pretrained(folder)
    loaded, info = AutoModelForCausalLM.from_pretrained(folder, output_loading_info=True)
    assert not info["missing_keys"]
    assert not info["unexpected_keys"]
    return loaded


@pytest.mark.parametrize(
    ("arch", "kept"),
    slow_except(rotated([a for a in ARCHITECTURES if a != "gemma4_text"], KEPT), CUT),
)
def test_three_ways_to_leave_layers_out_agree(
    arch: str, kept: tuple[int, ...], tmp_path: Path
) -> None:
    """Catches a layer that gets another's window, RoPE, experts or mask, in memory or when the folder is loaded, and a
    model that is left whole."""
    model = tiny_model(arch)
    whole, trial = logits(model), logits(without(model, kept))
    cut_layers(model, kept)
    assert len(layer_stack(model)) == model.config.num_hidden_layers == len(kept)
    torch.testing.assert_close(logits(model), trial, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(logits(reloaded(model, tmp_path)), trial, atol=1e-5, rtol=1e-5)
    assert not torch.allclose(trial, whole, atol=1e-2)


@pytest.mark.parametrize("arch", slow_except(list(HYBRIDS), ["qwen3_next", "lfm2", "zaya"]))
def test_recurrent_models_agree_too_or_are_refused(arch: str, tmp_path: Path) -> None:
    """Catches a hybrid whose saved layers are of other kinds."""
    model = tiny_hybrid(arch)
    if arch in ("zaya", "zamba2"):
        with pytest.raises(UserError, match=f"{arch} model cannot be cut"):
            cut_layers(model, [1, 2])
        return
    cut_layers(model, [1, 2])
    trial = logits(without(tiny_hybrid(arch), [1, 2]))
    torch.testing.assert_close(logits(model), trial, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(logits(reloaded(model, tmp_path)), trial, atol=1e-5, rtol=1e-5)


SEVEN: dict[str, Any] = {"num_hidden_layers": 7}
KINDS = ["full_attention", "sliding_attention"]
PLANS: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "kinds by layer": (
        "gemma3_text",
        SEVEN | {"layer_types": [KINDS[i in (0, 4, 5)] for i in range(7)]},
        {"layer_types": [KINDS[0], KINDS[1], KINDS[1], KINDS[0]]},
    ),
    "windows from a layer on": (
        "qwen2",
        SEVEN | {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 4},
        {"max_window_layers": 1, "layer_types": [KINDS[0], *[KINDS[1]] * 3]},
    ),
    "no window": ("qwen2", SEVEN | {"max_window_layers": 7}, {"max_window_layers": 4}),
    "layers without RoPE": (
        "smollm3",
        SEVEN | {"no_rope_layers": [1, 1, 1, 1, 0, 1, 0]},
        {"no_rope_layers": [1, 0, 1, 0]},
    ),
    "dense first layers": (
        "deepseek_v3",
        SEVEN | {"first_k_dense_replace": 5},
        {"first_k_dense_replace": 2},
    ),
    "dense layers by number": (
        "qwen3_moe",
        SEVEN | {"mlp_only_layers": [0, 4, 6]},
        {"mlp_only_layers": [1, 3]},
    ),
    "as many ends as layers": ("llama", SEVEN | {"eos_token_id": [*range(7)]}, {"eos_token_id": [*range(7)]}),
}  # fmt: skip


@pytest.mark.parametrize("plan", PLANS)
def test_fields_with_an_entry_for_each_layer_are_cut_along(plan: str, tmp_path: Path) -> None:
    """Catches a list or a count that keeps what the whole model had, and one that has nothing to do with layers."""
    arch, changes, wanted = PLANS[plan]
    model, kept = tiny_model(arch, **changes), [1, 4, 5, 6]
    trial = logits(without(model, kept))
    cut_layers(model, kept)
    assert {name: getattr(model.config, name) for name in wanted} == wanted
    torch.testing.assert_close(logits(reloaded(model, tmp_path)), trial, atol=1e-5, rtol=1e-5)


def test_a_config_that_derives_its_kinds_derives_the_same(tmp_path: Path) -> None:
    """Catches max_window_layers of the whole model, which engines read that do not know layer_types."""
    arch, changes, _ = PLANS["windows from a layer on"]
    model = tiny_model(arch, **changes)
    cut_layers(model, [1, 4, 5, 6])
    model.save_pretrained(tmp_path)
    file = tmp_path / "config.json"
    fields = json.loads(file.read_text())
    del fields["layer_types"]
    file.write_text(json.dumps(fields))
    again = AutoModelForCausalLM.from_pretrained(tmp_path)
    torch.testing.assert_close(logits(again), logits(model))


@pytest.mark.parametrize("kept", [[0, 2], [1]])
def test_a_hybrid_without_one_of_its_kinds_is_refused(kept: list[int]) -> None:
    """Catches a config that is valid in memory and not when the trained draft is saved."""
    with pytest.raises(UserError, match="olmo_hybrid model cannot be cut .*at least one"):
        cut_layers(tiny_hybrid("olmo_hybrid"), kept)


@pytest.mark.parametrize(
    ("arch", "changes", "kept", "named"),
    [
        ("gemma4_text", {}, [1], "gemma4_text model cannot be cut"),
        ("gemma4_text", {}, [0, 2], "gemma4_text model cannot be cut"),
        ("qwen3_moe", {"decoder_sparse_step": 2}, [1, 2], "layers.0.mlp"),
        ("qwen3_moe", {"decoder_sparse_step": 3}, [2], "layers.0.mlp"),
    ],
)
def test_a_model_that_no_config_describes_is_refused(
    arch: str, changes: dict[str, Any], kept: list[int], named: str
) -> None:
    """Catches a folder that cannot be loaded, or loads as another model."""
    with pytest.raises(UserError, match=named) as found:
        cut_layers(tiny_model(arch, **changes), kept)
    assert "\n" not in str(found.value)


@pytest.mark.parametrize(
    ("plan", "named"),
    [
        ("layers without RoPE", "no_rope|use_rope"),
        ("dense first layers", "mlp"),
        ("dense layers by number", "mlp"),
    ],
)
def test_a_field_that_is_not_cut_along_is_seen(
    plan: str, named: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The check is blind unless it fails where the config keeps what the whole model had."""

    def kinds_alone(config: Any, layers: list[int]) -> None:
        config.num_hidden_layers = len(layers)
        if vars(config).get("layer_types"):
            config.layer_types = [config.layer_types[i] for i in layers]

    monkeypatch.setattr(layer_stack_module, "cut_config", kinds_alone)
    arch, changes, _ = PLANS[plan]
    with pytest.raises(UserError, match=f"cannot be cut.*({named})"):
        cut_layers(tiny_model(arch, **changes), [1, 4, 5, 6])
