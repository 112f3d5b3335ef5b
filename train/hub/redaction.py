"""What must not be published: paths of this machine are taken out, tokens and pickles are found and refused."""

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

# From / or ~ or a drive on, two parts at least: a lone "/x" in a text is as likely no path. What stands before
# must not make it the middle of a URL, of a hub name or of a closing tag.
LOCAL_PATH = re.compile(
    r"(?:file:/{2,3}|(?<![\w.:/<\\~-]))((?:~|/[\w.@+-]+)/[\w.@+/-]+|[A-Za-z]:\\[\w\\.-]+)"
)
TOKENS = re.compile(
    r"\b(?:hf_\w{20,}|api_org_\w{20,}|sk-[\w-]{20,}|wandb_v\d_\w{20,}|gh[pousr]_\w{20,}|github_pat_\w{20,}"
    r"|AKIA[0-9A-Z]{16})|-----BEGIN [A-Z ]*PRIVATE KEY"
)
HEX_KEY = re.compile(r"\b[0-9a-f]{40}\b")
"""A key of Weights & Biases, or a commit: those that a field of the files names as one are let pass."""
COMMITS = ("git", "git_sha", "revision", "commit")
VOCABULARY = ("tokenizer.json", "vocab.json", "merges.txt")
"""Full of pieces that look like paths."""
PICKLES = (".bin", ".pt", ".pth", ".pkl", ".pickle", ".ckpt")
SECRETS = ("HF_TOKEN", "HUGGING_FACE_HUB_TOKEN", "HUGGINGFACE_TOKEN", "WANDB_API_KEY")


def strip_local_paths(value: Any) -> Any:
    """`value` with every local path relative to the current folder, or reduced to its last part."""
    if isinstance(value, dict):
        return {key: strip_local_paths(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [strip_local_paths(item) for item in value]
    if not isinstance(value, str):
        return value
    return _shorten(value) if _is_path(value) else LOCAL_PATH.sub(lambda m: _shorten(m[1]), value)


def check_folder(folder: Path) -> None:
    """UserError naming the first file of `folder` that holds a token, a local path or a pickle. Prints no token."""
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
                f"{name} holds what looks like a token or key: take it out and revoke it"
            )
        found = None if path.name in VOCABULARY else find_local_path(text, _json(path))
        if found is not None:
            raise UserError(
                f"{name} holds the local path {found!r}: write the file again without it"
            )


def holds_token(text: str, commits: Iterable[str] = ()) -> bool:
    """Whether a token of a known form, or one that this machine uses, stands in the text."""
    known = {os.environ.get(name) for name in SECRETS} | {get_token()}
    return (
        TOKENS.search(text) is not None
        or any(token in text for token in known if token)
        or any(match not in set(commits) for match in HEX_KEY.findall(text))
    )


def redact(text: str) -> str:
    """`text` without tokens, for messages of others."""
    for token in {os.environ.get(name) for name in SECRETS} | {get_token()}:
        text = text.replace(token, "***") if token else text
    return TOKENS.sub("***", text)


def find_local_path(text: str, content: Any = None) -> str | None:
    """The first absolute path in the text, or among the strings of the JSON that it is."""
    match = LOCAL_PATH.search(text)
    if match is not None:
        return match[1]
    return next((item for item in _strings(content) if _is_path(item)), None)


def is_pickle(path: Path) -> bool:
    """By name, or by content where the name says otherwise."""
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
    """What people may read in a file: its text, or the metadata of weights; "" for other binary files."""
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
    """A whole string that begins as an absolute path does; "/think" is one, too."""
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
    """Values of the fields that name a commit."""
    if isinstance(value, list):
        return set().union(*map(_commits, value))
    if not isinstance(value, dict):
        return set()
    own = {
        v.removesuffix("+dirty") for k, v in value.items() if k in COMMITS and isinstance(v, str)
    }
    return own.union(*map(_commits, value.values()))
