"""Hidden states of an encoder-decoder for rows of prompt and answer, at the positions at which a causal LM has them."""

from typing import Any

import torch
from torch import Tensor

from decode.common.errors import UserError
from decode.model.hidden_states import HiddenStateHooks, HiddenStateSpec
from decode.model.runner import logits_only_at
from decode.model.seq2seq import start_id


def compute_answer_states(
    model: Any, input_ids: Tensor, loss_mask: Tensor, taps: HiddenStateSpec
) -> Tensor:
    """Hidden states [B, T, F] of the decoder; position t knows the tokens up to t, as in a causal LM.

    Each row of input_ids [B, T] is one prompt, one answer and padding. The encoder reads the prompt; the decoder reads
    its start token in the place of the prompt's last token, then the answer. States before that are undefined.
    UserError for states of layers: heads have no encoder-decoder as target.
    """
    if taps.layers:
        raise UserError(
            "drafts that read hidden states have causal targets: set draft.family to causal"
        )
    length = loss_mask.long().argmax(1) + 1  # [B] tokens before each row's first label
    position = torch.arange(input_ids.shape[1], device=input_ids.device)
    width = int(length.max())
    start = length[:, None] - 1
    # [B, A] the places in the row of what the decoder reads; beyond the row's end its last token
    steps = position[: input_ids.shape[1] - int(length.min()) + 1]
    read = input_ids.gather(1, (start + steps).clamp_max(input_ids.shape[1] - 1))
    read[:, 0] = start_id(model)
    hooks = HiddenStateHooks(model, taps)
    try:
        with logits_only_at(model, lambda hidden: hidden[:, :0]):
            model(
                input_ids=input_ids[:, :width],
                attention_mask=(position[:width] < length[:, None]).long(),
                decoder_input_ids=read,
                use_cache=False,
            )
        states = hooks.states()
    finally:
        hooks.remove()
    at = (position - start).clamp(0, states.shape[1] - 1)
    return states.gather(1, at[..., None].expand(-1, -1, states.shape[-1]))
