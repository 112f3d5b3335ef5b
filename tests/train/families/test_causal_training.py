"""A small LM's loss: what a plain forward of both models gives, without their logits ever being there at once."""

from typing import Any

import pytest
import torch
from torch import Tensor

from decode.model import attention
from decode.model.hidden_states import HiddenStateSpec, LMHead
from tests.params import rotated, slow_except
from tests.tiny import ARCHITECTURES, FEW, noisy, reference, tiny_model, tiny_target
from tests.train.families.test_heads_training import SAMPLES, assert_same
from tests.train.losses.test_loss_memory import Live
from train.data import batching
from train.data.batching import Batch
from train.families.causal import CausalTrainer
from train.losses import chunked_sums
from train.losses.chunked_sums import max_chunk_rows
from train.losses.divergences import acceptance, forward_kl
from train.losses.objective import Criterion
from train.settings.training import DivergenceConfig
from train.teacher.live import LiveTeacher, TeacherOutput

Learned = tuple[dict[str, float], dict[str, Tensor]]


def trainer_of(
    model: Any, how: DivergenceConfig | None = None
) -> tuple[CausalTrainer, LiveTeacher]:
    """A draft that is a disturbed copy of its target."""
    teacher = LiveTeacher(tiny_target(model), HiddenStateSpec())
    lm = noisy(model, 0.05)
    lm.set_attn_implementation(attention.ATTENTION_NAME)
    return CausalTrainer(lm, teacher.head, Criterion("forward_kl", how)), teacher


def learned(trainer: CausalTrainer, teacher: LiveTeacher, batch: Batch) -> Learned:
    trainer.zero_grad(set_to_none=True)
    sums = trainer(batch, teacher.get_output(batch))
    sums["loss"].backward()
    grads = {n: p.grad.clone() for n, p in trainer.named_parameters() if p.grad is not None}
    return {name: value.item() for name, value in sums.items()}, grads


@pytest.mark.parametrize("arch", slow_except(ARCHITECTURES, FEW))
def test_it_is_the_loss_of_a_plain_forward(arch: str) -> None:
    """Catches logits without a model's own scale or cap, another position's, and parameters without their gradient;
    both models run by transformers' own attention, sample by sample."""
    model = tiny_model(arch)
    trainer, teacher = trainer_of(model)
    found = learned(trainer, teacher, batching.collate(SAMPLES[:4], 0))
    plain, own = reference(model), reference(noisy(model, 0.05))
    want = {"loss": 0.0, "overlap": 0.0, "top1": 0.0}
    for row in SAMPLES[:4]:
        ids, at = torch.tensor([list(row["input_ids"])]), batching.supervised_positions(row)
        with torch.no_grad():
            p_logits = plain(input_ids=ids, use_cache=False).logits[0, at]
        q_logits = own(input_ids=ids, use_cache=False).logits[0, at]
        loss = forward_kl(p_logits, q_logits).sum()
        loss.backward()
        want["loss"] += float(loss.detach())
        want["overlap"] += float(acceptance(p_logits, q_logits).sum().detach())
        want["top1"] += float((p_logits.argmax(-1) == q_logits.argmax(-1)).sum())
    grads = {f"lm.{n}": p.grad for n, p in own.named_parameters() if p.grad is not None}
    assert_same(found, (want, grads))


@pytest.mark.parametrize(("arch", "tied"), rotated(["llama", "gemma2", "granite"], [False, True]))
def test_in_chunks_it_is_the_same(arch: str, tied: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches sums or gradients of the last chunk only; a tied embedding has a gradient from both its uses."""
    trainer, teacher = trainer_of(
        tiny_model(arch, tie_word_embeddings=tied), DivergenceConfig(temperature=1.5, top=9)
    )
    batch = batching.collate(SAMPLES, 0)
    plain = learned(trainer, teacher, batch)
    monkeypatch.setattr(chunked_sums, "max_chunk_rows", lambda vocab_size: 7)
    assert_same(learned(trainer, teacher, batch), plain)


def test_nothing_to_learn_is_zero_for_every_parameter() -> None:
    """Catches NaN, and a process that waits for gradients which another's batch does not give."""
    trainer, teacher = trainer_of(tiny_model("llama"))
    batch = batching.collate(SAMPLES[:2], 0)
    batch.loss_mask[:] = False
    sums, grads = learned(trainer, teacher, batch)
    assert set(sums.values()) == {0.0}
    assert list(grads) == [name for name, _ in trainer.named_parameters()]
    assert all(float(grad.abs().max()) == 0 for grad in grads.values())


@pytest.mark.parametrize("chunked", [True, False])
def test_the_logits_of_all_positions_never_exist(
    chunked: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Catches an [N, V] of both models, which at Qwen's vocabulary is what a GPU runs out of memory with. In one chunk
    the count is high, so it sees what it should."""
    size, positions, rows = 151_936, 64, 4
    model = tiny_model("llama", vocab_size=size, num_hidden_layers=1, hidden_size=8, head_dim=2)
    if chunked:
        assert max_chunk_rows(size, 4 * size * rows) == rows
        monkeypatch.setattr(chunked_sums, "max_chunk_rows", lambda vocab_size: rows)
    lm = noisy(model, 0.05)
    lm.set_attn_implementation(attention.ATTENTION_NAME)
    target = tiny_target(model).runner.model
    trainer = CausalTrainer(lm, LMHead(target), Criterion("forward_kl"))
    batch = Batch(torch.arange(positions)[None], torch.ones(1, positions, dtype=torch.bool))
    look = TeacherOutput(torch.zeros(1, positions, 0), torch.randn(1, positions, 8))
    whole, weights = 4 * positions * size, 4 * size * 8
    with Live() as live:
        trainer(batch, look)["loss"].backward()
    if chunked:
        assert live.peak < 10 * whole * rows / positions + 6 * weights
        assert live.peak < whole
    else:
        assert live.peak > 4 * whole
