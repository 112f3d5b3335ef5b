"""DFlash and DSpark in training: blocks at drawn anchors, over the target's states as context."""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from decode.common.errors import UserError
from decode.drafts import blocks
from decode.drafts.blocks import DFlashDraft
from decode.drafts.dflash_model import DFlashModel
from decode.drafts.eagle_model import llama_config
from decode.model.attention import SETTINGS
from decode.model.hidden_states import HiddenStateSpec, LMHead
from decode.model.masks import (
    BLOCK,
    SlotMask,
    add_own_keys,
    attend_flex,
    block_mask,
    key_index,
    recomputed,
    run_now,
    take_keys,
)
from train.data import vocab_mapping
from train.data.batching import Batch
from train.families.base import (
    Config,
    FamilyContext,
    TrainableDraft,
    TrainableHead,
    check_trained_layers,
    check_widths,
    load_saved_config,
    random_init,
    vocabulary_facts,
)
from train.families.block_loss import BlockLoss
from train.families.eagle import hidden_state_rms, valid_slot_indices
from train.families.settings.base import DEFAULT_VOCAB, vocab_size
from train.families.settings.blocks import DFlashSettings
from train.families.slots import Retention, choose_mask_token, draw_depths
from train.teacher.live import TeacherOutput


def build_dflash(context: FamilyContext, s: DFlashSettings) -> TrainableDraft:
    """A DFlash or DSpark head in training."""
    counts = vocab_mapping.count_tokens(context.rows, context.target.runner.vocab_size)
    net, config = init_dflash(context, s, counts)
    draft = TrainableHead(context, s, net, config, DFlashTrainer, DFlashDraft)
    draft.metadata = vocabulary_facts(net.ids, counts)
    return draft


class DFlashTrainer(nn.Module):
    """The loss of blocks at drawn anchors. All blocks of a batch run in one pass and do not see each other.

    A block starts from slot t, where f_t and the anchor x_{t+1} are known, as EAGLE does: depth d predicts x_{t+2+d}.
    """

    def __init__(
        self,
        net: DFlashModel,
        head: Callable[[Tensor], Tensor],
        embedding: Tensor,
        context: FamilyContext,
        s: DFlashSettings,
    ):
        super().__init__()
        self.net = net
        self.embedding = embedding  # no buffer: it is the target's, and not to be synchronised
        self.run = recomputed if s.activation_checkpointing else run_now
        self.retention = Retention(1.0, 1.0, anchors=s.anchors)
        confidence = None if net.confidence_head is None else net.confidence
        vocab = len(embedding)
        self.loss = BlockLoss(context, head, net.logits, net.ids, net.max_tokens, vocab, confidence)

    def forward(self, batch: Batch, output: TeacherOutput) -> dict[str, Tensor]:
        net, ids = self.net, batch.input_ids
        size, first, dtype = net.block_size, net.first, net.fc.weight.dtype
        depths = draw_depths(batch, net.max_tokens, self.retention, skip=1)
        slots = valid_slot_indices(depths > 0)  # [B, M] the slots t with a block
        row = torch.arange(len(ids), device=ids.device)[:, None]
        positions = batch.positions().expand_as(ids)
        context = net.context(output.features.to(dtype), positions)
        numbers = batch.documents
        mask = SlotMask(slots, ids.shape[1], numbers)
        each = SlotMask(slots.repeat_interleave(size, 1), ids.shape[1], numbers)  # of all queries
        anchor = ids[row, (slots + 1).clamp_max(ids.shape[1] - 1)]
        tokens = net.block_tokens(anchor, size).flatten(1)  # [B, M * size]
        offset = torch.arange(size, device=ids.device)
        place = (positions[row, slots][..., None] + 1 + offset).flatten(1)

        def attend(number: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            if SETTINGS.method == "flex":
                return flex_block_attention(q, k, v, *context[number], each, size)
            return block_attention(q, k, v, *context[number], mask, size)

        states = net(F.embedding(tokens, self.embedding).to(dtype), place, attend, self.run)
        states = states.unflatten(1, (-1, size))[:, :, first:]  # [B, M, K, h]
        trained = depths[row, slots][..., None] > torch.arange(net.max_tokens, device=ids.device)
        line, block, depth = trained.nonzero(as_tuple=True)
        slot = slots[line, block]
        label = slot + depth + 2
        return self.loss(
            output.head_inputs[line, label - 1],
            states[line, block, depth],
            ids[line, label],
            line * slots.shape[1] + block,
            depth,
            ids[line, label - 1],
        )


def block_attention(
    q: Tensor, k: Tensor, v: Tensor, keys: Tensor, values: Tensor, mask: SlotMask, size: int
) -> Tensor:
    """[B, M * size, heads, D]: each of M blocks attends to the context that its slot of `mask` sees, and to itself.

    q [B, heads, M * size, D] and k, v [B, Hkv, M * size, D] of the blocks; keys, values [B, Hkv, T, D] of the context.
    From BLOCK queries on, a few blocks at a time are computed, and again in backward (decode/model/masks.py).
    """
    q = q.unflatten(1, (k.shape[1], -1)).unflatten(3, (-1, size)) * q.shape[-1] ** -0.5
    k, v = k.unflatten(2, (-1, size)), v.unflatten(2, (-1, size))  # [B, Hkv, M, size, D]
    count = q.shape[3]
    whole = SETTINGS.method == "dense" or (SETTINGS.method == "auto" and count * size <= BLOCK)
    step = count if whole else max(1, BLOCK // size)
    pieces = []
    for start in range(0, count, step):
        some = slice(start, start + step)
        ranges = mask.key_ranges(some.start, some.stop, None)
        inputs = q[:, :, :, some], k[:, :, some], v[:, :, some], keys, values, mask, start, ranges
        pieces.append(
            run_now(_some_blocks, *inputs) if whole else recomputed(_some_blocks, *inputs)
        )
    return torch.cat(pieces, 3).flatten(3, 4).flatten(1, 2).transpose(1, 2)


def _some_blocks(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    keys: Tensor,
    values: Tensor,
    mask: SlotMask,
    start: int,
    ranges: list[tuple[int, int]],
) -> Tensor:
    """[B, Hkv, G, m, size, D] of the m blocks from `start` on, with q of that shape, scaled."""
    keys, values = take_keys(keys, ranges), take_keys(values, ranges)
    blocks = torch.arange(start, start + q.shape[3], device=q.device)
    visible = mask.at(blocks, key_index(ranges, q.device), None)  # [B, m, t]
    far = torch.einsum("bkgmsd,bktd->bkgmst", q, keys)
    far = far.masked_fill(~visible[:, None, None, :, None], float("-inf"))
    near = torch.einsum("bkgmsd,bkmud->bkgmsu", q, k)
    weights = torch.cat([far, near], -1).softmax(-1, dtype=torch.float32).to(v.dtype)
    out = torch.einsum("bkgmst,bktd->bkgmsd", weights[..., : keys.shape[2]], values)
    return out + torch.einsum("bkgmsu,bkmud->bkgmsd", weights[..., keys.shape[2] :], v)


def flex_block_attention(
    q: Tensor, k: Tensor, v: Tensor, keys: Tensor, values: Tensor, mask: SlotMask, size: int
) -> Tensor:
    """`block_attention` with the context through flex_attention; the M * size queries are the slots of `mask`."""
    out, lse = attend_flex(q, keys, values, block_mask(mask, None), None)
    groups = q.shape[1] // k.shape[1]
    # A key head for every query head.
    k, v = (x.repeat_interleave(groups, 1) for x in (k, v))
    q, k, v = (x.unflatten(2, (-1, size)) for x in (q, k, v))
    scores = torch.einsum("bhmsd,bhmud->bhmsu", q, k).flatten(2, 3) * q.shape[-1] ** -0.5
    out, weights = add_own_keys(out, lse, scores)
    near = torch.einsum("bhmsu,bhmud->bhmsd", weights.unflatten(2, (-1, size)), v)
    return (out + near.flatten(2, 3)).transpose(1, 2)


def default_taps(layers: int) -> tuple[int, ...]:
    """The layers of a target with `layers` whose input states DFlash's authors read: five, or fewer of a small target.

    UserError for a target with fewer than four.
    """
    if layers < 4:
        raise UserError(f"a target of {layers} layers has no default taps: name some in draft.taps")
    return tuple(sorted({round(1 + i * (layers - 4) / 4) + 1 for i in range(5)}))


def init_dflash(
    context: FamilyContext, s: DFlashSettings, counts: Tensor
) -> tuple[DFlashModel, Config]:
    """(net, its config.json). A new one drafts the most frequent tokens of `counts`, with the target's LM head rows."""
    target, device, vocab = context.target, context.device, context.target.runner.vocab_size
    check_widths(target)
    if s.init:
        config = load_saved_config(s.init, s.family)
        s.continued(config, target.runner.config.num_hidden_layers)
        check_trained_layers(s.init, config, [])
        return blocks.load_dflash(s.init, target, device, "float32").net, config
    layers = tuple(s.taps) or default_taps(target.runner.config.num_hidden_layers)
    ids = vocab_mapping.build(counts, vocab_size(s.vocab, vocab, DEFAULT_VOCAB), sorted(target.eos))
    size = vocab if ids is None else len(ids)
    mask = choose_mask_token(s.mask_token, None, target.runner.embedding_rows, context.rows)
    config = s.new_config(target.runner.config, vocab, size, layers, mask)
    taps = HiddenStateSpec(layers)
    net = random_init(DFlashModel(llama_config(config), taps, ids, LMHead(target.runner.model)))
    start = target.runner.model.get_output_embeddings().weight.detach().cpu()
    with torch.no_grad():
        net.fc.weight /= hidden_state_rms(context, taps)
        if net.lm_head is not None:
            net.lm_head.weight.copy_(start[ids])
        if net.markov_head is not None:  # the correction starts at nothing
            nn.init.zeros_(net.markov_head.markov_w2.weight)
    return net.to(device), config
