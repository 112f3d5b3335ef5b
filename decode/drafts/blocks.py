"""Drafts that propose a block of K tokens in one pass, in chains or trees: PARD, P-EAGLE, DFlash and its kin.

PARD (An et al., arXiv 2504.18583) is a small language model. It reads the tokens committed since its last pass and
K - 1 mask tokens. The logits after the last committed token are those of the first drafted token, the logits after mask
j those of token j + 1. It knows nothing of a target but the tokenizer, so one draft serves every target that shares it.

P-EAGLE (arXiv 2602.01469) is an EAGLE-3 head. Behind the last pair of a hidden state and a token follow K - 1 pairs of
`mask_hidden`, which is trained, and the mask token. The pair at position t predicts token t + 2, each mask the token
after that.

DFlash, DFlash 2, DSpark, XPress and Domino read mask tokens too. The KV cache's slot t holds the context of the
target's hidden state at t. A pass writes its block's own keys from the anchor's slot on; the next one first writes the
context of all tokens that the round may have committed over them.
"""

from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from decode.checkpoints import importers, layouts
from decode.common.errors import UserError
from decode.common.files import read_json_object
from decode.drafts import causal, eagle
from decode.drafts.base import DraftContext, Proposal
from decode.drafts.causal import CausalDraft
from decode.drafts.dflash_model import BlockLogits, DFlashModel, independent_logits
from decode.drafts.drafting import DraftStep, draft_tokens
from decode.drafts.eagle import CachedHead, EagleDraft, name_layers
from decode.drafts.eagle_model import QK_NORM_FIELDS, Eagle3Model, check_arithmetic, llama_config
from decode.model.attention import attention_forward, forward_context
from decode.model.hidden_states import HiddenStateSpec, LMHead, check_aux_layers
from decode.model.kv_cache import TreeNodes
from decode.model.loading import DTYPES, Target, load_config, place_network
from decode.model.runner import PREFILL_CHUNK, ModelRunner
from decode.verification.tree import TreeShape, max_depth


def level_step(logits: BlockLogits) -> DraftStep:
    """The DraftStep of a block; its first call gives the logits of level 1.

    q is what they give: a product of independent distributions, or each given the tokens before. That is which tokens
    were drawn from, so every lossless rule stays exact.
    """
    level = 0

    def step(tokens: Tensor, length: Tensor, nodes: TreeNodes | None, above: Tensor) -> Tensor:
        nonlocal level
        level += 1
        return logits(level, tokens, above)

    return step


def check_mask_token(path: str, token: int, target: Target) -> None:
    """UserError unless the mask token of the draft in `path` is a row of the target's embedding."""
    if not 0 <= token < target.runner.embedding_rows:
        raise UserError(
            f"draft {path!r} has the mask token {token}, which is no row of the target's embedding: get it again"
        )


# ---- PARD ----

MASK_FIELD = "pard_token"
"""The field of config.json that holds the id of the mask token; serving engines read it too."""


class PardDraft(CausalDraft):
    """A CausalDraft whose KV cache holds committed tokens; the masks behind them are overwritten by the next pass."""

    def __init__(
        self, runner: ModelRunner, mask_token: int, name: str = "pard", shape: TreeShape = None
    ):
        super().__init__(runner, name, shape)
        self.mask_token = mask_token

    def begin_batch(self, request: DraftContext) -> None:
        super().begin_batch(request)
        self.reread = max_depth(self.shape, request.k) + 1

    def propose(self, history: Tensor, length: Tensor, k: int) -> Proposal:
        """A round commits up to depth + 1 tokens: as many are read, of which some were read before.

        Masks of the pass before lie at slots that are read again or are not visible yet.
        """
        depth = max_depth(self.shape, k)
        logits = self._read_with_masks(history, length, depth)
        step = level_step(independent_logits(logits))
        return draft_tokens(step, logits[:, 0], length, k, self.plan, self.request)

    def _read_committed(self, history: Tensor, length: Tensor) -> Tensor:
        return self._read_with_masks(history, length, 1)[:, 0]

    def _read_with_masks(self, history: Tensor, length: Tensor, depth: int) -> Tensor:
        """[B, depth, V]: the logits at each level."""
        count = self.unread + self.reread
        self.unread = 0
        back = length[:, None] + torch.arange(-count, 0, device=length.device)
        masks = history.new_full((len(history), depth - 1), self.mask_token)
        tokens = torch.cat([history.gather(1, back.clamp_min(0)), masks], 1)
        return self.runner.step(tokens, length - count, last=depth)


def load_pard(path: str, target: Target, device: str, dtype: str) -> PardDraft:
    """A language model from a folder or the Hub with `pard_token` in its config.json. UserError if it has none."""
    draft = causal.load(path, target, device, dtype)
    return PardDraft(draft.runner, mask_token_of(path, load_config(path, "draft")))


def mask_token_of(path: str, config: Any) -> int:
    """The id of the mask token in a draft's config. UserError unless it is a row of the draft's embedding."""
    found = config.to_dict().get(MASK_FIELD)
    size = config.get_text_config(decoder=True).vocab_size
    if not isinstance(found, int) or not 0 <= found < size:
        raise UserError(
            f"config.json of the PARD draft {path!r} has {MASK_FIELD} {found!r}, which is no token of its {size}: get "
            "the file again"
        )
    return found


def is_pard(folder: str) -> bool:
    """Whether the config.json in a folder is that of a PARD draft."""
    return MASK_FIELD in read_json_object(Path(folder) / "config.json", "the config of a draft")


# ---- P-EAGLE ----


class PEagleDraft(EagleDraft):
    """An EagleDraft whose masks lie behind the committed pairs in the KV cache, where the next pass overwrites them."""

    net: Eagle3Model

    def propose(self, history: Tensor, length: Tensor, k: int) -> Proposal:
        depth = max_depth(self.shape, k)
        tokens, states = self._committed_pairs(history, length)
        self.unread = k + 1
        masks = history.new_full((len(history), depth - 1), self.net.mask_token or 0)
        hidden = self.net.mask_hidden.expand(len(history), depth - 1, -1)
        inputs = self.net.init_state(torch.cat([states, hidden.to(states.dtype)], 1))
        self.kv_cache.slots.set_positions(length - 1 - tokens.shape[1], tokens.shape[1] + depth - 1)
        found = self._forward(inputs, torch.cat([tokens, masks], 1))[:, -depth:]
        logits = self.net.logits(found)
        step, first = level_step(independent_logits(logits)), logits[:, 0]
        return draft_tokens(step, first, length, k, self.plan, self.request, self.vocab)


def load_peagle(path: str, target: Target, device: str, dtype: str) -> PEagleDraft:
    """A head from a folder or the Hub. UserError if it does not fit the target or tensors are missing."""
    net, _, family = eagle.load_net(path, target, device, dtype)
    assert isinstance(net, Eagle3Model)
    assert net.mask_token is not None  # the importer requires it
    check_mask_token(path, net.mask_token, target)
    return PEagleDraft(net, target, family)


# ---- DFlash and its kin ----


class DFlashDraft(CachedHead):
    """A DFlashModel as a draft. In rounds of fewer tokens than it was trained for the blocks are as much shorter."""

    net: DFlashModel

    @torch.inference_mode()
    def begin_batch(self, request: DraftContext) -> None:
        depth = max_depth(self.shape, request.k)
        if depth > self.net.max_tokens:
            raise UserError(
                f"draft {self.name!r} was trained to draft {self.net.max_tokens} tokens in a pass: give k (or a tree) "
                "of at most as many"
            )
        super().begin_batch(request)
        size = depth + self.net.first
        index = torch.arange(size, device=self.device)[None]
        every = torch.ones(1, size, size, dtype=torch.bool, device=self.device)
        self.block = TreeNodes(index, index, every)

    def prefill(
        self, row: Tensor, prompts: Tensor, length: Tensor, features: Tensor | None
    ) -> None:
        assert features is not None
        self.state_buffer.reset_rows(row, features, length)
        for start in range(0, prompts.shape[1], PREFILL_CHUNK):
            states = features[:, start : start + PREFILL_CHUNK]
            base = torch.full_like(length, start)
            self._write_context(states, base, row)

    def propose(self, history: Tensor, length: Tensor, k: int) -> Proposal:
        self._read_committed(history, length)
        self.unread = k + 1
        anchor = history.gather(1, length[:, None] - 1)
        size = self.block.index.shape[1]
        tokens = self.net.block_tokens(anchor[:, 0], size)
        slots = self.kv_cache.slots
        slots.set_positions(length - 1, size, nodes=self.block)

        def attend(number: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            keys, values = self.kv_cache.kv_layers[number].update(k, v)
            window = self.net.windows[number]
            if window is None:
                return attention_forward(self.net, q, keys, values, None)[0]
            mask = self._window_mask(length - 1, size, keys.shape[2], window)[:, None]
            grouped = q.shape[1] != keys.shape[1]
            out = F.scaled_dot_product_attention(q, keys, values, mask, enable_gqa=grouped)
            return out.transpose(1, 2)

        embeds = F.embedding(tokens, self.embedding).to(self.dtype)
        with forward_context(slots):
            states = self.net(embeds, self._positions(), attend)
        before = history.gather(1, (length[:, None] - 2).clamp_min(0))[:, 0]
        logits = self.net.block_logits(states, before, self.embedding)
        first, step = logits(0, anchor, torch.zeros_like(anchor))[:, 0], level_step(logits)
        return draft_tokens(step, first, length, k, self.plan, self.request, self.vocab)

    def _window_mask(self, anchor: Tensor, size: int, slots: int, window: int) -> Tensor:
        """[B, size, S] bool: what the slots of a block at `anchor` [B] see of S slots in a layer with this window."""
        index = torch.arange(size, device=anchor.device)[:, None]  # [size, 1]
        relative = torch.arange(slots, device=anchor.device) - anchor[:, None, None]  # [B, 1, S]
        if self.net.window_from_anchor:
            context = (relative < 0) & (relative >= -window)
        else:
            context = (relative < 0) & (index - relative < window)
        last = index if self.net.sliding_is_causal else size - 1
        return context | ((relative >= 0) & (relative <= last))

    def _read_committed(self, history: Tensor, length: Tensor) -> Tensor:
        states = self.state_buffer.states
        self._write_context(states, length - 1 - states.shape[1])
        return states

    def _write_context(self, states: Tensor, base: Tensor, row: Tensor | None = None) -> None:
        """Keys and values of the target's states [b, T, F] at the slots from `base` [b] on."""
        self.kv_cache.slots.set_positions(base, states.shape[1], row=row)
        pairs = self.net.context(states.to(self.dtype), self._positions())
        for layer, (k, v) in zip(self.kv_cache.kv_layers, pairs, strict=True):
            layer.update(k, v)


def load_dflash(path: str, target: Target, device: str, dtype: str) -> DFlashDraft:
    """A draft from a folder or the Hub. UserError if it does not fit the target or tensors are missing."""
    path, found = importers.read_heads(path, target)
    config, tensors = found.config, dict(found.tensors)
    runner = target.runner
    hidden = runner.config.hidden_size
    wanted = {"vocab_size": runner.vocab_size, "hidden_size": hidden, "target_hidden_size": hidden}
    layouts.check_config(path, config, wanted)
    check_mask_token(path, config["dflash_config"]["mask_token_id"], target)
    aux_layers = HiddenStateSpec(tuple(config["eagle_aux_hidden_state_layer_ids"]))
    depth = runner.config.num_hidden_layers
    check_aux_layers(aux_layers, depth)
    name_layers(path, found, aux_layers.layers, depth)
    check_arithmetic(config, QK_NORM_FIELDS)
    ids = layouts.draft_to_target_ids(path, config, tensors)
    tensors, model = layouts.without_maps(tensors), runner.model
    embedding, output = model.get_input_embeddings(), model.get_output_embeddings()
    layouts.take_copy(path, tensors, "embed_tokens.weight", embedding, "an embedding")
    if ids is None:
        layouts.take_copy(path, tensors, "lm_head.weight", output, "an output matrix")
    head = LMHead(runner.model, device, DTYPES[dtype])
    net = DFlashModel(llama_config(config), aux_layers, ids, head)
    layouts.load_parameters(net, path, tensors)
    return DFlashDraft(place_network(net, device, dtype), target, found.family)
