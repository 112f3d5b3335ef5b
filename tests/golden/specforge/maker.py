"""Logits of SpecForge's own Domino, on a tiny untrained folder.

    git clone https://github.com/sgl-project/SpecForge S          # a6b6b023 made the numbers
    PYTHONPATH=.:S python tests/golden/specforge/maker.py

Writes logits.json: of each kind the config.json, the shapes of its tensors, log-probabilities [anchors, levels, V] by its
training pass on an eager CPU, and the tokens [anchors, block - 1] that its own drafting takes. Tokens, the target's
states and weights are those of tests/golden/speculators/maker.py. tests/decode/checkpoints/test_specforge.py reads it.
"""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
import transformers

from tests.golden.speculators import maker

HERE = Path(__file__).parent
CORRECTION = {
    "projector_type": "domino", "emb_dim": 6, "gru_hidden_dim": 7, "pure_draft_prefix_len": 1,
    "shift_label": True,
}  # fmt: skip
KINDS: dict[str, dict[str, Any]] = {
    "shifted": {},
    "unshifted": {"shift_label": False},
    "from the first": {"pure_draft_prefix_len": 0},
    "window": {"shift_label": False, "pure_draft_prefix_len": 2},
}
"""What of `dflash_config` each has otherwise."""
SLIDING = ("sliding_attention", "full_attention")


def settings(kind: str) -> dict[str, Any]:
    """config.json as SpecForge saves it."""
    nested = {"mask_token_id": 1, "target_layer_ids": [i - 1 for i in maker.TAPS], **CORRECTION}
    sliding = kind == "window"
    config = transformers.Qwen3Config(
        vocab_size=maker.VOCAB, hidden_size=maker.WIDTH, intermediate_size=24, num_hidden_layers=2,
        num_attention_heads=2, num_key_value_heads=1, head_dim=8, max_position_embeddings=64,
        use_sliding_window=sliding, sliding_window=maker.WINDOW if sliding else None,
        layer_types=list(SLIDING) if sliding else None, architectures=["DominoDraftModel"],
        block_size=maker.BLOCK, num_target_layers=8, dflash_config=nested | KINDS[kind],
    )  # fmt: skip
    return dict(config.to_dict())


# ---- what follows needs SpecForge ----


def made_by_it(kind: str, config: dict[str, Any]) -> dict[str, Any]:
    from specforge.algorithms.common.dflash_family_model import OnlineDominoModel
    from specforge.modeling.draft.domino import DominoDraftModel

    model = DominoDraftModel(transformers.Qwen3Config(**config, attn_implementation="eager"))
    model = model.eval()
    shapes = {name: list(value.shape) for name, value in model.state_dict().items()}
    model.load_state_dict(maker.weights(kind, shapes))
    embed = torch.nn.Embedding.from_pretrained(maker.embedding())
    head = torch.nn.Linear(maker.WIDTH, maker.VOCAB, bias=False)
    head.weight.copy_(maker.head())
    training = OnlineDominoModel(
        model, head, embed, 1, maker.BLOCK, "eager", objective_chunk_blocks=0,
        shift_label=model.shift_label,
    )  # fmt: skip
    ids, anchors = torch.tensor(maker.text())[None], torch.tensor(maker.ANCHORS)[None]
    drawn = anchors, torch.ones_like(anchors, dtype=torch.bool)
    with (
        mock.patch.object(training, "_sample_anchor_positions", return_value=drawn),
        maker.kept(OnlineDominoModel, "_apply_domino_head") as calls,
    ):
        training(ids, maker.features()[None], torch.ones(1, maker.LENGTH))
    states = calls[0][1]["hidden4d"][0]  # [anchors, block, h]
    rows = calls[0][2][0][:, 0 if model.shift_label else 1 :].log_softmax(-1)
    target = SimpleNamespace(lm_head=head, model=SimpleNamespace(embed_tokens=embed))
    blocks = torch.ones(len(states), maker.BLOCK, dtype=torch.long)
    blocks[:, 0] = ids[0, anchors[0]]
    greedy = model._sample_draft_tokens(target, states, blocks)
    logits = [[[round(x, 6) for x in level] for level in levels] for levels in rows.tolist()]
    return {"config": config, "shapes": shapes, "logits": logits, "greedy": greedy.tolist()}


@torch.no_grad()
def main() -> None:
    versions = {"torch": torch.__version__, "transformers": transformers.__version__}
    kinds = {kind: made_by_it(kind, settings(kind)) for kind in KINDS}
    (HERE / "logits.json").write_text(json.dumps({"versions": versions, "kinds": kinds}) + "\n")


if __name__ == "__main__":
    main()
