"""What of a result is published: its fields say what a text in them may hold.

`name: Name`, `draft: Place | None`, `counts: dict[Word, int]`: paths and checksums are shortened, secrets refused, and
`Private` fields left out. A number cannot hold a key or a path. A text can, so one whose field has no such kind is a
TypeError: a new field would leak silently.
"""

import hashlib
import math
import re
from collections.abc import Callable, Collection
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, TypeVar, get_args

from decode.common import typed_json
from decode.common.errors import UserError
from decode.common.files import BUNDLED, ROOT
from decode.common.secret_patterns import find_secret
from decode.common.typed_json import WrongTypeError, fields_of, shape_of, to_json

T = TypeVar("T")
Known = Collection[str]
"""Commits and checksums that are published in full. Twelve digits of others are enough to find them."""
WITHHELD = "not published"
PART = r"\w[\w.@+-]*"
OWN_FOLDERS = (*BUNDLED, "outputs")
OWN_PATH = rf"(?:{'|'.join(OWN_FOLDERS)})(?:/{PART}){{1,5}}"
OPEN_NAME = rf"{PART}(?:/{PART})?|{PART}/{PART}/{PART}\.gguf|{OWN_PATH}|"
"""A Hub name, or a path that says nothing of a machine: in the project's own folders, or of two parts at most."""
OUTSIDE = rf"[/~.]|[A-Za-z][\w.+-]*:[/\\]|{PART}/"
SNAPSHOT = re.compile(
    r"(?:^|[/\\])(?:models|datasets)--([^/\\]+)[/\\]snapshots[/\\]([\w.-]+)((?:[/\\][\w.@+-]+)*)[/\\]*$"
)
SHORT_NAME = r"[\w.@+(][\w .,@()+/#&®™−'-]{0,79}"
TREE = r"(?:static )?tree of \d{1,5}(?:, (?:width|depth) \d{1,4}|, K = \d{1,4}){0,2}"


@dataclass(frozen=True)
class Kind:
    """What a text may hold. `publish` gives what of it is published, or raises WrongTypeError."""

    publish: Callable[[Any, Known], Any]


def checked(fits: Callable[[Any], object], what: str) -> Kind:
    def publish(value: Any, known: Known) -> Any:
        if not fits(value):
            raise WrongTypeError(what)
        return value

    return Kind(publish)


def matched(pattern: str, what: str) -> Kind:
    """A text of the whole pattern."""
    return checked(lambda value: isinstance(value, str) and re.fullmatch(pattern, value), what)


NAME = matched(SHORT_NAME, "a name of at most 80 letters, digits and spaces")
WORD = matched(r"[a-z][a-z0-9_-]{0,31}", "a word of small letters")
HASH = matched(r"[0-9a-f]{4,64}(?:\+dirty)?", "a commit or checksum")
VERSION = matched(r"\d{1,4}(?:[.+-]?[a-z0-9]{1,12}){0,8}", "a version")
SETTING = matched(rf"(?:E = \d{{1,4}}, )?(?:K = \d{{1,4}}|{TREE})", "a draft length or tree")


FLAG = checked(lambda value: isinstance(value, bool), "true or false")
NUMBER = checked(lambda value: type(value) in (int, float) and math.isfinite(value), "a number")


def publish_option(value: Any, known: Known) -> Any:
    kind = {bool: FLAG, str: WORD}.get(type(value), NUMBER)
    return kind.publish(value, known)


def publish_digest(value: Any, known: Known) -> str:
    plain, dirty, _ = HASH.publish(value, known).partition("+dirty")
    return str(value) if plain in known or len(plain) <= 16 else plain[:12] + dirty


def publish_revision(value: Any, known: Known) -> str:
    text = matched(r"[\w.@+/-]{1,64}", "a branch, tag or commit").publish(value, known)
    return publish_digest(text, known) if re.fullmatch(r"[0-9a-f]{4,64}", text) else text


def hub_snapshot(path: str) -> tuple[str, str] | None:
    """(Hub name, commit) of a folder or file in the Hub's cache, as owner/name or owner/name/file.gguf; None for every
    other path."""
    found = SNAPSHOT.search(path)
    if found is None:
        return None
    return found[1].replace("--", "/") + found[3].replace("\\", "/"), found[2]


def display_name(path: str) -> str:
    """What is shown of a path, wherever a command is called: a place in the Hub's cache by its Hub name, one in the
    OWN_FOLDERS of this checkout as seen from there, and of any other the last part."""
    snapshot = hub_snapshot(path)
    if snapshot is not None:
        return snapshot[0]
    if any(Path(path).is_relative_to(ROOT / folder) for folder in OWN_FOLDERS):
        return str(Path(path).relative_to(ROOT))
    return re.split(r"[/\\]", path.rstrip("/\\"))[-1]


def publish_place(value: Any, known: Known) -> str:
    """A Hub name or a path that says nothing of a machine; of any other path, or of a link, the `display_name`."""
    text = matched(r".*", "a path or a Hub name").publish(value, known)
    if re.fullmatch(OPEN_NAME, text):
        return text
    folders = re.findall(r"[0-9a-f]{32,64}", text)  # caches name folders by checksums
    if not re.match(OUTSIDE, text) or find_secret(text, strict=True, known=folders):
        raise WrongTypeError("a path or a Hub name")
    shown = display_name(text)
    return shown if re.fullmatch(OPEN_NAME, shown) else NAME.publish(display_name(shown), known)


def publish_folder(value: Any, known: Known) -> str:
    """`publish_place` of what can only be a folder of this disk: of owner/name, as of every path, the last part."""
    shown = publish_place(value, known)
    is_path = shown == value and not re.fullmatch(OWN_PATH, shown)
    return display_name(shown) if is_path else shown


def publish_served_name(value: Any, known: Known) -> str:
    try:
        return publish_place(value, known)
    except WrongTypeError:
        return WITHHELD


def publish_prompt_id(value: Any, known: Known) -> str:
    text = matched(r"(?s).*", "a text").publish(value, known)
    named = re.fullmatch(SHORT_NAME, text)
    return text if named else hashlib.sha256(text.encode()).hexdigest()[:12]


def publish_sentence(value: Any, known: Known) -> str:
    return value if re.fullmatch(r"[\w ,.;()%=<>×–-]{0,300}", str(value)) else WITHHELD


def publish_argument(value: Any, known: Known) -> Any:
    plain = isinstance(value, str) and re.fullmatch(r"[\w][\w ,.:-]{0,31}", value)
    return value if plain or isinstance(value, bool | int | float) else WITHHELD


Name = Annotated[str, NAME]  # A short name that somebody chose, of a method, a task or a device
Word = Annotated[str, WORD]  # A word of this program: a loss, a rule, a family
Version = Annotated[str, VERSION]
Setting = Annotated[str, SETTING]  # A draft length or tree as tables show it
Place = Annotated[str, Kind(publish_place)]
Folder = Annotated[str, Kind(publish_folder)]  # A folder, where no Hub name can stand
Digest = Annotated[str, Kind(publish_digest)]
Revision = Annotated[str, Kind(publish_revision)]  # A branch, a tag, or a commit as a Digest
ServedName = Annotated[str, Kind(publish_served_name)]
"""A server's name for a model; published if it is a Place."""
PromptId = Annotated[str, Kind(publish_prompt_id)]  # published as its hash if it is no Name
Sentence = Annotated[str, Kind(publish_sentence)]
"""A sentence of this program; published if it has no path, link or address."""
Withheld = Annotated[str, Kind(lambda value, known: WITHHELD)]
"""A text of other software, such as an error: published is only that there was one."""
Argument = Annotated[Any, Kind(publish_argument)]
"""An argument of a chat template; of others than numbers and short texts only that there was one is published."""
Option = Annotated[Any, Kind(publish_option)]  # A number, true or false, or a word
PRIVATE = object()
Private = Annotated[T, PRIVATE]  # A field that is not published


def published(value: Any, kind: Any, where: str, known: Known = ()) -> Any:
    """What is published of a value of type `kind`, or of its JSON: no private and no unknown fields.

    UserError that names the field, and not its value, for one of another type, and for one that holds a secret.
    """
    value = to_json(value)
    if value is None:
        return None
    arm, marks = typed_json.arm_for(kind, value)
    shape, inner = shape_of(arm), get_args(arm)
    said = next((mark for mark in marks if isinstance(mark, Kind)), None)
    if said is not None or shape not in (dict, list):
        return _leaf(value, said or _kind_of(arm, where), where, known)
    if typed_json.JSON_SHAPES.get(type(value)) is not shape:
        raise _wrong_type(where, typed_json.SHAPES[shape])
    if shape is list:
        return [published(x, inner[0], f"{where}[{i}]", known) for i, x in enumerate(value)]
    if inner:
        names = [published(key, inner[0], f"a key of {where}", known) for key in value]
        pairs = zip(names, value.values(), strict=True)
        return {name: published(x, inner[1], dotted(where, name), known) for name, x in pairs}
    shown = [field.keys for field in fields_of(arm) if PRIVATE not in field.marks]
    kinds = {key: one for keys in shown for key, one in keys.items() if key in value}
    return {
        key: published(value[key], one, dotted(where, key), known) for key, one in kinds.items()
    }


def _kind_of(arm: Any, where: str) -> Kind:
    if arm is str or arm is Any:
        raise TypeError(f"{where}: its field does not say what the text may hold, such as Name")
    return {str: WORD, bool: FLAG, float: NUMBER}[shape_of(arm)]


def _leaf(value: Any, kind: Kind, where: str, known: Known) -> Any:
    try:
        shown = kind.publish(value, known)
    except WrongTypeError as error:
        check_text(str(value), where)
        raise _wrong_type(where, str(error)) from None
    if isinstance(shown, str):
        check_text(shown, where, known)
    return shown


def _wrong_type(where: str, what: str) -> UserError:
    return UserError(f"{where} is not {what}: publish the file as it was written")


def check_text(text: str, where: str, known: Known = ()) -> None:
    """UserError that names `where`, and not the text, if the text holds a secret."""
    secret = find_secret(text, strict=True, known=known)
    if secret is not None:
        raise UserError(f"{where} holds what looks like {secret.what}: remove it and revoke it")


def dotted(where: str, key: str) -> str:
    """The name of a field in messages, as "report.json: methods[3].name"."""
    return f"{where}.{key}" if ": " in where else f"{where}: {key}"
