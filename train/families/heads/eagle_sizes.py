"""Memory and arithmetic of an EAGLE head in training, by its shape."""

from dataclasses import dataclass
from typing import Any

from train.families.head_init import Config
from train.families.heads.ttt_attention import BLOCK
from train.families.model_sizes import (
    DraftShape,
    ModelShape,
    StepWorkload,
    count_parameters,
    layer_activation_bytes,
)

KEPT_KEYS, KEPT_INPUTS = 14, 8
"""Bytes per token and hidden size, in bf16, that are kept of the keys and of each pass when both are recomputed."""


@dataclass(frozen=True)
class EagleShape(DraftShape):
    """Sizes of an EAGLE head in training."""

    bytes_per_hidden: int = 4
    """Bytes per token and hidden size that autograd keeps of the keys of every token, in bf16."""
    recompute: bool = False
    """Of the keys and of each pass only the inputs are kept (draft.activation_checkpointing)."""

    def activation_bytes(self, target: ModelShape, load: StepWorkload, scale: int) -> int:
        tokens = load.micro_batch * load.max_tokens
        slots = load.micro_batch * load.max_supervised_tokens
        block = min(load.max_supervised_tokens, BLOCK)
        scores = 8 * self.heads * load.max_tokens  # of one slot with all keys
        # Blocks of slots are computed again in backward, so one exists at a time, with its gradients.
        kept = 2 if load.max_supervised_tokens > BLOCK else self.passes_per_slot
        keys = tokens * self.bytes_per_hidden * self.hidden
        layer = slots * self.passes_per_slot * layer_activation_bytes(self)
        if self.recompute:
            kept = 2
            keys = tokens * KEPT_KEYS * self.hidden
            inputs = slots * self.passes_per_slot * KEPT_INPUTS * self.hidden
            layer = inputs + slots * layer_activation_bytes(self)  # one pass at a time
        return scale * (keys + layer + load.micro_batch * kept * scores * block)

    def attention_flops(self, load: StepWorkload) -> float:
        passes = load.supervised_tokens * self.passes_per_slot
        return passes * 16 * load.tokens * self.attention


def eagle_shape(
    net: Any,
    config: Config,
    vocab: int,
    passes: int,
    parameters_beside_layers: int,
    **fields: Any,
) -> EagleShape:
    """Sizes of `net`, whose slots are run `passes` times; `vocab` is the draft's own vocabulary.

    `net` has the layers `layers`, and `fc`, which fuses the target's states.
    """
    attention = [layer.self_attn for layer in net.layers]
    keys_values = sum(count_parameters(a.k_proj) + count_parameters(a.v_proj) for a in attention)
    return EagleShape(
        parameters=count_parameters(net),
        # Every token gives keys and values; supervised slots compute theirs again in the layers.
        body_parameters=count_parameters(net.fc) + keys_values,
        layers=len(attention),
        hidden=config["hidden_size"],
        intermediate=config["intermediate_size"],
        attention=config["num_attention_heads"] * config["head_dim"],
        heads=config["num_attention_heads"],
        kv_width=0,
        vocab=vocab,
        trained=sum(p.numel() for p in net.parameters() if p.requires_grad),
        parameters_per_pass=count_parameters(net.layers) + parameters_beside_layers,
        passes_per_slot=passes,
        **fields,
    )
