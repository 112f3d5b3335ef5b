"""Targets and drafts with recurrent layers in training: padding changes nothing, packed rows are refused."""

from typing import Any

import pytest
import torch

from decode.common.errors import UserError
from decode.drafts.mtp import last_layer
from decode.model import attention
from decode.model.hidden_states import HiddenStateSpec
from tests.hybrids import HYBRIDS, hybrid_target, tiny_hybrid
from tests.params import slow_except
from tests.tiny import noisy
from tests.train.families.test_heads_training import SAMPLES
from train.data import batching
from train.families.causal import CausalTrainer
from train.losses.divergences import forward_kl
from train.losses.objective import Criterion
from train.teacher.live import LiveTeacher

FAST = ["qwen3_next", "lfm2", "mamba2"]


@pytest.mark.parametrize("arch", slow_except(HYBRIDS, FAST))
def test_a_padded_batch_has_the_loss_of_plain_forwards(arch: str) -> None:
    """Catches padding, or positions as another argument, that change the states of target or draft."""
    model = tiny_hybrid(arch)
    teacher = LiveTeacher(hybrid_target(model), HiddenStateSpec())
    draft: Any = noisy(model, 0.05)
    draft.set_attn_implementation(attention.ATTENTION_NAME)
    trainer = CausalTrainer(draft, teacher.head, Criterion("forward_kl", None))
    batch = batching.collate(SAMPLES[:3], 0)
    found = trainer(batch, teacher.get_output(batch))["loss"]
    want = torch.zeros(())
    plain = noisy(model, 0.05)
    for row in SAMPLES[:3]:
        ids, at = torch.tensor([list(row["input_ids"])]), batching.supervised_positions(row)
        with torch.no_grad():
            p_logits = model(input_ids=ids, use_cache=False).logits[0, at]
        want = (
            want + forward_kl(p_logits, plain(input_ids=ids, use_cache=False).logits[0, at]).sum()
        )
    torch.testing.assert_close(found, want, rtol=1e-4, atol=1e-4)
    found.backward()
    assert draft.get_input_embeddings().weight.grad.abs().sum() > 0


def test_packed_rows_are_refused() -> None:
    """Catches a state that goes from one text to the next, which no mask of attention prevents."""
    teacher = LiveTeacher(hybrid_target(tiny_hybrid("qwen3_next")), HiddenStateSpec())
    with pytest.raises(UserError, match="qwen3_next model has recurrent layers.*loop.pack"):
        teacher.get_output(batching.pack(SAMPLES[:4], 0))


def test_an_mtp_layer_of_a_recurrent_kind_is_refused() -> None:
    """Catches a layer whose states nobody takes back; one with attention can be trained, as Qwen3-Next's own."""
    with pytest.raises(UserError, match="last layer of this qwen3_next model is recurrent"):
        last_layer(tiny_hybrid("qwen3_next"))
    kinds = ["linear_attention", "linear_attention", "full_attention"]
    assert last_layer(tiny_hybrid("qwen3_next", layer_types=kinds)).config.num_hidden_layers == 1
