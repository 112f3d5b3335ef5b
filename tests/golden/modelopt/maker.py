"""Logits of Model-Optimizer's own EAGLE-3, DFlash, DSpark and Domino, on tiny untrained folders as it exports them.

    pip install torch transformers nvidia-modelopt==0.47.0
    PYTHONPATH=. python tests/golden/modelopt/maker.py

Writes logits.json: of each kind the config.json that its exporter made, the shapes of the tensors that it exports, and
log-probabilities [anchors, levels, V] by the functions of its training pass on an eager CPU. Tokens, the target's states
and weights are those of tests/golden/speculators/maker.py. tests/decode/checkpoints/test_modelopt.py reads it.
"""

import importlib.metadata
import json
from pathlib import Path
from typing import Any

import torch

from tests.golden.speculators import maker

HERE = Path(__file__).parent
DEPTH = 3  # it wants a layer for each tap
DSPARK = {"projector_type": "dspark", "markov_rank": 6}
DOMINO = {"projector_type": "domino", "emb_dim": 6, "gru_hidden_dim": 7, "pure_draft_prefix_len": 1}
KINDS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "dflash": ({}, {}),
    "dflash, window": ({}, {"dflash_swa_window_size": maker.WINDOW}),
    "dspark": ({**DSPARK, "use_confidence_head": True}, {"dflash_confidence_head_alpha": 1.0}),
    "dspark, no confidence": (DSPARK, {"dflash_confidence_head_alpha": 0.0}),
    "dspark, window": (
        DSPARK,
        {"dflash_confidence_head_alpha": 0.0, "dflash_swa_window_size": maker.WINDOW},
    ),
    "domino": (DOMINO, {}),
}
"""What its architecture and its mode are given, beside the sizes."""
EAGLES = {"eagle3": 1, "eagle3, two layers": 2, "eagle3, scaled": 1}
"""Layers of each EAGLE-3."""


def weights(kind: str, shapes: dict[str, list[int]]) -> dict[str, torch.Tensor]:
    """Of EAGLE-3 the first layer's norm of embeddings is 1: in training it scales the states as well, which no engine
    does. "scaled" has another one."""
    found = maker.weights(kind, shapes)
    if kind.startswith("eagle3") and not kind.endswith("scaled"):
        found["layers.0.input_layernorm.weight"] = torch.ones(maker.WIDTH)
    return found


# ---- what follows needs the library ----


def tiny_target() -> Any:
    from transformers import Qwen3Config, Qwen3ForCausalLM

    config = Qwen3Config(
        vocab_size=maker.VOCAB, hidden_size=maker.WIDTH, intermediate_size=24, num_hidden_layers=8,
        num_attention_heads=2, num_key_value_heads=1, head_dim=8, max_position_embeddings=64,
        bos_token_id=None, eos_token_id=None, tie_word_embeddings=False, dtype="float32",
    )  # fmt: skip
    return Qwen3ForCausalLM(config)


def eagle_made_by_it(kind: str) -> dict[str, Any]:
    """Two draft steps of training: the second reads the first one's states, a slot later, by its mask."""
    import modelopt.torch.speculative as mtsp
    from modelopt.torch.speculative.config import EagleConfig
    from modelopt.torch.speculative.eagle.default_config import default_eagle_config
    from modelopt.torch.speculative.plugins.hf_eagle import EagleBaseModelOutput
    from transformers import DynamicCache
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

    architecture = default_eagle_config | {
        "num_hidden_layers": EAGLES[kind], "head_dim": 8, "num_attention_heads": 2, "num_key_value_heads": 1,
        "intermediate_size": 24, "use_aux_hidden_state": True, "use_last_layernorm": True,
        "eagle_aux_hidden_state_layer_ids": [i - 1 for i in maker.TAPS], "has_lm_head": True,
        "_attn_implementation": "eager",
    }  # fmt: skip
    settings = EagleConfig(
        eagle_architecture_config=architecture,
        eagle_use_torch_compile=False,
        eagle_ttt_steps=2,
        eagle_export_rope_scaling={},  # its default exports YaRN, with which it does not train
    )
    model = mtsp.convert(tiny_target(), mode=[("eagle", settings)]).eval()
    model.model.embed_tokens.weight.copy_(maker.embedding())
    exporter, draft = model.get_exporter(), model.eagle_module
    tensors = exporter._extract_state_dict(model.state_dict())
    shapes = {name: list(value.shape) for name, value in tensors.items()}
    draft.load_state_dict(weights(kind, shapes))
    draft.rotary_emb = LlamaRotaryEmbedding(config=draft.config)
    ids, length = torch.tensor(maker.text())[None], maker.LENGTH
    states = maker.features()[None]
    logits = torch.zeros(1, length, maker.VOCAB)  # of the target, for the loss alone
    base = EagleBaseModelOutput(out_hiddens=states, aux_hiddens=states, logits=logits)
    embeds, hidden, mask, position, *_ = model._prepare_eagle_inputs(ids, None, None, None, base)
    levels, cache = [], DynamicCache(config=draft.config)
    for step in range(2):
        if step:
            mask = model._get_ttt_attention_mask(1, length, step)
        _, out, found, cache = model._eagle_forward(hidden, embeds, mask, position, cache)
        levels.append(found[0].log_softmax(-1))
        hidden = out.roll(1, 1)
    # Slot t reads state t and token t + 1. The second step's prediction behind a token more stands a slot later.
    rows = torch.stack(
        [torch.stack([level[a - 1 + n] for n, level in enumerate(levels)]) for a in maker.ANCHORS]
    )
    config = json.loads(json.dumps(exporter._export_config()))
    return {"config": config, "shapes": shapes, "logits": maker.rounded(rows)}


def converted(architecture: dict[str, Any], mode: dict[str, Any]) -> Any:
    """A tiny target with a draft of blocks of this kind."""
    import modelopt.torch.speculative as mtsp
    from modelopt.torch.speculative.config import DFlashConfig

    target = tiny_target()
    architecture = architecture | {
        "num_hidden_layers": DEPTH, "head_dim": 8, "num_attention_heads": 2, "num_key_value_heads": 1,
        "intermediate_size": 24, "target_layer_ids": [i - 1 for i in maker.TAPS],
        "_attn_implementation": "sdpa",
    }  # fmt: skip
    settings = DFlashConfig(
        dflash_block_size=maker.BLOCK, dflash_mask_token_id=1, dflash_use_torch_compile=False,
        dflash_architecture_config=architecture, **mode,
    )  # fmt: skip
    model = mtsp.convert(target, mode=[("dflash", settings)])
    model.lm_head.weight.copy_(maker.head())
    model.model.embed_tokens.weight.copy_(maker.embedding())
    return model.eval()


def made_by_it(kind: str) -> dict[str, Any]:
    from transformers.models.qwen3.modeling_qwen3 import Qwen3RotaryEmbedding

    architecture, mode = KINDS[kind]
    model = converted(architecture, mode)
    exporter = model.get_exporter()
    tensors = exporter._extract_state_dict(model.state_dict())
    shapes = {name: list(value.shape) for name, value in tensors.items()}
    draft = model.dflash_module
    draft.load_state_dict(weights(kind, shapes))
    # What it does before its first pass, without the argument `device` that transformers 5.24 has no more.
    draft.rotary_emb = Qwen3RotaryEmbedding(config=draft._rotary_config)
    ids, anchors = torch.tensor(maker.text())[None], torch.tensor(maker.ANCHORS)[None]
    keep, count, length = (
        torch.ones_like(anchors, dtype=torch.bool),
        len(maker.ANCHORS),
        maker.LENGTH,
    )
    embeds = model._build_noise_embedding(ids, anchors, keep, count)
    position = model._build_position_ids(length, anchors, ids.device)
    window = model.dflash_swa_window_size
    common = (length, anchors, keep, count, torch.float32, ids.device)
    mask = model._build_draft_attention_mask(*common, window=window)
    states = draft(embeds, maker.features()[None], position, mask)
    base = model.lm_head(states).view(1, count, maker.BLOCK, -1)
    if kind.startswith("dspark"):
        rows = model._apply_markov_head(states, base, ids, anchors, count)[0][0]
    elif kind == "domino":
        flat = base.flatten(1, 2)
        found = model._apply_domino_head(states, flat, ids, anchors, count)
        rows = found.view(count, maker.BLOCK, -1)
    else:
        rows = base[0, :, 1:]  # the slot of the anchor predicts nothing
    config = json.loads(json.dumps(exporter._export_config()))
    return {"config": config, "shapes": shapes, "logits": maker.rounded(rows.log_softmax(-1))}


@torch.no_grad()
def main() -> None:
    packages = ("torch", "transformers", "nvidia-modelopt")
    versions = {name: importlib.metadata.version(name) for name in packages}
    kinds = {kind: made_by_it(kind) for kind in KINDS}
    kinds |= {kind: eagle_made_by_it(kind) for kind in EAGLES}
    (HERE / "logits.json").write_text(json.dumps({"versions": versions, "kinds": kinds}) + "\n")


if __name__ == "__main__":
    main()
