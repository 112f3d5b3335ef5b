"""Models with recurrent layers decode as transformers' `generate` does and follow their own law; others are refused."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from decode.common.errors import UserError
from decode.drafts.base import Draft, Proposal
from decode.drafts.causal import CausalDraft, RecurrentDraft, causal_draft
from decode.drafts.early_exit import EarlyExitDraft
from decode.drafts.lookup import NgramDraft
from decode.drafts.wrappers import TwoSourceDraft
from decode.engine.engine import SpeculativeEngine, decode
from decode.model import recurrent, runner
from decode.model.loading import build_runner
from decode.model.recurrent import RecurrentRunner
from decode.model.runner import ModelRunner
from decode.verification.sampling import SamplingParams
from decode.verification.tree import DynamicTree
from tests.decode.engine.test_engine import hf_text
from tests.decode.verification.test_exact_distribution import distances, engine_law
from tests.heads import random_draft
from tests.hybrids import (
    HYBRIDS,
    REFUSED,
    PartlyRight,
    generated,
    hybrid_target,
    plain_law,
    tiny_hybrid,
)
from tests.params import slow_except
from tests.tiny import noisy, tiny_model, tiny_prompts, tiny_target

FAST = ["qwen3_next", "lfm2", "mamba2"]
"""A delta rule with experts, convolutions alone, no attention."""
# Ragged; the first is longer than the window of 8, the last than no convolution
PROMPTS = tiny_prompts(13, 4, 9, 1)
TOKENS = 20
TOLERANCE = 1e-4


def random_causal(vocab: int = 97, **settings: Any) -> CausalDraft:
    """A draft with attention that knows nothing of the target: nearly all that it drafts is rejected."""
    return CausalDraft(ModelRunner(tiny_model("llama", seed=5, vocab_size=vocab)), **settings)


class Guess(Draft):
    """Chains that follow from the length of the text alone."""

    name = "guess"

    def propose(self, history: Tensor, length: Tensor, k: int) -> Proposal:
        return Proposal((length[:, None] + torch.arange(k)) % 3, None)


def recurrent_draft() -> Draft:
    return causal_draft(build_runner(tiny_hybrid("lfm2", seed=3, vocab_size=3)))


def answers(model: Any) -> dict[tuple[int, ...], list[int]]:
    return {tuple(prompt): generated(model, prompt, TOKENS) for prompt in PROMPTS}


# ---- greedy text ----


@pytest.mark.parametrize("arch", slow_except(HYBRIDS, FAST))
def test_greedy_text_equals_generate(arch: str) -> None:
    """Catches states of rejected drafts that stay, accepted tokens that a state lacks or reads twice, padding in a
    state, rows mixed up when they accept different numbers or are filled anew. In fp32, where `generate` reads the
    answer token by token and verification several at once.
    """
    model = tiny_hybrid(arch)
    want = answers(model)
    assert len({tuple(text) for text in want.values()}) == len(PROMPTS)  # the prompt matters
    target = hybrid_target(model)
    assert isinstance(target.runner, RecurrentRunner)
    others = [None, NgramDraft(), random_causal()] if arch in FAST else []
    for draft in [*others, PartlyRight(want)]:
        outputs = decode(target, draft, PROMPTS, k=3, max_new_tokens=TOKENS, rows=3)
        assert [output.output_ids for output in outputs] == [*want.values()], draft
    accepted = {accepted for output in outputs for _, accepted in output.rounds}
    assert accepted == {0, 1, 2, 3}  # every number of tokens was read again


@pytest.mark.parametrize("name", slow_except(["medusa", "eagle1", "eagle3", "lookup"], ["eagle3"]))
def test_other_chains_equal_generate(name: str) -> None:
    """Catches hidden states of tokens that were read again taken for those of the round, and of padding."""
    model = tiny_hybrid("qwen3_5_text")
    target = hybrid_target(model)
    if name == "lookup":
        draft: Draft = TwoSourceDraft(NgramDraft(), random_causal(), target.runner.vocab_size)
    else:
        draft = random_draft(name, target)
    outputs = decode(target, draft, PROMPTS, k=3, max_new_tokens=TOKENS, rows=3)
    assert [output.output_ids for output in outputs] == [*answers(model).values()]


def test_a_recurrent_draft_speeds_up_any_target() -> None:
    """Catches a draft whose kept states hold rejected tokens or lack accepted ones: a copy of the target as its draft
    has all its tokens accepted, in rows that are filled anew too, and a moved one not always."""
    model = tiny_hybrid("qwen3_5_text")
    want = [*answers(model).values()]
    settings: dict[str, Any] = {"k": 3, "max_new_tokens": TOKENS, "rows": 3}
    for noise, fewest in ((0.0, 3), (0.02, 0)):
        draft = causal_draft(build_runner(noisy(model, noise)))
        assert isinstance(draft, RecurrentDraft)
        outputs = decode(hybrid_target(model), draft, PROMPTS, **settings)
        assert [output.output_ids for output in outputs] == want
        accepted = [accepted for output in outputs for _, accepted in output.rounds]
        assert min(accepted) == fewest
        assert max(accepted) == 3
    plain = tiny_model("llama")
    lookup = TwoSourceDraft(NgramDraft(), draft, 97)
    for each in (draft, lookup):
        outputs = decode(tiny_target(plain), each, PROMPTS, **settings)
        assert [output.output_ids for output in outputs] == [
            hf_text(plain, prompt, max_new_tokens=TOKENS) for prompt in PROMPTS
        ]


@torch.inference_mode()
def test_hidden_states_are_those_of_one_pass() -> None:
    """Catches a draft's input that depends on padding, on the group that a row was read in, or on rejected tokens."""
    model = tiny_hybrid("qwen3_5_text", dtype=torch.float64)
    target = hybrid_target(model)
    draft = random_draft("eagle3", target)
    taps = draft.reads.aux_layers
    assert taps is not None
    target.runner.capture_hidden_states(taps)
    target.runner.allocate(2, 32)
    length = torch.tensor([9, 4])
    text = torch.tensor(tiny_prompts(9, 9))
    target.runner.prefill(text, length)
    after = torch.tensor([[1, 2, 3], [4, 5, 6]])
    target.runner.step(after, length)
    target.runner.step(after, length + torch.tensor([1, 3]))
    found = target.runner.features
    texts = [[*text[0, :9], 1, 1, 2, 3], [*text[1, :4], 4, 5, 6, 4, 5, 6]]
    for row, whole in enumerate(texts):
        states = model(torch.tensor([whole]), output_hidden_states=True).hidden_states
        want = torch.cat([states[i] for i in taps.layers], -1)[0, -3:]
        torch.testing.assert_close(found[row], want, atol=1e-5, rtol=1e-5)


def test_a_batch_gives_the_text_of_each_prompt_alone() -> None:
    """Catches rows that are read again together and exchange their states."""
    model = tiny_hybrid("falcon_h1", dtype=torch.float64)
    target, seeds = hybrid_target(model), [11, 12, 13, 14]
    settings: dict[str, Any] = {"k": 3, "max_new_tokens": TOKENS, "sampling": SamplingParams(1.0)}
    draft = PartlyRight(answers(model))
    together = decode(target, draft, PROMPTS, rows=3, seeds=seeds, **settings)
    for prompt, seed, output in zip(PROMPTS, seeds, together, strict=True):
        [alone] = decode(target, draft, [prompt], seeds=[seed], **settings)
        assert alone.output_ids == output.output_ids


def test_long_prompts_are_read_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches a part that begins from empty states, and buffers that lose states when they grow."""
    monkeypatch.setattr(runner, "PREFILL_CHUNK", 5)
    model = tiny_hybrid("bamba", max_position_embeddings=256)
    [prompt] = tiny_prompts(120)
    want = generated(model, prompt, 40)
    target = hybrid_target(model)
    draft = PartlyRight({tuple(prompt): want})
    [output] = decode(target, draft, [prompt], k=3, max_new_tokens=40)
    assert output.output_ids == want
    assert target.runner.shape[1] > 128


@pytest.mark.parametrize("arch", ["zamba2", "nemotron_h"])
def test_passes_of_all_widths_are_of_one_model(arch: str) -> None:
    """Catches time steps that transformers clamps in passes over several tokens alone: verification would have another
    law than plain decoding (and the trial would refuse the model)."""
    target = hybrid_target(tiny_hybrid(arch, time_step_min=1.0, time_step_max=2.0))
    plain = decode(target, None, PROMPTS, max_new_tokens=TOKENS)
    known = {tuple(output.prompt_ids): output.output_ids for output in plain}
    outputs = decode(target, PartlyRight(known), PROMPTS, k=3, max_new_tokens=TOKENS)
    assert [x.output_ids for x in outputs] == [x.output_ids for x in plain]


def test_half_precision_decodes() -> None:
    target = hybrid_target(tiny_hybrid("qwen3_next", dtype=torch.bfloat16))
    [output] = decode(target, random_causal(), PROMPTS[:1], k=3, max_new_tokens=16)
    assert len(output.output_ids) == 16


# ---- the law ----

SAMPLING, LENGTH = (
    SamplingParams(0.7),
    3,
)  # a first token and two rounds: what the first leaves is read by the second
SHORT = [[0, 2, 1], [1]]
LAWS: dict[str, tuple[Callable[[], Draft], int, str, int]] = {
    "certain": (Guess, 2, "exact", 2**2 * 3),  # two verdicts and the bonus
    "one": (Guess, 1, "exact", 2 * 3),
    "sampled": (lambda: random_causal(3), 1, "exact", 3 * 2 * 3),  # a draft, its verdict, the bonus
    "block": (lambda: random_causal(3), 1, "block", 3 * 2 * 3),
    "recurrent": (recurrent_draft, 1, "exact", 3 * 2 * 3),
}


def law_distance(arch: str, name: str, plant: Any = None) -> float:
    """Largest TV of the emitted text from the target's own law, all choices enumerated; `plant` is called when the
    target was loaded."""
    make, k, rule, branches = LAWS[name]
    model = tiny_hybrid(arch, vocab_size=3)
    target = hybrid_target(model)
    if plant is not None:
        plant()
    paths = 3 * branches ** (LENGTH - 1)
    law = engine_law(target, make(), k, LENGTH, SAMPLING, paths, rule, SHORT)
    return float(
        distances(law, lambda x: plain_law(model, x, LENGTH, SAMPLING), SHORT).nan_to_num(1).max()
    )


@pytest.mark.parametrize("arch", slow_except(HYBRIDS, FAST))
def test_sampled_text_follows_the_law(arch: str) -> None:
    """Catches p computed from another text than the committed one. Exact: no false alarm. The models compute in fp32,
    whose rounding is all that the distance may hold."""
    assert law_distance(arch, "certain" if arch in FAST else "one") < TOLERANCE


@pytest.mark.parametrize("name", ["sampled", "block", "recurrent"])
def test_sampled_drafts_follow_the_law(name: str) -> None:
    assert law_distance("lfm2", name) < TOLERANCE


# ---- planted bugs: the tests above are blind if they pass one of these ----


def read_one_less(self: RecurrentRunner, tokens: Any, base: Any, row: Any) -> None:
    if tokens.shape[1] > 1:
        READ_AGAIN(self, tokens[:, :-1], base, row)


def as_the_longest(values: list[int]) -> dict[int, list[int]]:
    return {max(values): list(range(len(values)))}


def nothing(*_: Any) -> None:
    pass


READ_AGAIN = RecurrentRunner._read_again
PLANTS: dict[str, tuple[Any, str, Any]] = {
    "states of rejected drafts stay": (RecurrentRunner, "_take_back", nothing),
    "states are restored but accepted tokens not read": (RecurrentRunner, "_read_again", nothing),
    "one accepted token is not read": (RecurrentRunner, "_read_again", read_one_less),
    "the states before a step are not kept": (
        recurrent, "copy_states", lambda states: {**states},
    ),
    "rows of unequal length are read together": (recurrent, "group_by", as_the_longest),
    "a row begins with the states of the one before": (recurrent, "clear_rows", nothing),
}  # fmt: skip


@pytest.mark.parametrize("arch", ["lfm2", "mamba2"])
@pytest.mark.parametrize("plant", PLANTS)
def test_planted_bugs_change_the_text(
    plant: str, arch: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = tiny_hybrid(arch)
    want = answers(model)
    target, draft = hybrid_target(model), PartlyRight(want)
    settings: dict[str, Any] = {"k": 3, "max_new_tokens": TOKENS, "rows": 2}
    monkeypatch.setattr(*PLANTS[plant])
    wrong = decode(target, draft, PROMPTS, **settings)
    assert [output.output_ids for output in wrong] != [*want.values()]


@pytest.mark.parametrize("plant", [*PLANTS][:3])
def test_planted_bugs_move_the_law(plant: str, monkeypatch: pytest.MonkeyPatch) -> None:
    setting = PLANTS[plant]
    assert law_distance("lfm2", "certain", lambda: monkeypatch.setattr(*setting)) > 1e-3


# ---- refusals ----


@pytest.mark.parametrize("arch", REFUSED)
def test_a_model_that_cannot_be_decoded_is_refused(arch: str) -> None:
    """Catches wrong text without a word for models that keep their states elsewhere or cannot go on from one."""
    with pytest.raises(UserError, match=f"this {arch} model cannot be decoded.*{REFUSED[arch][1]}"):
        hybrid_target(tiny_hybrid(arch))


def test_faint_states_are_no_excuse() -> None:
    """Catches a trial that sees no difference because the weights are small: states are compared, not logits alone."""
    with pytest.raises(UserError, match="as if nothing stood before them"):
        hybrid_target(tiny_hybrid("mamba", std=0.001))


def test_damaged_weights_are_refused() -> None:
    model = tiny_hybrid("mamba2")
    model.backbone.layers[1].mixer.in_proj.weight.data[0, 0] = float("nan")
    with pytest.raises(UserError, match="mamba2 .* NaN or infinite logits"):
        hybrid_target(model)


def test_what_needs_more_than_one_state_is_refused() -> None:
    """Catches trees verified as chains, and drafts that write into the states of the target."""
    target = hybrid_target(tiny_hybrid("lfm2"))
    tree = random_causal(shape=DynamicTree(width=3, nodes=9))
    with pytest.raises(UserError, match="recurrent layers, and draft 'causal' drafts trees"):
        SpeculativeEngine(target, tree)
    middle = random_causal()
    middle.runs = "pass"  # as Mirror
    with pytest.raises(UserError, match="acts in the middle of the target's pass"):
        SpeculativeEngine(target, middle)
    with pytest.raises(UserError, match="mode compiled is for causal targets with attention"):
        SpeculativeEngine(target, mode="compiled")
    with pytest.raises(UserError, match="lfm2 target has recurrent layers"):
        EarlyExitDraft(target, 1)
    with pytest.raises(UserError, match="rolls back by length, and its model has recurrent"):
        CausalDraft(target.runner)
    draft = causal_draft(hybrid_target(tiny_hybrid("lfm2", seed=1)).runner)
    draft.shape = DynamicTree(width=3, nodes=9)
    with pytest.raises(UserError, match="recurrent layers and drafts chains only"):
        decode(tiny_target(tiny_model("llama")), draft, PROMPTS)
