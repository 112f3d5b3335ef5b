"""Names of models, drafts and data sets: a path on this disk, or a repository of the Hugging Face Hub.

What looks like a path and is not there is refused at once: the Hub would be asked for it in vain. Where the Hub cannot
be reached its libraries read their caches only, instead of trying again for most of a minute for each file.
"""

import os
from functools import cache
from pathlib import Path
from typing import Literal

from huggingface_hub import constants
from huggingface_hub.utils import get_session

from decode.common.errors import UserError, disk_error, one_line, world_error
from decode.common.files import ROOT
from decode.common.proxies import through
from decode.common.published import hub_snapshot

Kind = Literal["model", "dataset"]
PATH_SUFFIXES = frozenset(
    (".json", ".jsonl", ".txt", ".yaml", ".yml", ".csv", ".parquet", ".arrow", ".gz", ".zip")
    + (".bin", ".pt", ".pth", ".gguf", ".safetensors")
)
"""Endings of names that mean files. No repository on the Hub ends like this, only files in it do."""
LONGEST_PART = 255
"""Bytes of a name between slashes: file systems refuse longer ones with errors of their own."""
HUB_TIMEOUT = 10.0
"""Seconds to wait for the Hub's first answer."""


def is_local(name: str, kind: Kind = "model") -> bool:
    """Whether `name` means a path: something is there, or it looks like one.

    It looks like one if it starts with a dot, a slash or ~, has more slashes than a name on the Hub (`owner/name`, or
    `owner/name/file.gguf`), ends as files do, or if its parent folder is here and the Hub's cache knows no such name.
    """
    path, is_gguf = Path(name), name.endswith(".gguf")
    if os.path.lexists(name):
        return True
    if "://" in name:
        return False
    looks_local = name.startswith((".", "/", "~")) or name.count("/") > (2 if is_gguf else 1)
    is_file = path.suffix.lower() in PATH_SUFFIXES and not (is_gguf and name.count("/") == 2)
    in_folder_here = "/" in name and path.parent.is_dir() and not _cached(name, kind)
    return looks_local or is_file or in_folder_here


def check_name(name: str, what: str, kind: Kind = "model", revision: str | None = None) -> bool:
    """Whether `name` is a path, which is there; False for a name on the Hub, which may be asked for next.

    `what` is its role ("target", "draft") in the UserError for an empty name, for a path that is not there, and for a
    `revision` of a path, which would be ignored.
    """
    if name.strip() == "":
        raise UserError(f"{what} is empty: give a path or a Hub name such as owner/name")
    if "\0" in name or any(len(part.encode()) > LONGEST_PART for part in name.split("/")):
        raise UserError(
            f"{what} {name[:40]!r} is no name: give a path, or a Hub name as owner/name"
        )
    path = Path(name)
    if not is_local(name, kind):
        # Its libraries would ask an unreachable Hub again and again, for most of a minute for each file.
        if not constants.HF_HUB_OFFLINE and not _reaches(constants.ENDPOINT):
            constants.HF_HUB_OFFLINE = True
        return False
    if not path.exists():
        link = " (it is a link to nothing)" if path.is_symlink() else ""
        raise UserError(
            f"{what} {name!r} does not exist{link}: correct the path, or give a Hub name such as owner/name"
        )
    if revision:
        raise UserError(
            f"revision {revision!r} is of no use: {name!r} is a local path, which has one version; leave it out"
        )
    return True


def recorded_name(name: str) -> tuple[str, str | None]:
    """(what results call a model, its commit where the name says it).

    A Hub name is itself, a place in the Hub's cache its repository, assets/… this project's. Another path begins with
    a slash, ~ or a dot, so that it is taken for no Hub name.
    """
    if not is_local(name):
        return name, None
    path = Path(name).absolute()
    for place in (path, path.resolve()):
        snapshot = hub_snapshot(str(place))
        if snapshot is not None:
            return snapshot
    if (ROOT / "assets") in path.parents:
        return str(path.relative_to(ROOT)), None
    return (name if name.startswith((".", "/", "~")) else f"./{name}"), None


def load_error(name: str, kind: Kind, error: Exception) -> str:
    """Why `name` could not be loaded, in one line: what a disk refused, that the Hub cannot be reached and has to be,
    or `error`."""
    refused = cache_error(error) or disk_error(error)
    if refused:
        return refused
    if constants.HF_HUB_OFFLINE and not is_local(name, kind) and not _cached(name, kind):
        asked = "" if os.environ.get("HF_HUB_OFFLINE") else through(constants.ENDPOINT)
        return (
            f"there is no such path, the Hub's cache does not hold it, and {constants.ENDPOINT} is not reached (no "
            f"network, or HF_HUB_OFFLINE is set{asked}): correct the name or the network"
        )
    return one_line(error)


def cache_error(error: Exception) -> str | None:
    """What the disk of the Hub's cache refused, in one line; None if it is not the cache's error.

    That is an error of a path in it, or one of writing that names no file: only the cache is written while models load.
    """
    found = disk_error(error, written=constants.HF_HOME) or world_error(error)
    files = (found or "").partition(": ")[0].split(" -> ")  # of a file that was copied two
    inside = any(file.startswith((constants.HF_HOME, constants.HF_HUB_CACHE)) for file in files)
    return f"{found}, or set HF_HOME to a folder on another disk" if inside else None


def _cached(name: str, kind: Kind) -> bool:
    repository = "/".join(name.split("/")[:2])
    return (Path(constants.HF_HUB_CACHE) / f"{kind}s--{repository.replace('/', '--')}").is_dir()


@cache
def _reaches(endpoint: str) -> bool:
    try:
        get_session().head(endpoint, timeout=HUB_TIMEOUT)
    except Exception:  # of an HTTP library that is not ours, by way of proxies
        return False
    return True
