"""A language model in compressed-tensors' W8A8, which vLLM serves: weights in eight bits with a scale for each output,
activations rounded to eight bits for each token.

Both are rounded to nearest, and nothing is rotated, since engines compute with activations as they are: a model so
written is further from its float form than --dtype w8a8 of the float form is here.
"""

from pathlib import Path
from typing import Any

import torch

from decode.checkpoints.draft_vocab import VOCAB_FILE
from decode.common.errors import UserError
from decode.model.layer_stack import layer_stack
from decode.model.loading import copy_tokenizer_files, load_model
from decode.model.quantized.conversion import refusal
from decode.model.quantized.w8a8 import quantize_rows

BITS = {"num_bits": 8, "type": "int", "symmetric": True}
LINEAR = {
    "targets": ["Linear"],
    "weights": BITS | {"strategy": "channel", "dynamic": False},
    "input_activations": BITS | {"strategy": "token", "dynamic": True},
    "output_activations": None,
}


def write_w8a8(name: str, out: Path) -> None:
    """Writes the model `name`, a folder, a GGUF or a Hub name, to the folder `out`: the linear layers of its decoder in
    int8, all else in bfloat16. UserError for a model with experts, recurrent layers or an encoder."""
    if (Path(name) / VOCAB_FILE).is_file():
        raise UserError(
            f"model {name!r}: w8a8 is for whole models, and this draft has a vocabulary of its own: leave it in "
            "bfloat16"
        )
    model = load_model(name, "model", "cpu", "bfloat16")
    reason = refusal(model, "w8a8") or linear_refusal(model)
    if reason:
        raise UserError(f"model {name!r}: w8a8 {reason}: leave it in bfloat16")
    inside = {part for layer in layer_stack(model) for part in layer.modules()}
    tensors, others = dict(model.state_dict()), []
    for path, part in model.named_modules():
        if type(part) is not torch.nn.Linear:
            continue
        if part not in inside:
            others.append(path)
            continue
        numbers, steps = quantize_rows(part.weight.detach().float())
        tensors[f"{path}.weight"] = numbers.to(torch.int8)
        tensors[f"{path}.weight_scale"] = steps
    # The tensors decide: a head that was trained apart is there, whatever the config says of it.
    head, embedding = model.get_output_embeddings(), model.get_input_embeddings()
    model.config.tie_word_embeddings = torch.equal(head.weight, embedding.weight)
    model.config.quantization_config = {
        "quant_method": "compressed-tensors", "format": "int-quantized",
        "quantization_status": "compressed", "ignore": others, "kv_cache_scheme": None,
        "config_groups": {"group_0": LINEAR | {"format": "int-quantized"}},
    }  # fmt: skip
    model.save_pretrained(out, state_dict=tensors)
    copy_tokenizer_files(name, out)


def linear_refusal(model: Any) -> str:
    """Why weights of its decoder layers would stay as they are; "" where all are linear layers."""
    layers = layer_stack(model)
    if any(p.ndim > 2 for p in layers.parameters()):
        return "is for linear layers, and its experts are stacked tensors"
    if not any(type(part) is torch.nn.Linear for part in layers.modules()):
        return "is for linear layers, and it has none"
    return ""
