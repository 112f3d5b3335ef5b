"""The images of prompts: found in the rows of sources and tasks, named by their content, and stored once beside the
samples of a set."""

import base64
import binascii
import hashlib
import io
from collections import deque
from collections.abc import Callable, Collection, ItemsView, Iterator, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

from PIL import Image
from torch import Tensor

from decode.common import damage
from decode.common.chat.choice import Arguments, Messages, Tools
from decode.common.errors import UserError
from decode.common.files import write_atomically
from decode.engine.image_prompts import ImageReader, encode_chat, read_image
from eval.tasks.row_forms import Row

FOLDER = "images"
"""In the folder of a set: each image as it was, named by the beginning of its SHA-256 and by its format."""
DIGITS = 32
MARK = "<image>"
"""In the text of a message: where an image of the row's column stands."""


class FoundImages:
    """The images of prompts that were read, those that stand in rows held in memory until they are stored."""

    def __init__(self, load_reader: Callable[[], ImageReader]) -> None:
        """`load_reader` is called once, when the first prompt with images is encoded."""
        self.load_reader = load_reader
        self.sources: dict[str, Path | bytes] = {}
        """{name: where it is, or its content}."""

    @cached_property
    def reader(self) -> ImageReader:
        return self.load_reader()

    def place(
        self, content: str | Messages, row: Row, where: str, path: Path | None
    ) -> str | Messages:
        """`content` with the names of its images in its parts; as it is if the row has none. A question without places
        for the images of the row's column gets them before its first text.

        Paths are relative to the folder `path` or that of the file `path`; None: of a data set of the Hub, whose images
        are in its rows. UserError for an image that cannot be read, and for other places than images.
        """
        folder = path if path is None or path.is_dir() else path.parent
        messages = content if isinstance(content, list) else [{"role": "user", "content": content}]
        waiting = deque(row.images)
        found = [{**m, "content": _parts(m.get("content"), bool(waiting))} for m in messages]
        images = [part for m in found for part in m["content"] if part["type"] == "image"]
        if not images and not waiting:
            return content
        if not images:
            asked = next((m for m in found if m["role"] == "user"), found[0])
            images = [{"type": "image", "image": None} for _ in waiting]
            asked["content"] = [*images, *asked["content"]]
        open_places = sum(part["image"] is None for part in images)
        if open_places != len(waiting):
            raise UserError(
                f"{where}: its column of images holds {len(waiting)}, and its messages have places for {open_places}: "
                "give as many"
            )
        for part in images:
            source = waiting.popleft() if part["image"] is None else part["image"]
            part["image"] = self._add(source, where, folder)
        return found

    def _add(self, source: Any, where: str, folder: Path | None) -> str:
        """The name of an image."""
        found: Path | bytes = b""
        try:
            found = _locate(source, folder)
            content = found.read_bytes() if isinstance(found, Path) else found
            with Image.open(io.BytesIO(content)) as image:
                kind = str(image.format).lower()
        except UserError as error:
            raise UserError(f"{where}: {error}") from error
        except Exception as error:  # a damaged file raises whatever its format's reader does
            named = str(found) if isinstance(found, Path) else "an image"
            raise UserError(f"{where}: {named} cannot be read as a picture") from error
        name = f"{hashlib.sha256(content).hexdigest()[:DIGITS]}.{kind}"
        self.sources.setdefault(name, found)
        return name

    def open(self, name: str) -> Image.Image:
        """An image, as RGB. UserError for one that cannot be read."""
        return read_image(self.sources[name])

    def encode(
        self, messages: Messages, tools: Tools | None, arguments: Arguments | None
    ) -> list[int]:
        """The token ids of a chat whose images are named, up to where the answer begins. UserError for an image that
        cannot be read, and as in `encode_chat`."""
        chat = with_pictures(messages, map(self.open, names_in(messages)))
        return encode_chat(self.reader.processor, chat, tools, arguments).ids

    def inputs(self, ids: Sequence[int], messages: Messages) -> "PromptImages":
        """What the target's forward takes beside the `ids` of such a chat."""
        return PromptImages(self.reader, ids, names_in(messages), self.open)

    def store(self, folder: Path, names: Collection[str]) -> None:
        """Writes these images into the set `folder`, but those that are there."""
        for name in sorted(names):
            path, source = folder / FOLDER / name, self.sources[name]
            if not path.is_file():
                write_atomically(path, source.read_bytes() if isinstance(source, Path) else source)
            self.sources[name] = path


def names_in(messages: Messages) -> list[str]:
    """The names of the images in a chat, in their order."""
    contents = (m["content"] for m in messages if isinstance(m.get("content"), list))
    return [part["image"] for content in contents for part in content if part["type"] == "image"]


def with_pictures(messages: Messages, pictures: Iterator[Image.Image]) -> Messages:
    """The chat with `pictures` in place of the names, in their order, all contents being lists of parts."""
    return [
        {**m, "content": [
            part | {"image": next(pictures)} if part["type"] == "image" else part
            for part in _parts(m.get("content"), False)
        ]}
        for m in messages
    ]  # fmt: skip


def read_stored(path: str) -> Image.Image:
    """A stored image, as RGB. UserError for one that is missing or was altered."""
    file = Path(path)
    if not file.is_file() or damage.sha256(file)[:DIGITS] != file.stem:
        state = "was altered: delete it" if file.is_file() else "is missing"
        raise UserError(f"image {path} {state}, and run the train/sample.py command again")
    return read_image(path)


class PromptImages(Mapping[str, Tensor]):
    """The inputs of a prompt's images, made when they are read: many prompts wait, and few are being read."""

    def __init__(
        self,
        reader: ImageReader,
        ids: Sequence[int],
        names: Sequence[str],
        open_image: Callable[[str], Image.Image] = read_stored,
    ):
        """`names` are paths of stored images, or what `open_image` opens."""
        self.reader, self.ids, self.names, self.open_image = reader, ids, names, open_image

    def read(self) -> dict[str, Tensor]:
        return self.reader.inputs(self.ids, [self.open_image(name) for name in self.names])

    def items(self) -> ItemsView[str, Tensor]:
        return self.read().items()

    def __getitem__(self, name: str) -> Tensor:
        return self.read()[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self.read())

    def __len__(self) -> int:
        return len(self.read())


def _parts(content: Any, has_marks: bool) -> list[dict[str, Any]]:
    """A content as a list of new parts; where it `has_marks`, each MARK in a text is the place of an image."""
    if isinstance(content, list):
        return [dict(part) for part in content]
    texts = content.split(MARK) if has_marks and content else [content or ""]
    parts: list[dict[str, Any]] = []
    for number, text in enumerate(texts):
        parts += [{"type": "image", "image": None}] if number else []
        said = text.strip("\n") if len(texts) > 1 else text
        parts += [{"type": "text", "text": said}] if said else []
    return parts


def _locate(source: Any, folder: Path | None) -> Path | bytes:
    """The file or the content of an image, as a row gives it. UserError for an address, and for what is none."""
    if isinstance(source, dict):
        source = source.get("bytes") or source.get("path")
    if isinstance(source, Image.Image):
        stored = io.BytesIO()
        source.convert("RGB").save(stored, "PNG")
        return stored.getvalue()
    if isinstance(source, bytes):
        return source
    if not isinstance(source, str):
        raise UserError(f"an image is a path, a file:// or data: address, not {source!r:.40}")
    address = urlsplit(source)
    if address.scheme in ("http", "https"):
        raise UserError(
            f"image {source:.80} is on the network, and nothing is fetched from there: download it first and name the "
            "file"
        )
    if address.scheme == "data":
        try:
            return base64.b64decode(source.partition(",")[2], validate=True)
        except binascii.Error as error:
            raise UserError(f"an image is no base64 ({error})") from error
    if folder is None:
        raise UserError(
            f"image {source:.80} is a path, and images of a data set of the Hub are read from its rows alone: download "
            "the set and name its folder (kind file)"
        )
    path = folder / (unquote(address.path) if address.scheme == "file" else source)
    if not path.is_file():
        raise UserError(f"there is no image file {str(path)!r}")
    return path
