"""Keeps private data out of published files: removes local paths, finds tokens and pickles."""

import json
import os
import re
import zipfile
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from huggingface_hub import get_token
from safetensors import SafetensorError, safe_open

from decode.common.errors import UserError

# Starts with /, ~ or a drive and has two parts at least: a single "/x" in a text is often no path. The character before
# it must not make it the middle of a URL, of a Hub name or of a closing tag.
LOCAL_PATH = re.compile(
    r"(?:file:/{2,3}|(?<![\w.:/<\\~-]))((?:~|/[\w.@+-]+)/[\w.@+/-]+|[A-Za-z]:\\[\w\\.-]+)"
)
TOKENS = re.compile(
    r"\b(?:hf_\w{20,}|api_org_\w{20,}|sk-[\w-]{20,}|wandb_v\d_\w{20,}|gh[pousr]_\w{20,}|github_pat_\w{20,}"
    r"|AKIA[0-9A-Z]{16})|-----BEGIN [A-Z ]*PRIVATE KEY"
)
HEX_KEY = re.compile(r"\b[0-9a-f]{40}\b")
"""A key of Weights & Biases, or a commit: values of the fields COMMITS are allowed."""
COMMITS = ("git", "git_sha", "revision", "commit")
VOCABULARY = ("tokenizer.json", "vocab.json", "merges.txt")
"""Vocabularies contain strings that look like paths."""
PICKLES = (".bin", ".pt", ".pth", ".pkl", ".pickle", ".ckpt")
SECRETS = ("HF_TOKEN", "HUGGING_FACE_HUB_TOKEN", "HUGGINGFACE_TOKEN", "WANDB_API_KEY")


def strip_local_paths(value: Any) -> Any:
    """`value` with every local path relative to the current folder, or, outside it, cut to its last part."""
    if isinstance(value, dict):
        return {key: strip_local_paths(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [strip_local_paths(item) for item in value]
    if not isinstance(value, str):
        return value
    return _shorten(value) if _is_path(value) else LOCAL_PATH.sub(lambda m: _shorten(m[1]), value)


def check_folder(folder: Path) -> None:
    """UserError that names a file of `folder` with a token, a local path or a pickle. The message has no token."""
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    for path in files:
        if is_pickle(path):
            raise UserError(
                f"{path.relative_to(folder)} is a pickle, which runs code when it is loaded: save safetensors"
            )
    commits = set().union(*(_commits(_json(path)) for path in files if path.suffix == ".json"))
    for path in files:
        name = path.relative_to(folder)
        text = readable_text(path)
        if holds_token(text, commits):
            raise UserError(
                f"{name} contains what looks like a token or key: remove it and revoke it"
            )
        local_path = None if path.name in VOCABULARY else find_local_path(text, _json(path))
        if local_path is not None:
            raise UserError(
                f"{name} contains the local path {local_path!r}: write the file again without it"
            )


def holds_token(text: str, commits: Iterable[str] = ()) -> bool:
    """Whether the text has a token of a known form, or one from this process's environment."""
    known = {os.environ.get(name) for name in SECRETS} | {get_token()}
    return (
        TOKENS.search(text) is not None
        or any(token in text for token in known if token)
        or any(match not in set(commits) for match in HEX_KEY.findall(text))
    )


def redact(text: str) -> str:
    """`text` with tokens replaced by ***, for messages of other software."""
    for token in {os.environ.get(name) for name in SECRETS} | {get_token()}:
        text = text.replace(token, "***") if token else text
    return TOKENS.sub("***", text)


def find_local_path(text: str, content: Any = None) -> str | None:
    """The first local path in the text, or among the strings of its parsed JSON `content`; None if there is none."""
    match = LOCAL_PATH.search(text)
    if match is not None:
        return match[1]
    return next((item for item in _strings(content) if _is_path(item)), None)


def is_pickle(path: Path) -> bool:
    """Whether a file is a pickle, by its name or by its content (old pickles and torch's archives)."""
    if path.suffix in PICKLES:
        return True
    with path.open("rb") as file:
        start = file.read(2)
    if start[:1] == b"\x80" and start[1:] in (b"\x02", b"\x03", b"\x04", b"\x05"):
        return True
    if start == b"PK" and zipfile.is_zipfile(path):
        return any(name.endswith(".pkl") for name in zipfile.ZipFile(path).namelist())
    return False


def readable_text(path: Path) -> str:
    """The text in a file: its content, or the metadata of safetensors; "" for other binary files."""
    if path.suffix == ".safetensors":
        try:
            with safe_open(path, framework="pt") as file:
                return json.dumps(file.metadata() or {})
        except SafetensorError as error:
            raise UserError(
                f"{path.name} is no valid safetensors file: save the draft again"
            ) from error
    try:
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError:
        return ""


def _shorten(path: str) -> str:
    here, clean = Path.cwd(), path.removeprefix("file://")
    if clean.startswith("/") and Path(clean).is_relative_to(here):
        return str(Path(clean).relative_to(here))
    return clean.replace("\\", "/").rstrip("/").rpartition("/")[2]


def _is_path(value: str) -> bool:
    """Whether a whole string starts as an absolute path does; "/think" counts as one."""
    return (
        re.match(r"(?:/|~/|file://|[A-Za-z]:\\)[\w.@+-]", value) is not None and "\n" not in value
    )


def _json(path: Path) -> Any:
    if path.suffix != ".json" or path.name in VOCABULARY:
        return None
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise UserError(f"{path.name} is not valid JSON: save the draft again") from error


def _strings(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict):
        for item in value.values():
            yield from _strings(item)
    elif isinstance(value, list):
        for item in value:
            yield from _strings(item)


def _commits(value: Any) -> set[str]:
    """Values of the fields COMMITS anywhere in parsed JSON, without "+dirty"."""
    if isinstance(value, list):
        return set().union(*map(_commits, value))
    if not isinstance(value, dict):
        return set()
    commits = {
        v.removesuffix("+dirty") for k, v in value.items() if k in COMMITS and isinstance(v, str)
    }
    return commits.union(*map(_commits, value.values()))
