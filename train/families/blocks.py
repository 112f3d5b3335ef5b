"""PARD and P-EAGLE in training: a small language model (An et al., arXiv 2504.18583) or EAGLE-3's network (arXiv
2602.01469) learns to read mask tokens."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from decode.checkpoints import eagle_layouts
from decode.common.errors import UserError
from decode.drafts.base import Draft
from decode.drafts.blocks import MASK_FIELD, PardDraft, PEagleDraft
from decode.drafts.eagle_model import Eagle3Model
from decode.model import attention
from decode.model.hidden_states import HiddenStateSpec, LogitTransform
from decode.model.layer_stack import decoder_config
from decode.model.masks import recomputed, run_now
from decode.model.recurrent import has_recurrent_layers
from train.data import vocab_mapping
from train.data.batching import Batch
from train.families.base import FamilyContext, TrainableDraft, TrainableHead, vocabulary_facts
from train.families.block_loss import BlockLoss
from train.families.causal import TrainableCausal, output_projection
from train.families.eagle import init_eagle3
from train.families.settings.blocks import PardSettings, PEagleSettings
from train.families.slots import BlockMask, BlockSlots, Retention, choose_mask_token, draw_depths
from train.teacher.live import TeacherOutput, run_for_states


class TrainablePard(TrainableCausal):
    """A PARD draft in training; its config.json names the mask token."""

    def make_trainer(
        self, context: FamilyContext, head: Callable[[Tensor], Tensor], ids: Tensor | None
    ) -> nn.Module:
        s = self.settings
        assert isinstance(s, PardSettings)
        if has_recurrent_layers(decoder_config(self.lm)):
            raise UserError(
                "a PARD draft reads masks that later passes overwrite, which recurrent layers cannot do: train a "
                "draft.init with attention alone, or draft.family causal"
            )
        saved = self.lm.config.to_dict().get(MASK_FIELD)
        size = self.lm.get_input_embeddings().weight.shape[0]
        self.mask_token = choose_mask_token(s.mask_token, saved, size, context.rows)
        setattr(self.lm.config, MASK_FIELD, self.mask_token)
        self.lm.config.spd_type = "pard"
        return PardTrainer(self.lm, self.mask_token, context, s, head, ids)

    def to_draft(self) -> Draft:
        return PardDraft(self.language_model(), self.mask_token)


class PardTrainer(nn.Module):
    """The loss of the blocks of a batch: one pass over the text and the masks of all its blocks."""

    def __init__(
        self,
        lm: Any,
        mask_token: int,
        context: FamilyContext,
        s: PardSettings,
        head: Callable[[Tensor], Tensor],
        ids: Tensor | None,
    ):
        super().__init__()
        self.lm, self.mask_token, self.block = lm, mask_token, s.block
        self.retention = Retention(s.retention, s.min_retention)
        self.finish = LogitTransform(lm)
        self.ids: Tensor | None
        self.register_buffer("ids", ids, persistent=False)
        self.context, self.head = context, head

    def forward(self, batch: Batch, output: TeacherOutput) -> dict[str, Tensor]:
        depths = draw_depths(batch, self.block, self.retention)
        slots = BlockSlots(batch, depths, self.block)
        masks = torch.full_like(slots.anchor, self.mask_token)
        with attention.masked_by(BlockMask(slots)):
            tokens = torch.cat([batch.input_ids, masks], 1)
            states = run_for_states(self.lm, tokens, slots.positions, HiddenStateSpec(final=True))
        line, column, anchor, depth = slots.supervised
        row = anchor + depth
        block = line * depths.shape[1] + anchor
        ids = batch.input_ids
        teacher, label, previous = output.head_inputs[line, row], ids[line, row + 1], ids[line, row]
        vocab = self.lm.get_output_embeddings().weight.shape[0]
        project, selected = output_projection(self.lm, self.ids)

        def logits(states: Tensor, previous: Tensor, *rows: Tensor) -> Tensor:
            return self.finish(project(states, *rows))

        loss = BlockLoss(
            self.context, self.head, logits, self.ids, self.block, vocab, shared=selected
        )
        return loss(teacher, states[line, column], label, block, depth, previous)


def build_peagle(context: FamilyContext, s: PEagleSettings) -> TrainableDraft:
    target = context.target
    counts = vocab_mapping.count_tokens(context.rows, target.runner.vocab_size)
    size = target.runner.embedding_rows
    mask = None if s.init else choose_mask_token(s.mask_token, None, size, context.rows)
    net, config = init_eagle3(context, s, counts, mask)
    draft = TrainableHead(context, s, net, config, PEagleTrainer, PEagleDraft)
    draft.metadata = {"norms": eagle_layouts.saved_norms(config)} | vocabulary_facts(
        net.ids, counts
    )
    return draft


class PEagleTrainer(nn.Module):
    """The loss of blocks that begin at slot t, where f_t and x_{t+1} are known: depth d predicts x_{t+2+d}."""

    def __init__(
        self,
        net: Eagle3Model,
        head: Callable[[Tensor], Tensor],
        embedding: Tensor,
        context: FamilyContext,
        s: PEagleSettings,
    ):
        super().__init__()
        self.net, self.block = net, s.block
        self.run = recomputed if s.activation_checkpointing else run_now
        self.embedding = embedding  # no buffer: it is the target's, and not to be synchronised
        self.retention = Retention(s.retention, s.min_retention)
        project = lambda states, previous: net.logits(states)  # noqa: E731
        self.loss = BlockLoss(context, head, project, net.ids, s.block, len(embedding))

    def forward(self, batch: Batch, output: TeacherOutput) -> dict[str, Tensor]:
        net, ids = self.net, batch.input_ids
        depths = draw_depths(batch, self.block, self.retention, skip=1)
        slots = BlockSlots(batch, depths, self.block)
        dtype = net.fc.weight.dtype
        masks = net.mask_hidden.expand(*slots.anchor.shape, -1)
        state = net.init_state(torch.cat([output.features.to(dtype), masks.to(dtype)], 1))
        tokens = torch.cat([ids.roll(-1, 1), torch.full_like(slots.anchor, net.mask_token or 0)], 1)
        embeds = net.embed(tokens, self.embedding).to(dtype)

        mask = BlockMask(slots)

        def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            with attention.masked_by(mask):
                return attention.attention_forward(net, q, k, v, None)[0]

        states = self.run(net.step, state, embeds, slots.positions, attend)
        line, column, slot, depth = slots.supervised
        label = slot + depth + 2
        return self.loss(
            output.head_inputs[line, label - 1],
            states[line, column],
            ids[line, label],
            line * ids.shape[1] + slot,
            depth,
            ids[line, label - 1],
        )
