"""Compiled rounds: whole graphs, none made anew while lengths change, the same text."""

import shutil
from functools import cache

import pytest
import torch
from torch._dynamo.utils import counters

from decode.drafts.base import Draft
from decode.drafts.causal import CausalDraft
from decode.drafts.early_exit import EarlyExitDraft
from decode.drafts.lookup import NgramDraft
from decode.engine import compiled as engine_compile
from decode.engine import engine as engines
from decode.engine import round as rounds
from decode.engine.engine import SpeculativeEngine, decode
from decode.engine.records import collect_outputs
from decode.model.loading import Target
from decode.model.regions import CAN_SKIP_TRACES
from decode.model.runner import ModelRunner
from decode.verification.sampling import SamplingParams
from decode.verification.tree import DynamicTree
from tests.decode.drafts import test_dflash, test_exit_adapter, test_mtp, test_pard, test_peagle
from tests.decode.drafts.test_token_trees import BUSHY
from tests.decode.engine.test_engine import PROMPTS, texts
from tests.heads import random_draft
from tests.params import rotated, slow_except
from tests.tiny import VOCAB, noisy, tiny_model, tiny_target

GREEDY, SAMPLED = SamplingParams(), SamplingParams(0.8, top_p=0.9)


def make(name: str, target: Target) -> Draft | None:
    near = ModelRunner(noisy(tiny_model("llama"), 0.01))
    return {
        "plain": None,
        "ngram": NgramDraft(),
        "causal": CausalDraft(near),
        "padded": CausalDraft(ModelRunner(tiny_model("llama", vocab_size=VOCAB + 8), VOCAB)),
        "reduced": CausalDraft(
            ModelRunner(tiny_model("llama", seed=1), VOCAB, torch.arange(0, VOCAB, 3))
        ),
        "static": CausalDraft(near, shape=BUSHY),
        "dynamic": CausalDraft(near, shape=DynamicTree(3, 8)),
        "early-exit": EarlyExitDraft(target, 2),
        "medusa": random_draft("medusa", target),
        "eagle3": random_draft("eagle3", target, DynamicTree(3, 8)),
        "pard": test_pard.pard_of(tiny_model("llama")),
        "peagle": test_peagle.draft_of(target),
        "dflash": test_dflash.draft_of("dflash", target),
        "dspark": test_dflash.draft_of("dspark", target, DynamicTree(2, 5)),
        "dflash2": test_dflash.draft_of("dflash2", target, ids=None),
        "xpress": test_dflash.draft_of("xpress", target, DynamicTree(2, 5), ids=None),
        "domino": test_dflash.draft_of("domino", target, DynamicTree(2, 5), ids=None),
        "dflare": test_dflash.draft_of("dflare", target, ids=None),
        "mtp": test_mtp.draft_of(target),
        "layerskip": test_exit_adapter.draft_of(target, ids=test_exit_adapter.IDS.clone()),
    }[name]


@pytest.fixture
def graphs(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Compilation without a code generator: dynamo's part is what can break and what can recompile."""
    made: list[int] = []

    def backend(module, inputs):  # type: ignore[no-untyped-def]
        made.append(len(made))
        return module.forward

    @cache
    def fast(function, device_type):  # type: ignore[no-untyped-def]
        options = {"guard_filter_fn": engine_compile.filter_guards}
        return torch.compile(
            function, fullgraph=True, dynamic=False, backend=backend, options=options
        )

    torch._dynamo.reset()
    for module in (rounds, engines):
        monkeypatch.setattr(module, "compile_function", fast)
    return made


FAMILIES = ["plain", "ngram", "causal", "padded", "reduced", "static", "dynamic", "early-exit"]
FAMILIES += ["medusa", "eagle3", "pard", "peagle", "dflash", "dspark", "mtp", "layerskip"]
FAMILIES += ["dflash2", "xpress", "domino", "dflare"]
HOW = ["greedy", "sampled"]
COMPILED = [name for name in FAMILIES if name not in ("padded", "static", "early-exit", "dflash")]
"""Without those whose code another one has as well: reduced, dynamic, layerskip, dspark."""


@pytest.mark.parametrize(
    ("name", "mode"),
    slow_except([*rotated(COMPILED, HOW), ("causal", "sampled")], [("plain", "greedy")]),
)
def test_compiled_rounds_say_the_same_and_compile_once(
    name: str, mode: str, graphs: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Catches graph breaks (they raise), state frozen into a graph, and a graph for every length or for every size of
    the KV buffers, which grow here."""
    monkeypatch.setattr("decode.engine.memory.BUCKET", 8)
    sampling = {"greedy": GREEDY, "sampled": SAMPLED}[mode]
    target = tiny_target(tiny_model("llama"))
    draft = make(name, target)
    settings = {"max_new_tokens": 24, "seed": 3}
    want = decode(target, draft, PROMPTS, k=3, sampling=sampling, **settings)
    sizes = set()
    engine = SpeculativeEngine(target, draft, k=3, sampling=sampling, mode="compiled")
    for _ in range(2):  # the second run finds what the first has compiled
        records = []
        for record in engine.speculate(PROMPTS, **settings):
            records.append(record)
            sizes.add(target.runner.cache.slots.size)
        got = collect_outputs(PROMPTS, records)
        assert texts(got) == texts(want)
        assert [o.rounds for o in got] == [o.rounds for o in want] or name == "ngram"
        # one for the draft, one for the target, one more for rounds in which lookup finds nothing
        assert len(graphs) <= {"plain": 1, "ngram": 3}.get(name, 2)
    assert len(graphs) > 0
    assert len(sizes) > 2 or not CAN_SKIP_TRACES


def test_fewer_prompts_than_rows_compile_nothing_anew(graphs: list[int]) -> None:
    """Catches the last prompts of a sampling run, or of a group, for which everything is compiled once more, and empty
    rows that change the text of others."""
    target = tiny_target(tiny_model("llama"))
    engine = SpeculativeEngine(target, None, sampling=SAMPLED, mode="compiled")
    for prompts in (PROMPTS[:3] * 2, PROMPTS[:3], PROMPTS[:1]):
        seeds = [7 + i for i in range(len(prompts))]
        settings = {"max_new_tokens": 12, "seeds": seeds, "rows": 4}
        want = decode(target, None, prompts, sampling=SAMPLED, **settings)
        got = collect_outputs(prompts, engine.speculate(prompts, **settings))
        assert texts(got) == texts(want)
    assert len(graphs) == 1


@pytest.mark.skipif(not CAN_SKIP_TRACES, reason="code of any number of slots needs torch 2.13")
@pytest.mark.parametrize(
    ("name", "most"),
    [("plain", 1), ("ngram", 3), pytest.param("causal", 2, marks=pytest.mark.slow)],
)
def test_longer_requests_compile_nothing_anew(
    name: str, most: int, graphs: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Catches a minute of compilation before the first answer to a prompt that is longer than those before it."""
    monkeypatch.setattr("decode.engine.memory.BUCKET_OF_ONE", 8)
    target = tiny_target(tiny_model("llama"))
    engine = SpeculativeEngine(target, make(name, target), k=3, mode="compiled")
    for length in (4, 21, 40):
        prompts = [[1 + i % (VOCAB - 1) for i in range(length)]]
        want = decode(target, make(name, target), prompts, k=3, max_new_tokens=12)
        got = collect_outputs(prompts, engine.speculate(prompts, max_new_tokens=12))
        assert texts(got) == texts(want)
        assert 0 < len(graphs) <= most


@pytest.mark.slow
def test_code_of_one_model_is_not_run_for_another(graphs: list[int]) -> None:
    """Catches guards left out that told models apart: weights are constants of the code, so it would say another
    model's text. Also layers left off, and states that a draft reads and another does not."""
    one = tiny_target(tiny_model("llama"))
    other = tiny_target(noisy(one.runner.model, 0.5))
    settings = {"k": 3, "max_new_tokens": 24}
    said = {}
    for target, name in [(one, "one"), (other, "other")]:
        drafts = [
            None,
            EarlyExitDraft(target, 2),
            EarlyExitDraft(target, 1),
            make("eagle3", target),
        ]
        for at, draft in enumerate(drafts):
            want = decode(target, draft, PROMPTS, **settings)
            got = decode(target, draft, PROMPTS, mode="compiled", **settings)
            assert texts(got) == texts(want), (name, at)
            assert [o.rounds for o in got] == [o.rounds for o in want], (name, at)
            said[name, at] = texts(want), [o.rounds for o in want]
    assert said["one", 0] != said["other", 0]
    assert said["one", 1] != said["one", 2]


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("g++") is None, reason="inductor needs a C++ compiler")
def test_real_compilation_says_the_same() -> None:
    """Catches wrong code from packing or in-place writes: the generated C++ itself runs. And weights that are constants
    of the code, which each layer would be compiled for, copies of weights that have changed, and code that every
    process makes anew."""
    target = tiny_target(tiny_model("llama"))
    draft = make("causal", target)
    want = decode(target, draft, PROMPTS, k=3, max_new_tokens=24)
    torch._dynamo.reset()
    engine_compile.compile_function.cache_clear()
    counters.clear()
    got = decode(target, draft, PROMPTS, k=3, max_new_tokens=24, mode="compiled")
    assert texts(got) == texts(want)
    assert counters["inductor"]["fxgraph_cache_bypass"] == 0
    target.runner.model.get_output_embeddings().weight.data.neg_()
    live = decode(target, draft, PROMPTS, k=3, max_new_tokens=24)
    got = decode(target, draft, PROMPTS, k=3, max_new_tokens=24, mode="compiled")
    assert texts(got) == texts(live) != texts(want)
