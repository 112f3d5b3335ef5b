"""Drafts whose context is shorter than the text: nothing is drafted beyond it, and the text stays the target's."""

import warnings
from collections.abc import Callable
from itertools import accumulate
from typing import Any

import pytest
from torch import Tensor

from decode.drafts.base import Draft
from decode.drafts.blocks import DFlashDraft, PardDraft, PEagleDraft
from decode.drafts.causal import CausalDraft
from decode.drafts.dflash_model import DFlashModel
from decode.drafts.eagle_model import Eagle3Model, llama_config
from decode.drafts.lookup import NgramDraft
from decode.drafts.mirror import MirrorConfig, MirrorDraft
from decode.drafts.wrappers import ConfidentDraft, TwoSourceDraft
from decode.engine.engine import decode, speculate
from decode.engine.records import RoundRecord
from decode.model.hidden_states import HiddenStateSpec, LMHead
from decode.model.loading import Target
from decode.model.runner import ModelRunner
from decode.verification.sampling import SamplingParams
from decode.verification.tree import DynamicTree, TreeShape, tree_from_paths
from tests.decode.drafts import test_dflash, test_peagle
from tests.heads import draft_of, net_of, randomise
from tests.params import rotated
from tests.tiny import VOCAB, noisy, tiny_model, tiny_prompts, tiny_target

CONTEXT, K, NEW = 16, 3, 14
SHORT = {"max_position_embeddings": CONTEXT}
PROMPTS = tiny_prompts(5, 12, 14, 15, 16, 17, 25)
"""Some end before the draft's context, some at it, some beyond it."""
TREE = tree_from_paths([[0], [1], [0, 0], [0, 1], [1, 0], [0, 0, 0]])
MODEL = tiny_model("llama")


def language_model(arch: str = "llama", **changes: Any) -> Any:
    """The target's architecture with fewer positions and almost its weights, or another one."""
    if arch != "llama":
        return tiny_model(arch, seed=1, **SHORT, **changes)
    short = tiny_model(arch, **SHORT, **changes)
    short.load_state_dict(noisy(MODEL, 0.03).state_dict())
    return short


def peagle(own: Target) -> PEagleDraft:
    config = llama_config(test_peagle.fields(own) | SHORT)
    net = Eagle3Model(config, HiddenStateSpec(test_peagle.TAPS), test_peagle.IDS)
    return PEagleDraft(randomise(net, 3), own, "peagle")  # type: ignore[arg-type]


def dflash(own: Target, name: str) -> DFlashDraft:
    config = llama_config(test_dflash.fields(name, own) | SHORT)
    net: Any = DFlashModel(
        config, HiddenStateSpec(test_dflash.TAPS), test_dflash.IDS, LMHead(own.runner.model)
    )
    return DFlashDraft(randomise(net, 3), own, name)  # type: ignore[arg-type]


def causal(arch: str = "llama") -> CausalDraft:
    return CausalDraft(ModelRunner(language_model(arch)))


FAMILIES: dict[str, Callable[[Target], Draft]] = {
    "causal": lambda own: causal(),
    "causal with learned positions": lambda own: causal("gpt2"),
    "pard": lambda own: PardDraft(ModelRunner(language_model()), VOCAB - 1),
    "eagle1": lambda own: draft_of(net_of("eagle1", own, **SHORT), own),
    "eagle3": lambda own: draft_of(net_of("eagle3", own, **SHORT), own),
    "narrow": lambda own: draft_of(net_of("narrow", own, **SHORT), own),
    "peagle": peagle,
    "dflash": lambda own: dflash(own, "dflash"),
    "dspark": lambda own: dflash(own, "dspark"),
}


def in_rounds(own: Target, draft: Draft | None, **settings: Any) -> list[list[RoundRecord]]:
    """The rounds of each prompt, without its prefill; one warning is expected."""
    settings = {"max_new_tokens": NEW, "k": K} | settings
    with pytest.warns(UserWarning, match="context of 16 tokens") as seen:
        records = list(speculate(own, draft, PROMPTS, **settings))
    assert len([one for one in seen if "nothing is drafted beyond it" in str(one.message)]) == 1
    return [[r for r in records if r.prompt == i and not r.prefill] for i in range(len(PROMPTS))]


def starts(prompt: list[int], rounds: list[RoundRecord]) -> list[int]:
    """The tokens of the text before each of its rounds: the prompt and the first token, then what rounds added."""
    return list(accumulate([len(r.tokens) for r in rounds[:-1]], initial=len(prompt) + 1))


def emitted(rounds: list[RoundRecord]) -> list[int]:
    return [token for r in rounds for token in r.tokens]


def plain(own: Target, **settings: Any) -> list[list[int]]:
    outputs = decode(own, None, PROMPTS, max_new_tokens=NEW, **settings)
    return [output.output_ids for output in outputs]


@pytest.mark.parametrize("name", FAMILIES)
def test_chains_end_at_the_drafts_context(name: str) -> None:
    """Catches any family that drafts a token more or less than its context has room for, beside rows of other lengths,
    and one that fails on a prompt that it cannot read."""
    own = tiny_target(MODEL)
    found = in_rounds(own, FAMILIES[name](own), rows=3)
    for prompt, rounds, text in zip(PROMPTS, found, plain(own), strict=True):
        assert emitted(rounds) == text[1:]
        wanted = [min(K, max(0, CONTEXT - n)) for n in starts(prompt, rounds)]
        assert [r.drafted for r in rounds] == wanted
        assert [len(r.proposed) for r in rounds] == wanted
    assert any(r.drafted for r in found[0])
    assert sum(r.accepted for rounds in found for r in rounds) > 0 or name not in ("causal", "pard")


@pytest.mark.parametrize(
    ("name", "shape"),
    rotated(["causal", "pard", "eagle1", "eagle3", "peagle", "dflash"], [TREE, DynamicTree(2, 5)]),
)
def test_trees_end_at_the_drafts_context(name: str, shape: TreeShape) -> None:
    """Catches a tree that is cut by its number of nodes, or not at all."""
    own = tiny_target(MODEL)
    draft = FAMILIES[name](own)
    draft.shape = shape
    found = in_rounds(own, draft, rows=3)
    nodes_within = [0, 2, 5, 6]  # of TREE, by the levels that there is room for
    for prompt, rounds, text in zip(PROMPTS, found, plain(own), strict=True):
        assert emitted(rounds) == text[1:]
        for n, one in zip(starts(prompt, rounds), rounds, strict=True):
            room = min(K, max(0, CONTEXT - n))
            assert one.accepted <= room
            assert (one.drafted == 0) == (room == 0)
            if shape is TREE:
                assert one.drafted == nodes_within[room]


@pytest.mark.parametrize("name", ["causal", "eagle3", "dspark"])
def test_a_rows_text_does_not_depend_on_its_batch(name: str) -> None:
    """Catches random numbers that are left out in rounds in which all rows are beyond the context, and state that is
    lost in them: a sampled text, and what was drafted for it, are those of the prompt alone."""
    own, sampling = tiny_target(MODEL), SamplingParams(1.3)
    seeds = list(range(len(PROMPTS)))
    together = in_rounds(own, FAMILIES[name](own), sampling=sampling, seeds=seeds, rows=2)
    for prompt, seed, rounds in zip(PROMPTS, seeds, together, strict=True):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            alone = list(
                speculate(
                    own, FAMILIES[name](own), [prompt], sampling=sampling, seeds=[seed],
                    max_new_tokens=NEW, k=K,
                )
            )[1:]  # fmt: skip
        assert [(r.drafted, r.accepted, r.tokens) for r in alone] == [
            (r.drafted, r.accepted, r.tokens) for r in rounds
        ]


@pytest.mark.parametrize("name", ["causal", "eagle3", "peagle"])
def test_the_draft_is_not_run_where_no_row_is_within_its_context(name: str) -> None:
    """Catches passes of the draft whose tokens are thrown away."""
    own = tiny_target(MODEL)
    draft = FAMILIES[name](own)
    propose, asked = draft.propose, []

    def watch(history: Tensor, length: Tensor, k: int) -> Any:
        asked.append(int(length.min()))
        return propose(history, length, k)

    draft.propose = watch  # type: ignore[method-assign]
    rounds = in_rounds(own, draft, rows=1)
    wanted = [n for prompt, one in zip(PROMPTS, rounds, strict=True) for n in starts(prompt, one)]
    assert asked == [n for n in wanted if n < CONTEXT]


def test_a_lookup_goes_on_where_the_draft_ends() -> None:
    """Catches a lookup that is silenced with the draft behind it: matches are copied at any length."""
    own = tiny_target(MODEL)
    repeated = [[3, 4, 5, 6] * 3, [3, 4, 5, 6] * 5, *tiny_prompts(25)]
    both = TwoSourceDraft(NgramDraft(), causal(), VOCAB)
    with pytest.warns(UserWarning, match="context of 16 tokens"):
        records = list(speculate(own, both, repeated, k=K, max_new_tokens=NEW))
    alone = list(speculate(own, NgramDraft(), repeated, k=K, max_new_tokens=NEW))
    texts = [[t for r in records if r.prompt == i for t in r.tokens] for i in range(3)]
    wanted = [o.output_ids for o in decode(own, None, repeated, max_new_tokens=NEW)]
    assert texts == wanted

    def beyond(found: list[RoundRecord], prompt: int) -> list[tuple[int, list[int]]]:
        """(tokens before it, what it proposed) of each round that drafts, of those beyond the draft's context."""
        rounds = [r for r in found if r.prompt == prompt and not r.prefill]
        pairs = zip(starts(repeated[prompt], rounds), rounds, strict=True)
        return [(n, r.proposed) for n, r in pairs if n >= CONTEXT and r.drafted]

    copied = [pair for prompt in range(3) for pair in beyond(records, prompt)]
    assert copied == [pair for prompt in range(3) for pair in beyond(alone, prompt)]
    assert copied


def test_chains_by_confidence_end_there_too() -> None:
    """Catches a chain that is sure of itself and passes the context."""
    own = tiny_target(MODEL)
    draft = ConfidentDraft(causal(), 0.0)
    found = in_rounds(own, draft, rows=3)
    for prompt, rounds, text in zip(PROMPTS, found, plain(own), strict=True):
        assert emitted(rounds) == text[1:]
        wanted = [min(K, max(0, CONTEXT - n)) for n in starts(prompt, rounds)]
        assert [r.drafted for r in rounds] == wanted  # rounds cost nothing more with drafts


@pytest.mark.parametrize("temperature", [0.0, 1.3])
def test_mirror_drafts_end_there_too(temperature: float) -> None:
    own = tiny_target(MODEL)
    draft = MirrorDraft(causal(), own, MirrorConfig(exit_layer=1, branches=1))
    found = in_rounds(own, draft, rows=3, sampling=SamplingParams(temperature))
    for prompt, rounds, text in zip(PROMPTS, found, plain(own), strict=True):
        assert temperature or emitted(rounds) == text[1:]
        wanted = [min(K, max(0, CONTEXT - n)) for n in starts(prompt, rounds)]
        assert [r.drafted for r in rounds] == wanted


def test_a_draft_that_is_long_enough_is_not_warned_of() -> None:
    """Catches a warning that says nothing because it is always there, and a limit where config.json names none."""
    own = tiny_target(MODEL)
    for changes in (SHORT, {"max_position_embeddings": None}):
        draft = draft_of(net_of("eagle3", own, **changes), own)
        new = 8 if changes is SHORT else 50
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            records = list(speculate(own, draft, PROMPTS[:1], k=K, max_new_tokens=new))
        assert all(r.drafted == K for r in records if not r.prefill)
