from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from train.losses import LOSSES, acceptance, forward_kl, hard_ce, jsd, lk_alpha, reverse_kl, tv

Loss = Callable[[Tensor, Tensor], Tensor]
every_loss = pytest.mark.parametrize("loss", LOSSES.values(), ids=list(LOSSES))
divergences = pytest.mark.parametrize("loss", [forward_kl, reverse_kl, jsd, tv, lk_alpha])


def logits(seed: int, rows: int = 64, vocabulary: int = 50) -> Tensor:
    return 3 * torch.randn(rows, vocabulary, generator=torch.Generator().manual_seed(seed))


def test_golden_values() -> None:
    """Bug: p and q swapped, a factor or a term lost. By hand for p = (1/2, 1/2), q = (3/4, 1/4)."""
    p, q = torch.tensor([[0.5, 0.5]]).log(), torch.tensor([[0.75, 0.25]]).log()
    golden = {
        forward_kl: 0.1438410,  # ln 2 / sqrt 3 ...: 1/2 ln(2/3) + 1/2 ln 2
        reverse_kl: 0.1308120,  # 3/4 ln(3/2) + 1/4 ln(1/2)
        jsd: 0.0338220,  # m = (5/8, 3/8)
        tv: 0.25,
        acceptance: 0.75,
        lk_alpha: 0.2876821,  # -ln 3/4
    }
    for function, value in golden.items():
        torch.testing.assert_close(function(p, q), torch.tensor([value]), atol=1e-6, rtol=0)
    torch.testing.assert_close(hard_ce(q, p), torch.tensor([0.6931472]))


@divergences
def test_zero_at_equality_and_positive_elsewhere(loss: Loss) -> None:
    """Bug: a KL without the teacher's entropy does not reach 0 at equality (pitfall 9)."""
    p, q = logits(0), logits(1)
    torch.testing.assert_close(loss(p, p + 5), torch.zeros(64), atol=1e-5, rtol=0)
    assert (loss(p, q) > 1e-3).all()


def test_kl_agrees_with_torch() -> None:
    """Bug: a formula that is only right where both are close."""
    p, q = logits(0).log_softmax(-1), logits(1).log_softmax(-1)
    reference = torch.nn.functional.kl_div(q, p, reduction="none", log_target=True).sum(-1)
    torch.testing.assert_close(forward_kl(p, q), reference)
    torch.testing.assert_close(reverse_kl(q, p), reference)
    assert (jsd(p, q) <= 0.6932).all()


def test_tv_is_one_minus_acceptance() -> None:
    """Bug: the acceptance that training reports is not the one that decoding has."""
    p, q = logits(0), logits(1)
    torch.testing.assert_close(tv(p, q), 1 - acceptance(p, q))


def test_forward_kl_has_the_known_gradient() -> None:
    """Bug: a detached term, or the gradient of something else: it is q - p in q's logits."""
    p, q = logits(0), logits(1).requires_grad_()
    forward_kl(p, q).sum().backward()
    torch.testing.assert_close(q.grad, q.detach().softmax(-1) - p.softmax(-1))


@every_loss
@pytest.mark.parametrize("floor", [-1e9, torch.finfo(torch.float32).min, float("-inf")])
def test_gradient_is_finite_and_the_loss_falls(loss: Loss, floor: float) -> None:
    """Bug: masked vocabulary entries give 0 * inf = NaN, or no gradient reaches the draft."""
    p, q = logits(0), logits(1)
    p[:, :7] = floor
    q[:, 3:9] = floor  # masked in both, in p only, in q only
    q.requires_grad_()
    before = loss(p, q)
    before.sum().backward()
    assert q.grad is not None
    assert torch.isfinite(before).all()
    assert torch.isfinite(q.grad).all()
    assert q.grad.abs().sum() > 0
    with torch.no_grad():
        assert loss(p, q - 0.1 * q.grad).sum() < before.sum()


@every_loss
def test_half_precision_is_computed_in_fp32(loss: Loss) -> None:
    """Bug: sums over a vocabulary in bf16 lose the small probabilities (pitfall 28)."""
    p, q = logits(0, vocabulary=4000).bfloat16(), logits(1, vocabulary=4000).bfloat16()
    assert loss(p, q).dtype == torch.float32
    torch.testing.assert_close(loss(p, q), loss(p.float(), q.float()))
