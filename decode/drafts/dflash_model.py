"""The network of DFlash and DSpark: a few layers over a block of mask tokens, with the target's states as context.

DFlash: z-lab's block diffusion draft; DSpark: arXiv 2607.05147. Parameters have the names of serving engines. The
hidden states of the text enter as keys and values alone: of each layer, at their own positions, from one fused state.
The block is [anchor, MASK, MASK, …]; its slots see each other and all states before the anchor. Layers with a window
see that many states, and in the block what is before them, unless `sliding_window_non_causal`.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from transformers import LlamaConfig

from decode.drafts.eagle_model import DecoderLayer, head_context, layer_windows
from decode.model.hidden_states import HiddenStateSpec
from decode.model.masks import run_now
from decode.model.modules import Fp32RotaryEmbedding, RMSNorm

LayerAttendFn = Callable[[int, Tensor, Tensor, Tensor], Tensor]
"""(number of the layer, q [B, heads, T, D], k and v [B, kv heads, T, D] of the block) -> [B, T, heads, D]."""


class MarkovHead(nn.Module):
    """DSpark's correction: a bias of rank r on the logits of a slot, given by the token before the one it predicts."""

    def __init__(self, vocab: int, draft_vocab: int, rank: int):
        super().__init__()
        self.markov_w1 = nn.Embedding(vocab, rank)
        self.markov_w2 = nn.Linear(rank, draft_vocab, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        """[..., Vd] of token ids [...]."""
        return self.markov_w2(self.markov_w1(tokens))


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
    too, unless `sample_from_anchor` says otherwise.
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
        self.fc = nn.Linear(len(aux_layers.layers) * config.target_hidden_size, width, bias=False)
        self.hidden_norm = RMSNorm(width, config.rms_norm_eps)
        self.layers = nn.ModuleList(
            DecoderLayer(config, True) for _ in range(config.num_hidden_layers)
        )
        self.windows = layer_windows(config, len(self.layers))
        self.norm = RMSNorm(width, config.rms_norm_eps)
        self.lm_head = None if ids is None else nn.Linear(width, len(ids), bias=False)
        draft_vocab = vocab if ids is None else len(ids)
        self.markov_head = MarkovHead(vocab, draft_vocab, rank) if rank else None
        self.confidence_head = ConfidenceHead(width, rank) if rank else None
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
        state = self.hidden_norm(self.fc(features))
        rotary = self.rotary(state, position)
        return [layer.self_attn.keys_values(state, rotary) for layer in self.layers]  # type: ignore[union-attr, operator]

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

    def logits(self, states: Tensor, previous: Tensor) -> Tensor:
        """[..., Vd] of normed states, given the tokens before those that they predict."""
        found = self.base_logits(states)
        return found if self.markov_head is None else found + self.markov_head(previous)

    def confidence(self, states: Tensor, previous: Tensor) -> Tensor:
        """Logits [...] of the probability that the token of each state is accepted; DSpark only."""
        assert self.markov_head is not None
        assert self.confidence_head is not None
        return self.confidence_head(states, self.markov_head.markov_w1(previous))
