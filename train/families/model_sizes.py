"""Sizes of a target and of a draft in training, computed from their configs alone: no weight is allocated.

A draft family has its own subclass of `DraftShape`, with the memory and compute terms that only it knows;
train/planning/resources.py adds these to what is the same for all families.
"""

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import nn
from transformers import PretrainedConfig

from decode.model.layer_stack import decoder_config, layer_stack
from decode.model.loading import auto_class


@dataclass(frozen=True)
class StepWorkload:
    """What one optimiser step reads."""

    samples: int
    tokens: float
    """Tokens of a sample, on average."""
    supervised_tokens: float
    """Supervised tokens of a sample, on average."""
    max_tokens: int
    """Tokens of the longest sample."""
    max_supervised_tokens: int
    """Supervised tokens of a sample, at most."""
    micro_batch: int
    """Samples per forward pass of each process."""
    processes: int = 1


@dataclass(frozen=True)
class ModelShape:
    """Sizes of a decoder: the target, or a draft."""

    parameters: int
    """All parameters, those of vision towers included."""
    body_parameters: int
    """Parameters that every token passes once: no embedding, no LM head; of experts only those that are routed to."""
    layers: int
    hidden: int
    intermediate: int
    attention: int
    """Query heads times the head size."""
    heads: int
    kv_width: int
    """Numbers per token and layer in the K/V cache; 0 for heads, which do not write text without their target."""
    vocab: int


@dataclass(frozen=True)
class DraftShape(ModelShape):
    """Sizes of a draft in training.

    Every token passes `body_parameters`; `parameters_per_pass` and the projection to the vocabulary are passed by
    supervised slots alone, `passes_per_slot` times each.
    """

    trained: int
    """Parameters that are trained."""
    parameters_per_pass: int
    """Parameters that a slot passes each time, without the projection to the vocabulary."""
    passes_per_slot: int
    head_is_frozen: bool = False
    """The projection to the vocabulary gets no gradient for its weights."""
    target_states: int = 1
    """Hidden states of the target that are kept for each token, in the target's precision."""
    target_state_copies: int = 0
    """Numbers of them that are kept in fp32 as well, for each token."""
    trains_target: bool = False
    """The target's weights are trained too: it runs twice, gets gradients, and is saved beside the draft."""

    saved_in_float32: ClassVar[bool] = False
    """The draft is saved as fp32; False: in the target's precision."""

    def activation_bytes(self, target: ModelShape, load: StepWorkload, scale: int) -> int:
        """Bytes that autograd keeps for one micro-batch, logits excluded; `scale` is 1 for bf16 and 2 for fp32."""
        raise NotImplementedError

    def logits_bytes(self, target: ModelShape, rows: int) -> int:
        """Bytes of all that is as wide as a vocabulary, for `rows` supervised rows; this one is for heads."""
        return rows * 4 * (2 * target.vocab + (3 * self.passes_per_slot + 3) * self.vocab)

    def attention_flops(self, load: StepWorkload) -> float:
        """Operations of the draft's attention scores and values for one sample, forward and backward."""
        return 0.0


def layer_activation_bytes(shape: ModelShape) -> int:
    """Bytes per token that autograd keeps of one Llama layer in bf16."""
    return 30 * shape.hidden + 15 * shape.attention + 8 * shape.intermediate


def target_activation_bytes(target: ModelShape, load: StepWorkload, scale: int) -> int:
    """Bytes that autograd keeps of a target that gets gradients; `scale` as in `DraftShape.activation_bytes`."""
    tokens = load.micro_batch * load.max_tokens
    return scale * tokens * target.layers * layer_activation_bytes(target)


def target_shape(config: PretrainedConfig) -> ModelShape:
    """Sizes of a language model with this config."""
    return model_shape(meta_model(config))


def meta_model(config: PretrainedConfig) -> Any:
    """A language model with this config on the meta device: it has shapes and no weights."""
    with torch.device("meta"):
        return auto_class(config).from_config(config)


def model_shape(model: Any) -> ModelShape:
    """Sizes of a language model, which may be on the meta device.

    Those of an encoder-decoder are its decoder's. A token of its rows passes the encoder or the decoder: as body
    parameters the mean of both is counted.
    """
    config = decoder_config(model)
    fields = config.to_dict()
    size = (
        fields.get(config.attribute_map.get("head_dim", "head_dim"))
        or config.hidden_size // config.num_attention_heads
    )
    experts = next((fields[k] for k in ("num_experts", "num_local_experts") if fields.get(k)), 0)
    routed = (fields.get("num_experts_per_tok") or 1) / experts if experts else 1.0
    body = sum(
        p.numel() * (routed if ".experts." in name else 1.0)
        for name, p in layer_stack(model).named_parameters()
    )
    if model.config.is_encoder_decoder:
        encoder = model.get_encoder()
        own = count_parameters(encoder) - count_parameters(encoder.get_input_embeddings())
        body = (body + own) / 2
    return ModelShape(
        parameters=count_parameters(model),
        body_parameters=int(body),
        layers=config.num_hidden_layers,
        hidden=config.hidden_size,
        intermediate=fields.get("intermediate_size")
        or fields.get("d_ff")
        or 4 * config.hidden_size,
        attention=config.num_attention_heads * size,
        heads=config.num_attention_heads,
        kv_width=2 * (fields.get("num_key_value_heads") or config.num_attention_heads) * size,
        vocab=model.get_output_embeddings().weight.shape[0],
    )


def lora_parameters_per_rank(model: Any) -> int:
    """Parameters of LoRA adapters of rank 1 on every linear layer but the LM head: the sum of inputs and outputs."""
    head = model.get_output_embeddings()
    linear = [m for m in model.modules() if isinstance(m, nn.Linear) and m is not head]
    return sum(m.in_features + m.out_features for m in linear)


def count_parameters(module: nn.Module) -> int:
    return sum(p.numel() for p in module.parameters())
