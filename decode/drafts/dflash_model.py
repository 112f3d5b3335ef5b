"""The network of DFlash and its kin: a few layers over a block of mask tokens, with the target's states as context.

DFlash and DFlash 2: z-lab's block diffusion drafts; DSpark: arXiv 2607.05147; XPress: arXiv 2608.02438; Domino: arXiv
2605.29707; DFlare: AngelSlim. Parameters have the names of serving engines. The hidden states of the text enter as keys
and values alone: of each layer, at their own positions, from one fused state (of DFlare one for each layer). The block
is [anchor, MASK, MASK, …]; its slots see each other and all states before the anchor. Layers with a window see that
many states, and in the block what is before them, unless `sliding_window_non_causal`.

A slot's own logits know no token of the block. DSpark, DFlash 2, XPress and Domino correct them by tokens before the
one that they predict: by the last, by the last among few candidates, and the other two by all of the block.
"""

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import LlamaConfig

from decode.drafts.eagle_model import (
    AttendFn,
    DecoderLayer,
    HeadAttention,
    head_context,
    layer_windows,
)
from decode.model.hidden_states import HiddenStateSpec
from decode.model.masks import run_now
from decode.model.modules import CosSin, Fp32RotaryEmbedding, RMSNorm

LayerAttendFn = Callable[[int, Tensor, Tensor, Tensor], Tensor]
"""(number of the layer, q [B, heads, T, D], k and v [B, kv heads, T, D] of the block) -> [B, T, heads, D]."""


BlockLogits = Callable[[int, Tensor, Tensor], Tensor]
"""(level, tokens [B, T], above [B, T]) -> logits [B, T, Vd] of the tokens at that level, from 0, behind each of these.
Levels are asked for one after the other, and `above` is as in DraftStep (decode/drafts/drafting.py)."""


def independent_logits(base: Tensor) -> BlockLogits:
    """Those of levels [B, K, Vd] that know no token of their block."""
    return lambda level, tokens, above: base[:, level, None].expand(-1, tokens.shape[1], -1)


class MarkovHead(nn.Module):
    """DSpark's correction: a bias of rank r on the logits of a slot, given by the token before the one it predicts."""

    def __init__(self, vocab: int, draft_vocab: int, rank: int):
        super().__init__()
        self.markov_w1 = nn.Embedding(vocab, rank)
        self.markov_w2 = nn.Linear(rank, draft_vocab, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        """[..., Vd] of token ids [...]."""
        return self.markov_w2(self.markov_w1(tokens))

    def block_logits(self, base: Tensor) -> BlockLogits:
        """Those of levels with logits [B, K, Vd] before the correction."""
        return lambda level, tokens, above: base[:, level, None] + self(tokens)


class CandidateSelector(nn.Module):
    """DFlash 2's correction: a slot's `count` most probable tokens get a score more, given the token before, and no
    other token is drafted."""

    def __init__(self, width: int, vocab: int, rank: int, count: int):
        super().__init__()
        self.count = count
        self.predecessor_codebook = nn.Parameter(torch.empty(vocab, rank))
        self.successor_codebook = nn.Parameter(torch.empty(vocab, rank))
        self.hidden_projection = nn.Linear(width, rank, bias=False)

    def block_logits(self, base: Tensor, states: Tensor) -> BlockLogits:
        """Those of levels with logits [B, K, V] and states [B, K, h]: -inf for what is no candidate."""
        scores, candidates = base.topk(self.count, dim=-1)  # [B, K, C]
        successors = self.successor_codebook[candidates]  # [B, K, C, r]
        weights = self.hidden_projection(states)  # [B, K, r]

        def logits(level: int, tokens: Tensor, above: Tensor) -> Tensor:
            before = self.predecessor_codebook[tokens] * weights[:, level, None]  # [B, T, r]
            found = scores[:, level, None] + before @ successors[:, level].transpose(1, 2)
            every = found.new_full((*tokens.shape, base.shape[-1]), float("-inf"))
            return every.scatter(-1, candidates[:, level, None].expand_as(found), found)

        return logits


class CausalRefiner(nn.Module):
    """XPress' correction: a bias on a slot's logits, given the block's states and the tokens before the one that the
    slot predicts, those of earlier slots included.

    Its authors draft by `num_jacobi_passes` passes over the block, each behind the most probable tokens of the pass
    before; pass n leaves the first n tokens as they are when drafted one by one, as here. Tokens that are drawn in such
    passes have no distribution given those before them; here q is the softmax of what is returned.
    """

    def __init__(
        self, width: int, vocab: int, draft_vocab: int, block: int, rank: int, mlp_ratio: int
    ):
        super().__init__()
        self.token_embed = nn.Embedding(vocab, rank)
        self.down_h = nn.Linear(width, rank, bias=False)
        self.down_g = nn.Linear(width, rank, bias=False)
        self.in_proj = nn.Linear(3 * rank, rank, bias=False)
        self.mix_l = nn.Parameter(torch.empty(rank, block, block))
        self.mlp_gate = nn.Linear(rank, mlp_ratio * rank, bias=False)
        self.mlp_up = nn.Linear(rank, mlp_ratio * rank, bias=False)
        self.mlp_down = nn.Linear(mlp_ratio * rank, rank, bias=False)
        self.readout = nn.Linear(rank, draft_vocab, bias=False)

    def block_logits(self, base: Tensor, states: Tensor, before: Tensor) -> BlockLogits:
        """Those of levels with logits [B, K, Vd] before the correction, in blocks with states [B, n + K, h]; `before`
        [B, n] are the tokens before those of the first n slots, which are no levels."""
        mean = self.down_g(states.mean(1, keepdim=True)).expand(-1, states.shape[1], -1)
        known = torch.cat([self.down_h(states), mean], -1)  # [B, n + K, 2r]
        path = known.new_zeros(len(states), 1, 0, mean.shape[-1])  # [B, T, slots so far, r]

        def mixed(tokens: Tensor, above: Tensor) -> Tensor:
            nonlocal path
            slot = path.shape[2]
            own = known[:, slot, None].expand(-1, tokens.shape[1], -1)
            x = self.in_proj(torch.cat([own, self.token_embed(tokens)], -1))  # [B, T, r]
            path = path.gather(1, above[..., None, None].expand(-1, -1, *path.shape[2:]))
            path = torch.cat([path, x[:, :, None]], 2)
            x = x + torch.einsum("btjr,rj->btr", path, self.mix_l[:, slot, : slot + 1])
            return x + self.mlp_down(F.silu(self.mlp_gate(x)) * self.mlp_up(x))

        for tokens in before.unbind(1):
            mixed(tokens[:, None], torch.zeros_like(tokens[:, None]))
        return lambda level, tokens, above: (
            base[:, level, None] + self.readout(mixed(tokens, above))
        )


class PrefixGRU(nn.Module):
    """A layer of GRU without biases, its parameters named as nn.GRU's, which torch.compile does not take."""

    def __init__(self, width: int, size: int):
        super().__init__()
        self.size = size
        self.weight_ih_l0 = nn.Parameter(torch.empty(3 * size, width))
        self.weight_hh_l0 = nn.Parameter(torch.empty(3 * size, size))

    def forward(self, x: Tensor, before: Tensor) -> Tensor:
        """[B, T, g] behind x [B, T, h], from the states [B, T, g] before it."""
        reset, update, new = F.linear(x, self.weight_ih_l0).chunk(3, -1)
        more_reset, more_update, old = F.linear(before, self.weight_hh_l0).chunk(3, -1)
        new = torch.tanh(new + torch.sigmoid(reset + more_reset) * old)
        return new + torch.sigmoid(update + more_update) * (before - new)


def prefix_logits(
    gru: PrefixGRU, project: nn.Module, own: int, base: Tensor, states: Tensor, embedding: Tensor
) -> BlockLogits:
    """Domino's correction of levels with logits [B, K, V] before it and states [B, K, h]: what `project` makes of a
    slot's state and of the `gru`'s, which has read the block's tokens from the anchor to the last one before the token
    that the slot predicts. The logits of the first `own` levels stay as they are. `embedding` [V, h] is the target's.
    """
    path = states.new_zeros(len(states), 1, gru.size)  # [B, T, g] behind each node

    def logits(level: int, tokens: Tensor, above: Tensor) -> Tensor:
        nonlocal path
        embeds = F.embedding(tokens, embedding).to(states.dtype)
        path = gru(embeds, path.gather(1, above[..., None].expand(-1, -1, gru.size)))
        found = base[:, level, None].expand(-1, tokens.shape[1], -1)
        if level < own:
            return found
        state = states[:, level, None].expand(-1, tokens.shape[1], -1)
        return found + project(torch.cat([state, path], -1))

    return logits


class DynamicConvolution(nn.Module):
    """DFlash 2's convolutions before and after a sublayer: over the last slots of the block, with weights for each
    number of a state, to which each slot adds one for each group of them."""

    def __init__(self, width: int, taps: int, group: int):
        super().__init__()
        self.group = group
        self.base_kernel = nn.Parameter(torch.empty(2, taps, width))
        self.kernel_projection = nn.Linear(width, 2 * taps * (width // group), bias=False)

    def forward(self, x: Tensor, sublayer: Callable[[Tensor], Tensor]) -> Tensor:
        """[B, T, h] of blocks x [B, T, h]."""
        added = self.kernel_projection(x).unflatten(-1, (*self.base_kernel.shape[:2], -1))
        before, after = (self.base_kernel + added.repeat_interleave(self.group, -1)).unbind(2)
        return convolve(sublayer(convolve(x, before)), after)


def convolve(x: Tensor, kernel: Tensor) -> Tensor:
    """[B, T, h]: x [B, T, h] of a slot and of those before it, by kernel [B, T, taps, h]; before a block is nothing."""
    shifted = (F.pad(x, (0, 0, tap, 0))[:, : x.shape[1]] for tap in range(kernel.shape[2]))
    return sum(x * weight for x, weight in zip(shifted, kernel.unbind(2), strict=True))  # type: ignore[return-value]


class ConvolvedLayer(DecoderLayer):
    """DFlash 2's layer: Qwen3's with convolutions around its attention and its MLP."""

    def __init__(self, config: LlamaConfig, taps: int, group: int):
        super().__init__(config, True)
        self.attention_conv = DynamicConvolution(config.hidden_size, taps, group)
        self.mlp_conv = DynamicConvolution(config.hidden_size, taps, group)

    def forward(self, x: Tensor, rotary: CosSin, attend: AttendFn) -> Tensor:
        normed = self.input_layernorm(x)
        x = x + self.attention_conv(normed, lambda y: self.self_attn(y, rotary, attend))
        return x + self.mlp_conv(self.post_attention_layernorm(x), self.mlp)


class TwoSourceAttention(HeadAttention):
    """DFlare's attention: the target's states get keys and values by projections of their own."""

    def __init__(self, config: LlamaConfig):
        super().__init__(config, config.hidden_size, True)
        outputs = self.k_proj.out_features
        self.k_proj_target = nn.Linear(config.hidden_size, outputs, bias=False)
        self.v_proj_target = nn.Linear(config.hidden_size, outputs, bias=False)

    def context_keys_values(self, x: Tensor, rotary: CosSin) -> tuple[Tensor, Tensor]:
        """k, v [B, kv heads, T, D] of the target's fused states x [B, T, h]."""
        return self.split_keys_values(self.k_proj_target(x), self.v_proj_target(x), rotary)


class FlaredLayer(DecoderLayer):
    """DFlare's layer: Qwen3's with that attention."""

    def __init__(self, config: LlamaConfig):
        super().__init__(config, True)
        self.self_attn = TwoSourceAttention(config)


class ConfidenceHead(nn.Module):
    """DSpark's estimate of the probability that a drafted token is accepted, before it is drawn."""

    def __init__(self, width: int, rank: int):
        super().__init__()
        self.proj = nn.Linear(width + rank, 1)

    def forward(self, state: Tensor, previous: Tensor) -> Tensor:
        """Logits [...] from states [..., h] and the embedding [..., r] of the tokens before."""
        return self.proj(torch.cat([state, previous.to(state.dtype)], -1))[..., 0]


class DFlashModel(nn.Module):
    """`fc` fuses the tapped states; `layers` run over the block; the head is its own over `ids` [Vd], or the target's.

    With `markov_rank` in its config it is DSpark: logits depend on the token before, and the anchor's slot predicts
    too, unless `sample_from_anchor` says otherwise. With `selector_rank` it is DFlash 2, with `xpress_rank` XPress,
    with `gru_hidden_dim` Domino, with `layer_fusion` DFlare, whose layers each weigh the tapped states.
    """

    def __init__(
        self,
        config: LlamaConfig,
        aux_layers: HiddenStateSpec,
        ids: Tensor | None,
        head: Callable[[Tensor], Tensor],
    ):
        super().__init__()
        fields = config.to_dict()
        width, vocab = config.hidden_size, config.vocab_size
        self.config, self.aux_layers, self.max_positions = config, aux_layers, head_context(config)
        self.sliding_is_causal = not fields.get("sliding_window_non_causal")
        self.window_from_anchor: bool = fields.get("window_from_anchor") or False
        """Whether windows count from the anchor, the same for all slots of a block, or from each slot."""
        self.mask_token: int = fields["dflash_config"]["mask_token_id"]
        self.block_size: int = fields["block_size"]
        rank: int = fields.get("markov_rank") or 0
        self.first = 0 if fields.get("sample_from_anchor", rank > 0) else 1
        """The first slot of a block that predicts a token."""
        depth, tapped = config.num_hidden_layers, len(aux_layers.layers)
        flared = bool(fields.get("layer_fusion"))
        self.layer_fusion_weights = nn.Parameter(torch.empty(depth, tapped)) if flared else None
        if not flared:
            self.fc = nn.Linear(tapped * config.target_hidden_size, width, bias=False)
        self.hidden_norm = RMSNorm(width, config.rms_norm_eps)
        taps, group = fields.get("conv_kernel_size"), fields.get("conv_group_size")

        def layer() -> DecoderLayer:
            if flared:
                return FlaredLayer(config)
            convolved = taps and group
            return ConvolvedLayer(config, taps, group) if convolved else DecoderLayer(config, True)

        self.layers = nn.ModuleList(layer() for _ in range(depth))
        self.windows = layer_windows(config, len(self.layers))
        self.norm = RMSNorm(width, config.rms_norm_eps)
        self.lm_head = None if ids is None else nn.Linear(width, len(ids), bias=False)
        draft_vocab = vocab if ids is None else len(ids)
        self.markov_head = MarkovHead(vocab, draft_vocab, rank) if rank else None
        confident = rank and fields.get("enable_confidence_head", True)
        self.confidence_head = ConfidenceHead(width, rank) if confident else None
        selector_rank, refiner_rank = fields.get("selector_rank"), fields.get("xpress_rank")
        self.candidate_selector = self.refiner_head = None
        if selector_rank:
            count = fields["selector_top_k"]
            self.candidate_selector = CandidateSelector(width, vocab, selector_rank, count)
        if refiner_rank:
            ratio = fields["xpress_mlp_ratio"]
            self.refiner_head = CausalRefiner(
                width, vocab, draft_vocab, self.block_size, refiner_rank, ratio
            )
        gru_width = fields.get("gru_hidden_dim")
        self.prefix_gru = PrefixGRU(width, gru_width) if gru_width else None
        if gru_width:
            inner, self.uncorrected = fields["emb_dim"], fields["pure_draft_prefix_len"]
            self.embed_proj = nn.Sequential(
                nn.Linear(width + gru_width, inner, bias=False),
                nn.SiLU(),
                nn.Linear(inner, draft_vocab, bias=False),
            )
        self.target_head = head  # the target's, frozen and no part of this model
        self.rotary = Fp32RotaryEmbedding(config)
        self.ids: Tensor | None
        self.register_buffer("ids", ids, persistent=False)

    @property
    def max_tokens(self) -> int:
        """Tokens that a block of full size drafts."""
        return self.block_size - self.first

    def context(self, features: Tensor, position: Tensor) -> list[tuple[Tensor, Tensor]]:
        """k, v [B, kv heads, T, D] of each layer for tapped states [B, T, F] at `position` [B, T]."""
        states = self.fused_states(features)
        rotary = self.rotary(states[0], position)
        return [
            layer.self_attn.context_keys_values(state, rotary)  # type: ignore[union-attr, operator]
            for layer, state in zip(self.layers, states, strict=True)
        ]

    def fused_states(self, features: Tensor) -> list[Tensor]:
        """[B, T, h] of tapped states [B, T, F], as each layer reads it."""
        if self.layer_fusion_weights is None:
            return [self.hidden_norm(self.fc(features))] * len(self.layers)
        shares = self.layer_fusion_weights.softmax(-1)  # [layers, taps]
        tapped = features.unflatten(-1, (shares.shape[1], -1))
        return [self.hidden_norm(torch.einsum("bsth,t->bsh", tapped, x)) for x in shares]

    def block_tokens(self, anchor: Tensor, size: int) -> Tensor:
        """[..., size]: the anchor [...] and masks."""
        masks = anchor[..., None].expand(*anchor.shape, size).clone()
        masks[..., 1:] = self.mask_token
        return masks

    def forward(
        self,
        embeds: Tensor,
        position: Tensor,
        attend: LayerAttendFn,
        run: Callable[..., Any] = run_now,
    ) -> Tensor:
        """Normed states [B, T, h] of the slots of blocks with these embeddings, at `position` [B, T].

        `run(layer, *inputs)` calls a layer: training may keep its inputs alone (decode/model/masks.py).
        """
        x, rotary = embeds, self.rotary(embeds, position)
        for number, layer in enumerate(self.layers):
            x = run(layer, x, rotary, lambda q, k, v, number=number: attend(number, q, k, v))
        return self.norm(x)

    def base_logits(self, states: Tensor) -> Tensor:
        """[..., Vd] of normed states, without the correction."""
        return self.target_head(states) if self.lm_head is None else self.lm_head(states)

    def block_logits(self, states: Tensor, before: Tensor, embedding: Tensor) -> BlockLogits:
        """Those of a block with normed states [B, S, h], behind the token `before` [B] its anchor; `embedding` [V, h]
        is the target's."""
        predicting = states[:, self.first :]
        base = self.base_logits(predicting)  # [B, K, Vd]
        if self.markov_head is not None:
            return self.markov_head.block_logits(base)
        if self.candidate_selector is not None:
            return self.candidate_selector.block_logits(base, predicting)
        if self.refiner_head is not None:
            return self.refiner_head.block_logits(base, states, before[:, None][:, : self.first])
        if self.prefix_gru is not None:
            head = self.prefix_gru, self.embed_proj, self.uncorrected
            return prefix_logits(*head, base, predicting, embedding)
        return independent_logits(base)

    def logits(self, states: Tensor, previous: Tensor) -> Tensor:
        """[..., Vd] of normed states, given the tokens before those that they predict; DFlash and DSpark only."""
        found = self.base_logits(states)
        return found if self.markov_head is None else found + self.markov_head(previous)

    def confidence(self, states: Tensor, previous: Tensor) -> Tensor:
        """Logits [...] of the probability that the token of each state is accepted; DSpark only."""
        assert self.markov_head is not None
        assert self.confidence_head is not None
        return self.confidence_head(states, self.markov_head.markov_w1(previous))
