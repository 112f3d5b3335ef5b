"""DFlash and DSpark in training: a block learns from exactly what it reads in decoding."""

from typing import Any

import pytest
import torch
from torch import Tensor

from decode.model.masks import SlotMask
from tests.decode.drafts.test_dflash import formula_states
from tests.heads import prefilled, randomise
from tests.params import rotated
from tests.tiny import FEW, tiny_model, tiny_target
from tests.train.data.test_packing import SAMPLES
from tests.train.families.test_heads_training import row
from train.data import batching
from train.data.batching import Batch
from train.families import dflash
from train.families.base import FamilyContext
from train.families.block_loss import BlockLoss
from train.families.builders import build_trainable
from train.families.registry import family_settings
from train.families.slots import Retention, draw_depths
from train.losses import chunked_sums
from train.settings.training import LossWeights
from train.trainer.settings import DistillConfig

K = 4


def trainee_of(
    name: str,
    model: Any,
    weights: LossWeights | None = None,
    loss: str = "forward_kl",
    **settings: Any,
) -> Any:
    """A head with random weights, whose correction says something."""
    chosen = {"depth": 2, "vocab": 60, "taps": [1, 2], "block": K, "anchors": 0.7} | settings
    if name == "dspark":
        chosen["markov_rank"] = 6
    config = DistillConfig(
        draft=family_settings(name)(**chosen),
        weights=weights or LossWeights(),
        loss=loss,  # type: ignore[arg-type]
    )
    made = build_trainable(config.draft, FamilyContext(config, tiny_target(model), SAMPLES))
    randomise(made.net, 5)  # type: ignore[attr-defined]
    return made


Inputs = tuple[Tensor, ...]


def inputs_of(trainee: Any, batch: Batch, monkeypatch: pytest.MonkeyPatch) -> Inputs:
    """(teacher rows, states, labels, block, depth, tokens before) that the loss gets."""
    found: list[Inputs] = []

    def record(self: BlockLoss, *inputs: Tensor) -> dict[str, Tensor]:
        found.append(inputs)
        return {"loss": inputs[1].sum()}

    with monkeypatch.context() as patch:
        patch.setattr(BlockLoss, "__call__", record)
        trainee.loss(trainee.model, batch)
    return found[0]


@torch.no_grad()
def gap(name: str, arch: str, monkeypatch: pytest.MonkeyPatch, packed: bool = False) -> float:
    """Largest difference of a slot's state from that of the formulas over the text before the anchor."""
    trainee = trainee_of(name, tiny_model(arch))
    net, own = trainee.net, trainee.target
    batch = (batching.pack if packed else batching.collate)(SAMPLES, 0)
    with torch.enable_grad():
        _, states, label, block, depth, before = inputs_of(trainee, batch, monkeypatch)
    embedding = own.runner.model.get_input_embeddings().weight
    wanted: dict[tuple[int, int], Tensor] = {}  # by the text's first and anchor's number
    for i, sample in enumerate(SAMPLES):
        ids = list(sample["input_ids"])
        features = prefilled(own, ids, net.aux_layers)
        for a in range(1, len(ids)):
            tokens = torch.tensor([ids[a], *[net.mask_token] * (net.block_size - 1)])
            wanted[i, a] = formula_states(net, features[:a], tokens, embedding)[net.first :]
    worst, used = 0.0, set()
    for n in range(len(label)):
        same = (block == block[n]) & (depth == 0)
        anchor_token, first_label = int(before[same][0]), int(label[same][0])
        close = [
            float((wanted[i, a][int(depth[n])] - states[n]).abs().max())
            for i, a in wanted
            if SAMPLES[i]["input_ids"][a] == anchor_token
            and list(SAMPLES[i]["input_ids"])[a + 1 : a + 2] == [first_label]
        ]
        worst = max(worst, min(close))
        used.add(int(block[n]))
    assert len(used) > 20
    return worst


@pytest.mark.parametrize(
    ("arch", "name", "packed"), rotated(FEW, ["dflash", "dspark"], [False, True])
)
def test_slots_read_what_decoding_reads(
    arch: str, name: str, packed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Catches context that reaches the anchor's own state, blocks that see each other, and wrong positions."""
    assert gap(name, arch, monkeypatch, packed) < 2e-3


ATTENTION = dflash.block_attention


def context_of_the_anchor(*inputs: Any) -> Tensor:
    *rest, mask, size = inputs
    later = (mask.slots + 1).clamp_max(mask.length - 1)
    return ATTENTION(*rest, SlotMask(later, mask.length, mask.numbers), size)


def test_a_wrong_mask_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """The test above is blind if this goes unseen: f_a is read, which decoding does not have yet."""
    monkeypatch.setattr(dflash, "block_attention", context_of_the_anchor)
    assert gap("dflash", "llama", monkeypatch) > 0.05


def test_golden_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Labels and tokens before them of a toy chat, written by hand: tokens 3 to 6, then 8 and 9 are the target's."""
    sample = row([10, 11, 12, 13, 14, 15, 16, 17, 18, 19], (3, 7), (8, 10))
    batch = batching.collate([sample], 0, 1)
    trainee = trainee_of("dspark", tiny_model("llama"), block=3, anchors=1.0)
    _, _, label, block, depth, before = inputs_of(trainee, batch, monkeypatch)
    first = {int(b): int(before[(block == b) & (depth == 0)][0]) for b in block.unique()}
    slots = zip(block.tolist(), depth.tolist(), before.tolist(), label.tolist(), strict=True)
    table = sorted((first[b], d, x, y) for b, d, x, y in slots)
    assert table == [
        (13, 0, 13, 14), (13, 1, 14, 15), (13, 2, 15, 16),
        (14, 0, 14, 15), (14, 1, 15, 16), (15, 0, 15, 16), (18, 0, 18, 19),
    ]  # fmt: skip


def test_some_positions_are_anchors() -> None:
    sample = row(list(range(1, 90)) + [7] * 12, (0, 101))
    depths = draw_depths(
        batching.collate([sample], 0, 1), K, Retention(1.0, 1.0, anchors=0.25), skip=1
    )
    assert int((depths > 0).sum()) == 25
    assert int((depths == K).sum()) >= 22


def test_the_loss_is_that_of_the_definitions(monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches teacher rows, weights, the correction or the confidence's label of another slot."""
    trainee = trainee_of("dspark", tiny_model("llama"), vocab=0)
    batch = batching.collate(SAMPLES, 0)
    sums = trainee.loss(trainee.model, batch)
    teacher, states, _, _, depth, before = inputs_of(trainee, batch, monkeypatch)
    with torch.no_grad():
        log_p = trainee.teacher.head(teacher).log_softmax(-1)
        markov = trainee.net.markov_head
        bias = markov.markov_w2.weight @ markov.markov_w1.weight[before].T
        log_q = (trainee.net.base_logits(states) + bias.T).log_softmax(-1)
        weight = 0.8**depth
        loss = weight * (log_p.exp() * (log_p - log_q)).sum(-1)
        alpha = 1 - (log_p.exp() - log_q.exp()).abs().sum(-1) / 2
        c = trainee.net.confidence(states, before).sigmoid()
        miss = -(alpha * c.log() + (1 - alpha) * (1 - c).log())
    assert float(sums["loss"].detach()) == pytest.approx(
        float((loss + weight * miss).sum()), rel=1e-4
    )
    assert float(sums["alpha_1"]) == pytest.approx(float(alpha[depth == 0].sum()), rel=1e-4)


def test_dpard_is_that_of_the_definitions(monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches weights by the sample's tokens, a confidence weighed like the loss, blocks that are mixed, and weights
    that carry a gradient: of a block with acceptances a_k it is the sum over k of w_k R_k + r_k BCE_k, in float64."""
    monkeypatch.setattr(chunked_sums, "max_chunk_rows", lambda vocab_size: 5)
    trainee = trainee_of("dspark", tiny_model("llama"), LossWeights("dpard"), "renyi_half", vocab=0)
    batch = batching.collate(SAMPLES, 0)
    teacher, states, label, block, depth, before = inputs_of(trainee, batch, monkeypatch)
    states = states.detach().requires_grad_()
    sums = trainee.model.loss(teacher, states, label, block, depth, before)
    (found,) = torch.autograd.grad(sums["loss"], states)

    log_p = trainee.teacher.head(teacher).double().log_softmax(-1)
    log_q = trainee.net.logits(states, before).double().log_softmax(-1)
    alpha = torch.minimum(log_p.exp(), log_q.exp()).sum(-1).detach()
    c = trainee.net.confidence(states, before).double().sigmoid()
    miss = -(alpha * c.log() + (1 - alpha) * (1 - c).log())
    renyi = -2 * (log_p.exp() * log_q.exp()).sqrt().sum(-1).log()
    total = torch.zeros((), dtype=torch.float64)
    for number in block.unique():
        chain = [int((block == number).nonzero()[i]) for i in range(int((block == number).sum()))]
        assert depth[chain].tolist() == [*range(len(chain))]
        prefix = (0.5 * alpha[chain] + 0.5).cumprod(0)
        for k, slot in enumerate(chain):
            total = total + prefix[k:].sum() * renyi[slot] + alpha[chain[:k]].prod() * miss[slot]
    torch.testing.assert_close(float(sums["loss"]), float(total), rtol=1e-4, atol=0)
    (wanted,) = torch.autograd.grad(total, states)
    torch.testing.assert_close(found, wanted, rtol=1e-3, atol=1e-5)
