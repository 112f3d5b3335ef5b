"""Logits of AngelSlim's own DFlash and DFlare, on tiny untrained folders.

    git clone https://github.com/Tencent/AngelSlim S          # 67394ce made the numbers
    PYTHONPATH=. python tests/golden/angelslim/maker.py S

Writes logits.json: of each kind the config.json, the shapes of its tensors, and log-probabilities [anchors, levels, V] by
its forward on an eager CPU, a block behind each anchor, as its own drafting runs it. Tokens, the target's states and
weights are those of tests/golden/speculators/maker.py. tests/decode/checkpoints/test_angelslim.py reads it.
"""

import importlib.util
import json
import sys
import types
from pathlib import Path
from typing import Any

import torch
import transformers

from tests.golden.speculators import maker

HERE = Path(__file__).parent
KINDS = {
    "dflash": ("qwen_dflash", "QwenDFlashDraftModel"),
    "dflare": ("qwen_dflare", "QwenDFlareDraftModel"),
}
"""(module, class) of each."""


def settings(kind: str) -> dict[str, Any]:
    """config.json as it saves it."""
    nested = {"mask_token_id": 1, "target_layer_ids": [i - 1 for i in maker.TAPS]}
    config = transformers.Qwen3Config(
        vocab_size=maker.VOCAB, hidden_size=maker.WIDTH, intermediate_size=24, num_hidden_layers=2,
        num_attention_heads=2, num_key_value_heads=1, head_dim=8, max_position_embeddings=64,
        architectures=[KINDS[kind][1]], block_size=maker.BLOCK, num_target_layers=8,
        dflash_config=nested,
    )  # fmt: skip
    return dict(config.to_dict())


# ---- what follows needs AngelSlim's sources ----


def own_class(root: Path, kind: str) -> Any:
    """Its class, without the packages that its parents import: a file of its own needs their registry alone."""
    module, name = KINDS[kind]
    for parent in ("angelslim_draft", "angelslim_draft.draft_model_factory"):
        sys.modules[parent] = types.ModuleType(parent)
    sys.modules["angelslim_draft"].__path__ = []
    registry = types.SimpleNamespace(register=lambda made: made)
    sys.modules["angelslim_draft.draft_model_factory"].DraftModelFactory = registry  # type: ignore[attr-defined]
    file = root / "angelslim/compressor/speculative/train/models/draft" / f"{module}.py"
    spec = importlib.util.spec_from_file_location(f"angelslim_draft.{module}", file)
    assert spec is not None
    assert spec.loader is not None
    made = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = made
    spec.loader.exec_module(made)
    return getattr(made, name)


def made_by_it(root: Path, kind: str) -> dict[str, Any]:
    config = settings(kind)
    made = transformers.Qwen3Config(**config, attn_implementation="eager")
    model = own_class(root, kind)(made).eval()
    shapes = {name: list(value.shape) for name, value in model.state_dict().items()}
    model.load_state_dict(maker.weights(kind, shapes))
    ids, states, rows = torch.tensor(maker.text()), maker.features(), []
    for anchor in maker.ANCHORS:
        block = torch.ones(maker.BLOCK, dtype=torch.long)
        block[0] = ids[anchor]
        out = model(
            position_ids=torch.arange(anchor + maker.BLOCK)[None],
            noise_embedding=maker.embedding()[block][None],
            target_hidden=states[None, :anchor],
        )
        rows.append((out[0, 1:] @ maker.head().T).log_softmax(-1))
    return {"config": config, "shapes": shapes, "logits": maker.rounded(torch.stack(rows))}


@torch.no_grad()
def main() -> None:
    versions = {"torch": torch.__version__, "transformers": transformers.__version__}
    kinds = {kind: made_by_it(Path(sys.argv[1]), kind) for kind in KINDS}
    (HERE / "logits.json").write_text(json.dumps({"versions": versions, "kinds": kinds}) + "\n")


if __name__ == "__main__":
    main()
