"""The networks of EAGLE-1 and EAGLE-3: decoder layers over the target's hidden states, without cache or loop.

Li et al., arXiv 2401.15077 (EAGLE-1) and 2503.01840 (EAGLE-3). Parameters have the names of serving engines
(decode/checkpoints/eagle_layouts.py), so that a state dict is a checkpoint. At slot t a model reads a state (the
target's f_t or its own estimate of it) and the token x_{t+1}; it returns its state for t + 1, whose logits are those of
x_{t+2}.
"""

from collections.abc import Callable, Collection, Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import LlamaConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from decode.common.errors import UserError, one_line
from decode.model.compatibility import check_sizes, position_limit
from decode.model.hidden_states import HiddenStateSpec
from decode.model.modules import (
    ACTIVATIONS,
    CosSin,
    Fp32RotaryEmbedding,
    GatedMLP,
    RMSNorm,
    apply_rotary,
)

AttendFn = Callable[[Tensor, Tensor, Tensor], Tensor]
"""q [B, heads, T, D], k and v [B, kv heads, T, D] of these tokens -> [B, T, heads, D]: the caller keeps the cache.
It is called for each layer, in their order."""


class HeadAttention(nn.Module):
    """Llama's attention on inputs of width `width_in`. If `normed`, queries and keys are normed in each head before the
    rotation, as Qwen3's are."""

    def __init__(self, config: LlamaConfig, width_in: int, normed: bool = False):
        super().__init__()
        self.size: int = config.head_dim  # type: ignore[assignment]
        heads: int = config.num_attention_heads
        kv_heads: int = config.num_key_value_heads  # type: ignore[assignment]
        self.q_proj = nn.Linear(width_in, heads * self.size, bias=False)
        self.k_proj = nn.Linear(width_in, kv_heads * self.size, bias=False)
        self.v_proj = nn.Linear(width_in, kv_heads * self.size, bias=False)
        self.o_proj = nn.Linear(heads * self.size, config.hidden_size, bias=False)
        eps = config.rms_norm_eps
        self.q_norm = RMSNorm(self.size, eps) if normed else nn.Identity()
        self.k_norm = RMSNorm(self.size, eps) if normed else nn.Identity()

    def keys_values(self, x: Tensor, rotary: CosSin) -> tuple[Tensor, Tensor]:
        """k, v [B, kv heads, T, D] of x [B, T, width_in]."""
        return self.split_keys_values(self.k_proj(x), self.v_proj(x), rotary)

    def context_keys_values(self, x: Tensor, rotary: CosSin) -> tuple[Tensor, Tensor]:
        """Those of states of a target."""
        return self.keys_values(x, rotary)

    def split_keys_values(self, k: Tensor, v: Tensor, rotary: CosSin) -> tuple[Tensor, Tensor]:
        """k, v [B, kv heads, T, D] of projected ones [B, T, kv heads · D]."""
        keys = self.k_norm(self._split_heads(k)).transpose(1, 2)
        return apply_rotary(keys, rotary), self._split_heads(v).transpose(1, 2)

    def forward(self, x: Tensor, rotary: CosSin, attend: AttendFn) -> Tensor:
        q = self.q_norm(self._split_heads(self.q_proj(x))).transpose(1, 2)
        return self.o_proj(attend(apply_rotary(q, rotary), *self.keys_values(x, rotary)).flatten(2))

    def _split_heads(self, x: Tensor) -> Tensor:
        return x.view(*x.shape[:-1], -1, self.size)


class DecoderLayer(nn.Module):
    """Llama's decoder layer, or Qwen3's if `normed`."""

    def __init__(self, config: LlamaConfig, normed: bool):
        super().__init__()
        self.input_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.self_attn = HeadAttention(config, config.hidden_size, normed)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.mlp = GatedMLP(config)

    def forward(self, x: Tensor, rotary: CosSin, attend: AttendFn) -> Tensor:
        x = x + self.self_attn(self.input_layernorm(x), rotary, attend)
        return x + self.mlp(self.post_attention_layernorm(x))


class Eagle3Layer(nn.Module):
    """EAGLE-3's first layer: attention reads [norm(e); norm(state)], the residual is the state without norm.

    With `norm_before_residual` the residual is norm(state), as the speculators library trains it.
    """

    def __init__(self, config: LlamaConfig, normed: bool):
        super().__init__()
        width, eps = config.hidden_size, config.rms_norm_eps
        self.normed_residual: bool = config.to_dict().get("norm_before_residual") or False
        self.input_layernorm = RMSNorm(width, eps)
        self.hidden_norm = RMSNorm(width, eps)
        self.self_attn = HeadAttention(config, 2 * width, normed)
        self.post_attention_layernorm = RMSNorm(width, eps)
        self.mlp = GatedMLP(config)

    def forward(self, state: Tensor, embeds: Tensor, rotary: CosSin, attend: AttendFn) -> Tensor:
        residual = self.hidden_norm(state) if self.normed_residual else state
        state = residual + self.self_attn(self._attention_input(state, embeds), rotary, attend)
        return state + self.mlp(self.post_attention_layernorm(state))

    def keys_values(self, state: Tensor, embeds: Tensor, rotary: CosSin) -> tuple[Tensor, Tensor]:
        return self.self_attn.keys_values(self._attention_input(state, embeds), rotary)

    def _attention_input(self, state: Tensor, embeds: Tensor) -> Tensor:
        return torch.cat([self.input_layernorm(embeds), self.hidden_norm(state)], -1)


class EagleNetwork(nn.Module):
    """What the networks of EAGLE-1 and EAGLE-3 share: a first layer, and an embedding of their own or the target's."""

    layers: nn.ModuleList
    embed_tokens: nn.Embedding | None

    @property
    def layer(self) -> Any:
        """The first layer, mostly the only one; checkpoints name them as a list."""
        return self.layers[0]

    def embed(self, tokens: Tensor, weight: Tensor) -> Tensor:
        """[..., h] of token ids; `weight` is the target's embedding."""
        own = self.embed_tokens
        return F.embedding(tokens, weight if own is None else own.weight)


class Eagle3Model(EagleNetwork):
    """`fc` combines three hidden states of the target; then one layer, or more, and an own head over `ids` of the
    vocabulary.

    `ids` [Vd] are the target's token ids that the head predicts, None for all; they are saved as the offsets d2t. A
    model narrower than its target has its own embedding; others read the target's unless `own_embedding`. Four flags
    in config.json, all false by default, add norms: `norm_before_residual` (Eagle3Layer),
    `norm_before_fc` (one norm of all three states), `fc_norm` (one norm of each), `norm_output` (of the state that goes
    to the next step). `qk_norm` makes its layers Qwen3's. With `mask_token_id` in config.json it is P-EAGLE, which has
    the state of a mask besides.
    """

    def __init__(
        self,
        config: LlamaConfig,
        aux_layers: HiddenStateSpec,
        ids: Tensor | None,
        own_embedding: bool = False,
    ):
        super().__init__()
        flags = config.to_dict()
        self.config, self.aux_layers, self.max_positions = config, aux_layers, head_context(config)
        width, target_width = config.hidden_size, config.target_hidden_size
        size = config.vocab_size if ids is None else len(ids)
        tapped, eps = len(aux_layers.layers), config.rms_norm_eps
        self.fc = nn.Linear(tapped * target_width, width, bias=False)
        self.input_norm = (
            RMSNorm(tapped * target_width, eps) if flags.get("norm_before_fc") else None
        )
        self.fc_norm = (
            nn.ModuleList(RMSNorm(target_width, eps) for _ in range(tapped))
            if flags.get("fc_norm")
            else None
        )
        self.normed_output: bool = flags.get("norm_output") or False
        normed = any(flags.get(name) for name in QK_NORM_FIELDS)
        more = [DecoderLayer(config, normed) for _ in range(1, config.num_hidden_layers)]
        self.layers = nn.ModuleList([Eagle3Layer(config, normed), *more])
        self.windows = layer_windows(config, len(self.layers))
        self.norm = RMSNorm(width, config.rms_norm_eps)
        self.lm_head = nn.Linear(width, size, bias=False)
        own_embedding = own_embedding or width != target_width
        self.embed_tokens = nn.Embedding(config.vocab_size, width) if own_embedding else None
        self.mask_token: int | None = flags.get("mask_token_id")
        if self.mask_token is not None:
            self.mask_hidden = nn.Parameter(torch.zeros(1, 1, tapped * target_width))
        self.rotary = Fp32RotaryEmbedding(config)
        self.ids: Tensor | None
        self.register_buffer("ids", ids, persistent=False)

    def init_state(self, features: Tensor) -> Tensor:
        """[..., h]: the input state for the target's hidden states [..., 3H]."""
        if self.input_norm is not None:
            features = self.input_norm(features)
        if self.fc_norm is not None:
            pieces = features.chunk(len(self.fc_norm), -1)
            features = torch.cat(
                [norm(piece) for norm, piece in zip(self.fc_norm, pieces, strict=True)], -1
            )
        return self.fc(features)

    def step(self, state: Tensor, embeds: Tensor, position: Tensor, attend: AttendFn) -> Tensor:
        """States and embeddings [B, T, h] at `position` [B, T] -> the next states (normed if `norm_output`)."""
        rotary = self.rotary(state, position)
        state = self.layer(state, embeds, rotary, attend)
        for layer in self.layers[1:]:
            state = layer(state, rotary, attend)
        return self.norm(state) if self.normed_output else state

    def keys_values(self, state: Tensor, embeds: Tensor, position: Tensor) -> tuple[Tensor, Tensor]:
        """k, v [B, kv heads, T, D] of these pairs in the first layer, without running the rest of it."""
        return self.layer.keys_values(state, embeds, self.rotary(state, position))

    def head_input(self, state: Tensor) -> Tensor:
        """[..., h]: the state as the head reads it."""
        return state if self.normed_output else self.norm(state)

    def logits(self, state: Tensor) -> Tensor:
        """[..., Vd] from a state that `step` returned."""
        return self.lm_head(self.head_input(state))


class Eagle1Layer(nn.Module):
    """A Llama decoder layer without its first norm."""

    def __init__(self, config: LlamaConfig):
        super().__init__()
        self.self_attn = HeadAttention(config, config.hidden_size)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.mlp = GatedMLP(config)

    def keys_values(self, x: Tensor, rotary: CosSin) -> tuple[Tensor, Tensor]:
        return self.self_attn.keys_values(x, rotary)

    def forward(self, x: Tensor, rotary: CosSin, attend: AttendFn) -> Tensor:
        x = x + self.self_attn(x, rotary, attend)
        return x + self.mlp(self.post_attention_layernorm(x))


class Eagle1Model(EagleNetwork):
    """`fc` and one layer map [e; f] to the next hidden state, from which the target's own head gives the logits.

    `head` is the target's, frozen and not part of this model; so is the embedding, unless `own_embedding`.
    """

    ids: None = None

    def __init__(
        self, config: LlamaConfig, head: Callable[[Tensor], Tensor], own_embedding: bool = False
    ):
        super().__init__()
        width = config.hidden_size
        self.config, self.aux_layers, self.head = config, HiddenStateSpec(final=True), head
        self.max_positions = head_context(config)
        # A bias of zeros that is not trained: SGLang requires it, others ignore it.
        self.fc = nn.Linear(2 * width, width)
        nn.init.zeros_(self.fc.bias).requires_grad_(False)
        self.layers = nn.ModuleList([Eagle1Layer(config)])
        self.windows = layer_windows(config, 1)
        self.embed_tokens = nn.Embedding(config.vocab_size, width) if own_embedding else None
        self.rotary = Fp32RotaryEmbedding(config)

    def init_state(self, features: Tensor) -> Tensor:
        """The target's hidden states [..., H] unchanged."""
        return features

    def step(self, state: Tensor, embeds: Tensor, position: Tensor, attend: AttendFn) -> Tensor:
        """Hidden states and embeddings [B, T, H] at `position` [B, T] -> hidden states of the next tokens."""
        x = self.fc(torch.cat([embeds, state], -1))
        return self.layer(x, self.rotary(x, position), attend)

    def keys_values(self, state: Tensor, embeds: Tensor, position: Tensor) -> tuple[Tensor, Tensor]:
        """k, v [B, kv heads, T, D] of these pairs, without running the rest of the layer."""
        x = self.fc(torch.cat([embeds, state], -1))
        return self.layer.keys_values(x, self.rotary(x, position))

    def head_input(self, state: Tensor) -> Tensor:
        """[..., H]: the state as the head reads it."""
        return state

    def logits(self, state: Tensor) -> Tensor:
        """[..., V] from a state that `step` returned."""
        return self.head(state)


EagleModel = Eagle1Model | Eagle3Model

UNBOUNDED = 1 << 30
"""Positions of a draft whose config.json names no number: RoPE itself has no end."""


def head_context(config: LlamaConfig) -> int:
    """Tokens that a head can read: its positions."""
    return position_limit(config) or UNBOUNDED


def layer_windows(config: LlamaConfig, layers: int) -> list[int | None]:
    """For each layer how many tokens a query sees, itself included; None: all before it."""
    fields = config.to_dict()
    window = fields.get("sliding_window") if fields.get("use_sliding_window", True) else None
    kinds = fields.get("layer_types") or ["sliding_attention"] * layers
    return [window if kind == "sliding_attention" else None for kind in kinds[:layers]]


UNREAD_FIELDS: dict[str, tuple[Any, ...]] = {
    **dict.fromkeys(("attention_bias", "qkv_bias", "mlp_bias", "use_bias"), (False,)),
    **dict.fromkeys(("qk_norm", "use_qk_norm", "query_key_norm", "use_query_key_norm"), (False,)),
    **dict.fromkeys(("rope_interleave", "rope_interleaved"), (False,)),
    **dict.fromkeys(("parallel_residual", "use_parallel_residual", "attention_sinks"), (False,)),
    **dict.fromkeys(("partial_rotary_factor", "rotary_pct"), (1,)),
    **dict.fromkeys(("embedding_multiplier", "residual_multiplier", "scale_emb"), (1,)),
    "input_embedding_scale": (1,),
    **dict.fromkeys(("logit_scale", "logits_scaling", "output_multiplier"), (1,)),
    **dict.fromkeys(("attention_multiplier", "query_pre_attn_scalar"), ()),
    **dict.fromkeys(("attn_logit_softcapping", "final_logit_softcapping"), ()),
}
"""Settings of other models' layers that heads do not compute, and the values with which they change nothing."""
QK_NORM_FIELDS = ("qk_norm", "use_qk_norm", "query_key_norm", "use_query_key_norm")
"""Those that are true of Qwen3's layers."""


def check_arithmetic(fields: Mapping[str, Any], has: Collection[str] = ()) -> None:
    """UserError for a setting of config.json that makes its layers compute what heads here do not.

    `has` are those of UNREAD_FIELDS that these layers do compute.
    """
    rope = {**(fields.get("rope_scaling") or {}), **(fields.get("rope_parameters") or {})}
    for name, neutral in UNREAD_FIELDS.items():
        value = fields.get(name, rope.get(name))
        if value is not None and value not in neutral and name not in has:
            raise UserError(
                f"config.json sets {name} to {value!r}, which heads here do not compute"
            )
    named = {fields[k] for k in ("hidden_act", "hidden_activation") if fields.get(k) is not None}
    wrong = next((one for one in sorted(named) if one not in ACTIVATIONS), None)
    if wrong is not None or len(named) > 1:
        what = f"{wrong!r}" if wrong is not None else " and ".join(map(repr, sorted(named)))
        raise UserError(
            f"config.json has the activation {what}: one of {', '.join(ACTIVATIONS)} is computed"
        )


def rope_of(fields: Mapping[str, Any]) -> dict[str, Any]:
    """RoPE from `rope_parameters`, or its two old field names. UserError where they contradict each other."""
    new, old = dict(fields.get("rope_parameters") or {}), dict(fields.get("rope_scaling") or {})
    theta = fields.get("rope_theta")
    for rope in (new, old):
        if rope and "rope_type" not in rope:
            rope["rope_type"] = rope.pop("type", "default")
        if None not in (theta, rope.get("rope_theta")) and rope["rope_theta"] != theta:
            raise UserError(
                f"config.json has the RoPE base {theta} and, nested, {rope['rope_theta']}: correct it"
            )
    shared = set(new) & set(old)
    if new and old and {k: new[k] for k in shared} != {k: old[k] for k in shared}:
        raise UserError("config.json has rope_parameters and another rope_scaling: correct it")
    found = {"rope_type": "default", **old, **new}
    found.setdefault("rope_theta", 10000.0 if theta is None else theta)
    if found["rope_type"] == "mrope":  # sections of positions, which are equal in text
        found["rope_type"] = "default"
    if found["rope_type"] not in ("default", *ROPE_INIT_FUNCTIONS):
        raise UserError(f"config.json has RoPE of type {found['rope_type']!r}, which is not known")
    return found


def llama_config(fields: dict[str, Any]) -> LlamaConfig:
    """The LlamaConfig of a draft's config.json. UserError for one that makes no model."""
    rest = {
        k: v for k, v in fields.items() if k not in ("rope_theta", "rope_scaling", "model_type")
    }
    if rest.get("max_position_embeddings") is None:
        rest["max_position_embeddings"] = UNBOUNDED
    rest["hidden_act"] = rest.get("hidden_act") or rest.get("hidden_activation") or "silu"
    rest["rope_parameters"] = rope_of(fields)
    try:
        config = LlamaConfig(**rest)
    except Exception as error:  # transformers raises several kinds
        raise UserError(f"config.json makes no Llama ({one_line(error)}): get it again") from error
    check_sizes(config, "config.json")
    return config
