"""Drafts that propose a block in one pass, native layers and exits in the engine: each family is a line of a table.

What they compute is compared with plain passes over the whole text, the text with the target's own, its law exactly.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from itertools import product
from typing import Any

import pytest
from torch import Tensor

from decode.drafts.base import Draft, Proposal
from decode.drafts.blocks import DFlashDraft, PardDraft, PEagleDraft
from decode.drafts.dflash_model import DynamicConvolution
from decode.drafts.early_exit import EarlyExitDraft
from decode.drafts.lookup import NgramDraft
from decode.drafts.mtp import MtpDraft, MtpModel
from decode.drafts.wrappers import TwoSourceDraft
from decode.engine.engine import decode
from decode.model.loading import Target
from decode.model.runner import ModelRunner
from decode.verification.sampling import SamplingParams
from tests.blocks import HOT, LENGTH, PROMPTS, SHAPES, K
from tests.decode.drafts import test_dflash, test_exit_adapter, test_mtp, test_pard, test_peagle
from tests.decode.verification.test_exact_distribution import (
    ENUMERATED,
    distance_from_own_law,
    engine_law,
    small,
)
from tests.params import pairwise, rotated, slow_except
from tests.tiny import ARCHITECTURES, FEW, VOCAB, noisy, tiny_model, tiny_target


def pard_of(target: Target) -> PardDraft:
    """One whose mask is the last token, and that agrees with a target of few tokens now and then."""
    model = target.runner.model
    return PardDraft(ModelRunner(noisy(model, 0.2)), model.config.vocab_size - 1)


@dataclass(frozen=True)
class Family:
    """How it is made, how far its logits are from plain passes (`drift`), and how it is made to enumerate its law over
    a target of so many layers."""

    make: Callable[..., Any]
    drift: Callable[..., tuple[float, set[int]]]
    layers: int
    for_law: Callable[[Target], Draft]


dflash, dspark = partial(test_dflash.draft_of, "dflash"), partial(test_dflash.draft_of, "dspark")
dflash2 = partial(test_dflash.draft_of, "dflash2", ids=None)
xpress = partial(test_dflash.draft_of, "xpress")
domino = partial(test_dflash.draft_of, "domino", ids=None)
dflare = partial(test_dflash.draft_of, "dflare", ids=None)
WHOLE: dict[str, Any] = {"ids": None, "taps": (0, 1)}
FAMILIES = {
    "pard": Family(
        lambda own, shape=None: test_pard.pard_of(own.runner.model, shape),
        test_pard.drift, 1, pard_of,
    ),
    "peagle": Family(
        test_peagle.draft_of, test_peagle.drift, 3, partial(test_peagle.draft_of, ids=None)
    ),
    "dflash": Family(dflash, test_dflash.drift, 2, partial(dflash, **WHOLE)),
    "dspark": Family(dspark, test_dflash.drift, 2, partial(dspark, **WHOLE)),
    "dflash2": Family(dflash2, test_dflash.drift, 2, partial(dflash2, **WHOLE)),
    "xpress": Family(xpress, test_dflash.drift, 2, partial(xpress, **WHOLE)),
    "domino": Family(
        domino, test_dflash.drift, 2, partial(domino, **WHOLE, pure_draft_prefix_len=0)
    ),
    "dflare": Family(dflare, test_dflash.drift, 2, partial(dflare, **WHOLE)),
    "mtp": Family(test_mtp.draft_of, test_mtp.drift, 2, test_mtp.draft_of),
}  # fmt: skip
BLOCKS = ["pard", "peagle", "dflash", "dspark", "dflash2", "xpress", "domino", "dflare"]


@pytest.mark.parametrize(
    ("name", "arch"),
    slow_except(
        [
            *product(BLOCKS[:3], FEW),
            *product(BLOCKS[3:], FEW[:1]),
            *product(["mtp"], test_mtp.KINDS),
        ],
        product(FAMILIES, FEW[:1]),
    ),
)
def test_distributions_are_those_of_plain_passes(name: str, arch: str) -> None:
    """Catches masks, keys and context that stay, positions, states or tokens one off, causal blocks and norms of
    another layer, after every number of accepted drafts and for rows shorter than what is read again."""
    own = tiny_target(tiny_model(arch))
    draft = FAMILIES[name].make(own)
    worst, counts = FAMILIES[name].drift(draft, draft, own, sampling=HOT)
    assert worst < 2e-3
    assert len(counts) > 1


@pytest.mark.parametrize(("name", "shape"), rotated(BLOCKS[:3], ["fixed", "grown"])[1:])
def test_distributions_in_trees(name: str, shape: str) -> None:
    own = tiny_target(tiny_model("llama"))
    draft = FAMILIES[name].make(own, SHAPES[shape])
    assert FAMILIES[name].drift(draft, draft, own)[0] < 2e-3


@pytest.mark.parametrize("name", BLOCKS)
def test_distributions_after_rounds_without_it(name: str) -> None:
    """Catches tokens, pairs or context that a lookup's rounds committed and the KV cache lacks."""
    own = tiny_target(tiny_model("llama"))
    inner = FAMILIES[name].make(own)
    draft = TwoSourceDraft(NgramDraft(longest=2, shortest=1), inner, VOCAB)
    assert FAMILIES[name].drift(draft, inner, own)[0] < 2e-3


READ, PAIRS, FORWARD = PardDraft._read_with_masks, PEagleDraft._committed_pairs, MtpModel.forward
WRITE, BEGIN = DFlashDraft._write_context, DFlashDraft.begin_batch


def too_few(self: PardDraft, *inputs: Any) -> Tensor:
    """Reads one token less than a round may commit: a mask of the pass before stays."""
    reread, self.reread = self.reread, self.reread - 2
    found = READ(self, *inputs)
    self.reread = reread
    return found


def too_few_pairs(self: PEagleDraft, history: Tensor, length: Tensor) -> Any:
    """Two pairs of the round before are not read again."""
    tokens, states = PAIRS(self, history, length)
    return tokens[:, 2:], states[:, 2:]


def late_position(
    self: MtpModel, state: Tensor, embeds: Tensor, position: Tensor, cache: Any
) -> Tensor:
    """Drafted tokens stand one position too far."""
    drafted = cache is not None and state.shape[1] == 1
    return FORWARD(self, state, embeds, position + drafted, cache)


def no_rewrite(self: DFlashDraft, states: Tensor, base: Tensor, row: Any = None) -> None:
    if row is not None:
        WRITE(self, states, base, row)


def causal_begin(self: DFlashDraft, request: Any) -> None:
    BEGIN(self, request)
    self.block = type(self.block)(
        self.block.index, self.block.depth, self.block.ancestor_mask.tril()
    )


@pytest.mark.parametrize(
    ("name", "owner", "method", "bug"),
    [
        ("pard", PardDraft, "_read_with_masks", too_few),
        ("pard", PardDraft, "_read_with_masks", lambda self, history, length, k: READ(self, history, length - 1, k)),
        ("peagle", PEagleDraft, "_committed_pairs", too_few_pairs),
        ("peagle", PEagleDraft, "_committed_pairs", lambda self, history, length: PAIRS(self, history, length - 1)),
        ("mtp", MtpDraft, "_committed_pairs", too_few_pairs),
        ("mtp", MtpDraft, "_committed_pairs", lambda self, history, length: PAIRS(self, history, length - 1)),
        ("mtp", MtpModel, "forward", late_position),
        ("dflash", DFlashDraft, "_write_context", lambda self, x, base, row=None: WRITE(self, x, base + 1, row)),
        ("dflash", DFlashDraft, "_write_context", no_rewrite),
        ("dflash", DFlashDraft, "begin_batch", causal_begin),
        ("dflash2", DynamicConvolution, "forward", lambda self, x, sublayer: sublayer(x)),
    ],
)  # fmt: skip
def test_planted_bugs_change_the_distributions(
    name: str, owner: type, method: str, bug: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The tests above are blind if one of these goes unseen."""
    own = tiny_target(tiny_model("llama"))
    draft = FAMILIES[name].make(own)
    monkeypatch.setattr(owner, method, bug)
    assert FAMILIES[name].drift(draft, draft, own, sampling=HOT)[0] > 0.02


DRAFTS: dict[str, Callable[..., Draft]] = {
    **{name: family.make for name, family in FAMILIES.items()},
    "early-exit": lambda own, shape: EarlyExitDraft(own, 2, shape),
    "layerskip": test_exit_adapter.draft_of,
}
LLAMA = [("llama", name, shape) for name, shape in pairwise(DRAFTS, ["chain", "grown"])]
TEXTS = [
    (arch, "dflash" if name == "mtp" and arch not in test_mtp.KINDS else name, shape)
    for arch, name, shape in [*LLAMA, *rotated(ARCHITECTURES, DRAFTS, SHAPES)[21:]]
]


@pytest.mark.parametrize(
    ("arch", "name", "shape"), slow_except(TEXTS, [("llama", "pard", "chain"), "gemma3_text"])
)
def test_greedy_text_is_the_targets(arch: str, name: str, shape: str) -> None:
    """Catches drafting that spoils the K/V or states that it shares with the target, all families and architectures."""
    own = tiny_target(tiny_model(arch))
    plain = decode(own, None, PROMPTS, max_new_tokens=LENGTH)
    draft = DRAFTS[name](own, SHAPES[shape])
    outputs = decode(own, draft, PROMPTS, k=K, max_new_tokens=LENGTH)
    assert [o.output_ids for o in outputs] == [o.output_ids for o in plain]


def law_distance(name: str, vocab: int, k: int, length: int, paths: int) -> float:
    """Largest TV of the emitted text from the target's own law."""
    family, sampling = FAMILIES[name], SamplingParams(0.7)
    model = small(vocab_size=vocab, num_hidden_layers=family.layers)
    own = tiny_target(model)
    law = engine_law(own, family.for_law(own), k, length, sampling, paths)
    return distance_from_own_law(law, model, length, sampling)


@pytest.mark.parametrize("case", ENUMERATED, ids=str)
@pytest.mark.parametrize("name", FAMILIES)
def test_sampled_text_has_the_targets_law(name: str, case: tuple[int, int, int, int]) -> None:
    """Catches a q that is not what a token was drawn from, DSpark's correction included. Exact: no false alarm."""
    assert law_distance(name, *case) < 1e-7  # HF norms compute in fp32


PROPOSE = DFlashDraft.propose


def uncorrected_q(self: DFlashDraft, history: Tensor, length: Tensor, k: int) -> Proposal:
    """Reports the law before the correction for tokens drawn after it."""
    found: list[Tensor] = []
    base_logits = self.net.base_logits

    def keep(states: Tensor) -> Tensor:
        found.append(base_logits(states))
        return found[-1]

    self.net.base_logits = keep  # type: ignore[method-assign]
    proposal = PROPOSE(self, history, length, k)
    del self.net.base_logits
    q = (found[-1] / self.request.sampling.temperature).softmax(-1)
    return Proposal(proposal.tokens, q, proposal.tree, proposal.finite)


def first_level_everywhere(propose: Callable[..., Proposal], self: Draft, *inputs: Any) -> Proposal:
    """Reports the first token's distribution for all: marginals for what was drawn given the token before."""
    proposal = propose(self, *inputs)
    assert proposal.q is not None
    q = proposal.q[:, :1].expand_as(proposal.q)
    return Proposal(proposal.tokens, q, proposal.tree, proposal.finite)


@pytest.mark.parametrize(
    ("name", "kind", "bug", "case"),
    [
        ("dspark", DFlashDraft, uncorrected_q, ENUMERATED[0]),
        ("dspark", DFlashDraft, partial(first_level_everywhere, PROPOSE), ENUMERATED[2]),
        ("dflash2", DFlashDraft, uncorrected_q, ENUMERATED[0]),
        ("xpress", DFlashDraft, uncorrected_q, ENUMERATED[1]),
        ("domino", DFlashDraft, uncorrected_q, ENUMERATED[1]),
        ("pard", PardDraft, partial(first_level_everywhere, PardDraft.propose), ENUMERATED[2]),
    ],
)
def test_a_wrong_q_moves_the_law(
    name: str, kind: type, bug: Any, case: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The test above is blind if one goes unseen."""
    monkeypatch.setattr(kind, "propose", lambda self, *inputs: bug(self, *inputs))
    assert law_distance(name, *case) > 1e-3
