"""Long samples: however attention is computed, and whatever backward computes again, a family learns the same."""

from typing import Any

import pytest
import torch
from torch.nn.attention import flex_attention

from decode.common.errors import UserError
from decode.model import attention, masks
from decode.model.hidden_states import HiddenStateSpec
from decode.model.masks import AttentionMask
from tests.params import pairwise, rotated, slow_except
from tests.tiny import FEW, tiny_model, tiny_target
from tests.train.data.test_packing import FAMILY, SAMPLES, trainee_of
from tests.train.families.test_heads_training import assert_same, learned, model_of
from train.data import batching
from train.families import dflash, ttt_attention
from train.teacher.live import compute_hidden_states

ATTENDING = ["causal", "pard", "eagle1", "eagle3", "mtp", "peagle", "dflash", "dspark"]
RECOMPUTING = [name for name in ATTENDING if name != "mtp"]
NO_MTP = ("mtp", "gpt2")  # its layers have other names
METHODS = ["blockwise", "flex"]


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks of a few queries, and flex_attention with the gradient on a CPU that its reference code has."""
    monkeypatch.setattr(flex_attention, "_validate_device", lambda *tensors: None)
    for module in (masks, ttt_attention, dflash):
        monkeypatch.setattr(module, "BLOCK", 7)


def both(trainee: Any, method: str, packed: bool = True) -> tuple[Any, Any]:
    """(sums and gradients by `method`, those with dense masks)."""
    batch = (batching.pack if packed else batching.collate)(SAMPLES, 0)
    found = []
    for one in (method, "dense"):
        with attention.training_attention(one):
            found.append(learned(trainee, batch))
    return found[0], found[1]


CASES = [f"{name}-{method}" for name in [*ATTENDING, "medusa"] for method in METHODS]


@pytest.mark.usefixtures("small")
@pytest.mark.parametrize("case", slow_except(CASES, [c for c in CASES if c.endswith("-blockwise")]))
def test_each_way_to_attend_teaches_the_same(case: str) -> None:
    """Catches a key that a block or the kernel leaves out or adds, in the draft or in the target, texts that share a
    line included: sums and gradients of every family."""
    family, _, method = case.partition("-")
    here, there = both(trainee_of(family, tiny_target(model_of())), method)
    assert_same(here, there)


@pytest.mark.usefixtures("small")
@pytest.mark.parametrize(
    ("family", "arch", "packed"),
    [
        case
        for case in pairwise(["causal", "pard", "mtp"], FEW, [False, True])
        if case[:2] != NO_MTP
    ],
)
def test_windows_and_sinks_are_kept_in_blocks(family: str, arch: str, packed: bool) -> None:
    """Catches a sliding window that begins elsewhere in a block, and soft caps and sinks of a block's scores alone."""
    trainee = trainee_of(family, tiny_target(tiny_model(arch)))
    trainee.model.eval()  # GPT-2 has dropout
    here, there = both(trainee, "blockwise", packed)
    assert_same(here, there)


@pytest.mark.parametrize(("family", "method"), rotated(RECOMPUTING, ["dense", "blockwise"]))
def test_layers_that_are_computed_again_teach_the_same(
    family: str, method: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Catches a second forward without the mask, keys of a step that are added twice, and nothing computed again."""
    plain = trainee_of(family, tiny_target(model_of()))
    monkeypatch.setattr(FAMILY[family], "activation_checkpointing", True)
    again = trainee_of(family, tiny_target(model_of()))
    batch = batching.pack(SAMPLES, 0)
    with attention.training_attention(method):
        assert_same(learned(again, batch), learned(plain, batch))
        assert kept_bytes(again, batch) < kept_bytes(plain, batch)


def kept_bytes(trainee: Any, batch: batching.Batch) -> int:
    """Bytes of the tensors that autograd keeps of a forward pass of the draft, weights apart."""
    weights = {p.data_ptr() for p in trainee.model.parameters()}
    kept: dict[int, int] = {}

    def keep(x: torch.Tensor) -> torch.Tensor:
        storage = x.untyped_storage()
        if storage.data_ptr() not in weights:
            kept[storage.data_ptr()] = storage.nbytes()
        return x

    held = []
    with torch.autograd.graph.saved_tensors_hooks(lambda x: held.append(x) or keep(x), lambda x: x):
        trainee.loss(trainee.model, batch)
    return sum(kept.values())


def test_a_mask_forgotten_in_backward_is_seen() -> None:
    """Planted: transformers' own checkpointing, whose second forward would run without the mask, is refused."""
    model = tiny_model("llama")
    model.set_attn_implementation(attention.ATTENTION_NAME)
    packed, taps = batching.pack(SAMPLES, 0), HiddenStateSpec(final=True)
    attention.recompute_layers(model)
    compute_hidden_states(model, packed, taps)
    model.gradient_checkpointing_enable()
    with pytest.raises(UserError, match="loop.pack"):
        compute_hidden_states(model, packed, taps)


@pytest.mark.usefixtures("small")
def test_a_block_that_misses_keys_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """Planted: blocks do not read the first tokens of a text that began before them."""
    trainee = trainee_of("causal", tiny_target(model_of()))
    at = AttentionMask.at

    def late(self: Any, queries: torch.Tensor, keys: torch.Tensor, window: Any) -> torch.Tensor:
        return at(self, queries, keys, window) & (keys >= queries[0])

    batch = batching.pack(SAMPLES, 0)
    with attention.training_attention("dense"):
        whole = learned(trainee, batch)[0]["loss"]
    monkeypatch.setattr(AttentionMask, "at", late)
    with attention.training_attention("blockwise"):
        assert abs(learned(trainee, batch)[0]["loss"] - whole) > 1e-2 * whole


def test_an_unknown_way_to_attend_is_refused() -> None:
    with pytest.raises(UserError, match="dense, blockwise"), attention.training_attention("sparse"):
        pass
