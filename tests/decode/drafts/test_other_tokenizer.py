"""Small language models that draft for a target with another tokenizer."""

import copy
from os.path import commonprefix
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from decode.common.errors import UserError
from decode.drafts.base import DraftContext, Proposal, Reads
from decode.drafts.lookup import NgramDraft
from decode.drafts.other_tokenizer import OtherTokenizerDraft, RowText
from decode.drafts.registry import load_draft
from decode.drafts.wrappers import ConfidentDraft, RecordingDraft, TwoSourceDraft
from decode.engine.engine import decode
from decode.model.loading import Target, build_runner, load_target
from decode.model.runner import ModelRunner
from decode.model.vocabularies import Spelling, shared_tokens, whole_characters
from decode.serving.transplant import lay_rows, source_rows
from decode.verification.sampling import SamplingParams
from decode.verification.tree import DynamicTree
from tests.decode.verification.test_exact_distribution import distances, engine_law, own_law, small
from tests.hybrids import tiny_hybrid
from tests.spellings import KINDS, TEXTS, of_letters, two_of_three
from tests.tiny import tiny_model, tiny_target

PAIRS = [
    ("bytes of code", "bytes of prose"),
    ("pieces of prose", "bytes of prose"),
    ("bytes of prose", "pieces of letters"),
    ("pieces of letters", "pieces of prose"),
]
"""Of the draft and of the target."""
TEXT = "".join(TEXTS.values())


def spelling(kind: str) -> Spelling:
    tokenizer = KINDS[kind]()
    return Spelling(tokenizer, len(tokenizer))


def pair(names: tuple[str, str], **changes: Any) -> tuple[Target, OtherTokenizerDraft, Spelling]:
    """(target, a draft with the target's layers and its rows on the draft's tokens, how the target spells)."""
    own, wanted = (spelling(name) for name in names)
    size = len(wanted.pieces)
    model = tiny_model("llama", 3, **{"vocab_size": size, "max_position_embeddings": 256} | changes)
    near = copy.deepcopy(model)
    lay_rows(near, source_rows(wanted, own, shared_tokens(wanted, own), len(own.pieces)))
    return tiny_target(model), OtherTokenizerDraft(ModelRunner(near), own, wanted, size), wanted


def prompts_of(wanted: Spelling, *lengths: int) -> list[list[int]]:
    ids = wanted.encode(TEXT.encode())
    return [ids[10 * n : 10 * n + length] for n, length in enumerate(lengths)]


def texts(outputs: Any) -> list[list[int]]:
    return [output.output_ids for output in outputs]


# ---- text ----


@pytest.mark.parametrize("names", PAIRS, ids=" for ".join)
def test_greedy_text_is_the_targets(names: tuple[str, str]) -> None:
    """Catches text that depends on the draft, on the other rows or on who had the row before, and a draft of which
    nothing is accepted: it has the target's layers. The second prompt is of any tokens, special ones and parts of
    characters among them."""
    target, draft, wanted = pair(names)
    prompts = prompts_of(wanted, 30, 3, 12, 50)
    prompts[1] = torch.randint(0, len(wanted.pieces), (40,)).tolist()
    plain = texts(decode(target, None, prompts, max_new_tokens=24))
    accepted = 0
    for k, rows in ((4, 2), (1, 4)):
        found = decode(target, draft, prompts, k=k, rows=rows, max_new_tokens=24)
        assert texts(found) == plain
        accepted += sum(a for output in found for _, a in output.rounds)
    assert accepted > 0


@pytest.mark.parametrize("names", PAIRS[:2], ids=" for ".join)
def test_composed_drafts_keep_the_text(names: tuple[str, str]) -> None:
    """Catches a lookup in front, chains that end by confidence, a short context and a reduced vocabulary that change
    the text or fail."""
    target, draft, wanted = pair(names)
    prompts = prompts_of(wanted, 30, 12, 5)
    plain = texts(decode(target, None, prompts, max_new_tokens=40))
    composed = [TwoSourceDraft(NgramDraft(), draft, len(wanted.pieces)), ConfidentDraft(draft, 0.3)]
    for one in composed:
        assert texts(decode(target, one, prompts, k=3, max_new_tokens=40)) == plain
    some = ModelRunner(draft.runner.model, None, torch.arange(0, len(draft.own.pieces), 2))
    reduced = OtherTokenizerDraft(some, draft.own, wanted, len(wanted.pieces))
    recording = RecordingDraft(reduced)
    sampling = SamplingParams(1.0)
    decode(target, recording, prompts, k=2, max_new_tokens=8, sampling=sampling)
    drafted = {token for one in recording.proposals for token in one.tokens.flatten().tolist()}
    assert all(reduced.shared[token] % 2 == 0 for token in drafted)
    draft.reads = Reads(context=40)
    recording = RecordingDraft(draft)
    assert texts(decode(target, recording, prompts, k=3, max_new_tokens=40)) == plain
    assert (recording.proposals[-1].tokens[0] == -1).all()


def test_sampled_text_depends_on_no_other_row() -> None:
    """Catches random numbers that are drawn for the rows together."""
    target, draft, wanted = pair(PAIRS[0])
    prompts, sampling = prompts_of(wanted, 30, 3, 12), SamplingParams(0.8, top_k=40)
    together = texts(decode(target, draft, prompts, k=3, max_new_tokens=20, sampling=sampling))
    alone = texts(decode(target, draft, prompts, k=3, rows=1, max_new_tokens=20, sampling=sampling))
    assert together == alone


# ---- law ----

SAMPLING = SamplingParams(0.7)
FLOAT64 = {"hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2, "vocab_size": 3}
"""GPT-2 computes its norms in float64 too, where Llama's are in float32."""
SIZES = [(1, 3, 3 * (2 * 2 * 3) ** 2), (2, 2, 3 * (2**2 * 2**2 * 3))]
"""(K, length, paths): the draft draws among the two tokens that both have."""


def law_distance(k: int, length: int, paths: int, bug: Any = None) -> float:
    """TV of what the engine emits from the target's own law, all choices walked."""
    model = tiny_model("gpt2", 0, 0.4, torch.float64, **FLOAT64)
    target = tiny_target(model)
    draft = two_of_three(target)
    if bug is not None:
        bug(draft)
    law = engine_law(target, draft, k, length, SAMPLING, paths)
    prompts = [[0, 2, 1], [1]]
    return float(distances(law, lambda x: own_law(model, x, length, SAMPLING), prompts).max())


@pytest.mark.parametrize(("k", "length", "paths"), SIZES)
def test_sampled_text_follows_the_targets_law(k: int, length: int, paths: int) -> None:
    """Catches a q that is not the law over the target's tokens that were drawn from. Exact: no false alarm."""
    assert law_distance(k, length, paths) < 1e-12


def changed(change: Any) -> Any:
    """The bug of a proposal that `change` makes of the right one."""

    def plant(draft: OtherTokenizerDraft) -> None:
        usual = draft.propose

        def propose(history: Tensor, length: Tensor, k: int) -> Proposal:
            return change(usual(history, length, k))

        draft.propose = propose  # type: ignore[method-assign]

    return plant


BUGS = {
    "q not renormalised": changed(lambda p: Proposal(p.tokens, p.q * 0.7)),
    "a token mapped to a wrong id": changed(lambda p: Proposal(1 - p.tokens, p.q)),
    "q over the draft's ids": changed(lambda p: Proposal(p.tokens, p.q[..., [1, 0, 2]])),
}


@pytest.mark.parametrize("bug", BUGS.values(), ids=BUGS.keys())
def test_planted_bugs_move_the_law(bug: Any) -> None:
    """The test above must see each of them. Exact: no false alarm."""
    assert law_distance(*SIZES[0], bug) > 1e-3


def test_q_is_the_restricted_law_of_the_draft() -> None:
    """Catches a draft that continues another text than the committed one, or other ids of it: q is compared with plain
    passes of the model over the text in its own tokens, and a softmax over the tokens that both have."""
    target = tiny_target(small())
    draft = two_of_three(target)
    recording = RecordingDraft(draft)
    [output] = decode(target, recording, [[0, 2, 1]], k=2, max_new_tokens=14, sampling=SAMPLING)
    letters, text = ["a", "b", "ab"], "aabb"
    plain = copy.deepcopy(draft.runner.model)
    plain.set_attn_implementation("eager")
    done = 0
    for proposal, (_, accepted) in zip(recording.proposals, [(0, 0), *output.rounds], strict=False):
        text += "".join(letters[one] for one in output.output_ids[done : done + accepted + 1])
        done += accepted + 1
        ids, (tokens,), q = draft.own.encode(text.encode()), proposal.tokens.tolist(), proposal.q
        assert q is not None
        for place in range(2):
            read = ids + [1 - one for one in tokens[:place]]
            logits = plain(torch.tensor([read])).logits[0, -1, [1, 0]]
            want = torch.softmax(logits.double() / 0.7, -1)
            torch.testing.assert_close(q[0, place, :2].double(), want, atol=1e-6, rtol=1e-5)
            assert q[0, place, 2] == 0
    assert len(recording.proposals) > 4


# ---- two spellings of a text ----


@pytest.mark.parametrize("names", PAIRS, ids=" for ".join)
def test_the_text_is_kept_in_the_drafts_tokens(names: tuple[str, str]) -> None:
    """Catches a text that is spelt token by token, one that loses bytes, and tokens that change far from the end."""
    _, draft, wanted = pair(names)
    ids = wanted.encode(TEXT.encode())
    state, before = RowText(b"", draft.own.encode(TEXT[:1].encode())), []
    draft.extend(state, ids[:1])
    for token in ids[1:]:
        before = state.ids
        draft.extend(state, [token])
        agree = len(commonprefix([before, state.ids]))
        assert len(draft.own.join(before[agree:])) < 60
    spelt = draft.own.join(state.ids).decode(errors="replace")
    assert spelt.endswith(TEXT[5:])
    whole = draft.own.encode(TEXT.encode())
    assert state.ids[-100:] == whole[-100:]


@pytest.mark.parametrize("names", PAIRS, ids=" for ".join)
def test_drafted_text_is_spelt_in_the_targets_tokens(names: tuple[str, str]) -> None:
    """Catches tokens of the drafted text alone, which the target spells otherwise behind what is committed: all but the
    last are the target's own."""
    _, draft, wanted = pair(names)
    own, text = draft.own, TEXT.encode()
    ids = wanted.encode(text)
    right = tried = 0
    for n in range(20, len(ids) - 20):
        place = len(text) - len(wanted.join(ids[n:]))
        found = own.encode_from(text[: place + 24], [place])
        if found is None:
            continue
        spelt = draft.spelt_for_target(ids[:n][-16:], found[1])
        assert whole_characters(text[place : place + 24]).startswith(wanted.join(spelt))
        # The text ends inside a word, which the target may spell otherwise once it is whole.
        sure = [k for k in range(len(spelt)) if len(wanted.join(spelt[k:])) > 8]
        tried += 1
        right += spelt[: len(sure)] == ids[n : n + len(sure)]
    assert right == tried > 50


def test_special_tokens_change_sides_by_role() -> None:
    """Catches an EOS that ends nothing, BOS as text, and a special token that is read as letters."""
    _, draft, wanted = pair(("pieces of prose", "bytes of code"))
    own, end = draft.own, wanted.tokenizer.eos_token_id
    mine = own.tokenizer.eos_token_id
    assert draft.shared[end] == mine
    assert draft.spelt_for_target([], [*own.encode(b"the other"), mine])[-1] == end
    user = wanted.tokenizer.convert_tokens_to_ids("<|user|>")
    assert draft.text_of([user, *wanted.encode(b"x"), end]) == b"x</s>"
    draft.begin_batch(DraftContext(1, 8, 2, SamplingParams(), lambda p: p.argmax(-1)))
    prompt = torch.tensor([wanted.encode(b"the")])
    draft.prefill(torch.tensor([0]), prompt, torch.tensor([prompt.shape[1]]), None)
    assert draft.rows[0].ids[0] == own.tokenizer.bos_token_id


# ---- loading ----


def folders(tmp_path: Path, names: tuple[str, str]) -> tuple[str, Target]:
    for folder, name, seed in zip(("draft", "target"), names, (1, 2), strict=True):
        tokenizer = KINDS[name]()
        tiny_model("llama", seed, vocab_size=len(tokenizer) + 3).save_pretrained(tmp_path / folder)
        tokenizer.save_pretrained(tmp_path / folder)
    return str(tmp_path / "draft"), load_target(str(tmp_path / "target"), "cpu")


@pytest.mark.parametrize("names", PAIRS[:3], ids=" for ".join)
def test_a_folder_with_another_tokenizer_drafts(
    names: tuple[str, str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Catches a pair that is refused, and one that is taken without a word."""
    path, target = folders(tmp_path, names)
    draft = load_draft(path, target)
    assert isinstance(draft, OtherTokenizerDraft)
    said = capsys.readouterr().err
    assert f"{len(draft.shared)} of the target's {len(target.tokenizer)} tokens" in said
    assert said.count("\n") == 1
    prompts = [target.tokenizer(text[:30])["input_ids"] for text in TEXTS.values()]
    plain = texts(decode(target, None, prompts, max_new_tokens=12))
    assert texts(decode(target, draft, prompts, k=3, max_new_tokens=12)) == plain


def test_what_cannot_draft_by_text_is_refused() -> None:
    """Catches a tree of the draft's tokens, states that cannot be rolled back, and a pair without a common token."""
    target = tiny_target(small())
    draft = two_of_three(target)
    draft.shape = DynamicTree(2, 4)
    with pytest.raises(UserError, match="chains only"):
        decode(target, draft, [[0]], k=2, max_new_tokens=4)
    own, wanted = of_letters("a", "b"), of_letters("c", "d")
    with pytest.raises(UserError, match="share no token"):
        OtherTokenizerDraft(draft.runner, own, wanted, 2)
    with pytest.raises(UserError, match="recurrent layers"):
        OtherTokenizerDraft(build_runner(tiny_hybrid("lfm2")), own, own, 2)
