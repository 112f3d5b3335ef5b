"""Logits of SpecForge's own Domino and DSpark, on tiny untrained folders.

    git clone https://github.com/sgl-project/SpecForge S          # a6b6b023 made the numbers
    PYTHONPATH=.:S python tests/golden/specforge/maker.py

Writes logits.json: of each kind the config.json, the shapes of its tensors, log-probabilities [anchors, levels, V] by its
training pass on an eager CPU, and of Domino the tokens [anchors, block - 1] that its own drafting takes (of DSpark that
takes slots which the training pass gives to other tokens). Tokens, the target's
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
"""What of `dflash_config` each Domino has otherwise."""
HEADS = {
    "projector_type": "dspark", "attention_mode": "gqa", "markov_rank": 6, "markov_head_type": "vanilla",
    "confidence_head_alpha": 1.0, "enable_confidence_head": True, "confidence_head_with_markov": True,
}  # fmt: skip
DSPARKS: dict[str, dict[str, Any]] = {
    "dspark": {},
    "dspark, no confidence": {"confidence_head_alpha": 0.0, "enable_confidence_head": False},
    "dspark, window": {},
}
"""What of `dflash_config` each DSpark has otherwise."""
SLIDING = ("sliding_attention", "full_attention")


def settings(kind: str) -> dict[str, Any]:
    """config.json as SpecForge saves it."""
    nested = {"mask_token_id": 1, "target_layer_ids": [i - 1 for i in maker.TAPS]}
    nested |= HEADS | DSPARKS[kind] if kind in DSPARKS else CORRECTION | KINDS[kind]
    if not nested.get("enable_confidence_head", True):
        nested["confidence_head_with_markov"] = False
    sliding = kind.endswith("window")
    config = transformers.Qwen3Config(
        vocab_size=maker.VOCAB, hidden_size=maker.WIDTH, intermediate_size=24, num_hidden_layers=2,
        num_attention_heads=2, num_key_value_heads=1, head_dim=8, max_position_embeddings=64,
        use_sliding_window=sliding, sliding_window=maker.WINDOW if sliding else None,
        layer_types=list(SLIDING) if sliding else None,
        architectures=["DSparkDraftModel" if kind in DSPARKS else "DominoDraftModel"],
        block_size=maker.BLOCK, num_target_layers=8, dflash_config=nested,
    )  # fmt: skip
    return dict(config.to_dict())


# ---- what follows needs SpecForge ----


def built(
    own: Any, kind: str, config: dict[str, Any]
) -> tuple[Any, dict[str, list[int]], torch.nn.Embedding, torch.nn.Linear]:
    """(a draft of this class, the shapes of its tensors, the target's embedding, its LM head)."""
    model = own(transformers.Qwen3Config(**config, attn_implementation="eager")).eval()
    shapes = {name: list(value.shape) for name, value in model.state_dict().items()}
    model.load_state_dict(maker.weights(kind, shapes))
    head = torch.nn.Linear(maker.WIDTH, maker.VOCAB, bias=False)
    head.weight.copy_(maker.head())
    return model, shapes, torch.nn.Embedding.from_pretrained(maker.embedding()), head


def drawn() -> tuple[torch.Tensor, torch.Tensor]:
    """The anchors [1, n], and that all of them count."""
    anchors = torch.tensor(maker.ANCHORS)[None]
    return anchors, torch.ones_like(anchors, dtype=torch.bool)


def made_by_it(kind: str, config: dict[str, Any]) -> dict[str, Any]:
    from specforge.algorithms.common.dflash_family_model import OnlineDominoModel
    from specforge.modeling.draft.domino import DominoDraftModel

    model, shapes, embed, head = built(DominoDraftModel, kind, config)
    training = OnlineDominoModel(
        model, head, embed, 1, maker.BLOCK, "eager", objective_chunk_blocks=0,
        shift_label=model.shift_label,
    )  # fmt: skip
    with (
        mock.patch.object(training, "_sample_anchor_positions", return_value=drawn()),
        maker.kept(OnlineDominoModel, "_apply_domino_head") as calls,
    ):
        ids = torch.tensor(maker.text())[None]
        training(ids, maker.features()[None], torch.ones(1, maker.LENGTH))
    states = calls[0][1]["hidden4d"][0]  # [anchors, block, h]
    rows = calls[0][2][0][:, 0 if model.shift_label else 1 :].log_softmax(-1)
    target = SimpleNamespace(lm_head=head, model=SimpleNamespace(embed_tokens=embed))
    blocks = torch.ones(len(states), maker.BLOCK, dtype=torch.long)
    blocks[:, 0] = ids[0, maker.ANCHORS]
    greedy = model._sample_draft_tokens(target, states, blocks)
    return {
        "config": config,
        "shapes": shapes,
        "logits": maker.rounded(rows),
        "greedy": greedy.tolist(),
    }


def dspark_made_by_it(kind: str, config: dict[str, Any]) -> dict[str, Any]:
    from specforge.algorithms.common.dflash_family_model import OnlineDSparkModel
    from specforge.modeling.draft.dspark import DSparkDraftModel

    model, shapes, embed, head = built(DSparkDraftModel, kind, config)
    training = OnlineDSparkModel(model, head, embed, 1, maker.BLOCK, "eager")
    with (
        mock.patch.object(training, "_sample_anchor_positions", return_value=drawn()),
        maker.kept(DSparkDraftModel, "apply_logits_head") as calls,
    ):
        length = maker.LENGTH
        last = torch.zeros(1, length, maker.WIDTH)  # of the target, for the loss alone
        ids = torch.tensor(maker.text())[None]
        training(ids, maker.features()[None], torch.ones(1, length), last)
    return {
        "config": config,
        "shapes": shapes,
        "logits": maker.rounded(calls[0][2][0].log_softmax(-1)),
    }


@torch.no_grad()
def main() -> None:
    versions = {"torch": torch.__version__, "transformers": transformers.__version__}
    kinds = {kind: made_by_it(kind, settings(kind)) for kind in KINDS}
    kinds |= {kind: dspark_made_by_it(kind, settings(kind)) for kind in DSPARKS}
    (HERE / "logits.json").write_text(json.dumps({"versions": versions, "kinds": kinds}) + "\n")


if __name__ == "__main__":
    main()
