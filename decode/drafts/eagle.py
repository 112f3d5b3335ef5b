"""EAGLE-1 and EAGLE-3 heads as drafts: one layer that continues the target's hidden states, in chains or trees.

The head's KV slot t holds the pair (state at t, token t + 1), one slot before the token's own. What drafting wrote
there came from the head's own states; the next proposal begins by rewriting all slots that the round may have
committed, from the target's hidden states. EAGLE-2 is EAGLE-1 or EAGLE-3 with a DynamicTree.
"""

import warnings
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from decode.checkpoints import eagle_layouts, importers, layouts
from decode.checkpoints.draft_folder import read_metadata
from decode.common.errors import UserError
from decode.drafts.base import Draft, DraftBuffers, DraftContext, Proposal, Reads
from decode.drafts.drafting import ReducedVocab, build_tree_plan, draft_tokens
from decode.drafts.eagle_model import (
    QK_NORM_FIELDS,
    Eagle1Model,
    Eagle3Model,
    EagleModel,
    check_arithmetic,
    llama_config,
)
from decode.model.attention import attention_forward, forward_context
from decode.model.gpu.cuda_layers import patch_layers
from decode.model.hidden_states import HiddenStateBuffer, HiddenStateSpec, LMHead, check_aux_layers
from decode.model.kv_cache import StaticKVCache, TreeNodes
from decode.model.loading import DTYPES, Target, place_network
from decode.model.runner import PREFILL_CHUNK
from decode.verification.tree import max_depth


class CachedHead(Draft):
    """A head over the target's hidden states with the target's embedding and a KV cache of its own layers."""

    net: Any

    def __init__(self, net: Any, target: Target, name: str):
        self.net, self.name = net.eval(), name
        self.context: int = min(target.runner.context, net.max_positions)
        self.reads = Reads(net.aux_layers, target, context=self.context)
        patch_layers(net)
        weight = next(net.parameters())
        self.device, self.dtype = weight.device, weight.dtype
        embedding = target.runner.model.get_input_embeddings().weight
        self.embedding = embedding.detach().to(self.device)
        self.vocab = None
        if net.ids is not None:
            self.vocab = ReducedVocab(net.ids, target.runner.vocab_size)
        hidden = target.runner.config.hidden_size
        self.width = hidden * (len(net.aux_layers.layers) + net.aux_layers.final)
        self.state = list[Tensor]()
        self.kv_cache = StaticKVCache(len(net.layers), 0, 0, self.device)

    @torch.inference_mode()
    def begin_batch(self, request: DraftContext) -> None:
        self.request = request
        self.plan = build_tree_plan(self.shape, self.device)
        # A round commits at most its levels, forced tokens and the bonus token: so many slots are rewritten from the
        # target's states.
        count = max_depth(self.shape, request.k) + 1 + request.extra
        rows, size = request.rows, request.size
        # Buffers of the same shape stay: CUDA graphs hold their addresses
        if (rows, size) != self.kv_cache.shape:
            self.kv_cache = StaticKVCache(len(self.net.layers), rows, size, self.device)
            self.state_buffers: dict[int, HiddenStateBuffer] = {}
        # methods of another K or tree take turns with one draft
        if count not in self.state_buffers:
            buffer = HiddenStateBuffer(rows, count, self.width, self.device, self.dtype)
            self.state_buffers[count] = buffer
        self.state_buffer = self.state_buffers[count]
        self.state = [self.state_buffer.states]
        self.unread = 1  # committed tokens at most that the KV cache lacks; of a prompt one

    def buffers(self) -> DraftBuffers:
        return DraftBuffers([self], self, [self.kv_cache], self.state)

    def update_hidden_states(self, features: Tensor, count: Tensor) -> None:
        self.state_buffer.update_hidden_states(features, count)

    def skip(self, history: Tensor, length: Tensor, k: int, proposed: bool = False) -> None:
        """Reads what rounds have committed, without the LM head, as soon as the buffer of the target's states could not
        hold it together with what this round commits."""
        if proposed:
            self.unread = 0
        if self.unread + k + 1 > self.state_buffer.states.shape[1]:
            self._read_committed(history, length)
            self.unread = 0
        self.unread += k + 1

    def plan_compiled_round(self, history: Tensor, length: Tensor, k: int) -> None:
        self.unread = k + 1

    def _read_committed(self, history: Tensor, length: Tensor) -> Tensor:
        """Brings the KV cache up to date with the states in the buffer."""
        raise NotImplementedError

    def _positions(self) -> Tensor:
        # As in the target: beyond the context longrope would use other frequencies for all rows.
        return self.kv_cache.slots.position.clamp_max(self.context - 1)


class EagleDraft(CachedHead):
    """An EAGLE model as a draft."""

    net: EagleModel

    def prefill(
        self, row: Tensor, prompts: Tensor, length: Tensor, features: Tensor | None
    ) -> None:
        """Fills the KV cache with the prompt's pairs, except the last, whose token `propose` will know."""
        assert features is not None
        self.state_buffer.reset_rows(row, features, length)
        for start in range(0, prompts.shape[1] - 1, PREFILL_CHUNK):
            states = features[:, start : start + PREFILL_CHUNK]
            tokens = prompts[:, start + 1 : start + 1 + PREFILL_CHUNK]
            base = torch.full_like(length, start)
            slots = self.kv_cache.slots
            slots.set_positions(base, tokens.shape[1], row=row, is_prefill=start == 0)
            self._forward(self.net.init_state(states[:, : tokens.shape[1]].to(self.dtype)), tokens)

    def propose(self, history: Tensor, length: Tensor, k: int) -> Proposal:
        state = self._read_committed(history, length)
        self.unread = k + 1

        def step(tokens: Tensor, length: Tensor, nodes: TreeNodes | None, above: Tensor) -> Tensor:
            nonlocal state
            before = state.gather(1, above[..., None].expand(-1, -1, state.shape[-1]))
            base = length - 1 if nodes is None else length - 2
            self.kv_cache.slots.set_positions(base, tokens.shape[1], nodes=nodes)
            state = self._forward(before, tokens)
            return self.net.logits(state)

        first = self.net.logits(state)[:, 0]
        return draft_tokens(step, first, length, k, self.plan, self.request, self.vocab)

    def _read_committed(self, history: Tensor, length: Tensor) -> Tensor:
        """[B, 1, h]: the state after the last committed pair; the KV cache then holds every pair before it."""
        tokens, states = self._committed_pairs(history, length)
        count = tokens.shape[1]
        self.kv_cache.slots.set_positions(length - 1 - count, count)
        return self._forward(self.net.init_state(states), tokens)[:, -1:]

    def _committed_pairs(self, history: Tensor, length: Tensor) -> tuple[Tensor, Tensor]:
        """Tokens [B, n] and the target's hidden states [B, n, F] before them: all that a round may have committed."""
        back = length[:, None] - len(self.state_buffer.offsets) + self.state_buffer.offsets
        return history.gather(1, back.clamp_min(1)), self.state_buffer.states

    def _forward(self, state: Tensor, tokens: Tensor) -> Tensor:
        """States [b, T, h] and tokens [b, T] -> next states, at the positions that were set in the KV cache."""
        slots = self.kv_cache.slots
        layers = iter(zip(self.kv_cache.kv_layers, self.net.windows, strict=True))

        def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            layer, window = next(layers)
            keys, values = layer.update(k, v)
            with forward_context(slots):
                return attention_forward(self.net, q, keys, values, None, sliding_window=window)[0]

        embeds = self.net.embed(tokens, self.embedding).to(self.dtype)
        return self.net.step(state, embeds, self._positions(), attend)


def load(path: str, target: Target, device: str, dtype: str) -> EagleDraft:
    """A head from a folder or the Hub. UserError if it does not fit the target or tensors are missing."""
    return EagleDraft(*load_net(path, target, device, dtype))


def load_net(path: str, target: Target, device: str, dtype: str) -> tuple[EagleModel, Target, str]:
    """(net, target, family) of a head in a folder or on the Hub; UserError as in `load`."""
    path, found = importers.read_heads(path, target)
    config, tensors, metadata = found.config, dict(found.tensors), read_metadata(path)
    hidden = target.runner.config.hidden_size
    layouts.check_config(path, config, {"vocab_size": target.runner.vocab_size})
    check_arithmetic(config, QK_NORM_FIELDS if config.get("qk_norm") else ())
    own = "embed_tokens.weight"
    if own in tensors and layouts.equal_values(
        tensors[own], target.runner.model.get_input_embeddings().weight
    ):
        tensors.pop(own)  # a copy of the target's, which other trainers save too
    net: EagleModel
    if found.family == "eagle1":
        layouts.check_config(path, config, {"hidden_size": hidden})
        head = LMHead(target.runner.model, device, DTYPES[dtype])
        tensors.setdefault("fc.bias", torch.zeros(hidden))
        net = Eagle1Model(llama_config(config), head, own in tensors)
    else:
        layouts.check_config(path, config, {"target_hidden_size": hidden})
        for flag in eagle_layouts.NORM_FLAGS:
            # most flags add no tensor whose absence would be noticed
            trained = flag in (metadata.norms or ())
            if metadata.is_known and config[flag] != trained:
                raise UserError(
                    f"draft {path!r} has {flag} {config[flag]} and was trained with {trained}: get the files again"
                )
        depth = target.runner.config.num_hidden_layers
        aux_layers = HiddenStateSpec(eagle_layouts.aux_layers(config, depth))
        check_aux_layers(aux_layers, depth)
        name_layers(path, found, aux_layers.layers, depth)
        ids = layouts.draft_to_target_ids(path, config, tensors)
        tensors = layouts.without_maps(tensors)
        if ids is None and "lm_head.weight" not in tensors:  # then the head is the target's
            if config.get("tie_word_embeddings") and own in tensors:
                raise UserError(
                    f"draft {path!r} ties its output matrix to an embedding of its own, which engines do not: save "
                    "lm_head.weight"
                )
            tensors["lm_head.weight"] = target.runner.model.get_output_embeddings().weight.detach()
        net = Eagle3Model(llama_config(config), aux_layers, ids, own in tensors)
    layouts.load_parameters(net, path, tensors)
    return place_network(net, device, dtype), target, found.family


def name_layers(
    path: str, found: importers.DraftCheckpoint, layers: Sequence[int], depth: int
) -> None:
    """One warning that names the layers that are read where config.json names none, or one more than the draft reads.

    UserError for a surplus one that is not the last of a target of `depth` layers.
    """
    surplus = found.surplus_layer
    if surplus is not None and surplus not in (depth - 1, depth):
        raise UserError(
            f"draft {path!r} names the layers {[*layers, surplus]} and reads one less, and {surplus} is not the last "
            f"of the target's {depth}: correct its config.json"
        )
    said = None
    if surplus is not None:
        said = f"names layer {surplus} too, which fc does not read: it is left out, and {list(layers)} are read"
    elif (
        not found.config.get("eagle_aux_hidden_state_layer_ids")
        and not read_metadata(path).is_known
    ):
        said = f"names no layers whose states it reads: {list(layers)} are taken, the default of EAGLE-3"
    if said is not None:
        warnings.warn(f"draft {path!r} {said}", stacklevel=2)
