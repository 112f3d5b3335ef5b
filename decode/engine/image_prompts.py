"""A text and image files as token ids with placeholders, and the tensors that the model's vision part reads."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from PIL import Image
from torch import Tensor
from transformers import AutoProcessor

from decode.common.errors import UserError, first_line
from decode.model.loading import model_folder
from decode.model.names import load_error


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


def read_image(path: str) -> Image.Image:
    """The picture in a file, as RGB. UserError when it is not there or no picture."""
    if not Path(path).is_file():
        raise UserError(f"there is no image file {path!r}")
    try:
        with Image.open(path) as image:
            return image.convert("RGB")
    except Exception as error:  # a damaged file raises whatever its format's reader does
        raise UserError(f"{path!r} cannot be read as an image: {first_line(error)}") from error


def encode_image_prompt(processor: Any, text: str, paths: Sequence[str]) -> ImagePrompt:
    """One user message with the images, in their order, before `text`, up to where the model's answer begins.

    UserError for a file that is no picture, and for a message that the model's processor refuses.
    """
    images = [{"type": "image", "image": read_image(path)} for path in paths]
    message = {"role": "user", "content": [*images, {"type": "text", "text": text}]}
    try:
        encoded = processor.apply_chat_template(
            [message],
            add_generation_prompt=True,
            tokenize=True,
            return_dict=True,
            return_tensors="pt",
        )
    except Exception as error:  # the template is a program that came with the model
        raise UserError(
            f"the target's processor refuses the prompt with its images: {first_line(error)}"
        ) from error
    inputs = {name: value for name, value in encoded.items() if isinstance(value, Tensor)}
    ids: list[int] = inputs.pop("input_ids")[0].tolist()
    inputs.pop("attention_mask", None)  # one row is not padded
    return ImagePrompt(ids, inputs)
