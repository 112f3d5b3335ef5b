"""Taps give the states that transformers itself calls hidden_states, and leave the model as it was."""

from typing import Any

import pytest
import torch
from torch import Tensor

from decode.common.errors import UserError
from decode.drafts.early_exit import EarlyExitDraft
from decode.engine.engine import decode
from decode.model.hidden_states import HiddenStateHooks, HiddenStateSpec, LMHead
from decode.model.runner import check_plain_pass
from tests.decode.engine.test_engine import texts
from tests.heads import hf_states, random_draft
from tests.params import slow_except
from tests.tiny import ARCHITECTURES, FEW, tiny_model, tiny_prompts, tiny_target

PROMPTS = tiny_prompts(13, 1, 9)
ALL = HiddenStateSpec((0, 1, 2), final=True)


def hooks(model: Any) -> int:
    """Those that tap hidden states; the model itself has one that looks at passes which no runner makes."""
    found = [hook for module in model.modules() for hook in module._forward_pre_hooks.values()]
    return sum(hook is not check_plain_pass for hook in found)


@pytest.mark.parametrize("arch", slow_except(ARCHITECTURES, FEW))
def test_states_are_those_of_transformers(arch: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches taps that are a layer off (methods 3), normed or scaled, rows or chunks mixed up, padding read as text.
    hidden_states[i] enters layer i; the final state, through the head, gives the logits: softcaps, scales, biases."""
    monkeypatch.setattr("decode.model.runner.PREFILL_CHUNK", 4)
    model = tiny_model(arch)
    runner = tiny_target(model).runner
    width, longest = runner.config.hidden_size, max(map(len, PROMPTS))
    runner.capture_hidden_states(ALL)
    runner.allocate(len(PROMPTS), longest + 4)
    padded = torch.tensor([prompt + [0] * (longest - len(prompt)) for prompt in PROMPTS])
    length = torch.tensor([len(prompt) for prompt in PROMPTS])
    runner.prefill(padded, length)
    prefilled = runner.features
    with torch.inference_mode():
        logits = runner.step(torch.tensor([[5, 6], [7, 8], [9, 10]]), length)
    stepped = runner.features
    assert prefilled.shape == (3, longest, 4 * width)
    assert stepped.shape == (3, 2, 4 * width)
    for row, prompt in enumerate(PROMPTS):
        states, right = hf_states(model, [*prompt, 5 + 2 * row, 6 + 2 * row])
        got = torch.cat([prefilled[row, : len(prompt)], stepped[row]])
        for i in ALL.layers:
            close(got[:, i * width : (i + 1) * width], states[i])
        close(LMHead(runner.model)(got[:, -width:]), right)
    close(LMHead(runner.model)(stepped[..., -width:]), logits)


def close(a: Tensor, b: Tensor) -> None:
    torch.testing.assert_close(a, b, atol=1e-4, rtol=1e-4)


def test_taps_stand_side_by_side_in_their_order() -> None:
    """Catches states sorted, or joined along another dimension: fc has its columns in the order of the taps."""
    runner = tiny_target(tiny_model("llama")).runner
    runner.allocate(1, 16)
    found = []
    for layers in ((0,), (2,), (2, 0, 2)):
        runner.capture_hidden_states(HiddenStateSpec(layers))
        runner.prefill(torch.tensor(PROMPTS[:1]), torch.tensor([13]))
        found.append(runner.features)
    assert torch.equal(found[2], torch.cat([found[1], found[0], found[1]], -1))


def test_states_are_forgotten_once_taken() -> None:
    """Catches states of an earlier forward given out for this one, and memory that they keep."""
    model = tiny_model("llama")
    catch = HiddenStateHooks(model, ALL)
    model(torch.tensor([[1, 2]]))
    assert catch.states().shape == (1, 2, 4 * 32)
    assert catch.captured == {}


def test_the_head_is_no_forward_of_the_model() -> None:
    """Catches a head that goes through the module, whose hooks would take its input for the target's state."""
    model = tiny_model("llama")
    catch = HiddenStateHooks(model, HiddenStateSpec(final=True))
    LMHead(model)(torch.zeros(1, 1, 32))
    assert catch.captured == {}


def test_a_head_in_another_dtype_is_a_copy() -> None:
    """Catches a target whose own head is moved or rounded, and one that is trained along with the draft."""
    model = tiny_model("gpt2")  # tied to the embedding
    before = model.lm_head.weight.detach().clone()
    state = torch.randn(2, 32)
    rough = LMHead(model, dtype=torch.bfloat16)(state.bfloat16())
    assert rough.dtype == torch.bfloat16
    torch.testing.assert_close(rough.float(), LMHead(model)(state), atol=0.2, rtol=0.02)
    assert not LMHead(model)(state).requires_grad
    assert torch.equal(model.lm_head.weight, before)


@pytest.mark.parametrize("layer", [-1, 3])
def test_an_unknown_layer_is_refused(layer: int) -> None:
    """Catches -1 taken for the last layer, an index error, and a decoder that half keeps the taps it was refused."""
    runner = tiny_target(tiny_model("llama")).runner
    runner.capture_hidden_states(HiddenStateSpec((1,)))
    with pytest.raises(UserError, match=rf"no layer {layer} to tap: .* layers 0 to 2"):
        runner.capture_hidden_states(HiddenStateSpec((0, layer)))
    runner.capture_hidden_states(HiddenStateSpec((1,)))
    runner.allocate(1, 16)
    runner.prefill(torch.tensor(PROMPTS[:1]), torch.tensor([13]))
    close(runner.features[0], hf_states(runner.model, PROMPTS[0])[0][1])
    runner.capture_hidden_states(None)
    assert hooks(runner.model) == 0


def test_no_hook_is_left() -> None:
    """Catches hooks that stay: each later forward would keep states that nobody takes, and pay for it."""
    runner = tiny_target(tiny_model("llama")).runner
    one = HiddenStateSpec((1,))
    for taps, count in ((ALL, 4), (one, 1), (one, 1), (None, 0), (None, 0)):
        runner.capture_hidden_states(taps)
        assert hooks(runner.model) == count


@pytest.mark.parametrize("arch", ["llama", "gpt2"])
def test_plain_and_tapping_drafts_alternate(arch: str) -> None:
    """Catches taps of one engine that the next one trips over, early exit through tapped layers among them."""
    own = tiny_target(tiny_model(arch))
    want = texts(decode(own, None, PROMPTS, max_new_tokens=8))
    drafts = [
        random_draft("eagle3", own),
        None,
        random_draft("medusa", own),
        EarlyExitDraft(own, 2),
    ]
    for draft in [*drafts, *drafts[::-1]]:
        assert texts(decode(own, draft, PROMPTS, k=3, max_new_tokens=8)) == want
    decode(own, None, PROMPTS, max_new_tokens=2)
    assert hooks(own.runner.model) == 0


def test_a_shorter_decoder_takes_no_part_in_taps() -> None:
    """Catches an early exit made while its target was tapped, which then asks for states that no hook keeps."""
    runner = tiny_target(tiny_model("llama")).runner
    runner.capture_hidden_states(ALL)
    runner.allocate(1, 16)
    short = runner.first_layers(2)
    runner.capture_hidden_states(None)
    with torch.inference_mode():
        short.step(torch.tensor([[1]]), torch.tensor([0]))
