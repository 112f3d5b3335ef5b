"""DFlash and its kin in the engine: distributions are those of the formulas, the text is the target's.

What the speculators library itself computes is in tests/decode/checkpoints/test_speculators.py.
"""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from decode.checkpoints import block_layouts, importers, layouts
from decode.checkpoints.draft_folder import METADATA_FILE
from decode.common.errors import UserError
from decode.drafts.blocks import DFlashDraft
from decode.drafts.dflash_model import BlockLogits, DFlashModel
from decode.drafts.eagle_model import llama_config
from decode.drafts.registry import draft_family, load_draft
from decode.engine.engine import decode
from decode.model.hidden_states import HiddenStateSpec, LMHead
from decode.model.loading import Target
from decode.verification.tree import TreeShape
from tests.blocks import LENGTH, PROMPTS, K, decode_and_compare, watch_logits
from tests.heads import prefilled, randomise
from tests.tiny import VOCAB, tiny_model, tiny_target

RANK = 6
IDS = torch.tensor([i for i in range(VOCAB) if i % 7 != 1])
"""The tokens of a reduced vocabulary."""
TAPS = (0, 2)
KIN: dict[str, dict[str, Any]] = {
    "dflash2": {"conv_kernel_size": 3, "conv_group_size": 4, "selector_rank": RANK, "selector_top_k": 2},
    "xpress": {"xpress_rank": RANK, "xpress_mlp_ratio": 2, "num_jacobi_passes": 2},
    "domino": {"gru_hidden_dim": 5, "emb_dim": RANK, "pure_draft_prefix_len": 1, "sample_from_anchor": True},
    "dflare": {"layer_fusion": True},
}  # fmt: skip
"""What config.json of families that are not trained here holds besides."""
Taps = tuple[int, ...]


def fields(
    name: str, target: Target, ids: Tensor | None = IDS, taps: Taps = TAPS, **changes: Any
) -> dict[str, Any]:
    vocab = target.runner.vocab_size
    size = vocab if ids is None else len(ids)
    # capture id 0, the embedding, has no name among layer outputs
    config = block_layouts.dflash_config(
        target.runner.config, vocab, size, [max(1, i) for i in taps], 2,
        K + (name not in ("dspark", "domino")), vocab - 1, RANK if name == "dspark" else 0,
    )  # fmt: skip
    return config | {"eagle_aux_hidden_state_layer_ids": list(taps)} | KIN.get(name, {}) | changes


def net_of(
    name: str, target: Target, ids: Tensor | None = IDS, taps: Taps = TAPS, **changes: Any
) -> DFlashModel:
    config = llama_config(fields(name, target, ids, taps, **changes))
    model = target.runner.model
    net = DFlashModel(config, HiddenStateSpec(taps), ids, LMHead(model))
    randomise(net, 3)  # type: ignore[arg-type]
    return net.to(model.dtype)


def draft_of(name: str, target: Target, shape: TreeShape = None, **more: Any) -> DFlashDraft:
    draft = DFlashDraft(net_of(name, target, **more), target, name)
    draft.shape = shape
    return draft


def in_window(net: DFlashModel, layer: int, count: int, size: int) -> Tensor:
    """[size, count + size] bool: what a block's slots see of `count` states and of the block, written out."""
    see = torch.ones(size, count + size, dtype=torch.bool)
    fields = net.config.to_dict()
    if fields.get("layer_types") is None or fields["layer_types"][layer] == "full_attention":
        return see
    for slot in range(size):
        for other in range(count + size):
            anchored = count - other <= fields["sliding_window"]
            own = count + slot - other < fields["sliding_window"]
            before = other <= count + slot or fields.get("sliding_window_non_causal", False)
            near = anchored if fields.get("window_from_anchor") else own
            see[slot, other] = near if other < count else before
    return see


def formula_states(net: DFlashModel, features: Tensor, tokens: Tensor, embedding: Tensor) -> Tensor:
    """[B, h] normed states of a block whose anchor follows T tapped states [T, F]: attention over one list of keys."""
    own = {name: value.detach() for name, value in net.state_dict().items()}
    size: int = net.config.head_dim  # type: ignore[assignment]
    eps = net.config.rms_norm_eps

    def rms(x: Tensor, name: str) -> Tensor:
        return x / (x.square().mean(-1, keepdim=True) + eps).sqrt() * own[f"{name}.weight"]

    def turn(x: Tensor, position: Tensor) -> Tensor:  # [n, heads, D]
        cos, sin = net.rotary(x, position[None])
        half = size // 2
        turned = torch.cat([-x[..., half:], x[..., :half]], -1)
        return x * cos[0, :, None] + turned * sin[0, :, None]

    def convolved(x: Tensor, given: Tensor, name: str, side: int) -> Tensor:
        if f"{name}.base_kernel" not in own:
            return x
        base = own[f"{name}.base_kernel"][side]  # [taps, h]
        added = (given @ own[f"{name}.kernel_projection.weight"].T).view(len(x), 2, len(base), -1)
        group = torch.arange(base.shape[1]) // (base.shape[1] // added.shape[-1])
        out = torch.zeros_like(x)
        for slot in range(len(x)):
            for tap in range(min(len(base), slot + 1)):
                out[slot] += (base[tap] + added[slot, side, tap, group]) * x[slot - tap]
        return out

    def context_of(layer: int) -> Tensor:
        if "layer_fusion_weights" not in own:
            return rms(features @ own["fc.weight"].T, "hidden_norm")
        shares = own["layer_fusion_weights"][layer].softmax(-1)
        tapped = features.view(len(features), len(shares), -1)
        return rms((tapped * shares[:, None]).sum(1), "hidden_norm")

    count = len(features)
    places = torch.arange(count + len(tokens))
    x = embedding[tokens]
    for i in range(len(net.layers)):
        at = f"layers.{i}.self_attn"
        first = rms(x, f"layers.{i}.input_layernorm")
        normed = convolved(first, first, f"layers.{i}.attention_conv", 0)

        def projected(name: str, at: str = at, i: int = i, normed: Tensor = normed) -> Tensor:
            weight = own[f"{at}.{name}.weight"]
            of_context = own.get(f"{at}.{name}_target.weight", weight)
            both = torch.cat([context_of(i) @ of_context.T, normed @ weight.T])
            return both.unflatten(-1, (-1, size))

        q = (normed @ own[f"{at}.q_proj.weight"].T).unflatten(-1, (-1, size))
        k, v = projected("k_proj"), projected("v_proj")
        q, k = turn(rms(q, f"{at}.q_norm"), places[count:]), turn(rms(k, f"{at}.k_norm"), places)
        groups = q.shape[1] // k.shape[1]
        k, v = k.repeat_interleave(groups, 1), v.repeat_interleave(groups, 1)
        scores = torch.einsum("shd,thd->hst", q, k) * size**-0.5
        scores = scores.masked_fill(~in_window(net, i, count, len(tokens)), float("-inf"))
        out = torch.einsum("hst,thd->shd", scores.softmax(-1), v).flatten(1)
        out = out @ own[f"{at}.o_proj.weight"].T
        x = x + convolved(out, first, f"layers.{i}.attention_conv", 1)
        second = rms(x, f"layers.{i}.post_attention_layernorm")
        normed = convolved(second, second, f"layers.{i}.mlp_conv", 0)
        inner = F.silu(normed @ own[f"layers.{i}.mlp.gate_proj.weight"].T)
        inner = inner * (normed @ own[f"layers.{i}.mlp.up_proj.weight"].T)
        inner = inner @ own[f"layers.{i}.mlp.down_proj.weight"].T
        x = x + convolved(inner, second, f"layers.{i}.mlp_conv", 1)
    return rms(x, "norm")


def drift(draft: Any, inner: DFlashDraft, own: Target, **settings: Any) -> tuple[float, set[int]]:
    """(largest difference of the logits without correction from the formulas, accepted lengths that occurred)."""
    net, embedding = inner.net, own.runner.model.get_input_embeddings().weight

    def formula(text: list[int], depth: int) -> Tensor:
        features = prefilled(own, text[:-1], net.aux_layers)
        tokens = torch.tensor([text[-1], *[net.mask_token] * (depth + net.first - 1)])
        return net.base_logits(formula_states(net, features, tokens, embedding)[net.first :])

    with watch_logits(inner, net, "base_logits") as seen:
        return decode_and_compare(own, draft, seen, formula, **settings)


def saved(folder: Path, name: str, own: Target, ids: Tensor | None = IDS) -> str:
    taps = (1, 2)
    net = net_of(name, own, ids, taps)
    layouts.save_heads(folder, fields(name, own, ids, taps), net, torch.float32, ids)
    facts = {"family": name, "tokenizer_hash": own.fingerprint}
    (folder / METADATA_FILE).write_text(json.dumps(facts))
    return str(folder)


@pytest.mark.parametrize(("name", "ids"), [("dflash", None), ("dspark", IDS)])
def test_a_saved_draft_is_the_same(name: str, ids: Tensor | None, tmp_path: Path) -> None:
    """Catches a weight, a tap or the mask that is lost on the way, and a family told from the tensors alone."""
    own = tiny_target(tiny_model("llama"))
    path = saved(tmp_path / "d", name, own, ids)
    draft = load_draft(path, own)
    assert isinstance(draft, DFlashDraft)
    assert importers.detect_family(importers.tensor_files(path)) == name == draft_family(path)
    was = net_of(name, own, ids, (1, 2))
    for key, value in was.state_dict().items():
        assert torch.equal(value, draft.net.state_dict()[key]), key
    assert (draft.net.mask_token, draft.net.block_size, draft.net.aux_layers) == (
        was.mask_token, was.block_size, was.aux_layers,
    )  # fmt: skip


SLIDING: dict[str, Any] = {"layer_types": ["sliding_attention", "full_attention"]}
SLIDING |= {"sliding_window": 4}
WINDOWS: dict[str, dict[str, Any]] = {
    "speculators": SLIDING | {"window_from_anchor": True},
    "speculators, both ways": SLIDING
    | {"window_from_anchor": True, "sliding_window_non_causal": True},
    "others": SLIDING,
    "all slide": SLIDING | {"layer_types": ["sliding_attention"] * 2},
}


@pytest.mark.parametrize(
    ("name", "windows"), [*(("dflash", w) for w in WINDOWS), ("dspark", "speculators")]
)
def test_sliding_layers_see_what_they_were_trained_on(name: str, windows: str) -> None:
    """Catches windows that count from the wrong slot, and blocks that see ahead where they were trained causally."""
    own = tiny_target(tiny_model("llama"))
    draft = DFlashDraft(net_of(name, own, None, **WINDOWS[windows]), own, name)
    far, lengths = drift(draft, draft, own)
    assert far < 1e-4
    draft.net.windows = [None, None]  # planted: full attention
    assert drift(draft, draft, own)[0] > 1e-3


def test_sliding_layers_are_read(tmp_path: Path) -> None:
    """Catches windows or causality of a published draft that are lost on the way."""
    own = tiny_target(tiny_model("llama"))
    path = Path(saved(tmp_path / "d", "dflash", own, None))
    (path / METADATA_FILE).unlink()
    config = json.loads((path / "config.json").read_text())
    inner = {k: v for k, v in config.items() if k not in ("dflash_config", "block_size")} | SLIDING
    nested = {
        "speculators_model_type": "dflash", "transformer_layer_config": inner,
        "draft_vocab_size": config["vocab_size"], "block_size": config["block_size"],
        "mask_token_id": config["dflash_config"]["mask_token_id"],
        "aux_hidden_state_layer_ids": [1, 2],
    }  # fmt: skip
    flat = config | SLIDING | {"sliding_window_non_causal": True}
    for layout, causal, anchored in ((nested, True, True), (flat, False, False)):
        (path / "config.json").write_text(json.dumps(layout))
        with pytest.warns(UserWarning, match="names no tokenizer"):
            draft = load_draft(str(path), own)
        assert isinstance(draft, DFlashDraft)
        assert draft.net.windows == [4, None]
        assert (draft.net.sliding_is_causal, draft.net.window_from_anchor) == (causal, anchored)


def test_published_layouts_are_read(tmp_path: Path) -> None:
    """Catches layer ids by the other convention and fields in the other place: flat (z-lab), nested (speculators)."""
    own = tiny_target(tiny_model("llama"))
    path = Path(saved(tmp_path / "d", "dflash", own, None))
    (path / METADATA_FILE).unlink()
    config = json.loads((path / "config.json").read_text())
    ours = ("eagle_aux_hidden_state_layer_ids", "draft_vocab_size", "target_hidden_size")
    flat = {k: v for k, v in config.items() if k not in ours}
    inner = {k: v for k, v in config.items() if k not in ("dflash_config", "block_size")}
    nested = {
        "speculators_model_type": "dflash",
        "transformer_layer_config": inner,
        "draft_vocab_size": config["vocab_size"],
        "block_size": config["block_size"],
        "aux_hidden_state_layer_ids": [1, 2],
        "mask_token_id": config["dflash_config"]["mask_token_id"],
    }
    inner.pop("eagle_aux_hidden_state_layer_ids")
    for layout in (flat, nested):
        (path / "config.json").write_text(json.dumps(layout))
        with pytest.warns(UserWarning, match="names no tokenizer"):
            draft = load_draft(str(path), own)
        assert draft.reads.aux_layers == HiddenStateSpec((1, 2))


def test_the_anchor_is_read_as_each_layout_means_it(tmp_path: Path) -> None:
    """Catches a DSpark of speculators, which does not predict from the anchor where its file is silent."""
    own = tiny_target(tiny_model("llama"))
    path = Path(saved(tmp_path / "d", "dspark", own))
    (path / METADATA_FILE).unlink()
    config = json.loads((path / "config.json").read_text())
    config.pop("sample_from_anchor")
    inner = {k: v for k, v in config.items() if k != "dflash_config"}
    outer = {
        k: config[k] for k in ("block_size", "markov_rank", "draft_vocab_size", "dflash_config")
    }
    for layout, first in ((config, 0), ({"transformer_layer_config": inner, **outer}, 1)):
        (path / "config.json").write_text(json.dumps(layout))
        with pytest.warns(UserWarning, match="names no tokenizer"):
            draft = load_draft(str(path), own)
        assert isinstance(draft, DFlashDraft)
        assert draft.net.first == first


@pytest.mark.parametrize(("name", "anchor"), [("dflash", True), ("dspark", False)])
def test_where_the_first_token_is_read_follows_the_config(
    name: str, anchor: bool, tmp_path: Path
) -> None:
    """Catches a published DSpark without, or DFlash with, `sample_from_anchor` that is decoded one slot off."""
    own = tiny_target(tiny_model("llama"))
    path = Path(saved(tmp_path / "d", name, own))
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps(config | {"sample_from_anchor": anchor}))
    draft = load_draft(str(path), own)
    assert isinstance(draft, DFlashDraft)
    assert draft.net.max_tokens == config["block_size"] - (not anchor)
    outputs = decode(own, draft, PROMPTS, k=draft.net.max_tokens, max_new_tokens=LENGTH)
    plain = decode(own, None, PROMPTS, max_new_tokens=LENGTH)
    assert [o.output_ids for o in outputs] == [o.output_ids for o in plain]


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"dflash_config": {"mask_token_id": VOCAB, "target_layer_ids": [0, 1]}}, "mask token"),
        ({"dflash_config": {"mask_token_id": 3, "target_layer_ids": [0, 1], "causal": True}}, "causal"),
        ({"layer_types": ["sliding_attention", "full_attention"]}, "sliding"),
        ({"vocab_size": 7}, "vocab_size"),
        ({"eagle_aux_hidden_state_layer_ids": [1, 99]}, "99"),
    ],
)  # fmt: skip
def test_what_does_not_fit_is_refused(change: dict[str, Any], named: str, tmp_path: Path) -> None:
    own = tiny_target(tiny_model("llama"))
    path = Path(saved(tmp_path / "d", "dflash", own))
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps(config | change))
    with pytest.raises(UserError, match=named):
        load_draft(str(path), own)


@pytest.mark.parametrize("name", ["xpress", "domino"])
def test_logits_behind_a_node_are_those_of_its_own_path(name: str) -> None:
    """Catches trees in which a token is corrected by those of another branch."""
    own = tiny_target(tiny_model("llama"))
    net, embedding = net_of(name, own), own.runner.model.get_input_embeddings().weight
    states, before = torch.randn(1, K + 1, net.config.hidden_size), torch.tensor([4])

    def block() -> BlockLogits:
        return net.block_logits(states, before, embedding)

    def chain(*tokens: int) -> Tensor:
        logits, above = block(), torch.zeros(1, 1, dtype=torch.long)
        return [logits(i, torch.tensor([[t]]), above) for i, t in enumerate(tokens)][-1][0, 0]

    tree, root = block(), torch.zeros(1, 2, dtype=torch.long)
    tree(0, torch.tensor([[7]]), root[:, :1])
    tree(1, torch.tensor([[8, 9]]), root)
    found = tree(2, torch.tensor([[1, 1, 2]]), torch.tensor([[1, 0, 1]]))[0]
    for node, path in enumerate([(7, 9, 1), (7, 8, 1), (7, 9, 2)]):
        assert torch.allclose(found[node], chain(*path), atol=1e-5)
    assert not torch.allclose(found[0], found[1], atol=1e-2)


def test_only_candidates_are_drafted() -> None:
    """Catches tokens that DFlash 2's selector does not know in q."""
    own = tiny_target(tiny_model("llama"))
    net = net_of("dflash2", own, None)
    states = torch.randn(1, K + 1, net.config.hidden_size)
    anchor = torch.tensor([[7]])
    embedding = own.runner.model.get_input_embeddings().weight
    logits = net.block_logits(states, anchor[0], embedding)
    found = logits(0, anchor, torch.zeros_like(anchor))[0, 0]
    assert found.isfinite().nonzero()[:, 0].tolist() == sorted(
        net.base_logits(states)[0, 1].topk(2).indices.tolist()
    )


def test_more_tokens_than_a_block_has_are_refused() -> None:
    own = tiny_target(tiny_model("llama"))
    with pytest.raises(UserError, match=f"{K} tokens"):
        decode(own, draft_of("dflash", own), PROMPTS, k=K + 1, max_new_tokens=4)
