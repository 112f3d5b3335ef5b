"""The loop over tiny real architectures: greedy text equals transformers' own, rows and rounds are counted right."""

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from decode.checkpoints.draft_folder import draft_sha256
from decode.common.errors import UserError
from decode.drafts.base import Draft
from decode.drafts.causal import CausalDraft
from decode.drafts.lookup import NgramDraft
from decode.drafts.registry import load_draft
from decode.drafts.wrappers import CrossDeviceDraft
from decode.engine.engine import decode, speculate
from decode.engine.records import DecodeRecord
from decode.engine.round import PhaseTimes
from decode.model.loading import Target, load_target
from decode.model.runner import ModelRunner
from decode.verification.rules import NO_DRAFT
from decode.verification.sampling import SamplingParams
from tests.params import rotated
from tests.tiny import FEW, noisy, reference, tiny_model, tiny_prompts, tiny_target

PROMPTS = tiny_prompts(13, 4, 9)  # ragged; the first is longer than the window of 8
DRAFTS = ["plain", "ngram", "causal"]
SAMPLINGS = [SamplingParams(), SamplingParams(1.0)]


def make_draft(name: str, model: Any) -> Draft | None:
    """`causal` is the model with moved weights: accepted now and then, at every count from 0 to K."""
    causal = CausalDraft(ModelRunner(noisy(model, 0.01)))
    return {"plain": None, "ngram": NgramDraft(), "causal": causal}[name]


def perfect(model: Any) -> CausalDraft:
    return CausalDraft(ModelRunner(copy.deepcopy(model)))


def hf_text(model: Any, prompt: list[int], **limits: Any) -> list[int]:
    """Greedy text of transformers' own generate."""
    ids = torch.tensor([prompt])
    full = reference(model).generate(
        ids, attention_mask=torch.ones_like(ids), do_sample=False, pad_token_id=0, **limits
    )
    return full[0, len(prompt) :].tolist()


def texts(outputs: list[DecodeRecord]) -> list[list[int]]:
    return [output.output_ids for output in outputs]


# ---- text ----


@pytest.mark.parametrize(("name", "sampling"), rotated(DRAFTS, SAMPLINGS[::-1]), ids=str)
def test_a_rows_text_does_not_depend_on_its_batch(name: str, sampling: SamplingParams) -> None:
    """Catches padding that is attended to, and random numbers shared with or shifted by other rows."""
    model = tiny_model("gemma3_text")
    assert_rows_are_alone(tiny_target(model), make_draft(name, model), sampling=sampling)


def assert_rows_are_alone(
    target: Target, draft: Draft | None, prompts: list[list[int]] = PROMPTS, **settings: Any
) -> list[DecodeRecord]:
    """The outputs of the prompts together, whose texts and rounds are those of each prompt alone."""
    settings = {"k": 3, "max_new_tokens": 20} | settings
    seeds, rows = list(range(11, 11 + len(prompts))), settings.pop("rows", None)
    alone = [
        decode(target, draft, [prompt], seeds=[seed], **settings)[0]
        for prompt, seed in zip(prompts, seeds, strict=True)
    ]
    together = decode(target, draft, prompts, seeds=seeds, rows=rows, **settings)
    assert [(o.output_ids, o.rounds) for o in together] == [(o.output_ids, o.rounds) for o in alone]
    return together


@pytest.mark.parametrize("sampling", SAMPLINGS, ids=["greedy", "sampled"])
def test_a_draft_elsewhere_drafts_the_same(sampling: SamplingParams) -> None:
    """Catches a proposal or a random number lost on the way between devices (here both are the CPU)."""
    model = tiny_model("llama")
    cpu = torch.device("cpu")
    near = make_draft("causal", model)
    assert near is not None
    target, settings = tiny_target(model), {"k": 3, "sampling": sampling, "max_new_tokens": 20}
    here = decode(target, near, PROMPTS, **settings)
    there = decode(target, CrossDeviceDraft(near, cpu, cpu), PROMPTS, **settings)
    assert texts(there) == texts(here)
    assert [o.rounds for o in there] == [o.rounds for o in here]


def test_sampled_text_follows_the_seed() -> None:
    """Catches an ignored seed and unseeded randomness. Equal texts by chance: below 1e-9."""
    model, seeded = tiny_model("llama"), []

    def run(seed: int) -> list[list[int]]:
        torch.manual_seed(len(seeded))  # must not matter
        seeded.append(seed)
        settings = {"sampling": SamplingParams(1.0), "max_new_tokens": 20, "seed": seed}
        return texts(decode(tiny_target(model), make_draft("causal", model), PROMPTS, **settings))

    first = run(1)
    assert run(1) == first
    assert all(a != b for a, b in zip(run(2), first, strict=True))
    same_prompt = decode(
        tiny_target(model), None, [PROMPTS[0]] * 2, sampling=SamplingParams(1.0), max_new_tokens=20
    )
    assert same_prompt[0].output_ids != same_prompt[1].output_ids  # rows have seeds of their own


def test_a_longer_batch_may_follow() -> None:
    """Catches buffers that keep the first batch's size, and text of the first batch seen by the second."""
    model = tiny_model("mistral")
    target, draft = tiny_target(model), make_draft("causal", model)
    for lengths in ((3,), (20, 5), (2, 2, 7)):
        prompts = tiny_prompts(*lengths, seed=len(lengths))
        outputs = decode(target, draft, prompts, k=3, max_new_tokens=12)
        assert texts(outputs) == [hf_text(model, prompt, max_new_tokens=12) for prompt in prompts]


# ---- acceptance ----


@pytest.mark.parametrize(("arch", "sampling"), rotated(FEW, SAMPLINGS), ids=str)
def test_a_perfect_draft_is_always_accepted(arch: str, sampling: SamplingParams) -> None:
    """Catches a draft whose K/V misses a token after full acceptance, so that later rounds accept less. Sampled, p and
    q differ by rounding only: a false alarm has a probability of about 1e-5 per new seed."""
    model = tiny_model(arch)
    settings = {"k": 3, "sampling": sampling, "max_new_tokens": 21}
    outputs = decode(tiny_target(model), perfect(model), PROMPTS, **settings)
    assert [output.rounds for output in outputs] == [[(3, 3)] * 5] * 3


@pytest.mark.parametrize(("name", "sampling"), rotated(DRAFTS, SAMPLINGS[::-1]), ids=str)
def test_rounds_account_for_every_token(name: str, sampling: SamplingParams) -> None:
    """Catches a tau that is not what was emitted: each round gives accepted + 1 tokens, trimmed only at the end."""
    model = tiny_model("qwen3")
    settings = {"k": 3, "sampling": sampling, "max_new_tokens": 18}
    records = list(speculate(tiny_target(model), make_draft(name, model), PROMPTS, **settings))
    for row in range(len(PROMPTS)):
        first, *rounds = [record for record in records if record.prompt == row]
        assert first.prefill
        assert (first.drafted, first.accepted, len(first.tokens)) == (0, 0, 1)
        assert not any(record.prefill for record in rounds)
        for record in rounds[:-1]:
            assert record.finished is None
            assert len(record.tokens) == record.accepted + 1
            assert record.tokens[:-1] == record.proposed[: record.accepted]
        for record in rounds:
            assert record.accepted <= record.drafted == len(record.proposed) <= 3
        trimmed = rounds[-1].accepted + 1 - len(rounds[-1].tokens)
        assert 0 <= trimmed <= 3
        assert sum(record.accepted + 1 for record in rounds) - trimmed == 17
        assert rounds[-1].finished == "length"


# ---- where text ends ----


@pytest.mark.parametrize("arch", ["llama", "mistral"])
def test_eos_inside_a_drafted_window(arch: str) -> None:
    """Catches tokens after EOS, a lost EOS, and rounds that were trimmed before they were counted."""
    model = tiny_model(arch)
    free = hf_text(model, PROMPTS[0], max_new_tokens=20)
    place = next(i for i in range(2, 20) if i % 4 in (1, 2, 3) and free[i] not in free[:i])
    # The first token comes before the rounds of 4: this one is a draft, not a bonus
    eos = free[place]
    want = hf_text(model, PROMPTS[0], max_new_tokens=20, eos_token_id=eos)
    for name in DRAFTS:
        target, draft = tiny_target(model, (eos,)), make_draft(name, model)
        [output] = decode(target, draft, PROMPTS[:1], k=3, max_new_tokens=20)
        assert output.output_ids == want == free[: place + 1]
        assert output.finish_reason == "eos"
    target = tiny_target(model, (eos,))
    [output] = decode(target, perfect(model), PROMPTS[:1], k=3, max_new_tokens=20)
    assert output.output_ids == want
    assert output.rounds == [(3, 3)] * -(-place // 4)


def test_rows_end_at_their_own_eos() -> None:
    """Catches a finished row that goes on, and one that stops or disturbs the others."""
    model = tiny_model("llama")
    free = [hf_text(model, prompt, max_new_tokens=20) for prompt in PROMPTS]
    eos = (free[1][0], free[2][7])
    outputs = decode(tiny_target(model, eos), make_draft("causal", model), PROMPTS, k=3, max_new_tokens=20)  # fmt: skip
    want = [hf_text(model, prompt, max_new_tokens=20, eos_token_id=list(eos)) for prompt in PROMPTS]
    assert texts(outputs) == want
    assert len({len(text) for text in want}) == 3
    ended = outputs[1]  # by the prefill's token
    assert (ended.output_ids, ended.rounds) == ([eos[0]], [])
    for output in outputs:
        assert output.finish_reason == ("eos" if output.output_ids[-1] in eos else "length")


@pytest.mark.parametrize("name", DRAFTS)
def test_max_new_tokens_is_exact(name: str) -> None:
    """Catches an overshoot by the drafts of the last round, and one token too few."""
    model = tiny_model("gpt2")
    target, draft = tiny_target(model), make_draft(name, model)
    whole = texts(decode(target, None, PROMPTS, max_new_tokens=9))
    for limit in (1, 2, 3, 6, 9):
        outputs = decode(target, draft, PROMPTS, k=3, max_new_tokens=limit)
        assert texts(outputs) == [text[:limit] for text in whole]
        assert {output.finish_reason for output in outputs} == {"length"}


@pytest.mark.parametrize("arch", ["llama", "gpt2"])
def test_text_stops_at_the_context(arch: str) -> None:
    """Catches positions beyond the last one (an index error where they are learned) and drafts cut too early."""
    context = 24
    model = tiny_model(arch, max_position_embeddings=context)
    prompts = tiny_prompts(13, 23, 2)
    for draft in (None, NgramDraft(), make_draft("causal", model), perfect(model)):
        outputs = decode(tiny_target(model), draft, prompts, k=3, max_new_tokens=100)
        for output in outputs:
            assert output.output_ids == hf_text(model, output.prompt_ids, max_length=context)
            assert len(output.prompt_ids) + len(output.output_ids) == context
            assert output.finish_reason == "length"
    for output in outputs:  # the perfect draft: 3 a round while there are 3 positions left
        done, want = len(output.prompt_ids) + 1, []
        while done < context:
            room = min(3, context - done)
            want.append((room, room))
            done += room + 1
        assert output.rounds == want


@pytest.mark.parametrize(
    ("prompts", "settings", "message"),
    [
        ([], {}, "no prompt"),
        ([[1], []], {}, "prompt 1 is empty"),
        ([[1] * 64], {}, "64 tokens .* context holds 64"),
        ([[1] * 70], {}, "70 tokens .* context holds 64"),
        ([[1]], {"k": 0}, "k is 0: give 1 to 63"),
        ([[1]], {"k": 64}, "k is 64: give 1 to 63, since the context of .* holds 64 tokens"),
        ([[1]], {"sampling": SamplingParams(-0.1)}, "sampling.temperature is -0.1"),
        ([[1]], {"sampling": SamplingParams(1.0, -1)}, "sampling.top_k is -1"),
        ([[1]], {"sampling": SamplingParams(1.0, 0, 0.0)}, "sampling.top_p is 0.0"),
        ([[1]], {"max_new_tokens": 0}, "max_new_tokens >= 1"),
    ],
)
def test_bad_input_is_refused(
    prompts: list[list[int]], settings: dict[str, Any], message: str
) -> None:
    """Catches a stack trace from deep inside torch, or silence, where the user can fix the input."""
    with pytest.raises(UserError, match=message):
        decode(tiny_target(tiny_model("llama")), NgramDraft(), prompts, **settings)


def test_phases_are_filled_when_asked_for() -> None:
    """Catches a phase that is never timed or counted twice: they sum to the rounds' own seconds."""
    model, phases = tiny_model("llama"), PhaseTimes()
    [output] = decode(
        tiny_target(model), perfect(model), PROMPTS[:1], k=3, max_new_tokens=21, phases=phases
    )
    assert phases.rounds == len(output.rounds) == 5
    assert min(phases.draft, phases.verify, phases.overhead) > 0
    assert phases.total == pytest.approx(sum(output.round_seconds), rel=0.2)


# ---- n-gram lookup ----


def slow_lookup(text: list[int], k: int, longest: int, shortest: int) -> list[int]:
    """What followed the latest earlier occurrence of the longest suffix that has one."""
    for n in range(min(longest, len(text)), shortest - 1, -1):
        for end in range(len(text) - 1, n - 1, -1):
            if text[end - n : end] == text[-n:]:
                return text[end : end + k]
    return []


@settings(max_examples=150)
@given(
    st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=14), min_size=1, max_size=4),
    st.integers(1, 4),
    st.integers(1, 4),
    st.integers(0, 3),
)
def test_ngram_equals_the_slow_reference(
    rows: list[list[int]], k: int, shortest: int, more: int
) -> None:
    """Catches the earliest match taken for the latest, a suffix that matches itself, stale ids read as text."""
    slots = max(map(len, rows)) + 5
    history = torch.randint(0, 3, (len(rows), slots))  # behind the text lies what was rolled back
    for row, text in enumerate(rows):
        history[row, : len(text)] = torch.tensor(text)
    length = torch.tensor([len(text) for text in rows])
    proposal = NgramDraft(shortest + more, shortest).propose(history, length, k)
    assert proposal.q is None
    for text, tokens in zip(rows, proposal.tokens.tolist(), strict=True):
        want = slow_lookup(text, k, shortest + more, shortest)
        assert tokens == want + [NO_DRAFT] * (k - len(want))


# ---- drafts on disk ----


def save(folder: Path, words: list[str], **changes: Any) -> str:
    """A tiny llama with a tokenizer that knows these words."""
    tokenizer = Tokenizer(
        models.WordLevel({word: i for i, word in enumerate(words)}, unk_token=words[0])
    )
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tiny_model("llama", **changes).save_pretrained(folder)
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token=words[0]).save_pretrained(folder)
    return str(folder)


WORDS = ["<unk>", "def", "return", "x"]


def test_load_draft_and_decode(tmp_path: Path) -> None:
    """Catches a saved draft that loads with other weights, and evaluation that writes into its directory."""
    target = load_target(save(tmp_path / "target", WORDS), "cpu")
    path = save(tmp_path / "draft", WORDS)
    before = draft_sha256(path), sorted(Path(path).iterdir())
    [output] = decode(target, load_draft(path, target), PROMPTS[:1], k=3, max_new_tokens=13)
    assert output.rounds == [(3, 3)] * 3  # the same seed made both
    assert (draft_sha256(path), sorted(Path(path).iterdir())) == before
    other = save(tmp_path / "other", WORDS, seed=1)
    assert draft_sha256(other) != before[0]
    assert draft_sha256(str(tmp_path)) is None
