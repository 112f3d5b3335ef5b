"""Golden tables of what goes with what, written by hand, and the wrong tables that other trainers have used."""

import random
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from decode.checkpoints.layouts import capture_to_output, default_aux_layers, output_to_capture
from decode.common.errors import UserError
from tests.tiny import tiny_model
from train.data.batching import (
    Batch,
    collate,
    document_positions,
    supervised_token_count,
    truncate_rows,
)
from train.data.sample_store import SampleRow
from train.families.alignment import AlignedIndices, Alignment, target_run_length

FIRST = 10
"""Token t of every row here is FIRST + t, so that a token tells which one it is."""


def later(x: Tensor, n: int) -> Tensor:
    """x [B, T, ...] shifted: at each position the value n >= 0 positions later, zeros beyond the end."""
    return torch.cat([x[:, n:], torch.zeros_like(x[:, :n])], dim=1)


def supervised(loss_mask: Tensor, j: int, documents: Tensor | None = None) -> Tensor:
    """[B, T] bool: the slots that are valid at step j."""
    return target_run_length(loss_mask, documents) >= 2 + j


def row(length: int, spans: list[list[int]]) -> SampleRow:
    return {
        "id": "x", "source": "test", "origin": "target",
        "input_ids": list(range(FIRST, FIRST + length)), "loss_spans": spans,
        "finish_reason": "eos",
    }  # fmt: skip


EXAMPLE = row(6, [[2, 6]])
"""Prompt x_0 x_1, answer x_2 .. x_5. So s = 2, and drafting begins at slot s - 1 = 1."""


def align(*rows: SampleRow, steps: int = 3, multiple: int = 1) -> Alignment:
    batch = collate(rows, pad_id=0, multiple=multiple)
    return Alignment(batch.input_ids, batch.loss_mask, steps)


def table(places: AlignedIndices, b: int = 0) -> list[tuple[int, ...]]:
    """(slot, token read, teacher row, label, position), tokens by their index in the row."""
    slot = torch.arange(places.valid.shape[1])
    columns = (places.token[b] - FIRST, places.teacher[b], places.label[b] - FIRST)
    stack = torch.stack([slot, *columns, places.position[b]], dim=1)  # [T, 5]
    return [tuple(line) for line in stack[places.valid[b]].tolist()]


def slots(valid: Tensor) -> list[int]:
    return valid[0].nonzero()[:, 0].tolist()


CAUSAL = [(1, 1, 1, 2, 1), (2, 2, 2, 3, 2), (3, 3, 3, 4, 3), (4, 4, 4, 5, 4)]
STEPS = [
    [(1, 2, 2, 3, 1), (2, 3, 3, 4, 2), (3, 4, 4, 5, 3)],
    [(1, 3, 3, 4, 2), (2, 4, 4, 5, 3)],
    [(1, 4, 4, 5, 3)],
]
"""By step: slot, token read, teacher row, label, position. Slot 1 = s - 1 is in, slot 0 = s - 2 is not."""


def test_golden_table_of_a_draft_lm() -> None:
    """Catches labels or teachers shifted once more than the logits already are."""
    places = align(EXAMPLE, steps=0).causal()
    assert table(places) == CAUSAL
    batch = collate([EXAMPLE], pad_id=0)
    assert torch.equal(align(EXAMPLE, multiple=8).causal().valid, batch.loss_mask)
    assert int(places.valid.sum()) == supervised_token_count([EXAMPLE])


def test_golden_table_of_medusa() -> None:
    """Catches the Medusa head offset (methods.md 16 #4): head 0 says t + 2, for the LM head says t + 1."""
    heads = align(EXAMPLE)
    feature = torch.arange(6)[None]  # at every slot, whatever the head: f of that slot
    found = []
    for head in range(3):
        p = heads.step(head)
        columns = (feature, p.teacher, p.label - FIRST)
        found += [(head, *(int(c[0, t]) for c in columns)) for t in slots(p.valid)]
    assert found == [
        # head, feature, teacher row, label
        (0, 1, 2, 3),
        (0, 2, 3, 4),
        (0, 3, 4, 5),
        (1, 1, 3, 4),
        (1, 2, 4, 5),
        (2, 1, 4, 5),
    ]


def test_golden_table_of_eagle_1() -> None:
    """Catches f_t paired with x_t (it knows that token) and a feature label that is its own input (#2)."""
    p = align(EXAMPLE, steps=1).step(0)
    feature = torch.arange(6)[None]
    columns = (feature, p.token - FIRST, p.teacher, p.label - FIRST, later(feature, 1), p.position)
    assert [tuple(int(c[0, t]) for c in columns) for t in slots(p.valid)] == [
        # feature, token read, teacher row, label, feature label, position
        (1, 2, 2, 3, 2, 1),
        (2, 3, 3, 4, 3, 2),
        (3, 4, 4, 5, 4, 3),
    ]


def test_golden_table_of_eagle_3() -> None:
    """Catches a mask, teacher or token that stays behind when a step moves on (#1), and positions that restart
    at each step (BaldEagle, #6)."""
    steps = align(EXAMPLE)
    assert [table(steps.step(j)) for j in range(3)] == STEPS
    with pytest.raises(ValueError, match="step 3"):
        steps.step(3)  # would be read beyond the padding


def test_teacher_row_is_the_law_of_the_label() -> None:
    """Catches any two of feature, teacher and label one off, against a real model: its own greedy text."""
    model = tiny_model("llama", seed=1, std=0.5)
    ids = model.generate(torch.tensor([[5, 6, 7]]), max_new_tokens=12, do_sample=False)  # [1, 15]
    with torch.no_grad():
        best = model(ids).logits.argmax(-1)  # [1, T]
    assert len(set(ids[0, 3:].tolist())) > 6  # 11: a shift is seen
    mask = torch.zeros_like(ids, dtype=torch.bool)
    mask[:, 2:-1] = True
    alignment = Alignment(ids, mask, 7)
    for places in [alignment.causal(), *(alignment.step(j) for j in range(7))]:
        assert torch.equal(best.gather(1, places.teacher)[places.valid], places.label[places.valid])
    for j in range(7):  # the other way to the teacher, for tensors as wide as [B, T, H]
        places = alignment.step(j)
        moved = later(best, 1 + j)
        assert torch.equal(moved[places.valid], best.gather(1, places.teacher)[places.valid])


def test_two_turn_chat() -> None:
    """Catches drafts that run from one answer through the user's turn into the next (label-only masks)."""
    chat = align(row(8, [[1, 4], [5, 8]]))  # user 0, answer 1 2 3, user 4, answer 5 6 7
    assert [line[0] for line in table(chat.causal())] == [0, 1, 2, 4, 5, 6]
    assert [table(chat.step(j)) for j in range(3)] == [
        [(0, 1, 1, 2, 0), (1, 2, 2, 3, 1), (4, 5, 5, 6, 4), (5, 6, 6, 7, 5)],
        [(0, 2, 2, 3, 1), (4, 6, 6, 7, 5)],
        [],
    ]
    label_only = later(written([1, 2, 3, 5, 6, 7], 8), 2 + 2)  # step 2 judged by its label alone
    assert slots(label_only) == [1, 2, 3]


def test_packed_documents_do_not_touch() -> None:
    """Catches labels, teachers or positions that go over from one document of a packed row into the next. The second
    document has no prompt: its first token is to learn, so the mask is True at the place before it, the first
    document's last."""
    ids = torch.arange(FIRST, FIRST + 6)[None]
    mask = torch.tensor([[True, True, True, True, True, False]])  # tokens 1 .. 5 to learn
    documents = torch.tensor([[7, 7, 7, 3, 3, 3]])
    packed = Alignment(ids, mask, 2, documents)
    assert table(packed.causal()) == [
        (0, 0, 0, 1, 0),
        (1, 1, 1, 2, 1),
        (3, 3, 3, 4, 0),
        (4, 4, 4, 5, 1),
    ]
    assert table(packed.step(0)) == [(0, 1, 1, 2, 0), (3, 4, 4, 5, 0)]
    assert table(packed.step(1)) == []
    assert slots(Alignment(ids, mask, 2).step(1).valid) == [
        0,
        1,
        2,
    ]  # without `documents` it is one


@pytest.mark.parametrize("multiple", [8, 64])
def test_padding_changes_nothing(multiple: int) -> None:
    """Catches zero-padded teacher rows that are learned as a uniform law (#7), alone or beside a longer row."""
    alone = align(EXAMPLE, multiple=multiple)
    beside = align(EXAMPLE, row(20, [[1, 20]]), multiple=multiple)
    for alignment in (alone, beside):
        assert table(alignment.causal()) == CAUSAL
        assert [table(alignment.step(j)) for j in range(3)] == STEPS


def test_an_answer_cut_at_the_end_of_the_row() -> None:
    """Catches teachers beyond the row: after the cut there is no token to learn, and no wrap to the first."""
    cut = truncate_rows([row(9, [[2, 9]])], max_length=5)[0]
    places = align(*cut)
    assert table(places.step(0)) == [(1, 2, 2, 3, 1), (2, 3, 3, 4, 2)]
    assert table(places.step(1)) == [(1, 3, 3, 4, 2)]
    assert table(places.step(2)) == []
    assert int(places.step(2).teacher.max()) == 4
    open_end = torch.ones(1, 5, dtype=torch.bool)  # claims a token to learn behind the last one
    assert [slots(supervised(open_end, j)) for j in (-1, 0, 3)] == [[0, 1, 2, 3], [0, 1, 2], []]


def written(tokens: list[int], length: int) -> Tensor:
    """[1, T] bool: the tokens that the target wrote, unshifted, as most trainers hold them."""
    return torch.tensor([[t in tokens for t in range(length)]])


def by_slot(m: Tensor, j: int) -> Tensor:
    """EAGLE-1's data, BaldEagle, SpecForge, TorchSpec: m[t + j]."""
    return later(m, j)


def by_input(m: Tensor, j: int) -> Tensor:
    """speculators: m[t + 1 + j]."""
    return later(m, 1 + j)


def by_label(m: Tensor, j: int) -> Tensor:
    """m[t + 2 + j]."""
    return later(m, 2 + j)


@pytest.mark.parametrize(
    ("convention", "expected"),
    [
        # slots at steps 0, 1, 2 of the example with two tokens of padding; label index = slot + 2 + step
        (by_slot, [[2, 3, 4, 5], [1, 2, 3, 4], [0, 1, 2, 3]]),  # step 0 lacks 1; labels up to 7
        (by_input, [[1, 2, 3, 4], [0, 1, 2, 3], [0, 1, 2]]),  # slot 4 at step 0 has label 6
        (by_label, [[0, 1, 2, 3], [0, 1, 2], [0, 1]]),  # right labels, but slot 0 never drafts
    ],
)
def test_the_masks_of_others_are_not_ours(
    convention: Callable[[Tensor, int], Tensor], expected: list[list[int]]
) -> None:
    """Catches SpecForge #885 (the first draft of every answer is never trained, #1) and its relatives. The golden
    table tells each from ours at every step, and each of them handed to us as a loss mask as well."""
    m = written([2, 3, 4, 5], 8)
    ours = [[1, 2, 3], [1, 2], [1]]
    steps = align(EXAMPLE, multiple=8)
    assert [slots(steps.step(j).valid) for j in range(3)] == ours
    assert [slots(convention(m, j)) for j in range(3)] == expected
    assert all(a != b for a, b in zip(expected, ours, strict=True))
    # Our mask, m[t + 1], is right; m[t] and m[t + 2] in its place are seen.
    handed = [slots(supervised(convention(m, 0), j)) for j in range(3)]
    assert (handed == ours) == (convention is by_input)


def test_supervision_follows_its_definition() -> None:
    """Catches any slip in the shortcut by run lengths: compared with the rule of methods.md 7.3, word for word."""
    rng = random.Random(0)
    for _ in range(60):
        length = rng.randint(2, 14)
        wrote = [rng.random() < 0.7 for _ in range(length)]
        turns = [rng.random() < 0.2 for _ in range(length)]
        document = [sum(turns[: t + 1]) for t in range(length)]
        mask = torch.tensor([[*wrote[1:], False]])
        for j in range(-1, 5):
            expected = [
                t
                for t in range(length - 2 - j)
                if all(wrote[t + 1 : t + 3 + j]) and document[t] == document[t + 2 + j]
            ]
            assert slots(supervised(mask, j, torch.tensor([document]))) == expected
        first = [document.index(d) for d in document]
        assert document_positions(mask, torch.tensor([document]))[0].tolist() == [
            t - start for t, start in enumerate(first)
        ]
    assert target_run_length(torch.tensor([[True, True, False]]))[0].tolist() == [2, 1, 0]


def test_steps_share_what_was_padded_once() -> None:
    """Catches a copy of ids or teacher rows for every step."""
    alignment = align(*[row(16, [[2, 16]])] * 3, steps=7)
    memory = {
        tensor.untyped_storage().data_ptr()
        for places in [alignment.causal(), *(alignment.step(j) for j in range(7))]
        for tensor in (places.token, places.label, places.teacher)
    }
    assert len(memory) == 2
    assert alignment.step(6).token.shape == alignment.step(6).teacher.shape == (3, 16)


@pytest.mark.parametrize(
    ("count", "capture", "output"),
    [(36, (2, 18, 33), (1, 17, 32)), (32, (2, 16, 29), (1, 15, 28)), (7, (2, 3, 4), (1, 2, 3))],
)
def test_default_taps(count: int, capture: tuple[int, ...], output: tuple[int, ...]) -> None:
    """Catches ids of one convention read in the other: Qwen3-8B, Llama-3.1-8B, the smallest that has taps."""
    assert default_aux_layers(count) == capture
    assert capture_to_output(capture) == output
    assert output_to_capture(output) == capture


@pytest.mark.parametrize("count", range(7))
def test_small_targets_have_no_default_taps(count: int) -> None:
    """Catches the same state tapped twice, or one counted from the end, without a word."""
    with pytest.raises(UserError, match="explicitly"):
        default_aux_layers(count)


def test_ids_that_name_no_state_are_refused() -> None:
    """Catches the embedding named as layer -1, which indexing would take for the last layer."""
    with pytest.raises(UserError, match="outputs of a layer"):
        capture_to_output([0, 4])
    with pytest.raises(UserError, match="never from the end"):
        output_to_capture([-1, 4])


def test_taps_are_the_states_they_are_named_for() -> None:
    """Catches vLLM PR #43671 (#3): the input of layer i taken for its output; acceptance 10 % and not 45 %."""
    model = tiny_model("llama", num_hidden_layers=8)
    entering: dict[int, Tensor] = {}
    leaving: dict[int, Tensor] = {}
    for i, layer in enumerate(model.model.layers):
        layer.register_forward_pre_hook(lambda _, args, i=i: entering.update({i: args[0]}))
        layer.register_forward_hook(lambda _, args, out, i=i: leaving.update({i: out}))
    with torch.no_grad():
        states = model(torch.arange(9)[None], output_hidden_states=True).hidden_states
    capture = default_aux_layers(8)
    assert capture == (2, 4, 5)
    for tap, layer in zip(capture, capture_to_output(capture), strict=True):
        assert torch.equal(states[tap], entering[tap])
        assert torch.equal(states[tap], leaving[layer])
        assert not torch.equal(
            states[tap], leaving[tap]
        )  # the bug: one convention read as the other


def test_batches_align_row_by_row() -> None:
    """Catches rows of a batch that see each other: every row has the table that it has alone."""
    rows = [EXAMPLE, row(4, [[1, 4]]), row(9, [[3, 6], [7, 9]])]
    batch: Batch = collate(rows, pad_id=0)
    together = Alignment(batch.input_ids, batch.loss_mask, 3)
    for b, one in enumerate(rows):
        for j in range(3):
            assert table(together.step(j), b) == table(align(one).step(j))
