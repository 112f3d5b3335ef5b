"""Texts and images as token ids with placeholders, and the tensors that the model's vision part reads."""

import io
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from PIL import Image
from torch import Tensor
from torch.nn.functional import pad
from transformers import AutoProcessor

from decode.common.chat.choice import Arguments, Messages, Tools, with_template
from decode.common.errors import UserError, first_line
from decode.model.loading import Target, model_folder
from decode.model.names import load_error
from decode.model.vision import image_token


@dataclass(frozen=True)
class ImagePrompt:
    """A prompt that holds images."""

    ids: list[int]
    """Its tokens, with a run of placeholders for each image."""
    inputs: dict[str, Tensor]
    """What else the model's forward takes for it."""


def load_processor(name: str, revision: str | None = None) -> Any:
    """The processor in a model's folder or on the Hub. UserError when it cannot be loaded, or has no chat template."""
    folder = model_folder(name, "target", revision)
    try:
        processor = AutoProcessor.from_pretrained(
            folder, revision=revision, trust_remote_code=False
        )
    except Exception as error:  # any of a dozen kinds, from HTTP to a package that is missing
        reason = load_error(name, "model", error)
        raise UserError(f"the processor of target {name!r} cannot be loaded: {reason}") from error
    fields = vars(processor)
    if not fields.get("image_processor") or not fields.get("chat_template"):
        raise UserError(
            f"target {name!r} has no processor with a chat template for images: leave the images out, or choose an "
            "instruction-tuned vision-language target"
        )
    return processor


def read_image(source: str | Path | bytes) -> Image.Image:
    """The picture in a file, or in its content, as RGB. UserError when it is not there or no picture."""
    named = "an image" if isinstance(source, bytes) else repr(str(source))
    if not isinstance(source, bytes) and not Path(source).is_file():
        raise UserError(f"there is no image file {named}")
    try:
        with Image.open(io.BytesIO(source) if isinstance(source, bytes) else source) as image:
            return image.convert("RGB")
    except Exception as error:  # a damaged file raises whatever its format's reader does
        raise UserError(f"{named} cannot be read as an image: {first_line(error)}") from error


def encode_image_prompt(processor: Any, text: str, paths: Sequence[str]) -> ImagePrompt:
    """One user message with the images, in their order, before `text`, up to where the model's answer begins.

    UserError for a file that is no picture, and for a message that the model's processor refuses.
    """
    images = [{"type": "image", "image": read_image(path)} for path in paths]
    message = {"role": "user", "content": [*images, {"type": "text", "text": text}]}
    return encode_chat(processor, [message])


def encode_chat(
    processor: Any,
    messages: Messages,
    tools: Tools | None = None,
    arguments: Arguments | None = None,
) -> ImagePrompt:
    """A chat whose contents are lists of texts and pictures, up to where the model's answer begins.

    UserError for a chat that the model's processor refuses.
    """
    try:
        encoded = processor.apply_chat_template(
            messages,
            add_generation_prompt=True,
            tokenize=True,
            return_dict=True,
            return_tensors="pt",
            **({"tools": tools} if tools else {}),
            **(arguments or {}),
        )
    except Exception as error:  # the template is a program that came with the model
        raise UserError(
            f"the target's processor refuses the prompt with its images: {first_line(error)}"
        ) from error
    inputs = {name: value for name, value in encoded.items() if isinstance(value, Tensor)}
    ids: list[int] = inputs.pop("input_ids")[0].tolist()
    inputs.pop("attention_mask", None)  # one row is not padded
    return ImagePrompt(ids, inputs)


class ImageReader:
    """How one vision-language target reads images in texts whose token ids are known."""

    def __init__(self, processor: Any, placeholder: int):
        """`placeholder` is the token that stands for a piece of an image (`vision.image_token`)."""
        self.processor, self.placeholder = processor, placeholder

    @classmethod
    def load(
        cls, name: str, revision: str | None, placeholder: int, template: Mapping[str, Any]
    ) -> "ImageReader":
        """That of a model in a folder or on the Hub; `template` is what `read_setting` gives. UserError as in
        `load_processor`."""
        return cls(with_template(load_processor(name, revision), template), placeholder)

    @classmethod
    def of(cls, target: Target) -> "ImageReader":
        """That of a vision-language target. UserError as in `load_processor`."""
        token = image_token(target.runner.model.config)
        return cls.load(target.name, target.revision, token, target.template)

    def inputs(self, ids: Sequence[int], images: Sequence[Image.Image]) -> dict[str, Tensor]:
        """What the model's forward takes beside `ids`, which hold the placeholders of `images` in their order.

        A processor makes the same of an image whatever the text around it is, so it is given the images alone, and what
        it says of each token is said of `ids`. UserError for ids with other placeholders.
        """
        content = [{"type": "image", "image": one} for one in images]
        alone = encode_chat(
            self.processor, [{"role": "user", "content": [*content, {"type": "text", "text": "a"}]}]
        )
        is_image = torch.tensor([[token == self.placeholder for token in ids]])
        needed, held = alone.ids.count(self.placeholder), int(is_image.sum())
        if needed != held:
            raise UserError(
                f"{len(images)} images take {needed} tokens, and the prompt has {held} for them: the processor of the "
                "target has other settings than when the prompt was made"
            )
        return {
            name: is_image.long() if name.endswith("token_type_ids") else value
            for name, value in alone.inputs.items()
        }

    def spans(self, ids: Sequence[int]) -> list[list[int]]:
        """The [start, end) of each run of placeholders."""
        is_image = (torch.tensor([*ids]) == self.placeholder).int()
        found: list[list[int]] = pad(is_image, (1, 1)).diff().nonzero().view(-1, 2).tolist()
        return found
