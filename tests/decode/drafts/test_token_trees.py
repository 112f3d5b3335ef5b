"""Trees through the whole engine: drafts of every shape leave the target's text as it is."""

import pytest
import torch

from decode.common.errors import UserError
from decode.drafts.causal import CausalDraft
from decode.drafts.early_exit import EarlyExitDraft
from decode.engine.engine import decode
from decode.model.kv_cache import StaticKVLayer
from decode.model.runner import ModelRunner
from decode.verification.sampling import SamplingParams
from decode.verification.tree import DynamicTree, StaticTree, TreeShape, tree_from_paths
from tests.decode.engine.test_engine import PROMPTS, assert_rows_are_alone, hf_text, texts
from tests.params import slow_except
from tests.tiny import noisy, tiny_model, tiny_prompts, tiny_target

BUSHY = tree_from_paths([[0], [1], [2], [0, 0], [0, 1], [1, 0], [0, 0, 0], [0, 0, 1], [1, 0, 0]])
SHAPES: dict[str, TreeShape] = {
    "chain": None,
    "static": BUSHY,
    "dynamic": DynamicTree(width=3, nodes=9),
}
CASES = [("gemma3_text", "static"), ("gpt_oss", "dynamic"), ("gpt2", "chain")]
CASES += [
    ("gemma3_text", "dynamic"),
    ("gpt_oss", "static"),
    ("gpt2", "static"),
    ("llama", "dynamic"),
]


@pytest.mark.parametrize(("arch", "shape"), slow_except(CASES, CASES[:3]))
def test_greedy_text_of_trees_equals_generate(arch: str, shape: str) -> None:
    """Catches slots taken for positions, windows counted in slots, siblings that see each other, K/V not compacted. The
    draft must have met short and long paths, else neither compaction nor roll-back was tried."""
    model = tiny_model(arch)
    want = [hf_text(model, prompt, max_new_tokens=20) for prompt in PROMPTS]
    draft = CausalDraft(ModelRunner(noisy(model, 0.01)), shape=SHAPES[shape])
    outputs = decode(tiny_target(model), draft, PROMPTS, k=3, max_new_tokens=20)
    assert texts(outputs) == want
    accepted = {accepted for output in outputs for _, accepted in output.rounds}
    assert min(accepted) < max(accepted) >= 2


@pytest.mark.parametrize(("arch", "shape"), slow_except(CASES, CASES[:3]))
def test_greedy_text_of_early_exit_equals_generate(arch: str, shape: str) -> None:
    """Catches drafting that spoils the K/V it shares with the target, and layers looked up by the wrong index."""
    model = tiny_model(arch)
    want = [hf_text(model, prompt, max_new_tokens=20) for prompt in PROMPTS]
    target = tiny_target(model)
    draft = EarlyExitDraft(target, 2, SHAPES[shape])
    assert texts(decode(target, draft, PROMPTS, k=3, max_new_tokens=20)) == want


def test_early_exit_drafts_with_its_own_layers_only() -> None:
    """Catches a draft that runs the whole target: all would be accepted. A last layer of zeros changes nothing."""
    model = tiny_model("llama")
    target = tiny_target(model)
    some = decode(target, EarlyExitDraft(target, 2), PROMPTS, k=3, max_new_tokens=20)
    assert sum(a for o in some for _, a in o.rounds) < sum(d for o in some for d, _ in o.rounds)
    with torch.no_grad():
        model.model.layers[2].self_attn.o_proj.weight.zero_()
        model.model.layers[2].mlp.down_proj.weight.zero_()
    target = tiny_target(model)
    for output in decode(target, EarlyExitDraft(target, 2), PROMPTS, k=3, max_new_tokens=21):
        assert output.rounds == [(3, 3)] * 5


@pytest.mark.parametrize("layers", [0, 3])
def test_early_exit_needs_a_proper_part(layers: int) -> None:
    """Catches a draft of no layers or of all, which can only be slower."""
    target = tiny_target(tiny_model("llama"))
    with pytest.raises(UserError, match="1 to 2 layers"):
        decode(target, EarlyExitDraft(target, layers), PROMPTS)


def test_a_tree_accepts_at_least_what_its_first_branch_would() -> None:
    """Catches a walk that takes the wrong sibling: the chain of rank-0 nodes is inside the tree."""
    model = tiny_model("llama")
    target = tiny_target(model)
    chain = CausalDraft(ModelRunner(noisy(model, 0.02)))
    bushy = CausalDraft(ModelRunner(noisy(model, 0.02)), shape=BUSHY)
    prompts = tiny_prompts(*[5] * 8)
    rounds = [
        sum(len(o.rounds) for o in decode(target, draft, prompts, k=3, max_new_tokens=24))
        for draft in (chain, bushy)
    ]
    assert rounds[1] < rounds[0]


@pytest.mark.parametrize(("temperature", "shape"), [(1.0, "dynamic"), (0.0, "static")])
def test_a_rows_tree_does_not_depend_on_its_batch(temperature: float, shape: str) -> None:
    """Catches masks, paths and random numbers mixed up between rows, also when rows wait and are refilled."""
    model = tiny_model("gemma3_text")
    draft = CausalDraft(ModelRunner(noisy(model, 0.01)), shape=SHAPES[shape])
    assert_rows_are_alone(tiny_target(model), draft, sampling=SamplingParams(temperature), rows=2)


def test_a_path_left_in_its_slots_changes_the_text(monkeypatch: pytest.MonkeyPatch) -> None:
    """The tests above are blind if compaction that does nothing goes unseen."""
    monkeypatch.setattr(StaticKVLayer, "compact_path", lambda self, base, path: None)
    model = tiny_model("llama")
    want = [hf_text(model, prompt, max_new_tokens=20) for prompt in PROMPTS]
    draft = CausalDraft(ModelRunner(noisy(model, 0.02)), shape=BUSHY)
    assert texts(decode(tiny_target(model), draft, PROMPTS, k=3, max_new_tokens=20)) != want


def test_static_tree_is_the_best_by_rank() -> None:
    """Catches ranks read off the wrong node: the drafted tokens are the draft's own top ones, node by node."""
    model = tiny_model("llama")
    draft = CausalDraft(ModelRunner(noisy(model, 0.02)), shape=BUSHY)
    plain = noisy(model, 0.02)
    seen = []

    class Spy(CausalDraft):
        def propose(self, history, length, k):  # type: ignore[no-untyped-def]
            proposal = super().propose(history, length, k)
            for row, n in enumerate(length.tolist()):
                seen.append((history[row, :n].tolist(), proposal.tokens[row].tolist()))
            return proposal

    decode(tiny_target(model), Spy(draft.runner, shape=BUSHY), PROMPTS, k=3, max_new_tokens=12)
    shape: StaticTree = BUSHY
    for text, tokens in seen:
        paths: list[list[int]] = [[]]
        for i, (parent, rank) in enumerate(zip(shape.parents, shape.ranks, strict=True)):
            with torch.no_grad():
                logits = plain(torch.tensor([text + paths[parent]])).logits[0, -1]
            assert tokens[i] == logits.topk(rank + 1).indices[rank]
            paths.append([*paths[parent], tokens[i]])
