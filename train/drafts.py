"""The model that becomes a draft: an existing small LM, or chosen layers of the target."""

import copy
from dataclasses import dataclass, field
from typing import Any, Literal

from torch import nn

from decode.drafts.base import check_tokenizer
from decode.settings import UserError
from decode.target import Target, fingerprint, load_model, load_tokenizer


@dataclass
class DraftSettings:
    """What the draft is and where its weights start."""

    family: Literal["causal", "medusa", "medusa2", "eagle1", "eagle3"] = "causal"
    """causal: a small LM; the others are heads over the target's own states. medusa2 trains the target too."""
    init: str = ""
    """causal: folder or hub name of a small LM with the target's tokenizer. Heads: a draft directory to go on from."""
    layers: list[int] = field(default_factory=list)
    """causal, instead of init: layers of the target to cut a draft from, such as [0, 11]."""
    heads: int = 4
    """medusa: tokens drafted at once."""
    head_layers: int = 1
    """medusa: residual blocks of a head."""
    rank: int = 16
    """medusa2: of the LoRA adapters by which the target is trained along with its heads."""
    steps: int = 7
    """eagle3: times that each slot is run in training (training-time test)."""
    vocab: int = 32000
    """eagle3: size of the draft's vocabulary, the most frequent tokens of the samples; 0: all of the target's."""
    taps: list[int] = field(default_factory=list)
    """eagle3: layers whose incoming states are read; empty: 2, L/2, L-3 of L, which every engine assumes."""
    width: int = 0
    """eagle3: hidden size; 0: the target's."""

    def __post_init__(self) -> None:
        if min(self.heads, self.rank, self.steps) < 1:
            raise UserError("draft: need heads, rank and steps >= 1")
        if min(self.head_layers, self.vocab, self.width) < 0:
            raise UserError("draft: need head_layers, vocab and width >= 0")


def new_draft(s: DraftSettings, target: Target, device: str) -> Any:
    """A trainable causal LM in fp32 whose vocabulary is the target's."""
    if bool(s.init) == bool(s.layers):
        raise UserError("give either draft.init (a small LM) or draft.layers (cut from the target)")
    if s.layers:
        return cut(target, s.layers)
    check_tokenizer(s.init, fingerprint(load_tokenizer(s.init)), target)
    model = load_model(s.init, "draft", device, "float32")
    size = model.get_output_embeddings().weight.shape[0]
    if size != target.decoder.vocab_size:
        raise UserError(
            f"draft {s.init!r} has {size} logits and target {target.name!r} "
            f"{target.decoder.vocab_size}: pad the smaller vocabulary so that both agree"
        )
    return model


def cut(target: Target, layers: list[int]) -> Any:
    """A copy of the target that keeps only `layers`, renumbered so that its cache is as short."""
    depth = target.decoder.config.num_hidden_layers
    if not all(0 <= i < depth for i in layers) or sorted(set(layers)) != layers:
        raise UserError(f"draft.layers {layers}: name layers of 0 … {depth - 1} in rising order")
    model = copy.deepcopy(target.decoder.model).float()
    stacks = [m for m in model.modules() if isinstance(m, nn.ModuleList) and len(m) == depth]
    if len(stacks) != 1:
        raise UserError(f"{target.name}: cannot tell which modules are its {depth} layers")
    for name, module in model.named_modules():
        for child, stack in module.named_children():
            if stack is stacks[0]:
                kept = nn.ModuleList(stacks[0][i] for i in layers)
                for number, layer in enumerate(kept):
                    for part in layer.modules():
                        if "layer_idx" in vars(part):
                            part.layer_idx = number  # type: ignore[assignment]
                setattr(model.get_submodule(name), child, kept)
    config = model.config.get_text_config(decoder=True)
    config.num_hidden_layers = len(layers)
    if config.to_dict().get("layer_types"):
        config.layer_types = [config.layer_types[i] for i in layers]
    return model
