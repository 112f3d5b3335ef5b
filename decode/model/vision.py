"""A vision-language model of transformers with its own K/V cache: prompts with images, then text in fixed shapes."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING, DynamicCache

from decode.common.errors import UserError, first_line
from decode.model import attention
from decode.model.compatibility import check_supported, use_grouped_experts
from decode.model.runner import ModelRunner, logits_only_at

ImageInputs = Mapping[str, Tensor]
"""What a processor makes of a prompt's images: the further arguments of the model's forward, for one row."""


def is_vision_language(config: Any) -> bool:
    """Whether models of this config read images and text, and write text with a decoder alone."""
    has_vision = "vision_config" in vars(config) and not config.is_encoder_decoder
    return has_vision and type(config) in MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING


def image_token(config: Any) -> int:
    """The id of the token that stands for a piece of an image, by the config of a vision-language model."""
    fields = vars(config)
    token: int = fields["image_token_id" if "image_token_id" in fields else "image_token_index"]
    return token


def image_arguments(model: Any, images: ImageInputs | None) -> dict[str, Tensor]:
    """What the forward or `generate` of a model of transformers takes for a prompt's `images`, on its device; nothing
    for None. The positions behind the last prompt's images, which models with M-RoPE keep, are forgotten."""
    for module in model.modules():
        if "rope_deltas" in vars(module):
            module.rope_deltas = None
    return {
        name: value.to(model.device, model.dtype if value.is_floating_point() else None)
        for name, value in ({} if images is None else images).items()
    }


class VisionRunner(ModelRunner):
    """One vision-language model, for rows of text and rows whose prompt holds images.

    Rows of text run like those of a causal LM. UserError for a model whose language model cannot be decoded with drafts
    (decode/model/compatibility.py).
    """

    takes_images = True

    def prepare_model(self) -> None:
        check_supported(self.model)
        decoder = self.model.get_decoder()
        self.own_attention: str = decoder.config._attn_implementation
        # Models with M-RoPE keep here by how much positions fall behind the tokens after a prompt's images.
        self.delta_holders = [m for m in self.model.modules() if "rope_deltas" in vars(m)]
        self.position_delta = torch.zeros(1, dtype=torch.long, device=self.model.device)
        """[B] what is added to the slots of each row to get its positions."""
        self.set_attention(attention.ATTENTION_NAME)
        use_grouped_experts(self.model)

    def set_attention(self, name: str) -> None:
        """Sets the attention of the language model; the vision part, which sees later patches, keeps its own."""
        self.model.get_decoder().set_attn_implementation(name)

    def allocate(self, rows: int, size: int) -> None:
        super().allocate(rows, size)
        if len(self.position_delta) != rows:
            self.position_delta = torch.zeros(rows, dtype=torch.long, device=self.device)

    def share_kv_cache(self, owner: ModelRunner) -> None:
        super().share_kv_cache(owner)
        assert isinstance(owner, VisionRunner)
        self.position_delta = owner.position_delta

    def positions(self) -> Tensor:
        slots = self.cache.slots
        row = slots.all_rows if slots.row is None else slots.row
        return super().positions() + self.position_delta[row][:, None]

    @torch.inference_mode()
    def prefill(
        self,
        tokens: Tensor,
        length: Tensor,
        row: Tensor | None = None,
        images: Sequence[ImageInputs | None] | None = None,
    ) -> Tensor:
        """`ModelRunner.prefill`; `images` gives each row the inputs of its images, or None for a row of text.

        A row with images is read on its own and in one piece, with the model's own attention, so that image tokens see
        each other as in `generate`. UserError for images that do not fit the row's placeholders.
        """
        row = self.cache.slots.all_rows[: len(tokens)] if row is None else row
        self.position_delta[row] = 0
        if images is None or all(one is None for one in images):
            return super().prefill(tokens, length, row)
        logits = torch.zeros(
            len(tokens), self.vocab_size, device=self.device, dtype=self.model.dtype
        )
        features: list[tuple[Tensor, Tensor]] = []
        for index, one in _groups(images, self.device):
            if one is None:
                logits[index] = super().prefill(tokens[index], length[index], row[index])
            else:
                prompt = tokens[index, : int(length[index])]
                logits[index] = self._read_images(prompt, row[index], one)
            if self.hidden_state_hooks is not None:
                features.append((index, self.features))
        if features:
            first = features[0][1]
            self.features = first.new_zeros(*tokens.shape, first.shape[-1])
            for index, states in features:
                self.features[index, : states.shape[1]] = states
        return logits

    def _read_images(self, tokens: Tensor, row: Tensor, images: ImageInputs) -> Tensor:
        """Logits [1, V] after a prompt [1, L] with images, which is read into row `row` [1]."""
        computed = DynamicCache()
        with logits_only_at(self.model, lambda hidden: hidden[:, -1:]):
            more = {"use_cache": True, self.cache_name: computed}
            logits = self.forward_with_images(tokens, images, **more)
        if self.hidden_state_hooks is not None:
            self.features = self.hidden_state_hooks.states()
        self.cache.write_rows(row, computed)
        for holder in self.delta_holders:
            self.position_delta[row] = holder.rope_deltas.flatten()
        return self.widen_logits(logits)[:, 0]

    def forward_with_images(self, tokens: Tensor, images: ImageInputs, **more: Any) -> Tensor:
        """Logits of a row [1, L] with images, with the model's own attention and positions; `more` are further
        arguments of the model's forward. UserError for images that do not fit the row's placeholders."""
        own = image_arguments(self.model, images)
        self.set_attention(self.own_attention)
        try:
            logits: Tensor = self.model(
                input_ids=tokens, attention_mask=torch.ones_like(tokens), **more, **own
            ).logits
        except Exception as error:  # whatever the code of a model raises
            raise UserError(
                f"this {self.model.config.model_type} model cannot read the prompt's images: {first_line(error)}"
            ) from error
        finally:
            self.set_attention(attention.ATTENTION_NAME)
        if any(holder.rope_deltas is None for holder in self.delta_holders):
            raise UserError(
                f"this {self.model.config.model_type} model needs mm_token_type_ids to give the image's tokens "
                "their positions: prepare the prompt with the model's own processor"
            )
        return logits


def _groups(
    images: Sequence[ImageInputs | None], device: torch.device
) -> list[tuple[Tensor, ImageInputs | None]]:
    """(indices of rows that are read together, their images): all rows of text at once, others one by one."""
    text = [i for i, one in enumerate(images) if one is None]
    groups: list[tuple[list[int], ImageInputs | None]] = [(text, None)] if text else []
    groups += [([i], one) for i, one in enumerate(images) if one is not None]
    return [(torch.tensor(index, device=device), one) for index, one in groups]
