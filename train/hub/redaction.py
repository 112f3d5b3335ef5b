"""Keeps private data out of published files.

Of results only the fields are copied whose types say what they hold (decode/common/published.py). `check_folder`
searches what was written for secrets, local paths and pickles; the forms of secrets are in
decode/common/secret_patterns.py. `strip_local_paths` cuts local paths out of other text.
"""

import json
import mmap
import re
import zipfile
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open

from decode.common.errors import UserError
from decode.common.published import check_text, display_name, dotted
from decode.common.secret_patterns import environment_secrets, find_secret

# Starts with /, ~, .. or a drive and has two parts at least: a single "/x" in a text is often no path. The character
# before it must not make it the middle of a URL, of a Hub name or of a closing tag.
LOCAL_PATH = re.compile(
    r"(?:file:/{2,3}|(?<![\w.:/<\\~-]))((?:~|(?:\.\.)+|/[\w.@+-]+)/[\w.@+/-]+|[A-Za-z]:\\[\w\\.-]+)"
)
LINK = re.compile(r"\w://")
VOCABULARIES = ("tokenizer.json", "vocab.json", "merges.txt", "added_tokens.json")
"""Vocabularies contain strings that look like paths, passwords and keys; only secrets of a known form count."""
MODEL_SETTINGS = ("config.json", "generation_config.json", "tokenizer_config.json")
"""Files of other software in which a link leads to somebody's page; templates in them may contain links."""
PICKLES = (".bin", ".pt", ".pth", ".pkl", ".pickle", ".ckpt")


def check_values(content: Any, where: str, known: Collection[str] = ()) -> None:
    """`check_text` of every key and string in nested content."""
    for field, text in _strings(content, where):
        check_text(text, field, known)


def strip_local_paths(value: Any) -> Any:
    """`value` with the `display_name` of every local path."""
    if isinstance(value, dict):
        return {key: strip_local_paths(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [strip_local_paths(item) for item in value]
    if not isinstance(value, str):
        return value
    if _is_path(value):
        return display_name(value.removeprefix("file://"))
    return LOCAL_PATH.sub(lambda m: display_name(m[1]), value)


def check_folder(folder: Path, known: Collection[str] = ()) -> None:
    """UserError for a secret, a local path or a pickle in a file of `folder`, with the field or line, not the secret.

    `known` are commits and checksums that look like keys. The rows of shards are searched by dataset_card.py.
    """
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    for path in files:
        if is_pickle(path):
            raise UserError(
                f"{path.relative_to(folder)} is a pickle, which runs code when it is loaded: save safetensors"
            )
    for path in files:
        where = str(path.relative_to(folder))
        if path.suffix == ".json":
            _check_json(path, where, known)
        _check_lines(readable_text(path), where, path.name in VOCABULARIES, known)
        _check_bytes(path, where)


def is_pickle(path: Path) -> bool:
    """Whether a file is a pickle, by its name or by its content (old pickles and torch's archives)."""
    with path.open("rb") as file:
        start = file.read(2)
    zipped = start == b"PK" and zipfile.is_zipfile(path)
    inside = zipfile.ZipFile(path).namelist() if zipped else []
    return (
        path.suffix in PICKLES
        or re.match(rb"\x80[\x02-\x05]", start) is not None
        or any(name.endswith(".pkl") for name in inside)
    )


def readable_text(path: Path) -> str:
    """The text in a file: its content, or the metadata and names of safetensors; "" for other binary files."""
    if path.suffix == ".safetensors":
        try:
            with safe_open(path, framework="pt") as file:
                texts = [text for pair in (file.metadata() or {}).items() for text in pair]
                return "\n".join([*texts, *file.keys()])
        except SafetensorError as error:
            raise UserError(
                f"{path.name} is no valid safetensors file: save the draft again"
            ) from error
    try:
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError:
        return ""


def _check_json(path: Path, where: str, known: Collection[str]) -> None:
    """UserError for a secret, a link or a path in a field; escapes are undone. Vocabularies are left out."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise UserError(f"{where} is not valid JSON: save the draft again") from error
    if path.name in VOCABULARIES:
        in_model = path.name == "tokenizer.json" and isinstance(content, dict)
        vocabulary = content.pop("model", None) if in_model else content
        _check_lines("\n".join(t for _, t in _strings(vocabulary, "")), where, True, known)
        if not in_model:
            return
    for field, text in _strings(content, where):
        if not field.endswith("precompiled_charsmap"):
            check_text(text, field, known)
        if path.name in VOCABULARIES or field.endswith("chat_template"):
            continue
        if path.name in MODEL_SETTINGS and LINK.search(text):
            raise UserError(f"{field} holds a link: write the file again without it")
        if _is_path(text):
            raise UserError(f"{field} is the local path {text!r}: write the file again without it")


def _check_lines(text: str, where: str, vocabulary: bool, known: Collection[str]) -> None:
    secret = find_secret(text, strict=not vocabulary, known=known)
    if secret is not None:
        line = text.count("\n", 0, secret.match.start()) + 1
        raise UserError(
            f"{where}, line {line}, holds what looks like {secret.what}: remove it and revoke it"
        )
    local_path = None if vocabulary else LOCAL_PATH.search(text)
    if local_path is not None:
        raise UserError(
            f"{where} contains the local path {local_path[1]!r}: write the file again without it"
        )


def _check_bytes(path: Path, where: str) -> None:
    """UserError for a secret of this process's environment anywhere in a file, binary ones included."""
    secrets = environment_secrets()
    if len(secrets) == 0 or path.stat().st_size == 0:
        return
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content:
        if any(content.find(secret.encode()) >= 0 for secret in secrets):
            raise UserError(f"{where} holds a secret of this environment: remove it and revoke it")


def _is_path(value: str) -> bool:
    """Whether a whole string starts as an absolute path does; "/think" counts as one."""
    return (
        re.match(r"(?:/|~/|file://|[A-Za-z]:\\)[\w.@+-]", value) is not None and "\n" not in value
    )


def _strings(value: Any, where: str) -> Iterator[tuple[str, str]]:
    """(field, text) of every string in parsed JSON; keys, with their strings, as "key: text" if they hold a secret."""
    if isinstance(value, str):
        yield where, value
    elif isinstance(value, dict):
        for key, item in value.items():
            yield f"a key of {where}", key
            yield from _strings(item, dotted(where, key))
            if isinstance(item, str):
                yield dotted(where, key), f"{key}: {item}"
    elif isinstance(value, list):
        for i, item in enumerate(value):
            yield from _strings(item, f"{where}[{i}]")
