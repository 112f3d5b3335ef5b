import time

import numpy as np
import pytest
import torch

from decode.checkpoints.layouts import d2t_offsets, ids_from_d2t, t2d_mask
from decode.common.errors import UserError
from tests.rows import sample_row
from train.data.batching import supervised_token_count
from train.data.sample_store import SampleRow
from train.data.vocab_mapping import build, count_tokens, coverage, digest

COUNTS = torch.tensor([0, 7, 4, 9, 1, 0, 7, 2])
IDS = torch.tensor([1, 3, 6])
"""The 3 most frequent of COUNTS."""


def row(ids: list[int], spans: list[list[int]]) -> SampleRow:
    return sample_row(np.array(ids, dtype=np.int32), spans)  # as read_shards gives them


def built(counts: torch.Tensor, size: int, always: tuple[int, ...] = ()) -> list[int]:
    ids = build(counts, size, always)
    assert ids is not None
    assert ids.dtype == torch.int64
    return ids.tolist()


def test_golden_map() -> None:
    """Catches a map by rank (engines need rising ids), and one read the wrong way round."""
    assert built(COUNTS, 3) == IDS.tolist()
    assert d2t_offsets(IDS).tolist() == [1, 2, 4]
    assert t2d_mask(IDS, 8).tolist() == [False, True, False, True, False, False, True, False]
    assert ids_from_d2t(d2t_offsets(IDS), 8).tolist() == IDS.tolist()
    assert ids_from_d2t(d2t_offsets(IDS).int(), 8).dtype == torch.int64


def test_an_offset_is_no_index() -> None:
    """Catches the TorchSpec export (methods.md 16 #12): d2t used as an index, or ids saved as d2t."""
    d2t, t2d = d2t_offsets(IDS), t2d_mask(IDS, 8)
    assert torch.equal(torch.arange(3) + d2t, t2d.nonzero()[:, 0])
    rows = torch.arange(8)  # of the target's head, say
    assert torch.equal(rows[ids_from_d2t(d2t, 8)], IDS)
    assert not torch.equal(rows[d2t], IDS)  # the bug
    with pytest.raises(UserError, match="offsets are meant"):
        ids_from_d2t(IDS, 8)  # leaves the vocabulary: 1, 4, 8


@pytest.mark.parametrize("ids", [[], [3, 1], [1, 1], [-1, 2], [2, 8], [3, -7, 5]])
def test_maps_that_are_none_are_refused(ids: list[int]) -> None:
    """Catches a map for another vocabulary, which would scatter logits to wrong tokens, or wrap round."""
    wrong = torch.tensor(ids, dtype=torch.int64)
    with pytest.raises(UserError, match="must rise within 0..7"):
        t2d_mask(wrong, 8)
    with pytest.raises(UserError, match="must rise within 0..7"):
        ids_from_d2t(d2t_offsets(wrong), 8)


def test_end_of_sequence_is_kept_though_never_seen() -> None:
    """Catches a draft that cannot say EOS: answers cut at max_tokens hold none, so it has no count."""
    assert built(COUNTS, 3, (5,)) == [1, 3, 5]
    assert built(COUNTS, 3, (5, 0, 5)) == [0, 3, 5]
    assert built(COUNTS, 3, (1,)) == [1, 3, 6]  # frequent anyway: takes no second place
    with pytest.raises(UserError, match="cannot hold 3"):
        build(COUNTS, 2, (0, 4, 5))
    for outside in (8, -1):
        with pytest.raises(UserError, match=r"0\.\.7"):
            build(COUNTS, 3, (outside,))


def test_ties_go_to_the_lower_id() -> None:
    """Catches a map that differs from machine to machine: the cut mostly falls among equal counts."""
    assert built(torch.tensor([1, 2, 2, 2, 1]), 2) == [1, 2]
    many = torch.ones(5000, dtype=torch.int64)
    many[4000] = 2
    assert built(many, 100) == [*range(99), 4000]
    assert built(torch.tensor([0, 0, 0, 5]), 3) == [0, 1, 3]  # unseen ones fill up


def test_the_full_vocabulary_has_no_map() -> None:
    """Catches maps saved for Vd == V, which vLLM refuses (formats.md 2)."""
    assert build(COUNTS, 8) is None
    assert build(COUNTS, 9, (5,)) is None
    assert built(COUNTS, 7) == [0, 1, 2, 3, 4, 6, 7]


def test_nothing_to_choose_from_is_refused() -> None:
    """Catches a map of the lowest ids, made from a set without answers."""
    with pytest.raises(UserError, match="no supervised token"):
        build(torch.zeros(8, dtype=torch.int64), 3)
    with pytest.raises(UserError, match="make it larger"):
        build(COUNTS, 0)


def test_coverage_is_a_share_of_tokens() -> None:
    """Catches a share of ids, or of the renormalised teacher (#11)."""
    assert coverage(IDS, COUNTS) == 23 / 30
    assert coverage(torch.arange(8), COUNTS) == 1.0


def test_counts_only_what_is_learned() -> None:
    """Catches prompts and later turns in the counts, tokens of overlapping spans counted twice, and a first token,
    which nothing predicts: the sum is the number of supervised positions."""
    rows = [
        row([1, 2, 3, 3, 4, 6], [[2, 5]]), row([5, 6, 6, 7], [[1, 3], [2, 4]]),
        row([0, 2], [[0, 2]]), row([7, 7], []), row([], []),
    ]  # fmt: skip
    counts = count_tokens(rows, 8)
    assert counts.dtype == torch.int64
    assert counts.tolist() == [0, 0, 1, 2, 1, 0, 2, 1]
    assert int(counts.sum()) == supervised_token_count(rows)
    with pytest.raises(UserError, match="vocabulary of 7"):
        count_tokens(rows, 7)


def test_digest_tells_maps_apart() -> None:
    """Catches EAGLE's `cache.pt` (#13), a map used again after it changed. Golden: it must outlive versions."""
    assert digest(IDS) == digest(IDS.int()) == "ae3ea7e89aa8a861"
    others = [torch.tensor(ids) for ids in ([1, 3], [1, 3, 7], [1, 3, 6, 7], [0, 1, 3, 6])]
    seen = {digest(ids) for ids in [IDS, *others]}
    assert len(seen) == 5
    assert all(len(one) == 16 for one in seen)


def test_large_map_is_quick() -> None:
    """Catches list membership, O(V Vd): minutes for a map of 152k by 32k (#14). It takes about 20 ms."""
    counts = torch.from_numpy(np.random.default_rng(0).zipf(1.3, 152_064).clip(max=10**6))
    start = time.perf_counter()
    ids = build(counts, 32_000, (151_645, 151_643))
    assert ids is not None
    assert ids_from_d2t(d2t_offsets(ids), 152_064).shape == (32_000,)
    assert t2d_mask(ids, 152_064).sum() == 32_000
    assert coverage(ids, counts) > 0.5
    digest(ids)
    assert time.perf_counter() - start < 1.0
