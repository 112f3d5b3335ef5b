"""T5s decode as transformers' `generate` does and follow their own law; others are refused."""

import contextlib
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForSeq2SeqLM

from decode.common.errors import UserError
from decode.drafts.causal import CausalDraft
from decode.drafts.early_exit import EarlyExitDraft
from decode.drafts.lookup import NgramDraft
from decode.drafts.wrappers import TwoSourceDraft
from decode.engine.engine import SpeculativeEngine, decode
from decode.model.hidden_states import HiddenStateSpec
from decode.model.loading import Target, build_runner, load_target
from decode.model.runner import ModelRunner
from decode.model.seq2seq import EncodedPrompts, RaggedPositionBias, Seq2SeqRunner, answer_logits
from decode.verification.sampling import SamplingParams
from decode.verification.tree import DynamicTree, tree_from_paths
from tests.decode.engine.test_engine import assert_rows_are_alone
from tests.decode.verification.test_exact_distribution import distances, engine_law
from tests.params import slow_except
from tests.seq2seq import VARIANTS, build, generated, own_law, t5_target, tiny_t5
from tests.tiny import noisy, tiny_model, tiny_prompts

PROMPTS = tiny_prompts(5, 17, 1, 40)
FORKED = tree_from_paths([[0], [1], [0, 0]])


def near(target: Target, noise: float = 0.01, **shape: Any) -> CausalDraft:
    return CausalDraft(build_runner(noisy(target.runner.model, noise)), **shape)


DRAFTS: dict[str, Any] = {
    "plain": lambda t: None,
    "chain": near,
    "static tree": lambda t: near(t, shape=FORKED),
    "dynamic tree": lambda t: near(t, shape=DynamicTree(3, 9)),
    "ngram": lambda t: NgramDraft(),
    "lookup": lambda t: TwoSourceDraft(NgramDraft(), near(t), t.runner.vocab_size),
    "early exit": lambda t: EarlyExitDraft(t, 2),
    "early exit tree": lambda t: EarlyExitDraft(t, 1, FORKED),
    "reduced": lambda t: CausalDraft(
        build_runner(noisy(t.runner.model, 0.01), None, torch.arange(0, 97, 2))
    ),
    "causal LM": lambda t: CausalDraft(ModelRunner(tiny_model("llama"))),
}


@pytest.mark.parametrize("variant", slow_except(VARIANTS, ["t5", "t5-v1.1"]))
def test_greedy_text_equals_generate(variant: str) -> None:
    """Catches positions counted for the whole batch, prompts of other rows or their padding that are read, K/V of
    rejected drafts, a start token in the wrong slot, scaled attention, and rows refilled with an older prompt's states.
    """
    model = tiny_t5(variant)
    target = t5_target(model)
    want = [generated(model, prompt, 12) for prompt in PROMPTS]
    assert len({tuple(text) for text in want}) == len(PROMPTS)  # the prompt matters
    for name in DRAFTS if variant == "t5" else ["chain", "dynamic tree", "early exit tree"]:
        outputs = decode(target, DRAFTS[name](target), PROMPTS, k=3, max_new_tokens=12, rows=2)
        assert [output.output_ids for output in outputs] == want, name
        if name == "chain":
            counts = {accepted for output in outputs for _, accepted in output.rounds}
            assert min(counts) < max(counts) == 3  # roll-back was tried


def test_a_batch_gives_the_text_of_each_prompt_alone() -> None:
    target = t5_target(tiny_t5())
    draft = DRAFTS["dynamic tree"](target)
    assert_rows_are_alone(target, draft, PROMPTS, sampling=SamplingParams(1.0), rows=3)


def test_text_ends_at_eos_and_buffers_grow() -> None:
    model = tiny_t5()
    [long] = tiny_prompts(150, seed=2)
    text = generated(model, long, 200)
    eos = max(set(text), key=text.index)
    [plain] = decode(t5_target(model, (eos,)), None, [long], max_new_tokens=200)
    assert plain.output_ids == text[: text.index(eos) + 1]
    target = t5_target(model)
    [output] = decode(target, near(target), [long], k=5, max_new_tokens=200)
    assert output.output_ids == text
    assert target.runner.shape[1] > 256


def test_half_precision_decodes() -> None:
    target = t5_target(tiny_t5(dtype=torch.bfloat16))
    [output] = decode(target, near(target), [PROMPTS[0]], k=3, max_new_tokens=16)
    assert len(output.output_ids) == 16


SAMPLING, LENGTH = SamplingParams(0.7), 2
SHORT = [[0, 2, 1], [1]]
LAWS: dict[str, tuple[Any, str, int]] = {
    "chain": (lambda t: near(t, 0.2), "exact", 3**2 * 2**2 * 3),
    "block": (lambda t: near(t, 0.2), "block", 3**2 * 2**2 * 3),
    "tree": (lambda t: near(t, 0.2, shape=FORKED), "exact", 3**4),
    "early exit": (lambda t: EarlyExitDraft(t, 1), "exact", 3**2 * 2**2 * 3),
}  # fmt: skip


def law_distance(name: str) -> float:
    """Largest TV of the emitted text from the target's own law, all choices enumerated."""
    make, rule, branches = LAWS[name]
    model = tiny_t5(
        std=0.5, vocab_size=3, d_model=8, d_kv=4, d_ff=8, num_heads=2, num_decoder_layers=2,
        dtype=torch.float64,
    )  # fmt: skip
    target = t5_target(model)
    paths = 3 * branches ** (LENGTH - 1)
    law = engine_law(target, make(target), 2, LENGTH, SAMPLING, paths, rule, SHORT)
    return float(distances(law, lambda x: own_law(model, x, LENGTH, SAMPLING), SHORT).max())


@pytest.mark.parametrize("name", slow_except(LAWS, ["chain", "tree", "early exit"]))
def test_sampled_text_follows_the_law(name: str) -> None:
    assert law_distance(name) < 1e-7  # T5's norms compute in fp32


def test_a_visible_padding_moves_the_law(monkeypatch: pytest.MonkeyPatch) -> None:
    """The tests above are blind if they pass cross-attention to slots behind a prompt."""

    def open_mask(self: EncodedPrompts, dtype: torch.dtype) -> Tensor:
        return torch.zeros(len(self.length), 1, 1, self.cache.slots.size, dtype=dtype)

    monkeypatch.setattr(Seq2SeqRunner, "try_model", lambda self: None)
    monkeypatch.setattr(EncodedPrompts, "mask", open_mask)
    assert law_distance("chain") > 1e-3


def test_positions_of_the_whole_row_move_the_law(monkeypatch: pytest.MonkeyPatch) -> None:
    """The tests above are blind if they pass a bias without distances."""
    compute = RaggedPositionBias.compute_tables

    def flat(self: RaggedPositionBias, size: int) -> None:
        compute(self, size)
        self.tables = [table[:1].expand(size, -1) for table in self.tables]

    monkeypatch.setattr(Seq2SeqRunner, "try_model", lambda self: None)
    monkeypatch.setattr(RaggedPositionBias, "compute_tables", flat)
    assert law_distance("chain") > 1e-3


def bart() -> Any:
    size = {"encoder_layers": 2, "decoder_layers": 2, "encoder_ffn_dim": 32, "decoder_ffn_dim": 32}
    heads = {"encoder_attention_heads": 4, "decoder_attention_heads": 4}
    config = AutoConfig.for_model("bart", vocab_size=97, d_model=32, **size, **heads)
    return AutoModelForSeq2SeqLM.from_config(config)


def damaged() -> Any:
    model = tiny_t5()
    model.shared.weight.data.fill_(float("nan"))
    return model


def without_start_token() -> Any:
    model = tiny_t5()
    model.generation_config.decoder_start_token_id = model.config.decoder_start_token_id = None
    return model


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (bart, "bart model cannot be decoded: its decoder has no relative"),
        (damaged, "weights are damaged"),
        (without_start_token, "decoder_start_token_id"),
    ],
)
def test_what_cannot_be_decoded_is_refused(make: Any, said: str) -> None:
    with pytest.raises(UserError, match=said):
        build_runner(make())


def test_the_trial_pass_finds_other_logits(monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches a trial that compares nothing."""
    monkeypatch.setattr(RaggedPositionBias, "for_slots", lambda *_: contextlib.nullcontext())
    with pytest.raises(UserError, match="other logits for rows of unequal length"):
        build_runner(tiny_t5())


def test_heads_and_compilation_are_refused() -> None:
    target = t5_target(tiny_t5())
    with pytest.raises(UserError, match="encoder-decoder: draft with a smaller"):
        target.runner.capture_hidden_states(HiddenStateSpec(final=True))
    with pytest.raises(UserError, match="mode compiled is for causal targets"):
        SpeculativeEngine(target, mode="compiled")


def test_a_saved_t5_is_loaded(tmp_path: Path) -> None:
    world = build(tmp_path)
    target = load_target(str(world.target))
    assert target.eos == {1}
    prompt = target.tokenizer(world.texts[0])["input_ids"]
    assert prompt[-1] == 1
    [output] = decode(target, None, [prompt], max_new_tokens=40)
    assert output.output_ids == generated(target.runner.model, prompt, 40, [1])


def test_hooks_leave_transformers_alone() -> None:
    """`generate` of the runner's own model gives the same text before and after decoding."""
    model = tiny_t5()
    want = generated(model, PROMPTS[1], 16)
    target = t5_target(model)
    decode(target, near(target), PROMPTS, k=3, max_new_tokens=8)
    assert generated(target.runner.model, PROMPTS[1], 16) == want


@pytest.mark.parametrize("kind", ["t5", "llama"])
def test_logits_of_an_answer(kind: str) -> None:
    """One row of logits for each token of the answer, the first from the prompt alone."""
    model = tiny_t5() if kind == "t5" else tiny_model("llama")
    target = t5_target(model)
    [output] = decode(target, None, [PROMPTS[1]], max_new_tokens=6)
    found = answer_logits(model, PROMPTS[1], output.output_ids)
    assert found.argmax(-1).tolist() == output.output_ids
