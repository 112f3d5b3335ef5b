"""A row of a sampled set, or a prompt, as the checks see it: labels, text and messages."""

import functools
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, cast

import numpy as np

from decode.common.chat.choice import Messages
from decode.common.chat.probe import TemplateProbe
from decode.common.chat.render import ChatTemplate
from train.data.batching import label_mask
from train.data.conversations import Prompt
from train.data.sample_store import SampleRow


@dataclass(frozen=True, eq=False)
class SeenRow:
    """One row. T tokens."""

    id: str
    row: SampleRow
    chat: ChatTemplate
    """What renders it."""
    template: TemplateProbe | None
    """What that does; None if it is not known."""
    chosen: bool
    """The row is one of the sample whose text is rendered again."""

    @functools.cached_property
    def ids(self) -> list[int]:
        return np.asarray(self.row["input_ids"]).tolist()

    @functools.cached_property
    def is_image(self) -> np.ndarray:
        """[T] bool: tokens that stand for an image, which are no text."""
        mask = np.zeros(len(self.ids), dtype=bool)
        for start, end in self.row.get("image_spans", ()):
            mask[start:end] = True
        return mask

    def text_ids(self, start: int = 0, end: int | None = None) -> list[int]:
        """The tokens of `ids[start:end]` that are text."""
        return np.asarray(self.ids)[start:end][~self.is_image[start:end]].tolist()

    @functools.cached_property
    def labels(self) -> np.ndarray:
        """[T] bool: tokens that training supervises, by the code that makes the batches of training."""
        return label_mask(self.row)

    @property
    def spans(self) -> list[list[int]]:
        return self.row["loss_spans"]

    @property
    def is_window(self) -> bool:
        """A piece of plain text, which is supervised as a whole and has neither a reply nor an end."""
        return self.row["origin"] == "text" and bool(self.spans) and self.spans[0][0] <= 1

    @functools.cached_property
    def text(self) -> str:
        return decode(self.chat.tokenizer, self.ids)

    @functools.cached_property
    def messages(self) -> Messages | None:
        """The chat that the row holds; None without a template, or if the text was rendered by another one."""
        return None if self.template is None else self.template.unrender(self.text)

    @functools.cached_property
    def asked(self) -> str:
        """What the user wrote, without the template; of a window its whole text."""
        if self.messages is not None:
            return "\n".join(m["content"] for m in self.messages if m["role"] == "user")
        end = len(self.ids) if self.is_window or not self.spans else self.spans[0][0]
        return self.chat.tokenizer.decode(self.ids[:end], skip_special_tokens=True)

    def kept(self) -> "SeenRow":
        """The same row for keeping: without what was computed of it, and without the row group that it was read in."""
        own = np.array(self.row["input_ids"], dtype=np.int32)
        return replace(self, row={**self.row, "input_ids": cast(Sequence[int], own)})


def decode(tokenizer: Any, ids: list[int]) -> str:
    """The text of the ids with special tokens, and with spaces as they are."""
    return tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False)


def prompt_row(prompt: Prompt, ids: list[int]) -> SampleRow:
    return {
        "id": prompt.id,
        "source": prompt.source,
        "origin": "target",
        "input_ids": ids,
        "loss_spans": [],
        "finish_reason": "",
    }
