"""What heads are trained on is what they do in decoding; how their losses add up; what moves and what does not."""

import dataclasses
import json
import shutil
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Literal
from unittest import mock

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from decode.checkpoints import layouts
from decode.checkpoints.draft_folder import METADATA_FILE
from decode.common.errors import UserError
from decode.common.typed_json import to_json
from decode.drafts import drafting
from decode.drafts.base import Draft, DraftContext
from decode.drafts.eagle_model import Eagle1Model, Eagle3Model
from decode.drafts.medusa import MedusaModel
from decode.drafts.registry import load_draft
from decode.engine.engine import decode
from decode.model.loading import Target, load_target
from decode.verification.sampling import SamplingParams
from tests import worlds
from tests.heads import hf_states, randomise
from tests.params import rotated
from tests.tiny import VOCAB, rope, tiny_model, tiny_prompts, tiny_target
from tests.train.test_distill_command import (
    COMMAND,
    WEIGHTS,
    arguments,
    facts_of,
    losses_of,
    metrics_of,
    norms_of,
)
from tests.worlds import Done
from train.data import batching, sample_store, vocab_mapping
from train.data.batching import Batch
from train.data.sample_store import SampleRow
from train.families import eagle, head_loss, medusa, ttt_attention
from train.families.alignment import AlignedIndices, Alignment
from train.families.base import FamilyContext, TrainableDraft
from train.families.builders import build_trainable
from train.families.settings.base import FamilySettings
from train.families.settings.causal import CausalSettings
from train.families.settings.eagle import Eagle1Settings, Eagle3Settings
from train.families.settings.heads import MedusaSettings
from train.losses import chunked_sums, divergences
from train.settings.training import LossWeights
from train.trainer.loop import window_means
from train.trainer.settings import DistillConfig

STEPS, TAPS = 4, [0, 1, 2]
ROPE = rope("llama3", rope_theta=5e4, factor=4.0, low_freq_factor=1.0, high_freq_factor=4.0)
DRAFTS: dict[str, FamilySettings] = {
    "medusa": MedusaSettings(heads=STEPS),
    "eagle1": Eagle1Settings(),
    "eagle3": Eagle3Settings(steps=STEPS, vocab=60, taps=TAPS),
    "whole": Eagle3Settings(steps=STEPS, vocab=0, taps=TAPS),
    "narrow": Eagle3Settings(steps=STEPS, vocab=0, taps=TAPS, width=16),
    "normed": Eagle3Settings(steps=STEPS, vocab=60, taps=TAPS, norms=["fc_norm", "norm_output"]),
    "normed first": Eagle3Settings(
        steps=STEPS, vocab=0, taps=TAPS, norms=["norm_before_residual", "norm_before_fc"]
    ),
}
"""`eagle3` has a reduced vocabulary, `narrow` an embedding of its own."""
EAGLES3 = ["eagle3", "narrow"]
FEW = ["medusa", "eagle1", *EAGLES3]


def row(ids: Sequence[int], *spans: tuple[int, int]) -> SampleRow:
    """A sample in which the target wrote the tokens of these [start, end)."""
    return SampleRow(
        id="x",
        source="test",
        origin="target",
        input_ids=ids,
        loss_spans=[list(span) for span in spans],
        finish_reason="length",
    )


SAMPLES = [
    row(ids, (len(ids) // 3, len(ids)))
    for ids in tiny_prompts(20, 13, 9, 31, 12, 6, 18, 25, seed=7)
]


def trainee_of(
    family: str, own: Target, seed: int | None = 0, weights: LossWeights | None = None,
    loss: str = "forward_kl",
) -> TrainableDraft:  # fmt: skip
    """Heads as train/distill.py makes them; all parameters at random with a `seed`, else as training starts."""
    settings = DistillConfig(draft=DRAFTS[family], weights=weights or LossWeights(), loss=loss)  # type: ignore[arg-type]
    trainee = build_trainable(settings.draft, FamilyContext(settings, own, SAMPLES))
    if seed is not None:
        randomise(net_of(trainee), seed)
    return trainee


def net_of(trainee: TrainableDraft) -> Any:
    return next(
        m for m in trainee.model.modules() if isinstance(m, MedusaModel | Eagle1Model | Eagle3Model)
    )


def model_of(**changes: Any) -> Any:
    """RoPE whose frequencies depend on more than 10000 and the size of a head."""
    return tiny_model("llama+llama3", **(ROPE | changes))


def learned(trainee: TrainableDraft, batch: Batch) -> tuple[dict[str, float], dict[str, Tensor]]:
    """The objective's sums and the gradients of its loss."""
    trainee.model.zero_grad(set_to_none=True)
    sums = trainee.loss(trainee.model, batch)
    sums["loss"].backward()
    grads = {
        name: value.grad.clone()
        for name, value in trainee.model.named_parameters()
        if value.grad is not None
    }
    return {name: value.item() for name, value in sums.items()}, grads


def collate(*rows: SampleRow, pad: int = 0, multiple: int = 1) -> Batch:
    return batching.collate(rows, pad, multiple)


def assert_same(
    here: tuple[dict[str, float], dict[str, Tensor]],
    there: tuple[dict[str, float], dict[str, Tensor]],
) -> None:
    assert here[0] == pytest.approx(there[0], rel=1e-4, abs=1e-4)
    assert here[1].keys() == there[1].keys()
    for name, grad in here[1].items():
        scale = 1e-5 + 1e-4 * float(grad.abs().max())
        torch.testing.assert_close(grad, there[1][name], rtol=1e-3, atol=scale)


# ---- training-time test is what decoding does ----


@dataclasses.dataclass
class World:
    """A text, what a plain forward of transformers says of it, and heads."""

    own: Target
    ids: list[int]
    states: list[Tensor]
    logits: Tensor  # [T, V]
    trainee: TrainableDraft
    decay: float


def world_of(family: str, length: int = 12) -> World:
    model = model_of()
    (ids,) = tiny_prompts(length, seed=3)
    states, logits = hf_states(model, ids)
    own, weights = tiny_target(model), LossWeights(decay=0.7, feature=0.0, divergence=1.0)
    return World(own, ids, states, logits, trainee_of(family, own, 1, weights), weights.decay)


def decoder_laws(world: World, steps: int) -> Tensor:
    """[T - 1, steps, V]: from each slot t the laws that the draft gives when it has read x_0 .. x_{t+1} and drafts
    x_{t+2}, x_{t+3}, …, as the engine would ask it: all slots are rows of one batch."""
    draft: Draft = world.trainee.to_draft()
    taps = draft.reads.aux_layers
    assert taps is not None
    tapped = [world.states[i] for i in taps.layers]
    tapped += [world.states[-1]] if taps.final else []
    features = torch.cat(tapped, -1)
    count, places = len(world.ids) - 1, torch.arange(len(world.ids) - 1)
    text = torch.tensor([*world.ids, *[0] * (steps + 1)])
    turns = iter(range(steps))

    def choose(weights: Tensor) -> Tensor:
        return text[places + 2 + next(turns)]

    # `choose` gives ids of the text, also those that a reduced vocabulary lacks
    chosen = mock.patch.object(drafting, "token_ids", lambda vocab, index: index)
    with torch.inference_mode(), chosen:
        draft.begin_batch(
            DraftContext(count, len(text) + steps + 2, steps, SamplingParams(1.0), choose)
        )
        every = text.expand(count, -1)
        draft.prefill(places, every[:, :count], places + 1, features[:-1].expand(count, -1, -1))
        laws = draft.propose(every, places + 2, steps).q
    assert laws is not None
    return laws


def brute_force(world: World, laws: Tensor, start: int, end: int) -> dict[str, float]:
    """The sums that training shall give where the target wrote tokens `start` .. `end` - 1."""
    whole = torch.softmax(world.logits, -1)
    ids = getattr(net_of(world.trainee), "ids", None)
    ids = torch.arange(whole.shape[-1]) if ids is None else ids
    found = {"loss": 0.0}
    for j in range(laws.shape[1]):
        alpha, top1, count = 0.0, 0.0, 0
        for t in range(start - 1, end - 2 - j):  # x_{t+1} is the target's, and so is x_{t+2+j}
            law, q = whole[t + 1 + j], laws[t, j]
            p = law[ids] / law[ids].sum()
            found["loss"] += world.decay**j * float((p * (p / q[ids]).log()).sum())
            alpha += float(torch.minimum(law, q).sum())
            top1 += float(law.argmax() == q.argmax())
            count += 1
        found |= {f"alpha_{j + 1}": alpha, f"top1_{j + 1}": top1, f"count_{j + 1}": float(count)}
    return found


def steps_of(family: str) -> int:
    return 1 if family == "eagle1" else STEPS


LONG = [(3, 12)]
SHORT = [(a, b) for a in range(1, 11) for b in range(a + 1, min(a + STEPS + 1, 12) + 1)]
"""Answers that tell slots and steps apart: two tokens are one slot at step 0, each more adds a slot a step."""


@torch.no_grad()
def error_of(
    family: str,
    spans: list[tuple[int, int]],
    spoil: Callable[[TrainableDraft], None] = lambda trainee: None,
) -> float:
    """The largest error of a sum in training, over samples in which the target wrote these tokens."""
    world = world_of(family)
    laws = decoder_laws(world, steps_of(family))
    spoil(world.trainee)
    trainee, worst = world.trainee, 0.0
    for span in spans:
        sums = trainee.loss(trainee.model, collate(row(world.ids, span)))
        want = brute_force(world, laws, *span)
        assert sums.keys() - {"feature"} == want.keys()
        worst = max(worst, *(abs(float(sums[name]) - value) for name, value in want.items()))
    return worst


def expected_length_loss(
    how: str, world: World, laws: Tensor, start: int, end: int, a: float = 0.5
) -> float:
    """The loss that D-PACE's weights shall give, or D-PARD's: slot by slot, by the definition."""
    whole = torch.softmax(world.logits, -1)
    ids = getattr(net_of(world.trainee), "ids", None)
    ids = torch.arange(whole.shape[-1]) if ids is None else ids
    total = 0.0
    for t in range(start - 1, end - 2):
        steps = min(laws.shape[1], end - 2 - t)  # how far the target's text goes on
        reach, weights = 1.0, [0.0] * steps
        for k in range(steps):
            sure = laws[t, k, world.ids[t + 2 + k]]
            if how == "dpard":
                sure = torch.minimum(whole[t + 1 + k], laws[t, k]).sum()
            reach *= (1 - a) * float(sure) + a
            weights = [w + reach if i <= k else w for i, w in enumerate(weights)]
        for j in range(steps):
            law, q = whole[t + 1 + j], laws[t, j]
            p = law[ids] / law[ids].sum()
            total += weights[j] * float((p * (p / q[ids]).log()).sum())
    return total


@torch.no_grad()
def expected_length_error(family: str, how: Literal["dpace", "dpard"] = "dpace") -> float:
    """The largest relative error of the loss weighed by D-PACE or D-PARD, over several samples."""
    world = world_of(family)
    laws = decoder_laws(world, steps_of(family))
    trainee = trainee_of(family, world.own, 1, LossWeights(how, feature=0.0, divergence=1.0))
    worst = 0.0
    for span in [*LONG, *SHORT]:
        want = expected_length_loss(how, world, laws, *span)
        found = float(trainee.loss(trainee.model, collate(row(world.ids, span)))["loss"])
        worst = max(worst, abs(found - want) / (want + 1e-3))
    return worst


@pytest.mark.parametrize("how", ["dpace", "dpard"])
@pytest.mark.parametrize("family", DRAFTS)
def test_weights_of_the_steps_of_a_slot(
    family: str, how: Literal["dpace", "dpard"], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Catches products over the steps of a target row, which are of different slots; confidence in another token than
    the one that followed, or in a number of the draft's own; and pieces that are put together wrong."""
    monkeypatch.setattr(chunked_sums, "max_chunk_rows", lambda vocab_size: 5)
    assert expected_length_error(family, how) < 1e-4


@pytest.mark.parametrize("family", FEW[:1] + EAGLES3)
def test_dpace_over_rows_is_seen(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The test above is blind if weights of the steps of a row pass it."""

    def over_rows(
        weights: LossWeights, rows: head_loss.SupervisedRows, step_logits: Any, slots: Tensor,
        ids: Any, *_: Any,
    ) -> Tensor:  # fmt: skip
        sure = [head_loss.label_probability(q, rows.label, ids) for q in step_logits(slots)]
        return divergences.dpace(torch.stack(sure, 1), rows.valid)

    for module in (medusa, eagle):
        monkeypatch.setattr(module, "step_weights", over_rows)
    assert expected_length_error(family) > 1e-2


EXACT, CLEAR = 2e-5, 5e-3


@pytest.mark.parametrize("family", DRAFTS)
def test_training_sees_what_decoding_does(family: str) -> None:
    """Catches any difference between step j in training and the j-th token in decoding (methods 2, 3, 4, 6, 15): a
    position, token, feature or key one off, slots that decoding never starts from, the first one that is missing (1),
    and metrics of other places than the loss."""
    assert error_of(family, [*LONG, *SHORT]) < EXACT


class Square:
    """TestTimeAttention as one softmax over a square mask of all T keys and each later step's M.

    `own` "causal" (BaldEagle's bug) shows a slot what earlier ones said of themselves, "twice" its own first key again.
    """

    def __init__(
        self, keys: Tensor, values: Tensor, slots: Tensor, numbers: Tensor | None = None,
        own: str = "diagonal",
    ):  # fmt: skip
        at = torch.arange(keys.shape[2])
        self.seen = at <= slots[..., None]
        if numbers is not None:
            self.seen &= numbers.gather(1, slots)[..., None] == numbers[:, None]
        self.keys, self.values = [keys], [values]
        self.own = own

    def step(self, j: int) -> Any:
        return partial(self.attend, j)

    def attend(self, j: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        if j > 0 or self.own == "twice":
            self.keys.append(k)
            self.values.append(v)
        count, groups = q.shape[2], q.shape[1] // k.shape[1]
        later = torch.ones(count, count, dtype=torch.bool)
        later = later.tril() if self.own == "causal" else torch.eye(count, dtype=torch.bool)
        columns = [self.seen, *[later.expand(len(q), -1, -1)] * (len(self.keys) - 1)]
        keys = torch.cat(self.keys, 2).repeat_interleave(groups, 1)
        values = torch.cat(self.values, 2).repeat_interleave(groups, 1)
        scores = torch.einsum("bhmd,bhtd->bhmt", q, keys) / q.shape[-1] ** 0.5
        scores = scores.masked_fill(~torch.cat(columns, -1)[:, None], float("-inf"))
        return torch.einsum("bhmt,bhtd->bmhd", scores.softmax(-1), values)


STEP, SLOT_OF = Alignment.step, head_loss.SupervisedRows.values_at_slots


def still(self: Alignment, j: int) -> AlignedIndices:
    """RoPE at t for every step."""
    return dataclasses.replace(STEP(self, j), position=self.position)


def stale(self: Alignment, j: int) -> AlignedIndices:
    """Every step reads the token of the one before it."""
    return dataclasses.replace(STEP(self, j), token=STEP(self, max(0, j - 1)).token)


def eager(self: Alignment, j: int) -> AlignedIndices:
    """Slots count from the prompt's last but one token on: a label in the answer is enough."""
    places = STEP(self, j)
    valid = places.valid | torch.cat([places.valid[:, 1:], places.valid[:, :1]], 1)
    return dataclasses.replace(places, valid=valid)


def one_early(self: head_loss.SupervisedRows, values: Tensor, j: int) -> Tensor:
    """Row u is compared with slot u - 2 - j."""
    return SLOT_OF(self, values, j + 1)


def late_features(trainee: TrainableDraft) -> None:
    net = net_of(trainee)
    start = net.init_state
    net.init_state = lambda features: start(features.roll(1, 1))


BUGS: dict[str, tuple[list[str], tuple[Any, str, Any] | None]] = {
    "position not shifted": (EAGLES3, (Alignment, "step", still)),
    "token not shifted": (EAGLES3, (Alignment, "step", stale)),
    "keys of other slots": (EAGLES3, (eagle, "TestTimeAttention", partial(Square, own="causal"))),
    "first key twice": (EAGLES3, (eagle, "TestTimeAttention", partial(Square, own="twice"))),
    "feature one off": (["eagle1", *EAGLES3], None),
    "row one off": (FEW, (head_loss.SupervisedRows, "values_at_slots", one_early)),
    "slots of the prompt": (FEW, (Alignment, "step", eager)),
}


@pytest.mark.parametrize(
    ("bug", "family"), [(bug, family) for bug, (families, _) in BUGS.items() for family in families]
)
def test_planted_bugs_are_seen(bug: str, family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The test above is blind if one of these goes unseen."""
    patch = BUGS[bug][1]
    if patch is not None:
        monkeypatch.setattr(*patch)
    assert error_of(family, LONG, (lambda trainee: None) if patch else late_features) > CLEAR


def test_a_square_mask_in_training_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards the bugs above that are planted in the square: without one of them it is right."""
    monkeypatch.setattr(eagle, "TestTimeAttention", Square)
    assert error_of("eagle3", LONG) < EXACT


def test_eagle1_learns_the_feature_one_later(monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches a feature loss against f_t, which the head reads and could copy (methods 2), and weights mixed up."""
    world = world_of("eagle1")
    said: list[Tensor] = []
    draft: Any = world.trainee.to_draft()
    forward = draft._forward

    def watched(*inputs: Tensor) -> Tensor:
        said.append(forward(*inputs))
        return said[-1]

    draft._forward = watched
    monkeypatch.setattr(world.trainee, "to_draft", lambda: draft)
    laws = decoder_laws(world, 1)
    features = world.states[-1][1:]
    near = torch.nn.functional.smooth_l1_loss(said[-1][:, -1], features, reduction="none").mean(-1)
    trainee = trainee_of("eagle1", world.own, 1, LossWeights(feature=2.0, divergence=0.5))
    sums = trainee.loss(trainee.model, collate(row(world.ids, (4, 12))))
    slots = slice(3, 10)
    assert float(sums["feature"]) == pytest.approx(float(near[slots].sum()), rel=1e-4)
    divergence = brute_force(world, laws, 4, 12)["loss"]
    assert sums["loss"].item() == pytest.approx(2 * float(near[slots].sum()) + divergence / 2, 1e-4)


# ---- attention of the training-time test ----


@pytest.mark.parametrize("block", [512, 3])
@pytest.mark.parametrize("documents", [False, True])
@pytest.mark.parametrize("kv_heads", [4, 2, 1])
def test_attention_is_a_square_with_a_mask(
    kv_heads: int, documents: bool, block: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Catches key heads given to the wrong query heads, keys of a step that are seen by other slots or weighed apart
    from the rest, lost gradients, and blocks that are not the whole; values and gradients, slots in any order."""
    monkeypatch.setattr(ttt_attention, "BLOCK", block)
    rows, length, count, size = 2, 9, 7, 8
    slots = torch.stack([torch.randperm(length)[:count] for _ in range(rows)])
    numbers = torch.tensor([[0] * 4 + [1] * 5, [0] * 2 + [1] * 7])
    texts = numbers if documents else None
    shapes = [(rows, kv_heads, length, size)] * 2
    shapes += [(rows, h, count, size) for _ in range(STEPS) for h in (4, kv_heads, kv_heads)]
    given = [torch.randn(shape, dtype=torch.float64) for shape in shapes]
    weights = torch.randn(STEPS, rows, count, 4, size, dtype=torch.float64)

    def outcome(kind: Any) -> tuple[Tensor, list[Tensor | None]]:
        inputs = [x.clone().requires_grad_() for x in given]
        attention = kind(inputs[0], inputs[1], slots, texts)
        steps = [inputs[at : at + 3] for at in range(2, len(inputs), 3)]
        out = torch.stack([attention.step(j)(*given) for j, given in enumerate(steps)])
        (out * weights).sum().backward()
        return out.detach(), [x.grad for x in inputs]

    (here, grads), (there, wanted) = outcome(ttt_attention.TestTimeAttention), outcome(Square)
    torch.testing.assert_close(here, there, rtol=1e-5, atol=1e-5)  # it has a softmax in fp32
    for grad, want in zip(grads, wanted, strict=True):
        assert (grad is None) == (
            want is None
        )  # the first step's own k and v, which are among `keys`
        if grad is not None and want is not None:
            torch.testing.assert_close(grad, want, rtol=1e-4, atol=1e-5)
    with torch.no_grad():
        attention = ttt_attention.TestTimeAttention(given[0], given[1], slots, texts)
        first = attention.step(0)(given[2], given[3], given[4])
    torch.testing.assert_close(first, there[0], rtol=1e-5, atol=1e-5)


# ---- sums over slots, and nothing else ----


@pytest.fixture(scope="module")
def own() -> Target:
    return tiny_target(model_of())


@pytest.mark.parametrize("family", FEW)
def test_padding_changes_nothing(family: str, own: Target) -> None:
    """Catches padded rows that are learned as a uniform law (methods 7), or are seen."""
    trainee = trainee_of(family, own)
    plain = learned(trainee, collate(SAMPLES[0]))
    assert plain[0]["count_1"] == 13
    assert_same(learned(trainee, collate(SAMPLES[0], pad=5, multiple=32)), plain)


@pytest.mark.parametrize("family", FEW)
def test_a_batch_is_the_sum_of_its_samples(family: str, own: Target) -> None:
    """Catches means over slots or rows of a batch (methods 8, 36): the gradient would depend on the company."""
    trainee = trainee_of(family, own)
    alone = [learned(trainee, collate(sample)) for sample in SAMPLES]
    sums = {name: sum(one[0][name] for one in alone) for name in alone[0][0]}
    grads = {name: torch.stack([one[1][name] for one in alone]).sum(0) for name in alone[0][1]}
    assert_same(learned(trainee, collate(*SAMPLES)), (sums, grads))
    assert_same(learned(trainee, collate(*reversed(SAMPLES))), (sums, grads))


@pytest.mark.parametrize("family", FEW)
def test_in_chunks_it_is_the_same(
    family: str, own: Target, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Catches steps of a slot that are torn apart by chunks, and gradients or metrics of the last chunk only."""
    trainee = trainee_of(family, own)
    batch = collate(*SAMPLES[:4])
    plain = learned(trainee, batch)
    monkeypatch.setattr(chunked_sums, "max_chunk_rows", lambda vocab_size: 7)
    monkeypatch.setattr(ttt_attention, "BLOCK", 5)
    assert_same(learned(trainee, batch), plain)


def without_context(family: str) -> tuple[Target, TrainableDraft]:
    """Target and heads whose attention adds nothing and learns nothing: a state is a matter of its own token."""
    own = tiny_target(model_of())
    trainee = trainee_of(family, own)
    net = net_of(trainee)
    layers = list(own.runner.model.model.layers)
    layers += [] if isinstance(net, MedusaModel) else [net.layer]
    with torch.no_grad():
        for layer in layers:
            layer.self_attn.o_proj.weight.zero_()
            layer.self_attn.v_proj.weight.zero_()
    return own, trainee


@pytest.mark.parametrize("family", FEW)
def test_the_prompts_length_does_not_weigh_on_the_answer(family: str) -> None:
    """Catches losses averaged over slots that are not trained (methods 8)."""
    _, trainee = without_context(family)
    long, answer = tiny_prompts(30, 9)
    short = long[-2:]
    ends = [row([*prompt, *answer], (len(prompt), len(prompt) + 9)) for prompt in (short, long)]
    here, there = (learned(trainee, collate(sample)) for sample in ends)
    assert here[0]["count_1"] == 8
    assert_same(here, there)


@pytest.mark.parametrize("family", FEW)
def test_the_first_slot_is_the_prompts_last_token(family: str) -> None:
    """Catches a mask that is not shifted with its ids (methods 1): without context the loss hangs on the states that
    slots start from, the tokens they read and the laws they learn, so on x_{s-1} .. x_{e-2} and no other."""
    _, trainee = without_context(family)
    (ids,) = tiny_prompts(14)
    start, end = 5, 11

    def loss(ids: list[int]) -> float:
        return learned(trainee, collate(row(ids, (start, end))))[0]["loss"]

    plain = loss(ids)
    matters = [
        at
        for at in range(len(ids))
        if abs(loss([*ids[:at], (ids[at] + 1) % VOCAB, *ids[at + 1 :]]) - plain) > 1e-3
    ]
    assert matters == list(range(start - 1, end - 1))


@pytest.mark.parametrize("family", FEW)
@pytest.mark.parametrize("answer", [0, 1])
def test_nothing_to_learn_is_zero_for_every_parameter(
    family: str, answer: int, own: Target
) -> None:
    """Catches NaN, or a process that waits for gradients which another's batch does not give (methods 8): an answer of
    one token is never drafted."""
    trainee = trainee_of(family, own)
    sums, grads = learned(trainee, collate(row(tiny_prompts(9)[0], (5, 5 + answer))))
    assert set(sums.values()) == {0.0}
    trained = [name for name, value in trainee.model.named_parameters() if value.requires_grad]
    assert list(grads) == trained
    assert all(float(grad.abs().max()) == 0 for grad in grads.values())


@pytest.mark.parametrize("family", FEW)
def test_several_answers_in_a_sample_are_apart(family: str, own: Target) -> None:
    """Catches steps that run on over the user's turn between two answers."""
    trainee = trainee_of(family, own)
    (ids,) = tiny_prompts(20)
    both = learned(trainee, collate(row(ids, (3, 8), (12, 20))))
    one, two = (learned(trainee, collate(row(ids, span))) for span in ((3, 8), (12, 20)))
    sums = {name: value + two[0][name] for name, value in one[0].items()}
    assert_same(both, (sums, {name: grad + two[1][name] for name, grad in one[1].items()}))


def test_metrics_of_some_rows_count_those(own: Target, monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches sums over some rows that are divided by the number of all."""
    trainee, batch = trainee_of("eagle3", own), collate(*SAMPLES)
    every = learned(trainee, batch)
    monkeypatch.setattr(head_loss, "METRIC_ROWS", 20)
    some = learned(trainee, batch)
    assert some[0]["loss"] == pytest.approx(every[0]["loss"])
    assert 20 <= some[0]["count_1"] < 40 < every[0]["count_1"]
    for j in range(1, STEPS + 1):
        assert 0 < some[0][f"alpha_{j}"] < some[0][f"count_{j}"]


def test_means_divide_by_their_own_count() -> None:
    """Catches alpha_2 divided by all supervised tokens, of which fewer have a second step."""
    window = {"loss": 30.0, "tokens": 10.0, "feature": 5.0, "overlap": 4.0}
    window |= {"alpha_1": 4.0, "top1_1": 2.0, "count_1": 8.0}
    window |= {"alpha_2": 3.0, "top1_2": 1.0, "count_2": 4.0}
    window |= {"alpha_3": 0.0, "top1_3": 0.0, "count_3": 0.0}  # answers that are too short
    assert window_means(window) == {
        "loss": 3.0, "feature": 0.5, "overlap": 0.4, "alpha_1": 0.5, "top1_1": 0.25,
        "alpha_2": 0.75, "top1_2": 0.25, "alpha_3": 0.0, "top1_3": 0.0,
    }  # fmt: skip


# ---- what moves ----


@pytest.mark.parametrize(("family", "loss"), rotated(DRAFTS, ["forward_kl", "tv", "top_k"]))
def test_one_step_moves_all_that_is_trained_and_nothing_else(family: str, loss: str) -> None:
    """Catches detached terms, parts left out of the optimiser (methods 10), heads that are one module (33), and a
    target that is trained along."""
    own = tiny_target(model_of())
    trainee = trainee_of(family, own, None, loss=loss)
    params = dict(trainee.model.named_parameters())
    frozen = {name for name, value in params.items() if not value.requires_grad}
    assert frozen == ({"net.fc.bias"} if family == "eagle1" else set())
    state = {name: value.clone() for name, value in net_of(trainee).state_dict().items()}
    target = {name: value.clone() for name, value in own.runner.model.state_dict().items()}
    optimizer = torch.optim.AdamW([p for p in params.values() if p.requires_grad], lr=1e-3)
    learned(trainee, collate(*SAMPLES))
    optimizer.step()
    now = net_of(trainee).state_dict()
    still = {name for name, value in state.items() if torch.equal(value, now[name])}
    assert {f"net.{name}" for name in still} == frozen
    assert all(torch.equal(v, target[n]) for n, v in own.runner.model.state_dict().items())
    assert all(value.grad is None for value in own.runner.model.parameters())


@pytest.mark.parametrize("family", DRAFTS)
def test_the_targets_weights_are_no_parameters_of_heads(family: str, own: Target) -> None:
    """Catches an embedding or head of the target that is optimised, sent around, or saved with every checkpoint."""
    held = {value.data_ptr() for value in own.runner.model.parameters()}
    model = trainee_of(family, own, None).model
    assert held.isdisjoint(value.data_ptr() for value in model.parameters())
    assert held.isdisjoint(value.data_ptr() for value in model.state_dict().values())


def test_medusa_starts_as_the_targets_own_head(own: Target) -> None:
    """Catches blocks that are no identity at first (methods 4): heads that begin from noise lose the target's own."""
    (ids,) = tiny_prompts(9)
    states, logits = hf_states(own.runner.model, ids)
    net = net_of(trainee_of("medusa", own, None))
    for j in range(STEPS):
        assert torch.equal(net.states(states[-1], j), states[-1])
        torch.testing.assert_close(net.logits(states[-1], j), logits, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("tied", [False, True])
def test_eagle3_starts_with_rows_of_the_targets_head(tied: bool) -> None:
    """Catches rows numbered by the draft's ids instead of the target's, and tied heads that get lost (41)."""
    model = model_of(tie_word_embeddings=tied)
    net = net_of(trainee_of("eagle3", tiny_target(model), None))
    assert not torch.equal(net.ids, torch.arange(60))
    assert torch.equal(net.lm_head.weight, model.lm_head.weight[net.ids])


# ---- on disk ----


def directory(folder: Path, trainee: TrainableDraft, own: Target) -> str:
    """The draft directory as train/distill.py leaves it, but for most of its facts."""
    trainee.save(folder)
    facts = {
        "family": trainee.to_draft().name,
        "tokenizer_hash": own.fingerprint,
        **{name: to_json(value) for name, value in trainee.metadata.items()},
    }
    (folder / METADATA_FILE).write_text(json.dumps(facts))
    return str(folder)


@pytest.mark.parametrize("family", DRAFTS)
def test_a_saved_draft_says_what_the_trained_one_said(
    family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Catches RoPE, norms, taps or a vocabulary map that training has and the directory has not (methods 12, 15-17)."""
    world = world_of(family)
    laws = decoder_laws(world, steps_of(family))
    path = directory(tmp_path / "draft", world.trainee, world.own)
    monkeypatch.setattr(world.trainee, "to_draft", lambda: load_draft(path, world.own))
    assert torch.equal(decoder_laws(world, steps_of(family)), laws)


@pytest.mark.parametrize(("family", "flag"), [("normed", "norm_output"), ("whole", "norm_output")])
def test_norms_other_than_those_of_training_are_refused(
    family: str, flag: str, tmp_path: Path
) -> None:
    """Catches a flag that was changed after training, which adds no tensor and makes another function."""
    world = world_of(family)
    path = directory(tmp_path / "draft", world.trainee, world.own)
    file = tmp_path / "draft" / "config.json"
    config = json.loads(file.read_text())
    file.write_text(json.dumps(config | {flag: not config[flag]}))
    with pytest.raises(UserError, match=f"has {flag} {not config[flag]} and was trained"):
        load_draft(path, world.own)


# ---- the command ----

RUN_STEPS, HEADS = 3, 3
FLAGS: dict[str, list[object]] = {
    "medusa": ["--draft.family", "medusa", "--draft.heads", HEADS],
    "eagle1": ["--draft.family", "eagle1"],
    "eagle3": ["--draft.family", "eagle3", "--draft.steps", 3, "--draft.vocab", 100]
    + ["--draft.taps", "[0, 1, 2]"],
}
Run = Callable[..., Done]


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> worlds.World:
    """Prompts, and a target of 3 layers with a RoPE of its own."""
    folder, tokenizer = tmp_path_factory.mktemp("world"), worlds.byte_tokenizer()
    world = worlds.build(folder)
    model = model_of(vocab_size=len(tokenizer), max_position_embeddings=worlds.CONTEXT)
    return dataclasses.replace(world, target=worlds.save(folder / "deep", model, tokenizer))


@pytest.fixture(scope="module")
def data(place: worlds.World, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Samples of that target, of 1 to 40 tokens."""
    out = worlds.sampled(place, tmp_path_factory.mktemp("data"), "--max_new_tokens", 40)
    lengths = [
        end - start for row in sample_store.read_shards(out) for start, end in row["loss_spans"]
    ]
    assert min(lengths) < 5 < 30 < max(lengths)
    return out


def command(place: worlds.World, data: Path, out: Path, family: str, *more: object) -> list[object]:
    """Every step is logged and saved, the last one is measured; no init, as heads start."""
    return [
        *arguments(place, data, out), "--draft.init", "", "--loop.steps", RUN_STEPS,
        "--loop.save_every", 1, "--loop.keep", RUN_STEPS, "--check.k", HEADS, *FLAGS[family], *more,
    ]  # fmt: skip


@pytest.fixture
def distill(place: worlds.World, data: Path, tmp_path: Path) -> Run:
    """Trains this family into tmp_path / "out"."""
    return lambda family, *more: worlds.call(
        COMMAND, *command(place, data, tmp_path / "out", family, *more)
    )


@pytest.fixture(scope="module")
def made(
    place: worlds.World, data: Path, tmp_path_factory: pytest.TempPathFactory
) -> Callable[[str], Path]:
    """The directory of a family's draft that one process trained from start to end."""
    folder = tmp_path_factory.mktemp("made")

    def make(family: str) -> Path:
        out = folder / family
        if not out.exists():
            worlds.call(COMMAND, *command(place, data, out, family)).ok()
        return out

    return make


def same_run(out: Path, other: Path) -> bool:
    """Equal weights, losses, gradients and measurements, bit for bit."""
    names = (["train/loss", "train/grad_norm", "train/lr"], ["accept/tau", "accept/alpha"])
    return (out / WEIGHTS).read_bytes() == (other / WEIGHTS).read_bytes() and all(
        metrics_of(out, *some) == metrics_of(other, *some) for some in names
    )


@pytest.mark.parametrize("family", FLAGS)
def test_the_command_makes_a_draft_that_decodes(
    family: str, place: worlds.World, made: Callable[[str], Path]
) -> None:
    """Catches a draft that is not the one trained, lacks a file, or changes the target's text."""
    out = made(family)
    own = load_target(str(place.target), "cpu")
    draft = load_draft(str(out), own)
    assert draft.name == family
    prompts = [own.tokenizer(text)["input_ids"] for text in place.texts[:4]]
    plain = decode(own, None, prompts, max_new_tokens=24)
    drafted = decode(own, draft, prompts, k=HEADS, max_new_tokens=24)
    assert [o.output_ids for o in drafted] == [o.output_ids for o in plain]
    saved = load_file(out / WEIGHTS)
    last = load_file(out / "checkpoints" / f"step-{RUN_STEPS:06d}" / WEIGHTS)
    kept = {name.removeprefix("net."): value for name, value in last.items()}
    kept = layouts.to_midlayer(kept) if family == "eagle3" else kept
    assert kept.keys() == saved.keys() - {"d2t", "t2d"}
    assert all(torch.equal(value, saved[name]) for name, value in kept.items())
    assert len(losses_of(out)) == RUN_STEPS
    facts = facts_of(out)
    assert facts["family"] == family
    assert facts["measured_in_training"]["accept/tau"] >= 1
    (line,) = metrics_of(out, *(f"train/{name}_{j}" for name in ("alpha", "top1") for j in (1,)))[
        :1
    ]
    assert all(0 <= share <= 1 for share in line[1:])
    if family == "eagle3":
        ids = torch.arange(100) + saved["d2t"]
        assert facts["vocabulary"]["digest"] == vocab_mapping.digest(ids)
        assert 0.5 < facts["vocabulary"]["coverage"] < 1
        assert set(worlds.EOS) < set(ids.tolist())


@pytest.mark.parametrize("family", FLAGS)
def test_started_again_it_ends_with_the_same_bits(
    family: str, distill: Run, made: Callable[[str], Path], tmp_path: Path
) -> None:
    """Catches heads or moments that a checkpoint lacks, and other batches after it."""
    assert distill(family).code == 0
    assert same_run(tmp_path / "out", made(family))
    (tmp_path / "out" / "checkpoints" / "latest").write_text("step-000001\n")  # as if killed there
    (tmp_path / "out" / WEIGHTS).unlink()
    done = distill(family)
    assert "from step 1" in done.err
    assert same_run(tmp_path / "out", made(family))


@pytest.mark.slow
def test_killed_and_started_again_it_ends_with_the_same_bits(
    place: worlds.World, data: Path, distill: Run, made: Callable[[str], Path], tmp_path: Path
) -> None:
    """Catches a checkpoint of heads that is only whole when the process ends in peace."""
    family, out = "eagle3", tmp_path / "out"
    ready = (out / "checkpoints" / "latest").is_file
    assert worlds.kill_when(ready, COMMAND, *command(place, data, out, family)) == -9
    done = distill(family).ok()
    assert "from step 0" not in done.err
    assert same_run(out, made(family))


@pytest.mark.parametrize("family", FLAGS)
def test_micro_batches_do_not_change_the_result(
    family: str, distill: Run, made: Callable[[str], Path], tmp_path: Path
) -> None:
    """Catches losses divided by a micro-batch's own slots (methods 36): 1 x 8 must be 8 x 1."""
    assert distill(family, "--loop.micro_batch", 1).code == 0
    assert_near(tmp_path / "out", made(family))


@pytest.mark.parametrize("family", ["medusa", "eagle3"])
def test_packed_it_is_the_same_run(
    family: str, distill: Run, made: Callable[[str], Path], tmp_path: Path
) -> None:
    """Catches a setting that goes nowhere, and lines that change what a step learns."""
    laid: list[str] = []
    pack = batching.pack
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(batching, "pack", lambda *a, **k: laid.append("") or pack(*a, **k))
        assert distill(family, "--loop.pack", "true").code == 0
    assert len(laid) == RUN_STEPS
    assert_near(tmp_path / "out", made(family))


@pytest.mark.slow
def test_two_processes_equal_one(
    place: worlds.World, data: Path, made: Callable[[str], Path], tmp_path: Path
) -> None:
    """Catches gradients averaged over processes with unequal numbers of slots, and parameters that have none."""
    family, out = "medusa", tmp_path / "out"  # its last head has no slot in short answers
    worlds.fork(COMMAND, *command(place, data, out, family), processes=2).ok()
    assert facts_of(out)["processes"] == 2
    assert_near(out, made(family))


def assert_near(out: Path, other: Path) -> None:
    """The same run but for rounding; AdamW hides a wrong scale of the gradient, so its norm is compared too."""
    assert losses_of(out) == pytest.approx(losses_of(other), abs=1e-4)
    assert norms_of(out) == pytest.approx(norms_of(other), rel=1e-3)
    for name in ("alpha_1", "count_1"):
        if metrics_of(other, f"train/{name}"):
            here, there = (metrics_of(x, f"train/{name}") for x in (out, other))
            assert [v for _, v in here] == pytest.approx([v for _, v in there], abs=1e-3)


@pytest.mark.parametrize("family", FLAGS)
def test_it_goes_on_from_saved_heads(
    family: str, distill: Run, made: Callable[[str], Path], tmp_path: Path
) -> None:
    """Catches heads that start anew, and a vocabulary map that is counted again for weights that have another (13).
    What is not given is that of the saved draft."""
    init = ["--draft.init", made(family), "--loop.lr", 1e-30]
    default = {"eagle3": ["--draft.taps", "[]"], "medusa": ["--draft.heads", 4]}
    distill(family, *init, *default.get(family, [])).ok()  # as good as not given
    before, after = load_file(made(family) / WEIGHTS), load_file(tmp_path / "out" / WEIGHTS)
    assert before.keys() == after.keys()
    assert all(torch.equal(value, after[name]) for name, value in before.items())
    configs = [
        json.loads((x / "config.json").read_text()) for x in (made(family), tmp_path / "out")
    ]
    assert configs[0] == configs[1]


@pytest.mark.parametrize(
    ("family", "wrong", "named"),
    [
        ("eagle3", ["--draft.taps", "[0, 2, 1]"], "name layers in rising order"),
        ("eagle3", ["--draft.taps", "[0, 1, 1]"], "each once"),
        ("eagle3", ["--draft.taps", "[]"], "a target of 3 layers has no three default taps"),
        ("eagle3", ["--draft.taps", "[0, 1, 3]"], "no layer 3 to tap"),
        ("eagle3", ["--draft.taps", "[-1, 0, 1]"], "draft.taps[0] is -1"),
        ("eagle3", ["--draft.vocab", 11], "a draft vocabulary of 11 cannot hold 12 tokens"),
        ("eagle3", ["--draft.vocab", -1], "vocab"),
        ("eagle3", ["--draft.width", -8], "width"),
        ("eagle3", ["--draft.steps", 0], "steps"),
        ("eagle3", ["--draft.norms", "[fc_norm, norm_before_fc]"], "exclude each other"),
        ("eagle3", ["--draft.norms", "[norm]"], "norms"),
        ("medusa", ["--draft.heads", 0], "heads"),
        ("medusa", ["--check.k", HEADS + 1], "has 3 heads: give k (or a tree) of at most 3"),
        (
            "medusa",
            ["--draft.init", "missing"],
            "draft 'missing' cannot be fetched: there is no such path",
        ),
    ],
)
def test_bad_input_is_one_line_and_makes_no_folder(
    family: str, wrong: list[object], named: str, distill: Run, tmp_path: Path
) -> None:
    """Catches tracebacks, and what is found out only when the first measurement comes."""
    assert named in distill(family, *wrong).error()
    assert not (tmp_path / "out").exists()


def test_heads_fewer_than_k_may_be_trained_unmeasured(distill: Run) -> None:
    """Catches a refusal of what nobody asked for."""
    assert distill("medusa", "--draft.heads", 1, "--loop.eval_every", 0).code == 0


@pytest.mark.parametrize("family", FLAGS)
def test_saved_drafts_of_other_kinds_are_no_heads_to_go_on_from(
    family: str, place: worlds.World, distill: Run, made: Callable[[str], Path], tmp_path: Path
) -> None:
    """Catches EAGLE-3 weights that are trained and labelled as EAGLE-1, and tracebacks for a small LM."""
    for other in FLAGS:
        if other != family:
            error = distill(family, "--draft.init", made(other)).error()
            assert f"heads of family {other!r}" in error
    assert "no saved heads" in distill(family, "--draft.init", place.draft).error()
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("family", "name", "other", "has"),
    [
        ("medusa", "heads", 2, str(HEADS)),
        ("medusa", "head_layers", 2, "1"),
        ("eagle3", "vocab", 60, "100"),
        ("eagle3", "vocab", 0, "100"),
        ("eagle3", "width", 16, "32"),
        ("eagle3", "taps", "[0, 2]", "[0, 1, 2]"),
        ("eagle3", "norms", "['fc_norm']", "[]"),
    ],
)
def test_settings_that_contradict_the_saved_heads_are_refused(
    family: str, name: str, other: object, has: str, distill: Run, made: Callable[[str], Path],
    tmp_path: Path,
) -> None:  # fmt: skip
    """Catches a run whose settings say one thing and whose draft is another."""
    error = distill(family, "--draft.init", made(family), f"--draft.{name}", other).error()
    assert f"draft.{name} is {other}" in error
    assert f"has {has}" in error
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("family", ["medusa", "eagle1", "eagle3"])
def test_a_target_of_two_widths_is_refused(family: str) -> None:
    """Catches heads as wide as OPT-350m's layers over its narrower final states: a crash in the middle of a step."""
    own = tiny_target(tiny_model("opt", word_embed_proj_dim=16))
    with pytest.raises(UserError, match="width 16 and layers of width 32"):
        trainee_of(family, own, None)


def test_a_causal_draft_of_a_target_of_two_widths_learns() -> None:
    """Guards the test above: what is refused is heads, and the teacher's states are as wide as they are."""
    own = tiny_target(tiny_model("opt", word_embed_proj_dim=16))
    settings = DistillConfig(draft=CausalSettings(layers=[0, 1]))
    trainee = build_trainable(settings.draft, FamilyContext(settings, own, SAMPLES))
    assert learned(trainee, collate(*SAMPLES))[0]["loss"] > 0


def test_heads_of_another_tokenizer_are_refused(
    distill: Run, made: Callable[[str], Path], tmp_path: Path
) -> None:
    """Catches heads whose vocabulary means something else (methods 13)."""
    other = tmp_path / "other"
    shutil.copytree(made("eagle3"), other)
    (other / METADATA_FILE).write_text(json.dumps(facts_of(other) | {"tokenizer_hash": "0" * 16}))
    assert "disagree on token ids" in distill("eagle3", "--draft.init", other).error()
    assert not (tmp_path / "out").exists()
