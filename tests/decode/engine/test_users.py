"""One target and one draft, many users: read in turns, from threads, after errors, and left alone."""

import gc
import sys
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from decode.common.errors import UserError
from decode.common.lock import USERS
from decode.drafts.base import Draft, Proposal, check_request
from decode.drafts.causal import CausalDraft
from decode.drafts.early_exit import EarlyExitDraft
from decode.drafts.lookup import NgramDraft
from decode.drafts.mirror import MirrorConfig, MirrorDraft
from decode.drafts.swift import SwiftDraft
from decode.drafts.swift_search import SwiftConfig
from decode.drafts.wrappers import DraftWrapper, RecordingDraft, TwoSourceDraft
from decode.engine.engine import SpeculativeEngine, decode, speculate
from decode.engine.records import RoundRecord
from decode.model.kv_cache import StaticKVLayer
from decode.model.loading import Target
from decode.model.runner import ModelRunner
from decode.verification.sampling import SamplingParams
from tests.heads import random_draft
from tests.hybrids import hybrid_target, tiny_hybrid
from tests.params import rotated
from tests.tiny import VOCAB, noisy, reference, tiny_model, tiny_prompts, tiny_target

FIRST, SECOND = tiny_prompts(9, 5)
NEW = 10
KINDS = ["ngram", "causal", "eagle3", "mirror", "early-exit"]


@pytest.fixture(autouse=True)
def nothing_is_held() -> Iterator[None]:
    """No test leaves a target in use: the next one's might get its id."""
    yield
    gc.collect()
    assert not USERS


@pytest.fixture(scope="module")
def model() -> Any:
    return tiny_model("llama")


@pytest.fixture
def target(model: Any) -> Target:
    return tiny_target(model)


def causal(model: Any) -> CausalDraft:
    """Accepted now and then."""
    return CausalDraft(ModelRunner(noisy(model, 0.01)))


def make_draft(kind: str, model: Any, target: Target) -> Draft | None:
    makers: dict[str, Callable[[], Draft | None]] = {
        "plain": lambda: None,
        "ngram": NgramDraft,
        "causal": lambda: causal(model),
        "eagle3": lambda: random_draft("eagle3", target),
        "mirror": lambda: MirrorDraft(causal(model), target, MirrorConfig(exit_layer=2)),
        "early-exit": lambda: EarlyExitDraft(target, 1),
        "swift": lambda: SwiftDraft(target, SwiftConfig(min_layers=0)),
    }
    return makers[kind]()


def tokens(records: Any) -> list[int]:
    return [token for record in records if record is not None for token in record.tokens]


def text(target: Target, draft: Draft | None, prompt: list[int], **settings: Any) -> list[int]:
    return tokens(speculate(target, draft, [prompt], max_new_tokens=NEW, **settings))


def begin(
    target: Target, draft: Draft | None, prompt: list[int], **settings: Any
) -> tuple[Iterator[RoundRecord], list[RoundRecord]]:
    """A generator after its first records, and those."""
    records = speculate(target, draft, [prompt], max_new_tokens=NEW, **settings)
    return records, [next(records), next(records)]


# ---- in turns ----


@pytest.mark.parametrize("kind", ["plain", "eagle3", "mirror"])
def test_a_second_generator_is_refused_and_the_first_goes_on(
    model: Any, target: Target, kind: str
) -> None:
    """Bug: each wrote into the other's KV cache, without a word."""
    want = text(tiny_target(model), None, FIRST)
    records, read = begin(target, make_draft(kind, model, target), FIRST)
    for other in (None, NgramDraft()):
        with pytest.raises(
            UserError, match="target 'tiny' is decoding for .*close\\(\\) it first.*$"
        ):
            next(speculate(target, other, [SECOND]))
    assert tokens([*read, *records]) == want
    assert text(target, None, SECOND) == text(tiny_target(model), None, SECOND)


@pytest.mark.parametrize("rows", [None, 2])
def test_a_second_engine_waits_for_the_first(model: Any, target: Target, rows: int | None) -> None:
    """Engines of other settings on one target: refused while a request runs, right after it."""
    draft, other = causal(model), {"k": 6, "sampling": SamplingParams(1.0)}
    engines = SpeculativeEngine(target, draft, k=3), SpeculativeEngine(target, draft, **other)
    prompts = [FIRST, SECOND]
    want = [tokens(e.speculate(prompts, max_new_tokens=NEW, rows=rows)) for e in engines]
    records = engines[0].speculate(prompts, max_new_tokens=NEW, rows=rows)
    read = [next(records)]
    with pytest.raises(UserError, match="another generator"):
        next(engines[1].speculate(prompts, max_new_tokens=NEW))
    read += records
    again = tokens(engines[1].speculate(prompts, max_new_tokens=NEW, rows=rows))
    assert [tokens(read), again] == want


def test_what_two_drafts_share_is_refused(model: Any) -> None:
    """One draft, wrappers around it, drafts over one runner, one lookup in front of two drafts. Bug: its KV cache held
    both texts, and hardly a token was accepted."""
    one, two = tiny_target(model), tiny_target(model)
    runner, lookup = ModelRunner(noisy(model, 0.01)), NgramDraft()
    inner = CausalDraft(runner)
    for mine, theirs, named in (
        (inner, inner, "draft 'causal'"),
        (RecordingDraft(inner), inner, "draft 'causal'"),
        (inner, CausalDraft(runner), "this llama model"),
        (TwoSourceDraft(lookup, inner, VOCAB), lookup, "draft 'ngram'"),
    ):
        records, _ = begin(one, mine, FIRST)
        for _ in range(2):  # the refusal itself holds nothing
            with pytest.raises(UserError, match=f"{named} is decoding for another"):
                next(speculate(two, theirs, [SECOND]))
        del records
        assert text(two, theirs, SECOND) == text(tiny_target(model), None, SECOND)


def test_decoding_within_a_round(model: Any, target: Target) -> None:
    """A sampler that decodes with the target that asks it: refused, not mixed; with another target it is right."""
    other = tiny_target(model)
    want = text(other, None, SECOND)

    def choose(weights: Tensor) -> Tensor:
        assert text(other, None, SECOND) == want
        with pytest.raises(UserError, match="another generator"):
            decode(target, None, [SECOND])
        return weights.argmax(-1)

    engine = SpeculativeEngine(target, sampling=SamplingParams(1.0))
    found = tokens(engine.speculate([FIRST], max_new_tokens=4, choose=choose))
    assert found == text(other, None, FIRST)[:4]


# ---- left alone, closed, failed ----


def test_who_holds_a_target_and_who_does_not(model: Any, target: Target) -> None:
    """Never begun, read to its end, closed and deleted ones free the target; one that is kept holds it."""
    want = text(target, None, FIRST)
    never = speculate(target, causal(model), [SECOND])
    assert text(target, None, FIRST) == want
    read = speculate(target, None, [SECOND], max_new_tokens=NEW)
    list(read)
    assert text(target, None, FIRST) == want
    closed, _ = begin(target, causal(model), SECOND)
    with pytest.raises(UserError, match="another generator"):
        decode(target, None, [FIRST])
    closed.close()  # type: ignore[attr-defined]
    assert text(target, None, FIRST) == want
    deleted, _ = begin(target, causal(model), SECOND)
    del deleted
    assert text(target, None, FIRST) == want
    for _ in speculate(target, causal(model), [SECOND]):
        break
    assert text(target, None, FIRST) == want
    assert tokens(never)[:NEW] == text(target, None, SECOND)


def test_a_generator_in_a_cycle_is_collected(model: Any, target: Target) -> None:
    """As an exception with its traceback leaves one: it is freed when the next request asks."""

    class Page:
        def __init__(self) -> None:
            self.page, self.records = self, begin(target, None, SECOND)

    gc.disable()
    try:
        Page()
        assert USERS
        assert text(target, None, FIRST) == text(tiny_target(model), None, FIRST)
    finally:
        gc.enable()


def test_bad_prompts_hold_nothing(model: Any, target: Target) -> None:
    bad: list[list[list[int]]] = [[], [[]], [[1] * 64]]
    for prompts in bad:
        with pytest.raises(UserError):
            decode(target, causal(model), prompts)
        assert not USERS


class FailingDraft(DraftWrapper):
    """Fails in its `at`-th proposal, before or after the inner draft has run."""

    def __init__(self, inner: Draft, at: int, before: bool):
        super().__init__(inner)
        self.left, self.before = at, before

    def propose(self, history: Tensor, length: Tensor, k: int) -> Proposal:
        self.left -= 1
        if self.left == 0 and self.before:
            raise RuntimeError("planted")
        proposal = super().propose(history, length, k)
        if self.left == 0:
            raise RuntimeError("planted")
        return proposal


@pytest.mark.parametrize(("kind", "before"), rotated(KINDS, [True, False])[1:])
def test_a_failed_proposal_leaves_nothing_behind(
    model: Any, target: Target, kind: str, before: bool
) -> None:
    draft = make_draft(kind, model, target)
    assert draft is not None
    want = list(speculate(target, draft, [FIRST], max_new_tokens=NEW))
    with pytest.raises(RuntimeError, match="planted"):
        decode(target, FailingDraft(draft, 2, before), [SECOND], max_new_tokens=NEW)
    found = list(speculate(target, draft, [FIRST], max_new_tokens=NEW))
    assert [(r.tokens, r.accepted) for r in found] == [(r.tokens, r.accepted) for r in want]


@pytest.mark.parametrize(
    ("kind", "error"),
    [("plain", KeyboardInterrupt), ("eagle3", RuntimeError), ("mirror", KeyboardInterrupt)],
)
def test_a_pass_that_fails_in_the_middle(
    model: Any, target: Target, kind: str, error: type[BaseException]
) -> None:
    """In the target's second layer, in prefill and in rounds: no hook, no context and no cache is left as it was."""
    draft, left = make_draft(kind, model, target), 0
    want = text(target, draft, FIRST)

    def fail(*_: Any) -> None:
        nonlocal left
        left -= 1
        if left == 0:
            raise error("planted")

    layer = target.runner.model.model.layers[1]
    for at in (1, 2, 3):
        left = at
        handle = layer.register_forward_pre_hook(fail)
        with pytest.raises(error, match="planted"):
            text(target, draft, SECOND)
        handle.remove()
        assert text(target, draft, FIRST) == want


@pytest.mark.parametrize(("kind", "at"), [("plain", 2), ("causal", 5), ("eagle3", 4)])
def test_buffers_that_could_not_grow(kind: str, at: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """In the target's three layers or in the draft's. Bug: memory ran out after some layers were enlarged, and the next
    request of that size took them as they were."""
    monkeypatch.setattr("decode.engine.memory.BUCKET_OF_ONE", 128)
    model = tiny_model("llama", max_position_embeddings=512)
    target = tiny_target(model)
    draft = make_draft(kind, model, target)
    engine, fresh = SpeculativeEngine(target, draft), tiny_target(model)
    (long,) = tiny_prompts(100)
    want = tokens(speculate(fresh, None, [long], max_new_tokens=60))
    assert tokens(engine.speculate([long], max_new_tokens=4)) == want[:4]
    reserve, left = StaticKVLayer.reserve, at

    def fail(self: StaticKVLayer, *args: Any) -> None:
        nonlocal left
        left -= 1
        if left == 0:
            raise MemoryError("planted")
        reserve(self, *args)

    monkeypatch.setattr(StaticKVLayer, "reserve", fail)
    with pytest.raises(MemoryError, match="planted"):
        list(engine.speculate([long], max_new_tokens=60))
    monkeypatch.setattr(StaticKVLayer, "reserve", reserve)
    assert tokens(engine.speculate([long], max_new_tokens=60)) == want


def test_a_recurrent_target_after_a_failure() -> None:
    """Its states are those of one request as well."""
    target = replace(hybrid_target(tiny_hybrid("lfm2")), name="hybrid")
    want = text(target, NgramDraft(), FIRST)
    records, read = begin(target, NgramDraft(), FIRST)
    with pytest.raises(UserError, match="target 'hybrid' is decoding"):
        decode(target, None, [SECOND])
    assert tokens([*read, *records]) == want
    with pytest.raises(RuntimeError, match="planted"):
        decode(target, FailingDraft(NgramDraft(), 2, False), [SECOND], max_new_tokens=NEW)
    assert text(target, None, FIRST) == want


# ---- threads ----


def in_threads(*jobs: Callable[[], Any]) -> list[Any]:
    """The results of the jobs, each run in a thread of its own at once; an exception is a result."""
    found: list[Any] = [None] * len(jobs)
    ready = threading.Barrier(len(jobs), timeout=60)

    def work(number: int) -> None:
        ready.wait()
        try:
            found[number] = jobs[number]()
        except BaseException as error:
            found[number] = error

    threads = [threading.Thread(target=work, args=(n,)) for n in range(len(jobs))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=120)
    return found


@pytest.fixture
def hasty() -> Iterator[None]:
    """Threads take turns a thousand times as often."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(5e-6)
    yield
    sys.setswitchinterval(before)


def test_threads_with_a_target_each(hasty: None) -> None:
    """Bug: attention found the slots of the other thread's pass. All requests of four a thread, plain and with
    drafts, give the text and the rounds of runs apart."""
    model = tiny_model("gemma3_text")
    prompts = tiny_prompts(*range(3, 7))
    kinds = ["plain", "causal", "mirror"]

    def job(kind: str) -> Callable[[], Any]:
        target = tiny_target(model)
        draft = make_draft(kind, model, target)
        engine = SpeculativeEngine(target, draft, k=3)

        def decode_all() -> list[Any]:
            return [
                (record.tokens, record.accepted)
                for prompt in prompts
                for record in engine.speculate([prompt], max_new_tokens=8)
            ]

        return decode_all

    want = [job(kind)() for kind in kinds]
    assert in_threads(*map(job, kinds)) == want


def test_threads_that_race_for_a_target(model: Any, target: Target, hasty: None) -> None:
    """Each request is either right or refused, whoever is first."""
    want = text(tiny_target(model), None, SECOND)
    right = 0

    def many() -> list[Any]:
        found: list[Any] = []
        for _ in range(3):
            try:
                found.append(text(target, None, SECOND))
            except UserError as error:
                found.append(error)
        return found

    for found in in_threads(many, many, many):
        for one in found:
            assert one == want or isinstance(one, UserError)
            right += one == want
    assert right > 0


def test_plain_passes_in_another_thread(model: Any, target: Target, hasty: None) -> None:
    """Bug: a teacher's pass in one thread saw the slots, and the mask, of a decoder in another."""
    teacher = tiny_target(model).runner.model
    ids = torch.tensor([FIRST])
    want = teacher(ids).logits.detach(), text(target, None, SECOND)

    def passes() -> bool:
        return all(torch.equal(teacher(ids).logits, want[0]) for _ in range(20))

    def texts() -> bool:
        return all(text(target, None, SECOND) == want[1] for _ in range(3))

    assert in_threads(passes, texts, passes) == [True, True, True]


# ---- the model itself ----


def test_plain_passes_between_rounds_and_after(model: Any, target: Target) -> None:
    """transformers' own call of the target's model: right while a generator is open, which goes on, and after it."""
    draft = random_draft("eagle3", target)  # reads hidden states by hooks on that model
    want, own = text(target, draft, FIRST), reference(model)
    ids = torch.tensor([SECOND, FIRST[:5]])
    logits = own(ids).logits
    records, read = begin(target, draft, FIRST)
    for record in records:
        read.append(record)
        torch.testing.assert_close(target.runner.model(ids).logits, logits)
    assert tokens(read) == want
    with torch.inference_mode():
        torch.testing.assert_close(target.runner.model(ids).logits, logits)


def test_plain_passes_see_new_weights(model: Any, target: Target) -> None:
    """Bug: after training they multiplied by copies of the old weights, which only a request looked at."""
    text(target, None, FIRST)
    trained = noisy(model, 0.1)
    ids = torch.tensor([FIRST])
    with torch.inference_mode():
        target.runner.model(ids)
    target.runner.model.load_state_dict(trained.state_dict())
    with torch.inference_mode():
        found = target.runner.model(ids).logits
    torch.testing.assert_close(found, reference(trained)(ids).logits)


def test_generate_of_the_targets_model_is_refused(target: Target) -> None:
    """Bug: its steps attended to the first token alone. Any cache but ours is refused, also in chunks."""
    ids = torch.tensor([FIRST])
    limits: dict[str, Any] = {"max_new_tokens": 3, "do_sample": False, "pad_token_id": 0}
    for settings in ({}, {"use_cache": True}, {"cache_implementation": "static"}):
        with pytest.raises(UserError, match="load the model again with transformers"):
            target.runner.model.generate(ids, **limits, **settings)
    cache = target.runner.model(ids, use_cache=True).past_key_values
    with pytest.raises(UserError, match="reads no other KV cache"):
        target.runner.model(ids[:, :2], past_key_values=cache)


def test_padding_in_front_is_refused(model: Any, target: Target) -> None:
    """Bug: the mask was ignored. Behind a text it changes nothing that is read."""
    ids, mask = torch.tensor([FIRST]), torch.ones(1, len(FIRST), dtype=torch.long)
    for holes in (slice(0, 2), slice(3, 5)):
        left = mask.clone()
        left[0, holes] = 0
        for give in (lambda m: {"attention_mask": m}, lambda m: {"attention_mask": m.bool()}):
            with pytest.raises(UserError, match="pad on the right"):
                target.runner.model(ids, **give(left))
        with pytest.raises(UserError, match="pad on the right"):
            target.runner.model(ids, left)
    right = mask.clone()
    right[0, -3:] = 0
    found, want = target.runner.model(ids, attention_mask=right), reference(model)(ids)
    torch.testing.assert_close(found.logits[:, :-3], want.logits[:, :-3])


def test_the_runner_itself_is_refused_meanwhile(model: Any, target: Target) -> None:
    """Code that steps the runner without an engine: its buffers are those of the request that runs."""
    draft = causal(model)
    records, read = begin(target, draft, FIRST)
    for runner in (target.runner, draft.runner):
        with pytest.raises(UserError, match="this llama model is decoding for another generator"):
            runner.allocate(1, 128)
    with pytest.raises(UserError, match="draft 'causal' is decoding"):
        check_request(draft, 3, SamplingParams())
    assert tokens([*read, *records]) == text(tiny_target(model), None, FIRST)
    target.runner.allocate(1, 128)
    check_request(draft, 3, SamplingParams())


# ---- a draft of another target ----


@pytest.mark.parametrize("kind", ["eagle3", "swift", "mirror"])
def test_what_reads_a_target_drafts_for_no_other(model: Any, target: Target, kind: str) -> None:
    """Bug: the exit's layers, the head's embedding or the hooks were the other target's."""
    draft = make_draft(kind, model, target)
    assert draft is not None
    other = replace(tiny_target(model), name="other")
    for drafter in (draft, RecordingDraft(draft)):
        with pytest.raises(
            UserError, match=r"was loaded for another target than 'other': load it again"
        ):
            SpeculativeEngine(other, drafter)
    assert text(target, draft, FIRST, k=2) == text(other, None, FIRST)


def test_a_causal_draft_needs_the_same_tokens(model: Any, target: Target) -> None:
    """With the same tokenizer and vocabulary it drafts for any target; of other ids it is refused."""
    draft = causal(model)
    draft.reads = replace(draft.reads, tokenizer=target.fingerprint)
    assert text(target, draft, FIRST) == text(tiny_target(model), draft, FIRST)
    stranger = replace(tiny_target(model), fingerprint="other")
    wider = tiny_target(tiny_model("llama", vocab_size=VOCAB + 8))
    for other in (stranger, wider):
        with pytest.raises(UserError, match="draft 'causal' was loaded for another target"):
            SpeculativeEngine(other, draft)
