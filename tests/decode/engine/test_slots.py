"""Eager rounds attend to as many slots as the longest row of the batch needs, and to no more."""

from typing import Any

import pytest
from torch import Tensor

from decode.drafts.base import Draft
from decode.drafts.causal import CausalDraft
from decode.engine.engine import SpeculativeEngine, decode
from decode.engine.records import collect_outputs
from decode.model.kv_cache import StaticKVLayer
from decode.model.loading import Target
from decode.model.runner import ModelRunner
from decode.verification.sampling import SamplingParams
from decode.verification.tree import DynamicTree
from tests.heads import random_draft
from tests.params import pairwise
from tests.tiny import noisy, tiny_model, tiny_prompts, tiny_target

SHORT, LONG = tiny_prompts(9, 4, 12, 7, 10, 5), tiny_prompts(440)
SAMPLED = SamplingParams(0.8)


@pytest.fixture
def attended(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The number of slots of each call of attention that reads buffers."""
    seen: list[int] = []
    update = StaticKVLayer.update

    def noting(self: StaticKVLayer, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        keys, values = update(self, *args, **kwargs)
        if not self.slots.is_prefill:
            seen.append(keys.shape[2])
        return keys, values

    monkeypatch.setattr(StaticKVLayer, "update", noting)
    return seen


def make(name: str, target: Target) -> Draft | None:
    near = ModelRunner(noisy(target.runner.model, 0.01))
    return {
        "plain": None,
        "causal": CausalDraft(near),
        "tree": CausalDraft(near, shape=DynamicTree(3, 8)),
        "eagle3": random_draft("eagle3", target, DynamicTree(3, 8)),
    }[name]


CASES = pairwise(
    ["causal", "plain", "tree", "eagle3"], [2, 0, len(SHORT)], ["gemma3_text", "llama"]
)


@pytest.mark.slow
@pytest.mark.parametrize(("name", "place", "arch"), CASES)
def test_short_rows_do_not_attend_to_the_length_of_a_long_one(
    name: str, place: int, arch: str, attended: list[int]
) -> None:
    """Catches buffers as long as the longest prompt of all for every row, before it begins and after it is done, and
    text that changes with them: slots left out that are needed, values that are not numbers in a refilled row."""
    target = tiny_target(tiny_model(arch, max_position_embeddings=600))
    draft = make(name, target)
    prompts = [*SHORT[:place], *LONG, *SHORT[place:]]
    settings = {"max_new_tokens": 16, "k": 3, "sampling": SAMPLED, "seeds": list(range(7))}
    outputs = decode(target, draft, prompts, rows=2, **settings)
    seen = list(attended)
    for prompt, seed, output in zip(prompts, settings["seeds"], outputs, strict=True):
        [alone] = decode(target, draft, [prompt], **settings | {"seeds": [seed]})
        assert output.output_ids == alone.output_ids
    assert set(seen) == {128, 512}
    if place > 0:
        assert seen[0] == 128
    if place < len(SHORT):
        assert seen[-1] == 128


def test_an_engine_that_needs_every_slot_gets_them(attended: list[int]) -> None:
    """Catches slots that an eager engine has hidden from a compiled one of the same target and shape."""
    target = tiny_target(tiny_model("llama", max_position_embeddings=600))
    engine = SpeculativeEngine(target)
    list(engine.speculate(LONG + SHORT[:1], max_new_tokens=4))
    collect_outputs(SHORT[:2], engine.speculate(SHORT[:2], max_new_tokens=4))
    other = SpeculativeEngine(target)
    other._prepare_batch(2, 512, 512, None, 0)
    assert len(target.runner.cache.slots.slot) == 512
