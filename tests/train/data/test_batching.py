import pytest
import torch
from torch import Tensor

from decode.common.damage import warn_once
from decode.common.errors import UserError
from tests.rows import sample_row
from train.data.batching import Batch, collate, rank_slice, supervised_token_count, truncate_rows
from train.data.sample_store import SampleRow
from train.losses.divergences import forward_kl


def row(ids: list[int], spans: list[list[int]]) -> SampleRow:
    return sample_row(ids, spans, str(ids))


def positions(batch: Batch, i: int) -> list[int]:
    return batch.loss_mask[i].nonzero()[:, 0].tolist()


def test_golden_positions_of_a_two_turn_chat() -> None:
    """Bug: loss mask not shifted with the labels (method pitfall 1). Tokens 1 and 4, 5 of six were generated. So they
    are predicted at 0 (the prompt's last position), 3 (the second turn's last) and 4; 5, the row's last, predicts
    nothing."""
    batch = collate([row([10, 11, 12, 13, 14, 15], [[1, 2], [4, 6]])], pad_id=0)
    assert batch.loss_mask.tolist() == [[True, False, False, True, True, False, False, False]]
    assert positions(batch, 0) == [0, 3, 4]
    assert batch.input_ids[0, [1, 4, 5]].tolist() == [11, 14, 15]


def test_a_span_from_the_first_token_has_no_position_before_it() -> None:
    """Bug: position -1 wraps round to the row's last slot."""
    rows = [row([10, 11, 12], [[0, 3]])]
    assert positions(collate(rows, pad_id=0), 0) == [0, 1]
    assert supervised_token_count(rows) == 2


def test_collate_pads_right() -> None:
    """Bug: padding stands where causal attention sees it, or is counted as supervised."""
    rows = [row([1, 2, 3], [[1, 3]]), row([4] * 9, [[2, 3]]), row([5, 6], [])]
    batch = collate(rows, pad_id=7)
    assert batch.input_ids.shape == (3, 16)
    assert batch.input_ids[0].tolist() == [1, 2, 3] + [7] * 13
    assert [positions(batch, i) for i in range(3)] == [[0, 1], [1], []]
    assert supervised_token_count(rows) == int(batch.loss_mask.sum()) == 3


def test_overlapping_spans_count_once() -> None:
    """Bug: the divisor of the loss counts a token twice that the loss holds once."""
    assert supervised_token_count([row([1, 2, 3, 4], [[1, 3], [2, 4]])]) == 3


def toy_loss(rows: list[SampleRow], multiple: int) -> Tensor:
    """Summed loss over the supervised positions; the toy's logits depend on the token alone."""
    tables = torch.randn(2, 32, 11, generator=torch.Generator().manual_seed(0))
    batch = collate(rows, pad_id=31, multiple=multiple)
    p, q = tables[0][batch.input_ids], tables[1][batch.input_ids]  # [B, T, V]
    return forward_kl(p[batch.loss_mask], q[batch.loss_mask]).sum()


def test_loss_ignores_padding_and_prompt_length() -> None:
    """Bug: masked slots enter the loss, so its gradient depends on the prompt (pitfalls 7, 8)."""
    answer = [4, 5, 6]
    short = row([1, 2, *answer], [[2, 5]])
    long = row([9] * 20 + [1, 2, *answer], [[22, 25]])
    expected = toy_loss([short], multiple=1)
    for rows, multiple in (([short], 8), ([short], 64), ([long], 8)):
        torch.testing.assert_close(toy_loss(rows, multiple), expected)
    torch.testing.assert_close(toy_loss([short, long], 8), 2 * expected)


@pytest.mark.parametrize("world", [1, 2, 3, 6])
def test_slices_recombine_to_the_global_batch(world: int) -> None:
    """Bug: ranks see the same rows, or the batch depends on the number of processes."""
    rows = [3, 1, 4, 1, 5, 9]
    slices = [rank_slice(rank, world, rows) for rank in range(world)]
    assert [i for part in slices for i in part] == rows
    assert {len(part) for part in slices} == {6 // world}


def test_uneven_split_is_refused() -> None:
    """Bug: ranks with fewer rows hang the others or shift the mean."""
    with pytest.raises(UserError, match="6 rows .* over 4 processes"):
        rank_slice(0, 4, list(range(6)))


def test_long_rows_are_cut_and_empty_ones_dropped() -> None:
    """Bug: spans point past the cut, or rows with nothing to learn take part in batches."""
    rows = [
        row([1, 2, 3, 4, 5], [[1, 2], [3, 5]]),  # cut in the second span
        row([1, 2, 3, 4, 5], [[4, 5]]),  # answer lies past the cut
        row([1, 2], [[0, 1]]),  # only the first token, which nothing predicts
    ]
    kept, dropped = truncate_rows(rows, max_length=4)
    assert dropped == 2
    assert list(kept) == [row([1, 2, 3, 4], [[1, 2], [3, 4]]) | {"id": rows[0]["id"]}]
    assert rows[0]["input_ids"] == [1, 2, 3, 4, 5]


def test_a_set_with_nothing_to_learn_is_refused() -> None:
    """Bug: training runs to the end with a loss of zero."""
    with pytest.raises(UserError, match="max_length 2"):
        truncate_rows([row([1, 2, 3], [[2, 3]])], max_length=2)


@pytest.mark.parametrize(("length", "said"), [(10, ""), (9, ""), (8, "20%"), (4, "60%")])
def test_labels_that_are_cut_off_are_said(
    length: int, said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Bug: half of every answer is never learned, and nobody is told."""
    warn_once.cache_clear()
    truncate_rows([row(list(range(10)), [[0, 10]]), row([1, 2], [[1, 2]])], max_length=length)
    warning = capsys.readouterr().err
    assert bool(warning) == bool(said)
    assert said in warning
