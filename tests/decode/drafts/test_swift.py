"""SWIFT: what it drafts from, the law of the text, the search, and what is kept of it."""

import json
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from decode.common.errors import UserError
from decode.drafts import swift_search
from decode.drafts.base import Proposal
from decode.drafts.registry import create_draft, draft_family, load_draft
from decode.drafts.swift import MLP_NAMES, STATE_FILE, SkipSet, SwiftDraft, from_bits, open_search
from decode.drafts.swift_search import SearchState, SkipSearch, SwiftConfig
from decode.engine.engine import decode
from decode.model.compatibility import cache_name
from decode.model.kv_cache import StaticKVCache
from decode.model.layer_stack import layer_stack
from decode.model.loading import Target
from decode.verification.rules import NO_DRAFT
from decode.verification.sampling import SamplingParams
from eval.benchmark.config import check
from eval.benchmark.methods import build_draft
from eval.settings.evaluation import EvalConfig, MethodConfig
from tests import worlds
from tests.blocks import chain_drift
from tests.decode.drafts.test_exit_adapter import target_logits
from tests.decode.engine.test_engine import texts
from tests.decode.verification.test_exact_distribution import (
    ENUMERATED,
    distance_from_own_law,
    engine_law,
    small,
)
from tests.params import slow_except
from tests.tiny import ARCHITECTURES, reference, tiny_model, tiny_prompts, tiny_target

K, LENGTH = 3, 20
PROMPTS = tiny_prompts(13, 1, 9)
BITS = "0110"
"""Of four layers: the attention of layer 2 and the MLP of layer 1."""
HOT = SamplingParams(temperature=3.0)
FIXED = SwiftConfig(adaptive=False, skip_threshold=0.0)
KINDS = [arch for arch in ARCHITECTURES if arch not in ("opt", "gemma4_text")]
FEW = ["llama", "gemma3_text", "gpt_oss"]


def deep(arch: str) -> Any:
    """A model of four layers, of as many kinds as the architecture has."""
    more: dict[str, Any] = {"num_hidden_layers": 4}
    kinds = ARCHITECTURES[arch].get("layer_types")
    if kinds:
        more["layer_types"] = [*kinds, "full_attention"]
    if "no_rope_layers" in ARCHITECTURES[arch]:
        more["no_rope_layers"] = [1, 0, 1, 1]
    return tiny_model(arch, **more)


def draft_of(target: Target, config: SwiftConfig = FIXED, bits: str = BITS) -> SwiftDraft:
    layers = target.runner.config.num_hidden_layers
    return SwiftDraft(target, config, SkipSearch(layers, config, SearchState(bits)))


# ---- what it drafts from ----


@torch.no_grad()
def plain_laws(own: Any, text: list[int], drafted: list[int]) -> Tensor:
    """[n + 1, V]: logits after each of the n drafted tokens by transformers' own model and cache: whole for the text
    but its last token, then with the outputs of skipped sub-layers set to zero."""
    key, cache = cache_name(own), None
    if len(text) > 1:
        cache = own(torch.tensor([text[:-1]]), use_cache=True)[key]
    skipped, handles = from_bits(BITS), []

    def nothing(module: Any, args: Any, out: Any) -> Any:
        return (torch.zeros_like(out[0]), *out[1:]) if isinstance(out, tuple) else out * 0

    for number, layer in enumerate(layer_stack(own)):
        for name, part in layer.named_children():
            which = skipped.mlp if name in MLP_NAMES else skipped.attention
            if name in ("self_attn", "attn", "attention", *MLP_NAMES) and number in which:
                handles.append(part.register_forward_hook(nothing))
    laws = []
    for token in [text[-1], *drafted]:
        out = own(torch.tensor([[token]]), use_cache=True, **{key: cache})
        cache = out[key]
        laws.append(out.logits[0, -1])
    for handle in handles:
        handle.remove()
    return torch.stack(laws)


def drift(arch: str) -> tuple[float, set[int]]:
    """(largest difference of a chain's logits from `plain_laws`, accepted lengths that occurred)."""
    model = deep(arch)
    own, plain = tiny_target(model), reference(model)
    draft = draft_of(own)
    return chain_drift(draft, draft.runner, "step", own, partial(plain_laws, plain), sampling=HOT)


@pytest.mark.parametrize("arch", slow_except(KINDS, FEW))
def test_logits_are_those_of_a_pass_without_the_sublayers(arch: str) -> None:
    """Catches a sub-layer of another layer, one that still adds, K/V left by rejected tokens, positions one off."""
    gap, counts = drift(arch)
    assert gap < 2e-3
    assert len(counts) > 1


def one_layer_on(bits: str) -> SkipSet:
    found = from_bits(bits)
    return SkipSet(found.attention, tuple(i + 1 for i in found.mlp))


def attention_alone(bits: str) -> SkipSet:
    return SkipSet(from_bits(bits).attention, ())


@pytest.mark.parametrize("bug", [one_layer_on, attention_alone])
def test_other_sublayers_change_the_logits(bug: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The test above is blind if one of these goes unseen."""
    monkeypatch.setattr("decode.drafts.swift.from_bits", bug)
    assert drift("llama")[0] > 0.02


# ---- the text ----


SEARCHING = SwiftConfig(skip_threshold=0.02, window=4, ratio=0.5, bayes_every=3, max_score=1.0)


@pytest.mark.parametrize("arch", FEW)
def test_greedy_text_is_the_targets(arch: str) -> None:
    """Catches drafting or a search that spoils the K/V of the target."""
    own = tiny_target(deep(arch))
    plain = decode(own, None, PROMPTS, max_new_tokens=LENGTH)
    draft = SwiftDraft(own, SEARCHING)
    outputs = decode(own, draft, PROMPTS, k=K, max_new_tokens=LENGTH)
    assert texts(outputs) == texts(plain)
    assert len(draft.search.state.tried) > 1


@pytest.mark.parametrize("sampling", [SamplingParams(), SamplingParams(1.0)], ids=["0", "1"])
def test_a_rows_text_does_not_depend_on_its_batch(sampling: SamplingParams) -> None:
    """Catches random numbers that a row uses up or not depending on where the others stop."""
    own, seeds = tiny_target(deep("llama")), [11, 12, 13]
    draft = draft_of(own, replace(FIXED, skip_threshold=0.08))
    settings: dict[str, Any] = {"k": K, "sampling": sampling, "max_new_tokens": LENGTH}
    together = decode(own, draft, PROMPTS, seeds=seeds, **settings)
    for output, prompt, seed in zip(together, PROMPTS, seeds, strict=True):
        [alone] = decode(own, draft, [prompt], seeds=[seed], **settings)
        assert alone.output_ids == output.output_ids
        assert alone.rounds == output.rounds
    assert len({drafted for output in together for drafted, _ in output.rounds}) > 1


def law_distance(
    config: SwiftConfig, vocab: int, k: int, length: int, paths: int, rule: str = "exact"
) -> float:
    """Largest TV of the emitted text from the target's own law."""
    model, sampling = small(vocab_size=vocab, num_hidden_layers=4), SamplingParams(0.7)
    own = tiny_target(model)
    draft = draft_of(own, config)
    draft.search.state.tried[BITS] = (
        0.0  # the first set that a search tries is another one, and better
    )
    law = engine_law(own, draft, k, length, sampling, paths, rule)
    assert (draft.search.state.best != BITS) == config.adaptive
    return distance_from_own_law(law, model, length, sampling)


UNSURE = replace(FIXED, skip_threshold=0.4)
"""Some tokens end a chain of two, some do not."""


@pytest.mark.parametrize(
    ("config", "case"),
    [
        (UNSURE, ENUMERATED[1]),
        (UNSURE, ENUMERATED[2]),
        (SwiftConfig(window=1, max_score=1.0, skip_threshold=0.0), ENUMERATED[0]),
    ],
    ids=["stopping", "stopping longer", "searching"],
)
@pytest.mark.parametrize("rule", ["exact", "block"])
def test_sampled_text_has_the_targets_law(
    config: SwiftConfig, case: tuple[int, int, int, int], rule: str
) -> None:
    """Catches a q that is not what a token was drawn from, and an end of a chain that chooses among tokens. Exact."""
    assert law_distance(config, *case, rule) < 1e-7  # HF norms compute in fp32


PROPOSE = SwiftDraft.propose


def unsure_tokens_dropped(self: SwiftDraft, history: Tensor, length: Tensor, k: int) -> Proposal:
    """The token behind which a chain ends is not drafted: its value decides whether it is."""
    proposal = PROPOSE(self, history, length, k)
    tokens = proposal.tokens.clone()
    count = (tokens != NO_DRAFT).sum(1)
    ended = count < k
    tokens[ended, count[ended] - 1] = NO_DRAFT
    return Proposal(tokens, proposal.q, finite=proposal.finite)


def law_at_another_temperature(
    self: SwiftDraft, history: Tensor, length: Tensor, k: int
) -> Proposal:
    """q is that of logits which were not divided by the temperature."""
    proposal = PROPOSE(self, history, length, k)
    assert proposal.q is not None
    flat = proposal.q**0.7
    return Proposal(proposal.tokens, flat / flat.sum(-1, keepdim=True), finite=proposal.finite)


@pytest.mark.parametrize("bug", [unsure_tokens_dropped, law_at_another_temperature])
def test_planted_bugs_move_the_law(bug: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The test above is blind if one of these goes unseen."""
    monkeypatch.setattr(SwiftDraft, "propose", bug)
    assert law_distance(UNSURE, *ENUMERATED[1]) > 1e-4


# ---- the search ----


def test_trying_a_set_leaves_the_targets_cache_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches keys and values of a smaller model left for committed tokens; with them in place it must see them."""
    own = tiny_target(deep("llama"))
    before = target_logits(own)
    draft = SwiftDraft(own, replace(SEARCHING, adaptive=False))
    decode(own, draft, [PROMPTS[0]], k=K, max_new_tokens=LENGTH)

    def contents() -> list[Tensor]:
        return [layer.keys.clone() for layer in own.runner.cache.kv_layers]

    def changed() -> bool:
        was = contents()
        with torch.inference_mode():
            draft.matchness(BITS, 0)
        return not all(torch.equal(a, b) for a, b in zip(was, contents(), strict=True))

    assert not changed()
    assert torch.equal(target_logits(own), before)
    decode(own, draft, [PROMPTS[0]], k=K, max_new_tokens=LENGTH)
    monkeypatch.setattr(StaticKVCache, "copy_row", lambda self, row, size: self)
    assert changed()


def test_the_whole_target_matches_its_own_answer_everywhere() -> None:
    """Catches a window one token off, or one that begins in the prompt."""
    own = tiny_target(deep("llama"))
    draft = SwiftDraft(own, replace(SEARCHING, adaptive=False, window=12))
    decode(own, draft, PROMPTS[:2], k=K, max_new_tokens=LENGTH)
    with torch.inference_mode():
        assert [draft.matchness("0000", row) for row in (0, 1)] == [1.0, 1.0]
        assert draft.matchness("1111", 0) < 0.5


def test_the_search_finds_sublayers_that_do_nothing() -> None:
    """Catches scores of another set than is kept, and a draft that goes on with the old one. Twenty sets are possible,
    one is right: with it every token is accepted."""
    model = tiny_model("llama", num_hidden_layers=5)
    right = "010101"
    found = from_bits(right)
    with torch.no_grad():
        for i, layer in enumerate(model.model.layers):
            if i in found.attention:
                layer.self_attn.o_proj.weight.zero_()
            if i in found.mlp:
                layer.mlp.down_proj.weight.zero_()
    own = tiny_target(model)
    config = SwiftConfig(skip_threshold=0.0, window=16, ratio=0.5, bayes_every=5, max_score=1.0)
    draft = SwiftDraft(own, config, SkipSearch(5, config, SearchState("101010")))
    prompts = tiny_prompts(7, 4, 9, seed=2)
    first = decode(own, draft, prompts, k=K, max_new_tokens=40)
    state = draft.search.state
    assert draft.search.finished
    assert (state.best, state.score) == (right, 1.0)
    assert state.tried["101010"] < 1.0
    tried = len(state.tried)
    later = decode(own, draft, prompts, k=K, max_new_tokens=41)
    assert texts(first) == [text[:40] for text in texts(later)]
    assert all(output.rounds == [(K, K)] * 10 for output in later)
    assert len(state.tried) == tried  # a search that has ended costs nothing


def test_bayesian_steps_prefer_what_is_like_good_sets() -> None:
    """Catches a sign or a kernel the wrong way round."""
    generator = torch.Generator().manual_seed(0)
    right = "1" * 8 + "0" * 8

    def score(bits: str) -> float:
        return sum(a == b for a, b in zip(bits, right, strict=True)) / 16

    tried = {b: score(b) for b in (swift_search.random_set(16, 8, generator) for _ in range(60))}
    pools = [[swift_search.random_set(16, 8, generator) for _ in range(40)] for _ in range(10)]
    chosen = [score(swift_search.best_in_pool(tried, pool)) for pool in pools]
    mean = sum(score(bits) for pool in pools for bits in pool) / 400
    assert sum(chosen) / 10 > mean + 0.1


@pytest.mark.parametrize(
    ("config", "count"),
    [
        (SwiftConfig(), int(56 * 0.45)),
        (SwiftConfig(min_layers=16), int(56 * 0.45)),
        (SwiftConfig(min_layers=25), 10),
        (SwiftConfig(min_layers=99), 0),
        (SwiftConfig(ratio=0.0), 1),
    ],
)
def test_as_many_sublayers_are_skipped_as_asked(config: SwiftConfig, count: int) -> None:
    search = SkipSearch(30, config)
    for _ in range(4):
        bits = search.candidate()
        assert (len(bits), bits.count("1")) == (56, count)
        search.record(bits, 0.5)
    assert swift_search.every_other(6, 3) == "010101"


def test_a_search_ends() -> None:
    """Catches a search that goes on for ever where no set is good."""
    for config, most in ((SwiftConfig(tolerance=3), 4), (SwiftConfig(max_iterations=2), 2)):
        search, rounds = SkipSearch(30, config), 0
        while not search.finished:
            search.record(search.candidate(), 0.1)
            rounds += 1
        assert rounds == most
    assert SkipSearch(30, SwiftConfig(adaptive=False)).finished


# ---- files ----


def test_a_saved_search_goes_on(tmp_path: Path) -> None:
    """Catches a set, a score or a setting that is lost on the way to the next process."""
    own = tiny_target(deep("llama"))
    draft = SwiftDraft(own, SEARCHING)
    decode(own, draft, PROMPTS, k=K, max_new_tokens=LENGTH)
    draft.save(tmp_path)
    assert draft_family(str(tmp_path)) == "swift"
    again = load_draft(str(tmp_path), own)
    assert isinstance(again, SwiftDraft)
    assert (again.config, again.search.state) == (draft.config, draft.search.state)
    assert len(again.search.state.tried) > 1
    with pytest.raises(UserError, match="4 layers, and the target has 5"):
        load_draft(str(tmp_path), tiny_target(tiny_model("llama", num_hidden_layers=5)))


def test_a_search_in_a_folder_goes_on_as_if_nothing_had_happened(tmp_path: Path) -> None:
    """Catches a state that is saved too late, random numbers that begin anew, and a history with holes."""
    more: dict[str, Any] = {"k": K, "max_new_tokens": LENGTH}
    own = tiny_target(tiny_model("llama", num_hidden_layers=6))
    straight = SwiftDraft(own, SEARCHING)
    decode(own, straight, PROMPTS[:1], **more)
    first = len(straight.search.state.history)
    decode(own, straight, PROMPTS[1:2], **more)
    for prompt in PROMPTS[:2]:  # each by a draft that knows nothing but the folder
        decode(own, open_search(own, SEARCHING, str(tmp_path)), [prompt], **more)
    again = open_search(own, SEARCHING, str(tmp_path)).search.state
    assert again == straight.search.state
    assert len(again.history) > first > 3
    assert max(again.history) == again.score
    content = json.loads((tmp_path / STATE_FILE).read_text())
    del content["state"]["history"]  # as saved before there was one
    (tmp_path / STATE_FILE).write_text(json.dumps(content))
    assert open_search(own, SEARCHING, str(tmp_path)).search.state.history == list(
        again.tried.values()
    )


def test_a_search_that_begins_anew_is_noticed(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The test above is blind if this goes unseen."""
    monkeypatch.setattr(SwiftDraft, "save", lambda self, folder: None)
    with pytest.raises(AssertionError):
        test_a_search_in_a_folder_goes_on_as_if_nothing_had_happened(tmp_path)


@pytest.mark.parametrize("change", [{"ratio": 0.2}, {"window": 5}, {"min_layers": 7}])
def test_a_search_of_other_sets_is_refused(change: dict[str, Any], tmp_path: Path) -> None:
    """Catches scores of one window or of so many sub-layers that are taken for those of another."""
    own = tiny_target(tiny_model("llama", num_hidden_layers=8))
    SwiftDraft(own, SEARCHING).save(tmp_path)
    open_search(own, replace(SEARCHING, skip_threshold=0.5, adaptive=False), str(tmp_path))
    with pytest.raises(UserError, match="give the same or another folder"):
        open_search(own, replace(SEARCHING, **change), str(tmp_path))


def test_the_command_goes_on_when_called_again(tmp_path: Path) -> None:
    """Catches settings and a folder that do not reach the draft."""
    words = ["--prompt", "import os\nimport sys\n", "--draft", "swift", "--state", tmp_path, "--max_new_tokens", 20,
             "--swift.window", 12, "--swift.skip_threshold", 0.3, "--swift.min_layers", 4]  # fmt: skip
    counts = []
    for _ in range(2):
        done = worlds.call("decode/generate.py", *words)
        assert done.code == 0, done.err
        content = json.loads((tmp_path / STATE_FILE).read_text())
        counts.append(len(content["state"]["history"]))
    assert counts[1] > counts[0] > 1
    assert content["config"]["min_layers"] == 4
    assert content["config"]["skip_threshold"] == 0.3
    refused = worlds.call("decode/generate.py", "--prompt", "a", "--state", tmp_path)
    assert "settings of --draft swift" in refused.error()


def test_the_settings_of_the_articles_are_accepted(tmp_path: Path) -> None:
    """Catches a name that evaluation refuses, and settings of swift given to another method in silence."""
    own = tiny_target(deep("llama"))
    swift = {"skip_threshold": 0.8, "min_layers": 3, "adaptive": True}
    draft = build_draft(
        MethodConfig("swift", swift=SwiftConfig(**swift), state=str(tmp_path)), own, "float32"
    )
    assert isinstance(draft, SwiftDraft)
    assert (draft.config, draft.folder) == (SwiftConfig(**swift), tmp_path)
    for wrong in (
        MethodConfig("ngram", state="x"),
        MethodConfig("swift", draft="d", swift=SwiftConfig(window=9)),
    ):
        with pytest.raises(UserError, match="swift and state"):
            check(EvalConfig(methods=[wrong]))


@pytest.mark.parametrize(
    ("part", "change"),
    [
        ("state", {"best": 3}),
        ("state", {"best": "01x0"}),
        ("state", {"tried": {"01": 0.5}}),
        ("state", {"tried": {"0110": "high"}}),
        ("state", {"history": ["high"]}),
        ("config", {"windows": 3}),
        ("config", {"window": 0}),
    ],
)
def test_a_damaged_file_is_refused(part: str, change: dict[str, Any], tmp_path: Path) -> None:
    own = tiny_target(deep("llama"))
    draft_of(own).save(tmp_path)
    content = json.loads((tmp_path / STATE_FILE).read_text())
    content[part] |= change
    (tmp_path / STATE_FILE).write_text(json.dumps(content))
    with pytest.raises(UserError):
        load_draft(str(tmp_path), own)


def test_it_needs_no_files() -> None:
    draft = create_draft("swift", tiny_target(deep("llama")), layers=3)
    assert isinstance(draft, SwiftDraft)
    assert draft.config == SwiftConfig(min_layers=3)


@pytest.mark.parametrize("arch", ["opt", "gemma4_text"])
def test_targets_without_separate_sublayers_are_refused(arch: str) -> None:
    with pytest.raises(UserError, match="early exit"):
        SwiftDraft(tiny_target(tiny_model(arch)), SwiftConfig())


def test_two_layers_are_too_few() -> None:
    with pytest.raises(UserError, match="at least 3 layers"):
        SwiftDraft(tiny_target(tiny_model("llama", num_hidden_layers=2)), SwiftConfig())
