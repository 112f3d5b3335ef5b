"""A trained exit of the target: what it drafts from, the law of the text, the target beside it, its cost, its files."""

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from decode.checkpoints import head_layouts, importers, layouts
from decode.checkpoints.draft_folder import METADATA_FILE
from decode.common.errors import UserError
from decode.drafts import early_exit
from decode.drafts.base import Proposal, check_request
from decode.drafts.early_exit import EarlyExitDraft, ExitAdapter, copy_final_norm
from decode.drafts.registry import draft_family, load_draft
from decode.engine.engine import decode
from decode.model import layer_stack
from decode.model.hidden_states import LMHead
from decode.model.loading import Target
from decode.model.runner import ModelRunner
from decode.verification.sampling import SamplingParams
from decode.verification.tree import DynamicTree, TreeShape, tree_from_paths
from tests.blocks import chain_drift
from tests.decode.verification.test_exact_distribution import PROMPTS as LAW_PROMPTS
from tests.decode.verification.test_exact_distribution import engine_law, own_law, tv
from tests.heads import hf_states, randomise
from tests.params import rotated, slow_except
from tests.tiny import ARCHITECTURES, VOCAB, tiny_model, tiny_prompts, tiny_target

K, LENGTH, EXIT = 3, 20, 2
PROMPTS = tiny_prompts(13, 1, 9)
IDS = torch.tensor([i for i in range(VOCAB) if i % 7 != 1])
"""The tokens of a reduced vocabulary."""
HOT = SamplingParams(temperature=8.0)
"""At which even random exits are accepted now and then."""
FEW = ["llama", "gemma3_text", "gpt2"]


def adapter_of(
    target: Target, layers: int = EXIT, ids: Tensor | None = None, seed: int | None = 3
) -> ExitAdapter:
    """An adapter in the target's dtype with random weights; without a seed as training starts."""
    vocab, width = target.runner.vocab_size, 16
    size = vocab if ids is None else len(ids)
    config = head_layouts.exit_config(target.runner.config, vocab, size, layers, width)
    adapter = ExitAdapter(config, copy_final_norm(target.runner.model), ids)
    if seed is not None:
        randomise(adapter, seed)  # type: ignore[arg-type]
    return adapter.to(target.runner.model.dtype)


def draft_of(target: Target, shape: TreeShape = None, **settings: Any) -> EarlyExitDraft:
    adapter = adapter_of(target, **settings)
    return EarlyExitDraft(target, adapter.layers, shape, adapter)


def drift(arch: str, ids: Tensor | None = None) -> tuple[float, set[int]]:
    """(largest difference of a chain's logits from those of the hidden states of transformers' own pass over the text
    and the tokens drafted before, accepted lengths that occurred)."""
    own = tiny_target(tiny_model(arch))
    draft, head = draft_of(own, ids=ids), LMHead(own.runner.model)
    adapter = draft.adapter
    assert adapter is not None

    def plain_laws(text: list[int], drafted: list[int]) -> Tensor:
        states, _ = hf_states(own.runner.model, [*text, *drafted])
        logits = head(adapter(states[adapter.layers][len(text) - 1 :]))
        return logits if ids is None else logits[:, ids]

    return chain_drift(draft, draft.runner, "step", own, plain_laws, sampling=HOT)


@pytest.mark.parametrize(
    ("arch", "vocab"), slow_except(rotated(ARCHITECTURES, ["whole", "reduced"]), FEW)
)
def test_logits_are_those_of_a_plain_pass(arch: str, vocab: str) -> None:
    """Catches another layer's state, K/V left by rejected tokens, positions one off and logits of other tokens."""
    gap, counts = drift(arch, IDS if vocab == "reduced" else None)
    assert gap < 2e-3
    assert len(counts) > 1


FIRST, STEP = ModelRunner.first_layers, early_exit.decoder_step


def no_adapter(self: ModelRunner, count: int, norm: Any = None, ids: Any = None) -> ModelRunner:
    return FIRST(self, count, None, ids)


def a_position_late(runner: ModelRunner) -> Any:
    """Drafted tokens stand one slot too far."""
    step = STEP(runner)
    return lambda tokens, length, nodes, above: step(tokens, length + 1, nodes, above)


@pytest.mark.parametrize(
    ("place", "name", "bug"),
    [
        (ModelRunner, "first_layers", lambda self, count, *rest: FIRST(self, count - 1, *rest)),
        (ModelRunner, "first_layers", no_adapter),
        (early_exit, "decoder_step", a_position_late),
    ],
)
def test_planted_bugs_change_the_logits(
    place: Any, name: str, bug: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The test above is blind if one of these goes unseen."""
    monkeypatch.setattr(place, name, bug)
    assert drift("llama")[0] > 0.02


def test_an_untrained_adapter_is_the_plain_early_exit() -> None:
    """Catches a start that throws away what the target's own norm and head make of the state."""
    own = tiny_target(tiny_model("gemma3_text"))
    plain = decode(own, EarlyExitDraft(own, EXIT), PROMPTS, k=K, max_new_tokens=LENGTH)
    start = decode(own, draft_of(own, seed=None), PROMPTS, k=K, max_new_tokens=LENGTH)
    other = decode(own, draft_of(own), PROMPTS, k=K, max_new_tokens=LENGTH)
    assert [o.rounds for o in start] == [o.rounds for o in plain]
    assert [o.rounds for o in other] != [o.rounds for o in plain]


def three_tokens(arch: str) -> Any:
    """A model so small that one batch holds every branch of its text."""
    shape = {"vocab_size": 3, "hidden_size": 8, "num_hidden_layers": 2, "num_attention_heads": 2}
    more: dict[str, Any] = {"num_key_value_heads": 1, "head_dim": 4, "intermediate_size": 8}
    if arch == "gemma3_text":
        more |= {"query_pre_attn_scalar": 4}
        more |= {"layer_types": ["sliding_attention", "full_attention"]}
    own = {} if arch == "gpt2" else more
    return tiny_model(arch, 0, std=0.4, dtype=torch.float64, **(shape | own))


TWO = torch.tensor([0, 2])
FORKED = tree_from_paths([[0], [1], [0, 0]])
WALK = 3**4  # a draw at each of the root and three nodes
# name: (ids, shape, k, branches of a round): drafts, verdicts, bonus
LAWS: dict[str, tuple[Tensor | None, TreeShape, int, int]] = {
    "one token": (None, None, 1, 3 * 2 * 3),
    "two tokens": (None, None, 2, 3**2 * 2**2 * 3),
    "reduced": (TWO, None, 2, 2**2 * 2**2 * 3),
    "tree": (None, FORKED, 2, WALK),
    "grown tree, reduced": (TWO, DynamicTree(2, 3), 2, WALK),
}


def law_distance(arch: str, name: str) -> float:
    """Largest TV of the emitted text from the target's own law."""
    ids, shape, k, branches = LAWS[name]
    length, sampling = 2, SamplingParams(0.7)
    model = three_tokens(arch)
    own = tiny_target(model)
    draft: Any = draft_of(own, shape, layers=1, ids=ids)
    law = engine_law(own, draft, k, length, sampling, 3 * branches)
    pairs = zip(law, LAW_PROMPTS, strict=True)
    return max(tv(got, own_law(model, prompt, length, sampling)) for got, prompt in pairs)


@pytest.mark.parametrize(("arch", "name"), [*rotated(FEW, LAWS), ("gpt2", "tree")])
def test_sampled_text_has_the_targets_law(arch: str, name: str) -> None:
    """Catches a q that is not what a token was drawn from. Exact: no false alarm."""
    assert law_distance(arch, name) < 1e-7  # HF norms compute in fp32


DRAFT = early_exit.draft_tokens


def exit_without_temperature(step: Any, logits: Tensor, *rest: Any) -> Proposal:
    """q of the logits as they are, while tokens are drawn at the temperature."""
    proposal = DRAFT(step, logits, *rest)
    assert proposal.q is not None
    flat = proposal.q ** SamplingParams(0.7).temperature
    return Proposal(proposal.tokens, flat / flat.sum(-1, keepdim=True), finite=proposal.finite)


def test_a_wrong_q_moves_the_law(monkeypatch: pytest.MonkeyPatch) -> None:
    """The test above is blind if this goes unseen."""
    monkeypatch.setattr(early_exit, "draft_tokens", exit_without_temperature)
    assert law_distance("llama", "one token") > 1e-3


@torch.inference_mode()
def target_logits(own: Target) -> Tensor:
    """Logits of a prefill and of a step of four tokens behind it."""
    tokens = torch.tensor([PROMPTS[0]])
    own.runner.capture_hidden_states(None)
    own.runner.allocate(1, 64)
    first = own.runner.prefill(tokens, torch.tensor([tokens.shape[1]]))
    step = own.runner.step(tokens[:, :4], torch.tensor([tokens.shape[1]]))
    return torch.cat([first[:, None], step], 1)


@pytest.mark.parametrize(("arch", "ids"), [("gemma3_text", IDS), ("gpt2", None)])
def test_the_targets_logits_stay_the_same_to_the_bit(
    arch: str, ids: Tensor | None, tmp_path: Path
) -> None:
    """Catches an adapter that the target's own pass runs, and weights that it changes."""
    own = tiny_target(tiny_model(arch))
    before, weights = target_logits(own), own.runner.model.state_dict()
    copies = {name: value.clone() for name, value in weights.items()}
    draft = load_draft(saved(tmp_path / "d", own, ids), own)
    assert torch.equal(target_logits(own), before)
    decode(own, draft, PROMPTS, k=K, max_new_tokens=LENGTH)
    assert torch.equal(target_logits(own), before)
    after = own.runner.model.state_dict()
    assert after.keys() == copies.keys()
    assert all(torch.equal(after[name], value) for name, value in copies.items())


def test_a_round_passes_the_first_layers_once_more_for_each_draft() -> None:
    """K E + L passes over layers, (K + 1) L + K E layers for one token each, as the module says of itself."""
    own = tiny_target(tiny_model("llama"))
    passes, tokens = Counter[int](), Counter[int]()
    for number, layer in enumerate(layer_stack.layer_stack(own.runner.model)):

        def count(module: Any, args: Any, at: int = number) -> None:
            passes[at] += 1
            tokens[at] += args[0].shape[1]

        layer.register_forward_pre_hook(count)
    own.runner.allocate(1, 64)
    [output] = decode(own, draft_of(own), [PROMPTS[0]], k=K, max_new_tokens=LENGTH)
    rounds, layers = len(output.rounds), own.runner.config.num_hidden_layers
    assert all(drafted == K for drafted, _ in output.rounds)
    assert sum(passes.values()) == layers + rounds * (K * EXIT + layers)  # the first: prefill
    assert [passes[i] - 1 for i in range(layers)] == [rounds * (K + 1)] * EXIT + [rounds]
    each = K * EXIT + (K + 1) * layers
    assert sum(tokens.values()) == len(PROMPTS[0]) * layers + rounds * each


def saved(folder: Path, own: Target, ids: Tensor | None = None) -> str:
    adapter = adapter_of(own, ids=ids)
    layouts.save_heads(folder, adapter.config, adapter, torch.float32, ids)
    facts = {"family": "layerskip", "tokenizer_hash": own.fingerprint}
    (folder / METADATA_FILE).write_text(json.dumps(facts))
    return str(folder)


@pytest.mark.parametrize(("arch", "ids"), [("llama", None), ("gpt2", IDS)])
def test_a_saved_exit_is_the_same(arch: str, ids: Tensor | None, tmp_path: Path) -> None:
    """Catches a weight, a bias of the norm, the layer or the map that is lost on the way."""
    own = tiny_target(tiny_model(arch))
    path = saved(tmp_path / "d", own, ids)
    assert importers.detect_family(importers.tensor_files(path)) == draft_family(path)
    draft = load_draft(path, own, shape=DynamicTree(2, 5))
    assert isinstance(draft, EarlyExitDraft)
    assert (draft.name, draft.shape) == ("layerskip", DynamicTree(2, 5))
    was = adapter_of(own, ids=ids)
    assert draft.adapter is not None
    for key, value in was.state_dict().items():
        assert torch.equal(value, draft.adapter.state_dict()[key]), key
    draft.shape = None
    here, there = (
        decode(own, d, PROMPTS, k=K, max_new_tokens=LENGTH, sampling=HOT)
        for d in (draft_of(own, ids=ids), draft)
    )
    assert [o.rounds for o in here] == [o.rounds for o in there]


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"exit_layer": 3}, "1 to 2 layers"),
        ({"exit_layer": 0}, "1 to 2 layers"),
        ({"exit_layer": None}, "layerskip"),
        ({"exit_width": 17}, "does not fit"),
        ({"hidden_size": 16}, "hidden_size"),
        ({"vocab_size": 7}, "vocab_size"),
        ({"num_target_layers": 4}, "num_target_layers"),
        ({"draft_vocab_size": 50}, "d2t"),
    ],
)
def test_what_does_not_fit_is_refused(change: dict[str, Any], named: str, tmp_path: Path) -> None:
    """Catches an exit of another target, or of another layer of it, that would draft with low acceptance."""
    own = tiny_target(tiny_model("llama"))
    path = Path(saved(tmp_path / "d", own))
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps(config | change))
    with pytest.raises(UserError, match=named):
        load_draft(str(path), own)


def test_a_request_is_checked_before_anything_is_decoded() -> None:
    """Catches an exit that needs buffers which its target has not allocated yet, as at the start of training."""
    check_request(draft_of(tiny_target(tiny_model("llama"))), K, SamplingParams())


def test_another_device_than_the_targets_is_refused(tmp_path: Path) -> None:
    own = tiny_target(tiny_model("llama"))
    path = saved(tmp_path / "d", own)
    with pytest.raises(UserError, match="leave out its device"):
        early_exit.load(path, own, "cuda:1", "float32")


@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_every_architectures_final_norm_is_found(arch: str) -> None:
    """Catches another norm beside the layers: what the LM head reads must be what this one gives."""
    model = tiny_model(arch)
    given: list[Tensor] = []
    norm, head = layer_stack.final_norm(model), model.get_output_embeddings()
    norm.register_forward_hook(lambda module, args, out: given.append(out))
    head.register_forward_pre_hook(lambda module, args: given.append(args[0]))
    with torch.no_grad():
        model(torch.tensor([PROMPTS[0]]))
    out, read = given
    assert torch.equal(out, read)
