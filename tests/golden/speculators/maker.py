"""Untrained folders of the speculators library, and the logits of its own forwards on them.

    V/bin/pip install torch transformers speculators==0.9.0          # it needs what its pyproject.toml names
    PYTHONPATH=. V/bin/python tests/golden/speculators/maker.py

Writes logits.json: of each kind of draft the config.json that `speculators train --dry-run` wrote, the shapes of its
tensors, and log-probabilities [anchors, levels, V] by the library's forward on an eager CPU. Level 0 of an anchor a is
what is drafted behind tokens 0 … a, level n behind n tokens of the text more. Tokens, the target's states and every
weight are `numbers` of a name, so nothing of them is stored. tests/decode/checkpoints/test_speculators.py reads it.
"""

import importlib.metadata
import json
import tempfile
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import torch
from safetensors.torch import load_file, save_file

HERE = Path(__file__).parent
VOCAB, WIDTH, TAPS, LENGTH, BLOCK, WINDOW = 31, 16, (2, 4, 5), 18, 5, 6
ANCHORS = [4, 8, 11]
SIZES = ["--num-layers", "2", "--block-size", str(BLOCK), "--sliding-window", str(WINDOW)]
SIZES += ["--markov-rank", "6", "--selector-rank", "6", "--selector-top-k", "7"]
SIZES += ["--conv-group-size", "4", "--xpress-rank", "6", "--mask-token-id", "1"]
ONE, WIDE = ["--num-layers", "1"], ["--sliding-window", "64"]
KINDS = {
    "eagle3": [*ONE, *WIDE],
    "eagle3_window": ONE,
    "eagle3_plain": [*ONE, "--no-norm-before-residual", "--no-norm-before-fc", "--no-norm-output", *WIDE],
    "eagle3_fc": [*ONE, "--no-norm-before-fc", "--fc-norm", *WIDE],
    "eagle3_qwen3": [*ONE, "--draft-arch", "qwen3", *WIDE],
    "eagle3_two": WIDE,
    "eagle3_full": [*ONE, "--full-attention-indices", "0"],
    "dflash": [],
    "dflash_mixed": ["--full-attention-indices", "1"],
    "dflash_full": ["--full-attention-indices", "0", "1"],
    "dspark": [],
    "peagle": ONE,
    "dflash2": [],
    "xpress": [],
    "xpress_full": ["--full-attention-indices", "0", "1", "--sample-from-anchor"],
}  # fmt: skip
"""What its command is given besides SIZES: the kinds that its options make."""


def numbers(name: str, *shape: int) -> torch.Tensor:
    """Numbers that depend on the name alone, of variance 1: norms are around 1, matrices keep the size of states."""
    found = np.random.RandomState(zlib.crc32(name.encode())).standard_normal(shape)
    scale = 1.0 if len(shape) < 2 else shape[-1] ** -0.5
    if "norm" in name:
        found, scale = 1 + 0.3 * found, 1.0
    elif len(shape) == 3:
        scale = 0.3
    return torch.tensor(found * scale, dtype=torch.float32)


def weights(kind: str, shapes: dict[str, list[int]]) -> dict[str, torch.Tensor]:
    """Those of a draft's file, in which the embedding and the LM head are the target's."""
    own = {name: numbers(f"{kind} {name}", *shape) for name, shape in shapes.items()}
    shared = {"embed_tokens.weight": embedding(), "lm_head.weight": head()}
    return own | {name: value for name, value in shared.items() if name in own}


def rounded(rows: torch.Tensor) -> list[list[list[float]]]:
    """Rows [anchors, levels, V] as they are stored."""
    return [[[round(x, 6) for x in level] for level in levels] for levels in rows.tolist()]


def text() -> list[int]:
    found = np.random.RandomState(0).randint(2, VOCAB, LENGTH)
    return [int(token) for token in found]


def features() -> torch.Tensor:
    """[T, taps * H] the target's states."""
    return numbers("features", LENGTH, len(TAPS), WIDTH).flatten(1) * 3


def embedding() -> torch.Tensor:
    return numbers("embedding", VOCAB, WIDTH) * WIDTH**0.5


def head() -> torch.Tensor:
    return numbers("head", VOCAB, WIDTH) * 2


# ---- what follows needs the library ----


def write_folders(root: Path) -> None:
    from speculators.train import trainer
    from speculators.train.cli import main
    from speculators.train.config import TrainConfig
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=VOCAB, hidden_size=WIDTH, intermediate_size=24, num_hidden_layers=8,
        num_attention_heads=2, num_key_value_heads=1, head_dim=8, max_position_embeddings=64,
        bos_token_id=None, eos_token_id=None,
    )  # fmt: skip
    LlamaForCausalLM(config).save_pretrained(root / "target")
    (root / "data").mkdir()
    common = ["--verifier-name-or-path", str(root / "target"), "--data-path", str(root / "data")]
    common += ["--hidden-states-dtype", "float32", "--draft-attn-impl", "eager", "--dry-run"]
    for kind, extra in KINDS.items():
        words = [*common, "--save-path", str(root / kind), "--target-layer-ids", *map(str, TAPS)]
        words += ["--speculator-type", kind.split("_")[0], *SIZES, *extra]
        with mock.patch.object(trainer, "get_local_rank", return_value="cpu"):
            main(TrainConfig.resolve(words))


@contextmanager
def kept(owner: Any, name: str) -> Iterator[list[tuple[tuple[Any, ...], dict[str, Any], Any]]]:
    """(arguments, named ones, what came back) of every call of a function of a module."""
    calls: list[tuple[tuple[Any, ...], dict[str, Any], Any]] = []
    function = getattr(owner, name)

    def call(*args: Any, **named: Any) -> Any:
        calls.append((args, named, function(*args, **named)))
        return calls[-1][2]

    with mock.patch.object(owner, name, call):
        yield calls


def eagle_logits(model: Any) -> torch.Tensor:
    """[anchors, 2, V] by the loop of draft steps in training, whose slot t reads state t and token t + 1."""
    found: list[torch.Tensor] = []
    model.lm_head.register_forward_hook(lambda module, inputs, out: found.append(out[0]))
    ids = torch.tensor(text())[None]
    model(
        hidden_states=features()[None, :-1], input_ids=ids[:, 1:], ttt_steps=2,
        document_ids=torch.zeros(1, LENGTH - 1, dtype=torch.long),
        position_ids=torch.arange(1, LENGTH)[None],
    )  # fmt: skip
    return torch.stack([torch.stack([step[a - 1] for step in found]) for a in ANCHORS])


def peagle_logits(model: Any) -> torch.Tensor:
    """[anchors, 3, V] of depths 0, 1 and 2, all of which a training pass has where nothing is dropped."""
    from speculators.models.peagle import core

    found: list[torch.Tensor] = []
    model.lm_head.register_forward_hook(lambda module, inputs, out: found.append(out[0]))
    mask = torch.ones(1, LENGTH - 1)
    mask[:, :3] = 0  # or depths hang on slots before the text
    with kept(core, "generate_cod_sample_indices") as calls:
        model(
            hidden_states=features()[None, :-1], input_ids=torch.tensor(text())[None, 1:],
            document_ids=torch.zeros(1, LENGTH - 1, dtype=torch.long), loss_mask=mask,
            verifier_last_hidden_states=torch.zeros(1, LENGTH - 1, WIDTH), num_depths=3,
            down_sample_ratio=1.0, down_sample_ratio_min=1.0, loss_config=losses("kl_div"),
        )  # fmt: skip
    at = {(int(a), int(d)): i for i, (a, d) in enumerate(zip(*calls[0][2], strict=True))}
    return torch.stack([found[0][[at[a - 1, d] for d in range(3)]] for a in ANCHORS])


def losses(name: str) -> Any:
    """Those without Triton."""
    from speculators.losses import resolve_loss_config

    return resolve_loss_config(name, "eager")


def block_logits(model: Any, kind: str) -> tuple[torch.Tensor, torch.Tensor | None]:
    """[anchors, levels, V] of one training pass over blocks at ANCHORS, which no other anchor joins. Of XPress also the
    tokens [anchors, levels] that are most probable after its passes over the block."""
    from speculators.models.dspark import core as dspark
    from speculators.models.xpress import core as xpress

    found: list[torch.Tensor] = []
    model.lm_head.register_forward_hook(lambda module, inputs, out: found.extend([*inputs, out]))
    ids, mask = torch.tensor(text())[None], torch.zeros(1, LENGTH)
    mask[:, ANCHORS] = 1
    more: dict[str, Any] = {}
    if kind in ("dspark", "dflash2"):
        more["tv_loss_fn"] = losses("tv")["tv"][0]
    elif kind == "xpress":
        more["consistency_passes"] = model.config.num_jacobi_passes
        # Of no file, and never computed anew: from_pretrained leaves what the memory held.
        model.refiner_head.causal_tril.copy_(torch.ones(BLOCK, BLOCK).tril())
    with kept(dspark, "compute_metrics") as markov, kept(xpress, "compute_metrics") as refined:
        model(
            hidden_states=features()[None], input_ids=ids, loss_mask=mask,
            verifier_last_hidden_states=torch.zeros(1, LENGTH, WIDTH),
            document_ids=torch.zeros(1, LENGTH, dtype=torch.long), max_anchors=len(ANCHORS),
            loss_config=losses("kl_div"), **more,
        )  # fmt: skip
    (states, logits), after = found, None
    if kind == "dspark":
        logits = markov[0][0][0]
    elif kind == "xpress":
        logits, rounds, *_ = refined[0][0]  # the first are those behind the text's own tokens
        after = rounds[-1].argmax(-1).view(len(ANCHORS), BLOCK)
    elif kind == "dflash2":
        where = torch.tensor([[a + i for i in range(BLOCK)] for a in ANCHORS]).flatten()
        before = model._predecessor_ids(ids, where).reshape(1, -1)
        candidates, scores = model.candidate_selector.select(logits, states, before)
        logits = torch.full_like(logits, float("-inf")).scatter(-1, candidates, scores)
    first = 0 if model.config.sample_from_anchor else 1
    return logits[0].view(len(ANCHORS), BLOCK, -1)[:, first:], None if after is None else after[
        :, first:
    ]


def main() -> None:
    from speculators import SpeculatorModel, SpeculatorModelConfig

    made: dict[str, Any] = {"versions": {}, "kinds": {}}
    for package in ("speculators", "torch", "transformers"):
        made["versions"][package] = importlib.metadata.version(package)
    with tempfile.TemporaryDirectory() as name, torch.no_grad():
        root = Path(name)
        write_folders(root)
        for kind in KINDS:
            file, config = root / kind / "model.safetensors", root / kind / "config.json"
            stored = load_file(file)
            whole = {n: t for n, t in stored.items() if not t.is_floating_point()}
            shapes = {n: list(t.shape) for n, t in stored.items() if n not in whole}
            save_file(weights(kind, shapes) | whole, file, {"format": "pt"})
            settings = SpeculatorModelConfig.from_pretrained(str(root / kind))
            settings.transformer_layer_config._attn_implementation = "eager"
            model: Any = SpeculatorModel.from_pretrained(str(root / kind), config=settings)
            model = model.float().eval()
            for module, value in ((model.embed_tokens, embedding()), (model.lm_head, head())):
                module.weight.copy_(value)
            base, after = kind.split("_")[0], None
            if base in ("eagle3", "peagle"):
                found = eagle_logits(model) if base == "eagle3" else peagle_logits(model)
            else:
                found, after = block_logits(model, base)
            rows = rounded(found.log_softmax(-1))
            made["kinds"][kind] = {
                "config": json.loads(config.read_text()), "shapes": shapes, "logits": rows,
                "greedy": None if after is None else after.tolist(),
            }  # fmt: skip
    (HERE / "logits.json").write_text(json.dumps(made) + "\n")


if __name__ == "__main__":
    main()
