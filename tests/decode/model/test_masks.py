"""Masks of training as functions of indices: what they say, and that blocks look at every key that they show."""

from itertools import pairwise

import pytest
import torch
from torch import Tensor

from decode.model import masks
from decode.model.masks import AttentionMask, DocumentMask, SlotMask, key_index, take_keys

NUMBERS = torch.tensor([[0] * 9 + [1] * 4 + [2] * 10, [3] * 2 + [4] * 21])
SLOTS = torch.tensor([[3, 8, 9, 12, 20, 0], [1, 2, 5, 21, 22, 0]])
"""The last of each row fills it up, as in batches."""
MASKS: dict[str, AttentionMask] = {
    "texts": DocumentMask(NUMBERS),
    "slots": SlotMask(SLOTS, 23),
    "slots of texts": SlotMask(SLOTS, 23, NUMBERS),
    "slots with later keys": SlotMask(SLOTS, 23, NUMBERS, later=3),
}


def by_hand(mask: AttentionMask, row: int, query: int, key: int, window: int | None) -> bool:
    """The definition, one number at a time."""
    near = window if window is not None else 1000
    if isinstance(mask, DocumentMask):
        same = NUMBERS[row, query] == NUMBERS[row, key]
        return bool(same) and 0 <= query - key < near
    assert isinstance(mask, SlotMask)
    slot, count = int(SLOTS[row, query]), SLOTS.shape[1]
    if key >= 23:
        step, place = divmod(key - 23, count)
        return place == query and mask.later - (step + 1) < near
    same = mask.numbers is None or bool(NUMBERS[row, slot] == NUMBERS[row, key])
    return same and key <= slot and slot + mask.later - key < near


@pytest.mark.parametrize("window", [None, 1, 5])
@pytest.mark.parametrize("name", MASKS)
def test_a_mask_is_its_definition(name: str, window: int | None) -> None:
    mask = MASKS[name]
    rows, queries, keys = mask.shape
    found = mask.dense(window, 2)
    assert found.shape == (rows, 1, 2 * queries, keys)
    wanted = [
        [[by_hand(mask, b, q, k, window) for k in range(keys)] for q in range(queries)]
        for b in range(rows)
    ]
    assert torch.equal(found[:, 0, :queries], torch.tensor(wanted))
    assert torch.equal(found[:, 0, queries:], torch.tensor(wanted))


@pytest.mark.parametrize("size", [1, 3, 4, 30])
@pytest.mark.parametrize("window", [None, 1, 5])
@pytest.mark.parametrize("name", MASKS)
def test_ranges_of_a_block_hold_every_key_that_it_sees(
    name: str, window: int | None, size: int
) -> None:
    """Catches ranges that leave out a key of any row, overlap or count one twice, and ones that are never narrower."""
    mask = MASKS[name]
    dense, (_, count, keys) = mask.dense(window, 1)[:, 0], mask.shape
    read = 0
    for start in range(0, count, size):
        stop = min(start + size, count)
        ranges = mask.key_ranges(start, stop, window)
        assert all(first <= end <= keys for first, end in ranges)
        assert all(before[1] <= after[0] for before, after in pairwise(ranges))
        index, every = key_index(ranges, mask.device), torch.arange(start, stop)
        assert torch.equal(mask.at(every, index, window), dense[:, start:stop][..., index])
        assert int(mask.at(every, index, window).sum()) == int(dense[:, start:stop].sum())
        read += len(index) * (stop - start)
    assert read < count * keys or size == 30


def test_keys_of_ranges_are_in_their_order() -> None:
    values = torch.arange(10).reshape(1, 1, 10, 1)
    ranges = [(1, 3), (4, 5), (8, 10)]
    assert take_keys(values, ranges).flatten().tolist() == [1, 2, 4, 8, 9]
    assert key_index(ranges, values.device).tolist() == [1, 2, 4, 8, 9]
    assert take_keys(values, ranges[:1]).data_ptr() == values[:, :, 1:].data_ptr()  # no copy


def test_blocks_keep_neither_masks_nor_scores(monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches memory that grows with the square of the length: of a text of twice the length twice as much is kept."""
    monkeypatch.setattr(masks, "BLOCK", 16)

    def attend(query: Tensor, key: Tensor, value: Tensor, mask: Tensor) -> Tensor:
        scores = (query @ key.transpose(-1, -2)).masked_fill(~mask, float("-inf"))
        return scores.softmax(-1) @ value

    def kept(length: int) -> int:
        mask = DocumentMask(torch.zeros(1, length, dtype=torch.long))
        inputs = [torch.randn(1, 1, length, 4, requires_grad=True) for _ in range(3)]
        found: dict[int, int] = {}

        def keep(x: Tensor) -> Tensor:
            found[x.untyped_storage().data_ptr()] = x.untyped_storage().nbytes()
            return x.clone()

        with torch.autograd.graph.saved_tensors_hooks(keep, lambda x: x):
            out = masks.attend_in_blocks(attend, inputs[0][:, None], *inputs[1:], mask, None)
        whole = attend(*inputs, mask.dense(None, 1))
        torch.testing.assert_close(out[:, 0], whole)
        return sum(found.values())

    assert kept(256) <= 2.2 * kept(128)


def test_more_keys_join_the_softmax() -> None:
    """Catches weights of new keys that do not sum to one with the others."""
    torch.manual_seed(0)
    scores, values = torch.randn(2, 3, 4, 9), torch.randn(2, 3, 9, 5)
    first, lse = scores[..., :6], scores[..., :6].logsumexp(-1)
    out, weights = masks.add_own_keys(first.softmax(-1) @ values[:, :, :6], lse, scores[..., 6:])
    found = out + weights @ values[:, :, 6:]
    torch.testing.assert_close(found, scores.softmax(-1) @ values)
