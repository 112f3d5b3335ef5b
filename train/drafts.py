"""The model that becomes a draft: an existing small LM, or chosen layers of the target."""

import copy
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import torch
from peft import LoraConfig, get_peft_model
from torch import nn
from transformers import AutoModelForCausalLM

from decode.drafts.base import check_tokenizer, read_facts
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
    scratch: dict[str, Any] = field(default_factory=dict)
    """causal, instead of init: random weights, and how the config differs from the target's, such as {hidden_size: 512,
    num_hidden_layers: 4}."""
    lora_rank: int = 0
    """causal: of LoRA adapters on all linear layers, which are all that is trained then; 0: every weight is."""
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
        if min(self.head_layers, self.vocab, self.width, self.lora_rank) < 0:
            raise UserError("draft: need head_layers, vocab, width and lora_rank >= 0")
        if self.lora_rank and (self.family != "causal" or self.scratch):
            raise UserError(
                "draft.lora_rank adapts a causal draft that is something already: give draft.init or draft.layers"
            )


def new_draft(s: DraftSettings, target: Target, device: str) -> Any:
    """A trainable causal LM in fp32 whose vocabulary is the target's."""
    if [bool(s.init), bool(s.layers), bool(s.scratch)].count(True) != 1:
        raise UserError(
            "give one of draft.init (a small LM), draft.layers (cut from the target) and draft.scratch (random weights)"
        )
    if s.layers:
        return cut(target, s.layers)
    if s.scratch:
        return fresh(s.scratch, target).to(device)
    family = read_facts(s.init).get("family", "causal")
    if family != "causal":
        raise UserError(
            f"draft.init {s.init!r} holds heads of family {family!r}: set draft.family to that, or give a small LM"
        )
    check_tokenizer(s.init, fingerprint(load_tokenizer(s.init)), target)
    model = load_model(s.init, "draft", device, "float32")
    fit_vocabulary(model, target.decoder.vocab_size)
    return model


def fit_vocabulary(model: Any, size: int) -> None:
    """Gives `model` as many logits as the target has, in place: engines take no draft with more or fewer.

    Models of one tokenizer are padded to different sizes. Rows that are too many are cut off: no id of the tokenizer is
    among them. New rows are the mean of all others, so the logit of each is the mean of the model's logits: it wins
    nowhere, and its probability is below 1 / V everywhere. The target's law of its own padding trains them from there.
    """
    head = model.get_output_embeddings()
    old = head.weight.shape[0]
    if old == size:
        return
    model.resize_token_embeddings(size, mean_resizing=False)
    if old > size:
        return
    head = model.get_output_embeddings()
    tables = {id(w): w for w in (model.get_input_embeddings().weight, head.weight)}
    with torch.no_grad():
        for weight in [*tables.values(), *([] if head.bias is None else [head.bias])]:
            weight[old:] = weight[:old].mean(0)


def scratch_config(changes: dict[str, Any], config: Any, vocab: int) -> Any:
    """The target's text `config` with `changes` and `vocab` tokens. UserError names a field that it has not."""
    fields = config.to_dict()
    unknown = sorted(set(changes) - set(fields))
    if unknown or "vocab_size" in changes:
        name = unknown[0] if unknown else "vocab_size"
        reason = (
            "is the target's"
            if name == "vocab_size"
            else f"is no field of {config.model_type}'s config"
        )
        raise UserError(f"draft.scratch: {name} {reason}: leave it out")
    if changes.get("num_hidden_layers", config.num_hidden_layers) != config.num_hidden_layers:
        fields.pop("layer_types", None)  # as the class lays them out for another depth
    if "hidden_size" in changes or "num_attention_heads" in changes:
        fields.pop("head_dim", None)
    return type(config).from_dict({**fields, **changes, "vocab_size": vocab})


def fresh(changes: dict[str, Any], target: Target) -> Any:
    """A model of the target's kind with random weights; UserError if there can be none with these `changes`."""
    try:
        config = scratch_config(changes, target.decoder.config, target.decoder.vocab_size)
        return AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    except UserError:
        raise
    except (
        Exception
    ) as error:  # any of a dozen kinds, from a size that does not divide to a missing field
        reason = " ".join(str(error).split()) or type(error).__name__
        raise UserError(f"draft.scratch {changes} makes no model: {reason}") from error


class Adapters:
    """LoRA adapters in all linear layers of a causal LM, in place; all its other weights are frozen."""

    def __init__(self, model: Any, rank: int, base: str):
        config = LoraConfig(r=rank, lora_alpha=rank, target_modules="all-linear")
        self.base = base
        self.peft: Any = get_peft_model(model, config)

    def save(self, out: Path) -> None:
        """The merged model in `out`, and if its base lies somewhere the adapters for that in `out`/adapter."""
        if self.base:
            self.peft.peft_config["default"].base_model_name_or_path = self.base
            self.peft.save_pretrained(out / "adapter", save_embedding_layers=False)
        merged = copy.deepcopy(self.peft).merge_and_unload()
        merged.save_pretrained(out, safe_serialization=True)


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
