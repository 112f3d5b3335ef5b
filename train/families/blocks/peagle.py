"""P-EAGLE in training: all slots of a block run in one pass over the target's states and a trained mask state."""

from collections.abc import Callable

import torch
from torch import Tensor, nn

from decode.checkpoints import eagle_layouts
from decode.drafts.base import Draft
from decode.drafts.blocks.peagle import PEagleDraft
from decode.drafts.eagle_model import Eagle3Model
from decode.model import attention
from decode.model.masking.blocks import recomputed, run_now
from train.data import vocab_mapping
from train.data.batching import Batch
from train.families.base import FamilyContext, TrainableDraft
from train.families.blocks.block_loss import BlockLoss
from train.families.blocks.mask_token import choose_mask_token
from train.families.blocks.slots import BlockMask, BlockSlots, Retention, draw_depths
from train.families.heads.eagle import Eagle3, TrainableEagle
from train.families.heads.eagle_init import init_eagle3, vocabulary_facts
from train.teacher.live import TeacherOutput


class PEagle(Eagle3):
    """Trains a P-EAGLE head: EAGLE-3's network, which reads masks in place of its own states."""

    settings = frozenset(
        {"init", "vocab", "taps", "width", "norms", "block", "retention", "min_retention"}
    ) | {"mask_token", "activation_checkpointing"}
    description = "a P-EAGLE head"
    hub_tag = "p-eagle"

    def build(self, context: FamilyContext) -> TrainableDraft:
        s, target = context.config.draft, context.target
        counts = vocab_mapping.count_tokens(context.rows, target.runner.vocab_size)
        size = target.runner.embedding_rows
        mask = None if s.init else choose_mask_token(s.mask_token, None, size, context.rows)
        net, config = init_eagle3(context, counts, mask)
        draft = TrainablePEagle(context, "peagle", net, config, s.block)
        draft.metadata = {"norms": eagle_layouts.saved_norms(config)} | vocabulary_facts(
            net.ids, counts
        )
        return draft


class TrainablePEagle(TrainableEagle):
    """A P-EAGLE head in training; `config` is its config.json."""

    def make_trainer(
        self,
        context: FamilyContext,
        head: Callable[[Tensor], Tensor],
        embedding: Tensor,
        steps: int,
    ) -> nn.Module:
        return PEagleTrainer(self.net, head, embedding, context)

    def to_draft(self) -> Draft:
        return PEagleDraft(self.net, self.target, self.name)


class PEagleTrainer(nn.Module):
    """The loss of blocks that begin at slot t, where f_t and x_{t+1} are known: depth d predicts x_{t+2+d}."""

    def __init__(
        self,
        net: Eagle3Model,
        head: Callable[[Tensor], Tensor],
        embedding: Tensor,
        context: FamilyContext,
    ):
        super().__init__()
        s = context.config.draft
        self.net, self.block = net, s.block
        self.run = recomputed if s.activation_checkpointing else run_now
        self.embedding = embedding  # no buffer: it is the target's, and not to be synchronised
        self.retention = Retention(s.retention, s.min_retention)
        self.loss = BlockLoss(
            context.criterion(),
            context.config.weights,
            head,
            lambda states, previous: net.logits(states),
            net.ids,
            s.block,
            len(embedding),
        )

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
