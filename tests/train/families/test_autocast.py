"""Training in mixed bf16 or fp16 minimises the same loss as in fp32, but for rounding."""

import warnings
from collections.abc import Iterator

import pytest
import torch

from tests.tiny import tiny_target
from tests.train.families.test_heads_training import SAMPLES, collate, model_of
from train.families.base import FamilyContext, TrainableDraft
from train.families.builders import build_trainable
from train.families.settings.causal import CausalSettings
from train.families.settings.eagle import Eagle1Settings, Eagle3Settings
from train.families.settings.heads import MedusaSettings
from train.trainer.settings import DistillConfig

DRAFTS = {
    "causal": CausalSettings(layers=[0, 2]),
    "medusa": MedusaSettings(heads=3),
    "eagle1": Eagle1Settings(),
    "eagle3": Eagle3Settings(steps=3, vocab=60, taps=[0, 1, 2]),
}


@pytest.fixture(autouse=True)
def _every_warning() -> Iterator[None]:
    """torch warns once a process otherwise."""
    torch.set_warn_always(True)
    yield
    torch.set_warn_always(False)


def trainee_of(name: str) -> TrainableDraft:
    """The draft as its training starts; the same whenever it is made."""
    torch.manual_seed(0)
    settings = DistillConfig(draft=DRAFTS[name], loss="forward_kl")
    context = FamilyContext(settings, tiny_target(model_of()), SAMPLES)
    return build_trainable(settings.draft, context)


def loss_and_gradient(name: str, dtype: torch.dtype | None) -> tuple[float, torch.Tensor]:
    """The loss as `Accelerator.prepare` has it computed in `dtype`, and its gradient as one vector."""
    trainee, batch = trainee_of(name), collate(*SAMPLES)
    assert trainee.teacher is not None
    output = trainee.teacher.get_output(batch)
    with torch.autocast("cpu", dtype or torch.bfloat16, enabled=dtype is not None):
        loss = trainee.model(batch, output)["loss"]
    scale = 2.0**8 if dtype == torch.float16 else 1.0  # as a gradient scaler does
    (loss * scale).backward()
    grads = [p.grad.flatten() / scale for p in trainee.model.parameters() if p.grad is not None]
    return float(loss.detach()), torch.cat(grads)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", DRAFTS)
def test_the_loss_is_that_of_fp32(name: str, dtype: torch.dtype) -> None:
    """Catches losses, norms or target distributions in bf16, and norms that leave torch's fused kernel."""
    loss, grad = loss_and_gradient(name, None)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        rounded_loss, rounded_grad = loss_and_gradient(name, dtype)
    assert rounded_loss != loss
    assert rounded_loss == pytest.approx(loss, rel=5e-3)
    assert float((rounded_grad - grad).norm() / grad.norm()) < 0.05


@pytest.mark.parametrize("name", DRAFTS)
def test_the_targets_distribution_is_not_rounded(name: str) -> None:
    """Catches p in bf16: the draft would learn the rounding, which is no part of what it is verified against."""
    trainee, batch = trainee_of(name), collate(*SAMPLES)
    assert trainee.teacher is not None
    rows = trainee.teacher.get_output(batch).head_inputs[batch.loss_mask]
    exact = trainee.teacher.head(rows)
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(trainee.teacher.head(rows), exact)
