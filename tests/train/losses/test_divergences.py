import itertools
from collections.abc import Callable
from typing import get_args

import pytest
import torch
from torch import Tensor

from train.losses.divergences import (
    LOSSES,
    acceptance,
    dpace,
    forward_kl,
    hard_ce,
    jsd,
    lk_alpha,
    lk_lambda,
    log_probs,
    reach,
    renyi_half,
    reverse_kl,
    smooth_l1,
    soft_ce,
    top1,
    top_k,
    tv,
)
from train.settings.training import LossName

Loss = Callable[..., Tensor]
every_loss = pytest.mark.parametrize("loss", LOSSES.values(), ids=list(LOSSES))
divergences = pytest.mark.parametrize(
    "loss",
    [forward_kl, reverse_kl, jsd, renyi_half, tv, lk_alpha, lk_lambda],
    ids=lambda loss: loss.__name__,
)
GOLDEN: dict[Loss, float] = {
    forward_kl: 0.1438410,  # ln 2 / sqrt 3 ...: 1/2 ln(2/3) + 1/2 ln 2
    reverse_kl: 0.1308120,  # 3/4 ln(3/2) + 1/4 ln(1/2)
    jsd: 0.0338220,  # m = (5/8, 3/8)
    renyi_half: 0.0693365,  # -2 ln(sqrt(3/8) + sqrt(1/8))
    tv: 0.25,
    acceptance: 0.75,
    lk_alpha: 0.2876821,  # -ln 3/4
    lk_lambda: 0.2388108,  # l = exp(-9/4) = 0.1053992
    soft_ce: 0.8369882,  # the KL + ln 2
    top_k: 0.8369882,
}
"""Values for p = (1/2, 1/2), q = (3/4, 1/4), by hand."""
REDUCED_GOLDEN: dict[Loss, float] = {
    forward_kl: 0.1438410,
    reverse_kl: 0.1308120,
    jsd: 0.0338220,
    renyi_half: 0.0693365,
    soft_ce: 0.8369882,
    top_k: 0.8369882,
    acceptance: 0.5,  # 1/4 + 1/4
    tv: 0.5,
    lk_alpha: 0.6931472,
    lk_lambda: 0.4205304,  # l = exp(-3/2) = 0.2231302
}
"""Those for p = (1/2, 1/4, 1/4), q = (3/4, 1/4) on tokens 2 and 1; renormalised p is (1/2, 1/2)."""
IDS = torch.tensor([40, 3, 11, 12, 25, 49, 0, 30, 8, 21, 17, 5, 33, 46, 19])  # 15 of 50, unsorted


def test_every_loss_can_be_chosen_and_has_a_value_by_hand() -> None:
    """Bug: a name in the settings that is a KeyError at the first step, or a loss that no setting chooses."""
    assert tuple(LOSSES) == get_args(LossName)
    assert {*GOLDEN, hard_ce} == {*LOSSES.values(), acceptance}
    assert {*REDUCED_GOLDEN, hard_ce} == {*LOSSES.values(), acceptance}


def logits(seed: int, rows: int = 64, vocabulary: int = 50) -> Tensor:
    return 3 * torch.randn(rows, vocabulary, generator=torch.Generator().manual_seed(seed))


def test_golden_values() -> None:
    """Bug: p and q swapped, a factor or a term lost."""
    p, q = torch.tensor([[0.5, 0.5]]).log(), torch.tensor([[0.75, 0.25]]).log()
    for function, value in GOLDEN.items():
        torch.testing.assert_close(function(p, q), torch.tensor([value]), atol=1e-6, rtol=0)
    torch.testing.assert_close(hard_ce(q, p), torch.tensor([0.6931472]))


def test_golden_values_on_a_reduced_vocabulary() -> None:
    """Bug: acceptance with a renormalised teacher (pitfall 11), or a KL with one that is not."""
    p, q = torch.tensor([[0.5, 0.25, 0.25]]).log(), torch.tensor([[0.75, 0.25]]).log()
    for function, value in REDUCED_GOLDEN.items():
        found = function(p, q, torch.tensor([2, 1]))
        torch.testing.assert_close(found, torch.tensor([value]), atol=1e-6, rtol=0)
    p = torch.tensor([[0.5, 0.2, 0.3]]).log()  # the likeliest of tokens 2 and 1 is 2: column 0
    found = hard_ce(p, q, torch.tensor([2, 1]))
    torch.testing.assert_close(found, torch.tensor([0.2876821]), atol=1e-6, rtol=0)


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


def test_acceptance_stays_below_the_mass_of_the_ids() -> None:
    """Bug: alpha overstated, since the mass outside the draft's vocabulary was forgotten (pitfall 11)."""
    p, q = logits(0), logits(1)[:, : len(IDS)]
    mass = p.softmax(-1)[:, IDS].sum(-1)
    assert (acceptance(p, q, IDS) <= mass + 1e-6).all()
    best = p[:, IDS]  # q equal to p on ids accepts all that p has there
    torch.testing.assert_close(acceptance(p, best, IDS), mass)
    torch.testing.assert_close(forward_kl(p, best, IDS), torch.zeros(64), atol=1e-6, rtol=0)


@every_loss
def test_ids_only_name_columns(loss: Loss) -> None:
    """Bug: ids taken for offsets or for a mask: all ids are no ids, and the order of columns is free."""
    p, q = logits(0), logits(1)
    torch.testing.assert_close(loss(p, q, torch.arange(50)), loss(p, q))
    q, order = q[:, : len(IDS)], torch.randperm(len(IDS))
    torch.testing.assert_close(loss(p, q[:, order], IDS[order]), loss(p, q, IDS))
    torch.testing.assert_close(loss(p[:9], q[:9], IDS), loss(p, q, IDS)[:9])  # rows are independent


@every_loss
def test_padded_vocabulary_changes_nothing(loss: Loss) -> None:
    """Bug: columns that only align a matrix (p = q = 0 there) enter the sums."""
    p, q = logits(0), logits(1)
    padding = torch.full((64, 14), float("-inf"))
    padded = loss(torch.cat([p, padding], -1), torch.cat([q, padding], -1))
    torch.testing.assert_close(padded, loss(p, q))


@every_loss
@pytest.mark.parametrize("ids", [None, IDS], ids=["all", "ids"])
def test_extreme_logits_stay_finite(loss: Loss, ids: Tensor | None) -> None:
    """Bug: exp overflows, 0 * inf = NaN; one such position poisons every weight of the draft."""
    p, q = torch.zeros(5, 50), torch.zeros(5, 50)
    p[0, 0], q[0, 3] = 1e4, 1e4  # both sure, of different tokens
    p[1, 0], q[1, 3] = -1e4, -1e4
    p[2, 1], q[2, 0] = 1e4, 1e4  # p sure of a token outside ids
    p[3, IDS] = float("-inf")  # p has nothing on ids
    p[4, 20:], q[4, 1] = float("-inf"), 1e4
    q = (q if ids is None else q[:, : len(ids)]).clone().requires_grad_()
    value = loss(p, q, ids)
    value.sum().backward()
    assert torch.isfinite(value).all()
    assert q.grad is not None
    assert torch.isfinite(q.grad).all()


@every_loss
def test_no_rows(loss: Loss) -> None:
    """Bug: a batch without supervised positions ends a distributed run."""
    q = torch.zeros(0, len(IDS), requires_grad=True)
    for value in (loss(torch.zeros(0, 50), q, IDS), loss(q.detach(), q)):
        assert value.shape == (0,)
        value.sum().backward()


@pytest.mark.parametrize("ids", [None, IDS], ids=["all", "ids"])
@pytest.mark.parametrize("name", [name for name in LOSSES if name != "lk_lambda"])  # it detaches
def test_gradients_agree_with_finite_differences(name: str, ids: Tensor | None) -> None:
    """Bug: a term detached by mistake, above all in losses whose gradient is not in any table."""
    p, q = logits(0, rows=4).double(), logits(1, rows=4).double()
    q = (q if ids is None else q[:, : len(ids)]).clone().requires_grad_()
    assert torch.autograd.gradcheck(lambda q: LOSSES[name](p, q, ids), (q,))


def gradient(loss: Loss, p: Tensor, q: Tensor) -> Tensor:
    q = q.detach().requires_grad_()
    return torch.autograd.grad(loss(p, q).sum(), q)[0]


def test_lk_gradients() -> None:
    """Bug: not the LK losses: alpha's is TV's over alpha, lambda's a mixture with a detached share."""
    p, q = logits(0), logits(1)
    overlap = acceptance(p, q)[:, None]
    torch.testing.assert_close(gradient(lk_alpha, p, q), gradient(tv, p, q) / overlap)
    share = torch.exp(-3 * overlap)  # of each position, not of the batch's mean
    mixture = share * gradient(forward_kl, p, q) + (1 - share) * gradient(tv, p, q)
    torch.testing.assert_close(gradient(lk_lambda, p, q), mixture)


def test_renyi_half_pulls_q_to_a_law_between() -> None:
    """Bug: a divergence of another order: the gradient in q's logits is q - r, r = sqrt(p q) ÷ its sum."""
    p, q = logits(0).double(), logits(1).double()
    between = (p.softmax(-1) * q.softmax(-1)).sqrt()
    torch.testing.assert_close(renyi_half(p, q), -2 * between.sum(-1).log())
    between = between / between.sum(-1, keepdim=True)
    torch.testing.assert_close(gradient(renyi_half, p, q), q.softmax(-1) - between)


def test_lk_lambda_starts_as_kl() -> None:
    """Bug: the share turned round: without overlap it is all KL, whose gradient does not vanish."""
    p, q = torch.tensor([[0.0, 0, 40, 40]]), torch.tensor([[40.0, 40, 0, 0]])
    torch.testing.assert_close(lk_lambda(p, q), forward_kl(p, q))
    torch.testing.assert_close(gradient(lk_lambda, p, q), gradient(forward_kl, p, q))
    assert gradient(tv, p, q).abs().max() < 1e-6


def test_soft_ce_and_top_k() -> None:
    """Bug: a cross-entropy called KL (pitfall 9); top-k over q's largest, renormalised, or not k of them."""
    p, q = logits(0), logits(1)
    entropy = torch.distributions.Categorical(logits=p).entropy()
    torch.testing.assert_close(soft_ce(p, q), forward_kl(p, q) + entropy)
    torch.testing.assert_close(soft_ce(p, p), entropy)
    torch.testing.assert_close(top_k(p[:, :10], q[:, :10]), soft_ce(p[:, :10], q[:, :10]))
    terms = -p.softmax(-1) * q.log_softmax(-1)
    tenth = p.sort(-1).values[:, -10, None]
    torch.testing.assert_close(top_k(p, q), terms.masked_fill(p < tenth, 0).sum(-1))


def test_a_pair_serves_loss_and_metrics() -> None:
    """Bug: an objective that shares the softmax reports other numbers than the functions on logits."""
    p, q = logits(0), logits(1)[:, : len(IDS)]
    pair = log_probs(p, q, IDS)
    for loss in (*LOSSES.values(), acceptance):
        assert torch.equal(loss.of(pair), loss(p, q, IDS))


def test_what_the_draft_can_say() -> None:
    """Bug: columns compared with ids; positions whose best token the draft lacks counted as right."""
    p = torch.tensor([[9.0, 0, 0, 1], [0, 9, 0, 1], [0, 0, 1, 9]])
    q = torch.tensor([[1.0, 0], [1, 0], [1, 0]])
    ids = torch.tensor([3, 0])
    assert top1(p, q, ids).tolist() == [False, False, True]
    assert top1(p, p.flip(0)).tolist() == [False, True, False]


def test_smooth_l1() -> None:
    """Bug: a sum over H where EAGLE has the mean; half precision. By hand: (0.5 * 0.25 + 1.5) / 2."""
    feature = torch.tensor([[1.0, 1.0]]).bfloat16()
    found = smooth_l1(torch.tensor([[1.5, 3.0]]).bfloat16(), feature)
    torch.testing.assert_close(found, torch.tensor([0.8125]))
    assert smooth_l1(torch.zeros(0, 8), torch.zeros(0, 8)).shape == (0,)


def test_dpace_is_the_gradient_of_the_accepted_length() -> None:
    """Bug: a sum from the wrong end, or a product that leaves out its own position. At a = 0: E enumerated over all
    outcomes of independent acceptances, w = dE / d log confidence, and the gradient of sum w CE is that of -E. At a >
    0 the same holds in log s, s = (1 - a) c + a."""

    def length(s: Tensor) -> Tensor:
        total = torch.zeros(())
        for outcome in itertools.product([0, 1], repeat=len(s)):
            chance = torch.stack([x if o else 1 - x for x, o in zip(s, outcome, strict=True)])
            total = total + chance.prod() * len(list(itertools.takewhile(bool, outcome)))
        return total

    confidence, all_valid = torch.tensor([0.9, 0.3, 0.6, 0.8]), torch.ones(1, 4, dtype=torch.bool)
    for a in (0.0, 0.5):
        log_s = ((1 - a) * confidence + a).log().requires_grad_()
        expected = torch.autograd.grad(length(log_s.exp()), log_s)[0]
        torch.testing.assert_close(dpace(confidence[None], all_valid, a)[0], expected)
    log_q = confidence.log().requires_grad_()
    (dpace(log_q.exp()[None], all_valid, a=0)[0] * -log_q).sum().backward()
    by_hand = torch.autograd.grad(-length(log_q.exp()), log_q)[0]
    torch.testing.assert_close(log_q.grad, by_hand)


def test_reach_by_hand_and_padded() -> None:
    """Bug: a slot's own acceptance counted, or padding that ends a block."""
    accepted = torch.tensor([[0.5, float("nan"), 0.8, 0.0, 1.0]], requires_grad=True)
    found = reach(accepted, torch.tensor([[True, False, True, True, True]]))
    torch.testing.assert_close(found, torch.tensor([[1.0, 0, 0.5, 0.4, 0]]))


def test_dpace_by_hand_and_padded() -> None:
    """Bug: padding lengthens a block: its slots count as accepted; or their NaN spreads."""
    valid = torch.tensor([[True, True]])
    w = dpace(torch.tensor([[0.5, 0.0]], requires_grad=True), valid)  # s = 3/4, 1/2
    assert not w.requires_grad
    torch.testing.assert_close(w, torch.tensor([[1.125, 0.375]]))
    padded = torch.tensor([[float("nan"), 0.5, 0.9, 0.0, 1.0]])
    mask = torch.tensor([[False, True, False, True, False]])
    torch.testing.assert_close(dpace(padded, mask), torch.tensor([[0, 1.125, 0, 0.375, 0]]))
    assert dpace(torch.zeros(0, 4), torch.zeros(0, 4, dtype=torch.bool)).shape == (0, 4)
