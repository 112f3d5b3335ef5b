"""Widened models say what the small ones say; eight planted mistakes each make them say something else."""

import copy
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from decode.drafts.causal import CausalDraft
from decode.engine.engine import decode
from decode.model.runner import ModelRunner
from decode.verification.sampling import SamplingParams
from scripts.benchmarks.widen_llama import SHAPES, LlamaShape, randomise_, widen
from tests.tiny import VOCAB, noisy, tiny_model, tiny_prompts, tiny_target

pytestmark = pytest.mark.slow  # models of many shapes are made and compared

ASSETS = Path(__file__).resolve().parents[2] / "assets"
ALL = LlamaShape(96, 5, 8, 4, 16, 112, 131, tied=False)  # everything grows, the head size doubles
CASES: dict[str, tuple[LlamaShape, dict[str, Any]]] = {
    "all": (ALL, {}),
    "tied to untied": (ALL, {"tie_word_embeddings": True}),
    "tied": (replace(ALL, tied=True), {"tie_word_embeddings": True}),
    "one head size": (LlamaShape(64, 4, 16, 8, 8, 48, 128, tied=False), {}),
    "head size tripled": (replace(ALL, head_dim=24), {}),
    "a group split": (replace(ALL, kv_heads=8), {"num_key_value_heads": 1}),
    "wider groups": (replace(ALL, heads=12), {"num_key_value_heads": 4}),
    "uneven groups": (replace(ALL, heads=12, kv_heads=4), {"num_attention_heads": 8}),
    "depth only": (LlamaShape(32, 7, 4, 2, 8, 48, VOCAB, tied=False), {}),
}
TOLERANCE = 1e-4
IDS = torch.tensor(tiny_prompts(48, 48))


def small(**changes: Any) -> Any:
    """A tiny Llama whose norms and eps matter."""
    model = tiny_model("llama", **{"rms_norm_eps": 1e-2, **changes})
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for value in model.parameters():
            if value.ndim == 1:
                value += 0.3 * torch.randn(value.shape, generator=generator)
    return model


@torch.no_grad()
def error(wide: Any, model: Any, ids: torch.Tensor = IDS) -> float:
    """The largest difference of log-probabilities of the old ids; ids beyond take part in the softmax."""
    got = wide(ids).logits.float().log_softmax(-1)[..., : model.config.vocab_size]
    return float((got - model(ids).logits.float().log_softmax(-1)).abs().max())


def greedy(model: Any, ids: torch.Tensor, n: int) -> list[list[int]]:
    """transformers' own greedy text."""
    mask = torch.ones_like(ids)
    out = model.generate(
        ids, attention_mask=mask, do_sample=False, pad_token_id=0, max_new_tokens=n
    )
    return out[:, ids.shape[1] :].tolist()  # type: ignore[no-any-return]


@pytest.mark.parametrize("case", CASES)
def test_a_widened_model_is_the_same_function(case: str) -> None:
    """Logits (up to one number a position when tied), probabilities, argmax and text, in fp32."""
    shape, changes = CASES[case]
    model = small(**changes)
    wide = widen(model, shape)
    want = {"hidden_size": shape.hidden, "num_hidden_layers": shape.layers}
    assert {name: getattr(wide.config, name) for name in want} == want
    assert (wide.lm_head.weight is wide.model.embed_tokens.weight) == shape.tied
    with torch.no_grad():
        old, full = model(IDS).logits, wide(IDS).logits
    shift = full[..., :VOCAB] - old
    if shape.tied:
        shift = shift - shift[..., :1]
    assert shift.abs().max() < TOLERANCE * old.abs().max()
    assert error(wide, model) < TOLERANCE
    assert torch.equal(full.argmax(-1), old.argmax(-1))
    assert bool((full[..., VOCAB:] < -1000).all())
    assert greedy(wide, IDS[:, :8], 24) == greedy(model, IDS[:, :8], 24)


# ---- planted mistakes: each undoes one step of the derivation in a right model ----


def theta_kept(wide: Any) -> None:
    config = copy.deepcopy(wide.config)
    config.rope_parameters["rope_theta"] **= 0.5
    wide.model.rotary_emb = LlamaRotaryEmbedding(config)


def query_not_scaled(wide: Any) -> None:
    for layer in wide.model.layers:
        layer.self_attn.q_proj.weight /= 2**0.5


def norm_not_rescaled(wide: Any) -> None:
    for name, value in wide.named_parameters():
        if "norm" in name:
            value *= 3**0.5


def halves_not_moved(wide: Any) -> None:
    order = [*range(4), *range(8, 12), *range(4, 8), *range(12, 16)]
    for layer in wide.model.layers:
        for linear in (layer.self_attn.q_proj, layer.self_attn.k_proj):
            linear.weight.copy_(linear.weight.unflatten(0, (-1, 16))[:, order].flatten(0, 1))


def wrong_groups(wide: Any) -> None:
    for layer in wide.model.layers:
        for linear in (layer.self_attn.k_proj, layer.self_attn.v_proj):
            linear.weight.copy_(linear.weight.roll(16, 0))


def eps_lost(wide: Any) -> None:
    wide.model.embed_tokens.weight[:, 32] = 0


def constant_leaks(wide: Any) -> None:
    wide.model.layers[1].mlp.down_proj.weight[32] = wide.model.layers[1].mlp.down_proj.weight[0]


def padding_not_suppressed(wide: Any) -> None:
    wide.lm_head.weight[VOCAB:] = 0


MISTAKES = [
    theta_kept,
    query_not_scaled,
    norm_not_rescaled,
    halves_not_moved,
    wrong_groups,
    eps_lost,
    constant_leaks,
    padding_not_suppressed,
]


@pytest.mark.parametrize("plant", MISTAKES)
def test_the_comparison_sees(plant: Callable[[Any], None]) -> None:
    """Each mistake moves a log-probability by 100 tolerances or more, so the test above can fail."""
    model = small()
    wide = widen(model, ALL)
    with torch.no_grad():
        plant(wide)
    assert error(wide, model) > 100 * TOLERANCE


# ---- use ----


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_draft_acceptance_is_kept(temperature: float) -> None:
    """Target and draft, widened to different shapes with one vocabulary, keep every round's outcome."""
    model = small(tie_word_embeddings=True)
    draft, shape = noisy(model, 0.02), LlamaShape(64, 4, 16, 8, 8, 64, 131, tied=True)
    pairs = [(model, draft), (widen(model, ALL), widen(draft, shape))]
    few, many = (
        decode(
            tiny_target(target), CausalDraft(ModelRunner(proposer)), tiny_prompts(9, 5), k=3,
            sampling=SamplingParams(temperature), max_new_tokens=24,
        )
        for target, proposer in pairs
    )  # fmt: skip
    assert [(o.output_ids, o.rounds) for o in many] == [(o.output_ids, o.rounds) for o in few]
    assert len({accepted for output in few for _, accepted in output.rounds}) > 1


def test_the_bundled_target_keeps_its_text() -> None:
    """64 greedy tokens in fp32; in bf16 the rounding of the wide model is no worse than the small one's."""
    model: Any = AutoModelForCausalLM.from_pretrained(ASSETS / "target", dtype=torch.float32).eval()
    tokenizer: Any = AutoTokenizer.from_pretrained(ASSETS / "target")
    shape = LlamaShape(512, 14, 8, 4, 128, 768, 4352, tied=False)
    ids = tokenizer("import os\n\n\ndef read(path):\n", return_tensors="pt")["input_ids"]
    wide = widen(model, shape)
    text = greedy(model, ids, 64)
    assert len(text[0]) == 64
    assert greedy(wide, ids, 64) == text
    full = torch.cat([ids, torch.tensor(text)], 1)
    assert error(wide, model, full) < TOLERANCE
    half = widen(model, shape, dtype=torch.bfloat16)
    assert half.dtype == torch.bfloat16
    assert error(half, model, full) < 1.5 * error(copy.deepcopy(model).bfloat16(), model, full)


def test_shapes_are_the_published_ones() -> None:
    """As many parameters as Llama-3.1-8B, 3.2-3B and 3.2-1B have, counted on the meta device."""
    model: Any = tiny_model("llama", tie_word_embeddings=True)
    counts = {
        name: sum(value.numel() for value in widen(model, shape, device="meta").parameters())
        for name, shape in SHAPES.items()
    }
    assert counts == {
        "llama-3.1-8b": 8_030_261_248,
        "llama-3.2-3b": 3_212_749_824,
        "llama-3.2-1b": 1_235_814_400,
    }


def test_randomise_keeps_shapes_and_seed() -> None:
    """Matrices N(0, 0.02), norms 1, tied weights still tied, and the same numbers for the same seed."""
    first, second = (widen(small(tie_word_embeddings=True), CASES["tied"][0]) for _ in range(2))
    shapes = [value.shape for value in first.parameters()]
    randomise_(first, 3)
    randomise_(second, 3)
    assert [value.shape for value in first.parameters()] == shapes
    for one, two in zip(first.parameters(), second.parameters(), strict=True):
        assert torch.equal(one, two)
        assert (
            bool((one == 1).all()) if one.ndim == 1 else 0.018 < float(one.detach().std()) < 0.022
        )
    assert first.lm_head.weight is first.model.embed_tokens.weight


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"hidden": 16}, "hidden size"),
        ({"layers": 2}, "fewer layers"),
        ({"intermediate": 40}, "MLP"),
        ({"vocab": 90}, "fewer ids"),
        ({"hidden": 32}, "spare channel"),
        ({"head_dim": 12}, "no multiple"),
        ({"heads": 2, "kv_heads": 2}, "too few K/V heads"),
        ({"tied": True}, "tied"),
    ],
)
def test_a_shape_that_cannot_hold_the_model_is_refused(change: dict[str, Any], reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        widen(tiny_model("llama"), replace(ALL, **change))
