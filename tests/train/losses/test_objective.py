"""What a position costs as users set it: the divergence, its temperature, over which tokens, and what is mixed in."""

from pathlib import Path

import pytest
import torch
from torch import Tensor

from decode.common.errors import UserError
from decode.common.settings import parse_settings
from tests.train.losses.test_divergences import IDS, logits
from train.losses.divergences import (
    LOSSES,
    acceptance,
    bucket_tail,
    forward_kl,
    log_probs,
    reverse_kl,
    tv,
)
from train.losses.objective import Criterion
from train.settings.training import DivergenceConfig
from train.teacher.feature_codec import pack_distribution, unpack_log_probs
from train.trainer.settings import DistillConfig

every_name = pytest.mark.parametrize("name", LOSSES)
CONVEX = ["forward_kl", "reverse_kl", "jsd", "renyi_half", "tv", "lk_alpha"]
"""Those that cannot grow when tokens are taken together."""


def value_of(
    name: str, p: Tensor, q: Tensor, ids: Tensor | None = None, how: DivergenceConfig | None = None
) -> Tensor:
    criterion = Criterion(name, how)
    return criterion.position_losses(criterion.target_distribution(p, ids), q)


def gradient_of(name: str, p: Tensor, q: Tensor, how: DivergenceConfig) -> Tensor:
    q = q.clone().requires_grad_()
    return torch.autograd.grad(value_of(name, p, q, how=how).sum(), q)[0]


@every_name
@pytest.mark.parametrize("ids", [None, IDS], ids=["all", "ids"])
def test_plainly_it_is_the_divergence(name: str, ids: Tensor | None) -> None:
    """Catches a name that stands for another formula, and a reduced vocabulary that gets lost."""
    p, q = logits(0), logits(1, vocabulary=50 if ids is None else len(IDS))
    torch.testing.assert_close(value_of(name, p, q, ids), LOSSES[name](p, q, ids))
    everything = DivergenceConfig(top=10 if name == "top_k" else 1000)
    torch.testing.assert_close(value_of(name, p, q, ids, everything), LOSSES[name](p, q, ids))


@every_name
def test_temperature_is_that_of_both_laws(name: str) -> None:
    """Catches a temperature that warms one side only, or multiplies logits; the best token has none."""
    p, q = logits(0), logits(1)
    warm = value_of(name, p, q, how=DivergenceConfig(temperature=2.5))
    heat = 1.0 if name == "hard_ce" else 2.5
    torch.testing.assert_close(warm, LOSSES[name](p / heat, q / heat))
    half = value_of(name, p.bfloat16(), q.bfloat16(), how=DivergenceConfig(temperature=2.5))
    rounded = LOSSES[name](p.bfloat16().float() / heat, q.bfloat16().float() / heat)
    torch.testing.assert_close(half, rounded)  # divided in fp32


def test_few_by_hand() -> None:
    """Catches the tail counted once for each of its tokens, left out, or renormalised away. p = (1/2, 1/4, 1/8, 1/8)
    and q = (1/4, 1/4, 3/8, 1/8): of the best token and the rest these are (1/2, 1/2) and (1/4, 3/4)."""
    p = torch.tensor([[0.5, 0.25, 0.125, 0.125]]).log()
    q = torch.tensor([[0.25, 0.25, 0.375, 0.125]]).log()
    golden = {"forward_kl": 0.1438410, "reverse_kl": 0.1308120, "tv": 0.25, "lk_alpha": 0.2876821}
    for name, value in golden.items():
        found = value_of(name, p, q, how=DivergenceConfig(top=1))
        torch.testing.assert_close(found, torch.tensor([value]), atol=1e-6, rtol=0)
    # The rest together outweigh the best token, and are no label.
    torch.testing.assert_close(value_of("hard_ce", p, q, how=DivergenceConfig(top=1)), -q[:, 0])


@pytest.mark.parametrize("name", CONVEX)
def test_few_never_cost_more_than_all(name: str) -> None:
    """Catches a tail of q that is not that of p's tokens; equal where q's tail is p's but for its size."""
    p, q = logits(0), logits(1)
    how = DivergenceConfig(top=5)
    assert (value_of(name, p, q, how=how) <= value_of(name, p, q) + 1e-6).all()
    best = p.topk(5).indices
    tail = p.log_softmax(-1) + 1.5
    q = tail.scatter(-1, best, q.log_softmax(-1).gather(-1, best))
    torch.testing.assert_close(
        value_of(name, p, q, how=how), value_of(name, p, q), atol=1e-5, rtol=1e-4
    )


@every_name
@pytest.mark.parametrize("floor", [-1e9, float("-inf")])
def test_few_have_a_finite_gradient(name: str, floor: float) -> None:
    """Catches NaN from a tail that p or q think impossible."""
    p, q = logits(0), logits(1)
    p[:, 5:] = floor  # nothing is left for the rest
    q[:, :48] = floor
    q.requires_grad_()
    total = value_of(name, p, q, how=DivergenceConfig(top=5)).sum()
    total.backward()
    assert torch.isfinite(total)
    assert q.grad is not None
    assert torch.isfinite(q.grad).all()


@pytest.mark.parametrize("name", ["forward_kl", "tv", "lk_lambda", "jsd"])
def test_a_stored_law_teaches_few_as_well_as_the_live_one(name: str) -> None:
    """Catches the tail of a stored law taken for known: spread evenly it is another law where the target's is flat.
    Compared over the tokens that are kept, value and gradient are those of the live target (but for fp16)."""
    generator = torch.Generator().manual_seed(0)
    p = torch.randn(32, 400, generator=generator)  # flat: half of the mass is behind the best 64
    q = p + torch.randn(32, 400, generator=generator)
    packed = pack_distribution(p, 64)
    payload = torch.cat([packed["ids"].float(), packed["probabilities"].float()], -1)
    stored = unpack_log_probs(payload, 64, 400)
    assert float(p.softmax(-1).topk(64).values.sum(-1).mean()) < 0.6
    kept, whole = DivergenceConfig(top=64), DivergenceConfig()

    def error(how: DivergenceConfig) -> float:
        live, cached = (gradient_of(name, x, q, how) for x in (p, stored))
        return float((live - cached).norm() / live.norm())

    assert error(kept) < 0.02
    assert error(whole) > 0.1  # what this spares


def test_jsd_goes_from_forward_to_reverse_kl() -> None:
    """Catches beta on the wrong side. By hand for p = (1/2, 1/2), q = (3/4, 1/4), b = 1/4: m = (11/16, 5/16)."""
    p, q = torch.tensor([[0.5, 0.5]]).log(), torch.tensor([[0.75, 0.25]]).log()
    found = value_of("jsd", p, q, how=DivergenceConfig(beta=0.25))
    torch.testing.assert_close(found, torch.tensor([0.0260482]), atol=1e-6, rtol=0)
    p, q = logits(0).double() / 3, logits(1).double() / 3
    low, high = (
        value_of("jsd", p, q, how=DivergenceConfig(beta=b)) / 1e-4 for b in (1e-4, 1 - 1e-4)
    )
    torch.testing.assert_close(low, forward_kl(p, q), rtol=0.02, atol=1e-3)
    torch.testing.assert_close(high, reverse_kl(p, q), rtol=0.02, atol=1e-3)


@pytest.mark.parametrize("ids", [None, IDS], ids=["all", "ids"])
def test_a_mix_is_the_weighted_sum(ids: Tensor | None) -> None:
    """Catches weights on the wrong term, a term without gradient, and one that sees the others' tokens."""
    p, q = logits(0), logits(1, vocabulary=50 if ids is None else len(IDS)).requires_grad_()
    how = DivergenceConfig(temperature=2.0, top=7, mix={"tv": 0.3, "hard_ce": 0.1, "top_k": 2.0})
    mixed = value_of("forward_kl", p, q, ids, how)
    pair = log_probs(p / 2, q / 2, ids)
    lumped = bucket_tail(pair, pair.target.p.topk(7).indices)
    hard, seven = LOSSES["hard_ce"](p, q, ids), LOSSES["top_k"].of(pair, 7)
    parts = forward_kl.of(lumped) + 0.3 * tv.of(lumped) + 0.1 * hard + 2.0 * seven
    torch.testing.assert_close(mixed, parts)
    for here, there in zip(
        torch.autograd.grad(mixed.sum(), q), torch.autograd.grad(parts.sum(), q), strict=True
    ):
        torch.testing.assert_close(here, there)


@every_name
def test_gradients_are_those_of_the_values(name: str) -> None:
    """Catches a detached term behind temperature or the tail."""
    if name == "lk_lambda":
        pytest.skip("its share is detached on purpose")
    p, q = logits(0, 3, 9).double(), logits(1, 3, 9).double().requires_grad_()
    how = DivergenceConfig(temperature=1.7, top=4, beta=0.3)
    assert torch.autograd.gradcheck(lambda q: value_of(name, p, q, how=how), (q,))


def test_acceptance_of_few_is_no_less() -> None:
    """Catches the mass outside the draft's vocabulary forgotten in the tail (pitfall 11)."""
    p, q = logits(0), logits(1)[:, : len(IDS)]
    pair = log_probs(p, q, IDS)
    lumped = bucket_tail(pair, pair.target.p.topk(4).indices)
    mass = p.softmax(-1)[:, IDS].sum(-1)
    assert (acceptance.of(lumped) >= acceptance.of(pair) - 1e-6).all()
    assert (acceptance.of(lumped) <= mass + 1e-6).all()


def test_the_command_line_reaches_it(tmp_path: Path) -> None:
    """Catches settings that are parsed and lost, and a loss that falls back when one of them is given."""
    config = tmp_path / "c.yaml"
    config.write_text("loss: lk_alpha\ndivergence: {top: 64, mix: {hard_ce: 0.1}}\n")
    s = parse_settings(
        DistillConfig, "", ["--config", str(config), "--divergence.temperature", "2"]
    )
    assert s.loss == "lk_alpha"
    assert s.divergence == DivergenceConfig(temperature=2.0, top=64, mix={"hard_ce": 0.1})
    assert (
        parse_settings(
            DistillConfig, "", ["--loss", "jsd", "--divergence.beta", "0.2"]
        ).divergence.beta
        == 0.2
    )


@pytest.mark.parametrize(
    ("argv", "named"),
    [(["--divergence.mix", "{ce: 0.5}"], "no divergence 'ce'"), (["--loss", "kl"], "forward_kl")],
)
def test_bad_settings_are_named(argv: list[str], named: str) -> None:
    """Catches a traceback, or a loss that is NaN from the first step on."""
    with pytest.raises(UserError, match=named):
        parse_settings(DistillConfig, "", argv)
