"""Every architecture that is decoded here equals transformers' own text, and those that cannot be are refused."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from transformers import AttentionInterface, AutoConfig, AutoModelForCausalLM

from decode.common.errors import UserError
from decode.drafts.base import Draft
from decode.drafts.causal import CausalDraft
from decode.drafts.early_exit import EarlyExitDraft
from decode.drafts.lookup import NgramDraft
from decode.engine.engine import decode
from decode.model import attention, compatibility
from decode.model.compatibility import check_supported
from decode.model.loading import Target
from decode.model.runner import ModelRunner
from decode.verification.tree import DynamicTree
from tests.decode.drafts.test_token_trees import BUSHY
from tests.decode.engine.test_engine import PROMPTS, hf_text, texts
from tests.params import slow_except
from tests.tiny import (
    ARCHITECTURES,
    COMMON,
    FEW,
    GATED,
    GPTJ,
    GROUPED,
    SLIDING,
    noisy,
    reference,
    rope,
    tiny_model,
    tiny_prompts,
    tiny_target,
)

LAYERS = 3


def some_drafts(arch: str, model: Any, target: Target) -> list[Draft | None]:
    """A chain, a tree by confidence, a fixed tree drafted in the target's own K/V; for FEW none and a lookup too."""
    moved = ModelRunner(noisy(model, 0.01))
    return [
        *([None, NgramDraft()] if arch in FEW else []),
        CausalDraft(moved),
        CausalDraft(moved, shape=DynamicTree(width=3, nodes=9)),
        EarlyExitDraft(target, 2, BUSHY),
    ]


@pytest.mark.parametrize("arch", slow_except(ARCHITECTURES, FEW))
def test_greedy_text_equals_generate(arch: str) -> None:
    """Catches windows, softcaps, sinks, scales and RoPE variants lost, heads of unequal size, K/V shared between
    layers, K/V of rejected drafts that stays, rows mixed up: in fp32, for ragged rows.

    The moved model must have met rejection and full acceptance, else roll-back was not tried.
    """
    model = tiny_model(arch)
    want = [hf_text(model, prompt, max_new_tokens=16) for prompt in PROMPTS]
    target, accepted = tiny_target(model), set()
    for draft in some_drafts(arch, model, target):
        outputs = decode(target, draft, PROMPTS, k=3, max_new_tokens=16)
        assert texts(outputs) == want, draft
        if isinstance(draft, CausalDraft):
            accepted |= {accepted for output in outputs for _, accepted in output.rounds}
    assert min(accepted) < max(accepted) == 3


@pytest.mark.parametrize("arch", slow_except(ARCHITECTURES, FEW))
def test_text_stops_at_the_context(arch: str) -> None:
    """Catches a context read from the wrong field, an index beyond learned positions, and drafts that reach there."""
    context = 24
    original = {"original_max_position_embeddings": context}
    long = {**ARCHITECTURES[arch].get("rope_parameters", {}), **original}
    changes: dict[str, Any] = {"max_position_embeddings": context}
    if arch == "phi3+longrope":  # goes on, but not exactly
        changes = {**original, "rope_parameters": long}
    model = tiny_model(arch, **changes)
    target = tiny_target(model)
    assert target.runner.context == context
    [prompt] = tiny_prompts(21)
    [output] = decode(target, CausalDraft(ModelRunner(noisy(model, 0.01))), [prompt], k=3)
    assert output.output_ids == hf_text(model, prompt, max_length=context)
    with pytest.raises(UserError, match=f"context holds {context}"):
        decode(target, None, tiny_prompts(context))


def test_a_draft_without_a_context_stops_at_the_target_s() -> None:
    """Catches a drafted token that counts although no position is left for it; drafts with a context stop there by
    themselves."""
    size = tiny_model("gpt2").config.vocab_size
    model = tiny_model("gpt2", max_position_embeddings=size + 3)
    prompt = [*range(size)]  # an n-gram finds whatever comes first
    [output] = decode(tiny_target(model), NgramDraft(), [prompt], k=6)
    assert output.rounds[0][0] == 2
    assert output.output_ids == hf_text(model, prompt, max_length=size + 3)


def test_text_of_a_multimodal_model_equals_generate() -> None:
    """Catches checks that look at the vision tower (which sees later patches) and fields that only text_config has."""
    vision = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
    vision |= {"num_attention_heads": 4, "image_size": 28, "patch_size": 14}
    text = {**ARCHITECTURES["gemma3_text"], "initializer_range": 0.25, "eos_token_id": None}
    model = hf_model(
        "gemma3", text_config=text, vision_config=vision, mm_tokens_per_image=4, image_token_id=96
    )
    want = [hf_text(model, prompt, max_new_tokens=20, eos_token_id=None) for prompt in PROMPTS]
    draft = CausalDraft(ModelRunner(noisy(model, 0.01)), shape=DynamicTree(width=3, nodes=9))
    assert texts(decode(tiny_target(model), draft, PROMPTS, k=3, max_new_tokens=20)) == want


# ---- the attention that is called ----


@contextmanager
def counted_calls() -> Iterator[list[torch.nn.Module]]:
    """The modules that called the registered attention within it."""
    calls: list[torch.nn.Module] = []

    def counting(module: torch.nn.Module, *args: Any, **kwargs: Any) -> Any:
        calls.append(module)
        return attention.attention_forward(module, *args, **kwargs)

    AttentionInterface.register(attention.ATTENTION_NAME, counting)
    try:
        yield calls
    finally:
        AttentionInterface.register(attention.ATTENTION_NAME, attention.attention_forward)


def attends(model: Any) -> int:
    """How often one forward of a Decoder over `model` calls the registered attention."""
    runner = ModelRunner(model)
    runner.allocate(1, 8)
    with counted_calls() as calls:
        runner.step(torch.tensor([[1, 2, 3]]), torch.tensor([0]))
    return len(calls)


@pytest.mark.parametrize("arch", slow_except(ARCHITECTURES, FEW))
def test_every_layer_calls_our_attention(arch: str) -> None:
    """Catches a layer that attends in another way: its windows and tree masks would be lost without a word."""
    assert attends(tiny_model(arch)) == LAYERS


def test_a_model_that_goes_around_our_attention_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches attention of a model's own that no property tells: planted, by leaving out the check of properties."""
    monkeypatch.setattr(compatibility, "check_supported", lambda model: None)
    with pytest.raises(UserError, match="xglm .* attention by itself .* in 3 of its 3 layers"):
        ModelRunner(hf_model("xglm", **REFUSED["xglm"][0]))


def test_a_mask_of_the_models_own_is_refused() -> None:
    """Catches masks that a model makes in its layers, which no property tells, found only in the first round."""
    with pytest.raises(UserError, match="doge model cannot be decoded: DogeAttention masks"):
        ModelRunner(hf_model("doge", **GROUPED, keep_window_size=4))


def test_weights_that_are_no_numbers_are_refused() -> None:
    """Catches a damaged checkpoint that decodes as token 0."""
    model = tiny_model("llama")
    model.model.layers[1].mlp.up_proj.weight.data[0, 0] = float("nan")
    with pytest.raises(UserError, match="llama .* NaN or infinite logits"):
        ModelRunner(model)


def test_a_lost_keyword_is_made_up_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """Planted: stablelm does not pass keywords on; without `forward_context` tokens would attend to wrong slots."""
    model = tiny_model("stablelm")
    want = [hf_text(model, prompt, max_new_tokens=20) for prompt in PROMPTS]
    assert decode_some(model) == want
    monkeypatch.setattr(attention, "forward_context", nothing)
    with pytest.raises(UserError, match="reads no other KV cache"):
        decode_some(model)


@contextmanager
def nothing(slots: Any, *_: Any) -> Iterator[None]:
    yield


def decode_some(model: Any) -> list[list[int]]:
    return texts(decode(tiny_target(model), None, PROMPTS, max_new_tokens=20))


# ---- refusals ----

HEADS = {"hidden_size": 32, "num_attention_heads": 4, "num_hidden_layers": 3, "vocab_size": 97}
LINEAR = ["linear_attention", "full_attention", "linear_attention"]
OUTSIDE, RECURRENT = "attention by itself", "recurrent layers"
REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "bloom": ({"hidden_size": 32, "n_head": 4, "n_layer": 3, "vocab_size": 97}, OUTSIDE),
    "mpt": ({"d_model": 32, "n_heads": 4, "n_layers": 3, "vocab_size": 97}, OUTSIDE),
    "falcon+alibi": (HEADS | {"alibi": True}, OUTSIDE),
    "falcon": (HEADS | {"alibi": False}, OUTSIDE),
    "gpt_neo": (
        {"hidden_size": 32, "num_heads": 4, "num_layers": 2, "vocab_size": 97}
        | {"attention_types": [[["global", "local"], 1]]},
        OUTSIDE,
    ),
    "llama+dynamic": (GROUPED | rope("dynamic", factor=2.0), "dynamic NTK"),
    "mamba": ({"hidden_size": 32, "num_hidden_layers": 3, "vocab_size": 97}, RECURRENT),
    "jamba": (GROUPED | {"num_experts": 2, "mamba_expand": 2}, RECURRENT),
    "falcon_h1": (GROUPED | {"mamba_d_ssm": 32, "mamba_n_heads": 4, "mamba_d_head": 8}, RECURRENT),
    "qwen3_next": (GROUPED | {"layer_types": LINEAR, "num_experts": 4}, RECURRENT),
    "minimax": (GROUPED | {"layer_types": LINEAR}, "linear_attention layers"),
    "xglm": (COMMON | {"ffn_dim": 48, "attention_heads": 4}, OUTSIDE),
    "lfm2": (GROUPED | {"layer_types": ["conv", "full_attention", "conv"]}, "conv layers"),
    "phimoe": (SLIDING | {"num_local_experts": 4}, "does not pass its window of 8 positions"),
    "bart": (
        {"d_model": 32, "decoder_layers": 3, "decoder_attention_heads": 4, "vocab_size": 97},
        "takes no position_ids",
    ),
    "bert": (GATED | {"is_decoder": False}, "attends to later tokens"),
    "roberta": (GATED | {"is_decoder": True}, "positions from its padding id"),
}
REFUSED |= {arch: (GPTJ, OUTSIDE) for arch in ("gptj", "codegen") if arch not in ARCHITECTURES}


def hf_model(arch: str, **settings: Any) -> Any:
    """A random model of that type, whether or not it can be decoded."""
    ids = {"bos_token_id": 1, "eos_token_id": 1, "pad_token_id": 1}
    config = AutoConfig.for_model(arch.split("+")[0], **{**ids, **settings})
    return AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()


@pytest.mark.parametrize("arch", REFUSED)
def test_a_model_that_cannot_be_decoded_is_refused(arch: str) -> None:
    """Catches wrong text without a word, or a stack trace in mid-round, for models that the engine cannot run."""
    settings, reason = REFUSED[arch]
    with pytest.raises(UserError, match=f"this {arch.split('+')[0]} model .*: it .*{reason}"):
        ModelRunner(hf_model(arch, **settings))


def test_an_encoder_decoder_is_refused() -> None:
    """Catches a T5 given as a draft in Python, where no loader stands before."""
    from transformers import T5Config, T5ForConditionalGeneration

    config = T5Config(vocab_size=97, d_model=32, d_kv=8, d_ff=48, num_layers=1, num_heads=4)
    with pytest.raises(UserError, match="this t5 model .* encoder-decoder"):
        ModelRunner(T5ForConditionalGeneration(config))


def test_a_window_that_nobody_uses_is_no_reason() -> None:
    """Catches refusals for a field that the model does not read, and for windows as long as the context."""
    check_supported(tiny_model("llama", sliding_window=8))
    check_supported(hf_model("phimoe", **COMMON, num_local_experts=4, sliding_window=64))


# ---- experts ----


@pytest.mark.parametrize("arch", ["qwen3_moe", "mixtral", "gpt_oss", "deepseek_v3"])
def test_grouped_experts_compute_the_same(arch: str) -> None:
    """Catches experts that are grouped wrongly, and a model set to run them one by one that stays so."""
    model = tiny_model(arch)
    [ids] = [torch.tensor([prompt]) for prompt in tiny_prompts(20)]
    logits = {}
    for kind in ("eager", "grouped_mm"):
        own = reference(model)
        own.set_experts_implementation(kind)
        with torch.no_grad():
            logits[kind] = own(input_ids=ids).logits
        assert ModelRunner(own).model.get_experts_implementation()[""] == "grouped_mm"
    torch.testing.assert_close(logits["eager"], logits["grouped_mm"], atol=1e-5, rtol=1e-5)
