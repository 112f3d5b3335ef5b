"""Prompts of similar length are prefilled together: the cheapest groups, and what one group of all gives."""

import time
from itertools import combinations

import pytest
import torch
from torch import Tensor

from decode.model.hidden_states import HiddenStateSpec
from decode.model.runner import FORWARD_TOKENS, ModelRunner, prefill_groups
from tests.tiny import tiny_model, tiny_prompts


def cost(groups: list[list[int]], lengths: list[int]) -> int:
    return sum(len(g) * max(lengths[i] for i in g) + FORWARD_TOKENS for g in groups)


@pytest.mark.parametrize("step", [1, 60], ids=["apart", "some equal"])
@pytest.mark.parametrize("seed", range(6))
def test_groups_are_the_cheapest(seed: int, step: int) -> None:
    """Catches a prompt left out or read twice, and groups that cost more than others of neighbours in length."""
    generator = torch.Generator().manual_seed(seed)
    lengths = [n // step * step + 1 for n in torch.randint(200, (7,), generator=generator).tolist()]
    groups = prefill_groups(lengths)
    assert sorted(number for group in groups for number in group) == list(range(7))
    order = sorted(range(7), key=lengths.__getitem__)
    cuts = [[0, *cut, 7] for n in range(7) for cut in combinations(range(1, 7), n)]
    best = min(cost([order[a:b] for a, b in zip(c, c[1:], strict=False)], lengths) for c in cuts)
    assert cost(groups, lengths) == best


def test_thousands_of_prompts_are_grouped_at_once() -> None:
    """Catches work that grows with the square of the batch: 60,000 rows took minutes."""
    start = time.perf_counter()
    groups = prefill_groups([1, 3, 90] * 20_000)
    assert time.perf_counter() - start < 10
    assert [len(group) for group in groups] == [20_000] * 3


@pytest.mark.parametrize("every_row", [True, False])
def test_groups_give_what_one_group_gives(every_row: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches logits, hidden states or K/V of another prompt's row."""
    runner = ModelRunner(tiny_model("llama", max_position_embeddings=256))
    prompts = tiny_prompts(90, 3, 88, 150, 5)
    length = torch.tensor([len(prompt) for prompt in prompts])
    tokens = torch.nn.utils.rnn.pad_sequence([torch.tensor(p) for p in prompts], batch_first=True)
    row = None if every_row else torch.tensor([4, 0, 3, 5, 1])
    runner.capture_hidden_states(HiddenStateSpec((0, 2), False))
    assert len(prefill_groups(length.tolist())) == 3

    def run() -> tuple[Tensor, list[Tensor]]:
        runner.cache = runner.make_cache(0, 0)  # new buffers
        runner.allocate(5 if every_row else 6, 160)
        logits = runner.prefill(tokens, length, row)
        states = [runner.features[i, :n] for i, n in enumerate(length.tolist())]
        at = range(5) if row is None else row.tolist()
        layer = runner.cache.kv_layers[-1]
        kv = [layer.keys[r, :, :n] for r, n in zip(at, length.tolist(), strict=True)]
        assert runner.features.shape[:2] == tokens.shape
        return logits, [*states, *kv]

    logits, rest = run()
    monkeypatch.setattr(
        "decode.model.runner.prefill_groups", lambda lengths: [list(range(len(lengths)))]
    )
    together, rest_together = run()
    assert torch.allclose(logits, together, atol=1e-5)
    for one, other in zip(rest, rest_together, strict=True):
        assert torch.allclose(one, other, atol=1e-5)
