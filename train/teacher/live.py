"""The live target as teacher: hidden states at the taps, and final ones from which the LM head makes logits."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import Any

import torch
from torch import Tensor

from decode.common.errors import UserError
from decode.engine.image_prompts import ImageReader
from decode.model import attention
from decode.model.hidden_states import HiddenStateHooks, HiddenStateSpec, LMHead
from decode.model.layer_stack import decoder_config
from decode.model.linear import begin_request
from decode.model.loading import Target
from decode.model.recurrent import has_recurrent_layers
from decode.model.runner import logits_only_at
from decode.model.seq2seq import start_id
from decode.model.vision import VisionRunner
from eval.tasks.images import PromptImages
from train.data.batching import Batch
from train.losses import chunked_sums


def compute_hidden_states(model: Any, batch: Batch, taps: HiddenStateSpec) -> Tensor:
    """Hidden states [B, T, F] of `model` at `taps`, computed for each row on its own; no logits are computed.

    UserError for packed rows with gradient checkpointing other than `attention.recompute_layers`: recomputation in
    backward would let rows attend to each other; and for packed rows of a model with recurrent layers, whose states
    would go from one row to the next.
    """
    if batch.documents is not None and attention.recomputes_without_mask(model):
        raise UserError("gradient checkpointing needs unpacked rows: set loop.pack to false")
    if batch.documents is not None and has_recurrent_layers(decoder_config(model)):
        raise UserError(
            f"this {model.config.model_type} model has recurrent layers, which read packed rows as one text: set "
            "loop.pack to false"
        )
    if model.config.is_encoder_decoder:
        return compute_answer_states(model, batch.input_ids, batch.loss_mask, taps)
    with attention.packed_documents(batch.documents):
        return run_for_states(model, batch.input_ids, batch.positions(), taps)


def run_for_states(
    model: Any, input_ids: Tensor, position_ids: Tensor, taps: HiddenStateSpec
) -> Tensor:
    """Hidden states [B, T, F] of `model` at `taps` under the attention mask in force; no logits are computed."""
    run = partial(model, input_ids=input_ids, position_ids=position_ids, use_cache=False)
    return states_of_pass(model, taps, run)


def states_of_pass(model: Any, taps: HiddenStateSpec, run: Callable[[], Any]) -> Tensor:
    """Hidden states [B, T, F] of `model` at `taps` while `run` calls it; no logits are computed."""
    hooks = HiddenStateHooks(model, taps)
    try:
        with logits_only_at(model, lambda hidden: hidden[:, :0]):
            run()
        return hooks.states()
    finally:
        hooks.remove()


@dataclass(frozen=True)
class TeacherOutput:
    """A teacher's output for one batch. The teacher's `head` turns rows of `head_inputs` into logits when needed."""

    features: Tensor  # [B, T, F] hidden states that the draft reads
    head_inputs: Tensor  # [B, T, P] defined at supervised positions


class LiveTeacher:
    """The frozen target, run on every batch."""

    def __init__(self, target: Target, taps: HiddenStateSpec):
        self.target, self.model = target, target.runner.model
        self.taps = HiddenStateSpec(taps.layers, final=True)
        self.lm_head = LMHead(self.model)
        self.hidden: int = self.model.get_output_embeddings().in_features

    def head(self, rows: Tensor) -> Tensor:
        """Logits [N, V] of rows [N, P] of `TeacherOutput.head_inputs`, here hidden states after the final norm.

        They carry no gradient and may not be saved for one. On a CPU they come from packed weights.
        """
        # Autocast, under which a draft may train, would round the target's own logits to bf16.
        with chunked_sums.without_autocast(rows), torch.inference_mode():
            return self.lm_head(rows)

    def get_output(self, batch: Batch) -> TeacherOutput:
        """Hidden states of the rows of a batch; values at padding are undefined.

        The target runs in inference mode, in which its linear layers multiply by packed weights on a CPU.
        """
        begin_request()  # Medusa-2 and LayerSkip train in the target
        with torch.inference_mode():
            if batch.images:
                states = self._states_with_images(batch)
            else:
                states = compute_hidden_states(self.model, batch, self.taps)
        states = states.clone()  # autograd refuses to save tensors of inference mode
        final = states[..., -self.hidden :]
        return TeacherOutput(states[..., : -self.hidden] if self.taps.layers else final, final)

    @cached_property
    def images(self) -> ImageReader:
        """How the target reads images. UserError if its processor cannot be loaded."""
        return ImageReader.of(self.target)

    def _states_with_images(self, batch: Batch) -> Tensor:
        """`compute_hidden_states` of a batch in which some rows hold images: each of these is read alone, as in
        decoding, so that the states of its images are the target's own."""
        runner = self.target.runner
        assert isinstance(runner, VisionRunner)
        shape = batch.input_ids.shape
        width = self.hidden * (len(self.taps.layers) + 1)
        if len(batch.images) < len(batch.starts):
            # A placeholder may be no token of the target.
            is_image = batch.input_ids == self.images.placeholder
            text = replace(batch, input_ids=batch.input_ids.masked_fill(is_image, 0))
            states = compute_hidden_states(self.model, text, self.taps)
        else:
            states = torch.zeros(*shape, width, dtype=self.model.dtype, device=self.model.device)
        for number, files in batch.images.items():
            tokens, (line, column) = batch.row_tokens(number), batch.starts[number]
            inputs = PromptImages(self.images, tokens.tolist(), files)
            run = partial(runner.forward_with_images, tokens[None], inputs, use_cache=False)
            states[line, column : column + len(tokens)] = states_of_pass(self.model, self.taps, run)
        return states


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
    run = partial(
        model,
        input_ids=input_ids[:, :width],
        attention_mask=(position[:width] < length[:, None]).long(),
        decoder_input_ids=read,
        use_cache=False,
    )
    states = states_of_pass(model, taps, run)
    at = (position - start).clamp(0, states.shape[1] - 1)
    return states.gather(1, at[..., None].expand(-1, -1, states.shape[-1]))
