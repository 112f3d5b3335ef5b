"""DFlash and DSpark as drafts: a block of K tokens from one pass over mask tokens, in chains or trees.

The KV cache's slot t holds the context of the target's hidden state at t. A pass writes its block's own keys from the
anchor's slot on; the next one first writes the context of all tokens that the round may have committed over them.
"""

import torch
import torch.nn.functional as F

from decode.checkpoints import importers, layouts
from decode.common.errors import UserError
from decode.drafts.base import DraftContext, Proposal, check_target, read_metadata
from decode.drafts.blocks.dflash_model import DFlashModel
from decode.drafts.blocks.levels import level_step
from decode.drafts.blocks.mask_token import check_mask_token
from decode.drafts.drafting import draft_tokens
from decode.drafts.eagle import CachedHead, name_layers
from decode.drafts.eagle_model import QK_NORM_FIELDS, check_arithmetic, llama_config
from decode.model.attention import attention_forward, forward_context
from decode.model.hidden_states import HiddenStateSpec, LMHead, check_taps
from decode.model.kv_cache import TreeNodes
from decode.model.loading import DTYPES, Target
from decode.model.runner import PREFILL_CHUNK
from decode.verification.tree import max_depth


class DFlashDraft(CachedHead):
    """A DFlash or DSpark model as a draft."""

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
        self,
        row: torch.Tensor,
        prompts: torch.Tensor,
        length: torch.Tensor,
        features: torch.Tensor | None,
    ) -> None:
        assert features is not None
        self.state_buffer.reset_rows(row, features, length)
        for start in range(0, prompts.shape[1], PREFILL_CHUNK):
            states = features[:, start : start + PREFILL_CHUNK]
            base = torch.full_like(length, start)
            self._write_context(states, base, row)

    def propose(self, history: torch.Tensor, length: torch.Tensor, k: int) -> Proposal:
        self._read_committed(history, length)
        self.unread = k + 1
        anchor = history.gather(1, length[:, None] - 1)
        size = self.block.index.shape[1]
        tokens = self.net.block_tokens(anchor[:, 0], size)
        slots = self.kv_cache.slots
        slots.set_positions(length - 1, size, nodes=self.block)

        def attend(number: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
            keys, values = self.kv_cache.kv_layers[number].update(k, v)
            return attention_forward(self.net, q, keys, values, None)[0]

        embeds = F.embedding(tokens, self.embedding).to(self.dtype)
        with forward_context(slots):
            states = self.net(embeds, self._positions(), attend)[:, self.net.first :]
        base = self.net.base_logits(states)  # [B, K, Vd]
        correction = self.net.markov_head
        first = base[:, 0] if correction is None else base[:, 0] + correction(anchor[:, 0])
        step = level_step(base, correction)
        return draft_tokens(step, first, length, k, self.plan, self.request, self.vocab)

    def _read_committed(self, history: torch.Tensor, length: torch.Tensor) -> torch.Tensor:
        states = self.state_buffer.states
        self._write_context(states, length - 1 - states.shape[1])
        return states

    def _write_context(
        self, states: torch.Tensor, base: torch.Tensor, row: torch.Tensor | None = None
    ) -> None:
        """Keys and values of the target's states [b, T, F] at the slots from `base` [b] on."""
        self.kv_cache.slots.set_positions(base, states.shape[1], row=row)
        pairs = self.net.context(states.to(self.dtype), self._positions())
        for layer, (k, v) in zip(self.kv_cache.kv_layers, pairs, strict=True):
            layer.update(k, v)


def load(path: str, target: Target, device: str, dtype: str) -> DFlashDraft:
    """A draft from a folder or the Hub. UserError if it does not fit the target or tensors are missing."""
    path = importers.resolve_folder(path)
    check_target(path, target)
    found = importers.read_checkpoint(path)
    config, tensors = found.config, dict(found.tensors)
    layouts.check_family(path, found.family, read_metadata(path).get("family", found.family))
    runner = target.runner
    hidden = runner.config.hidden_size
    wanted = {"vocab_size": runner.vocab_size, "hidden_size": hidden, "target_hidden_size": hidden}
    layouts.check_config(path, config, wanted)
    check_mask_token(path, config["dflash_config"]["mask_token_id"], target)
    taps = HiddenStateSpec(tuple(config["eagle_aux_hidden_state_layer_ids"]))
    depth = runner.config.num_hidden_layers
    check_taps(taps, depth)
    name_layers(path, found, taps.layers, depth)
    check_arithmetic(config, QK_NORM_FIELDS)
    ids = layouts.draft_to_target_ids(path, config, tensors)
    tensors, model = layouts.without_maps(tensors), runner.model
    embedding = model.get_input_embeddings().weight
    layouts.take_copy(path, tensors, "embed_tokens.weight", embedding, "an embedding")
    if ids is None:
        matrix = model.get_output_embeddings().weight
        layouts.take_copy(path, tensors, "lm_head.weight", matrix, "an output matrix")
    head = LMHead(runner.model, device, DTYPES[dtype])
    net = DFlashModel(llama_config(config), taps, ids, head)
    layouts.load_parameters(net, path, tensors)
    return DFlashDraft(net.to(device, DTYPES[dtype]), target, found.family)
