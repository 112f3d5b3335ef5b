"""GGUF models: dequantised once into a cached folder of safetensors, which is then loaded like any other model.

A GGUF keeps quantised weights, the tokenizer and the chat template in one file or in parts of one. There is a folder
for its config and tokenizer, and one with the weights for each dtype that was asked for: the numbers that the file's
quantisation defines, in float32 and rounded once. `gguf.json` in it says what it was made from.
"""

import errno
import hashlib
import json
import math
import shutil
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import hf_hub_download, list_repo_files
from transformers import AutoConfig, GenerationConfig

from decode.common import damage
from decode.common.errors import UserError, disk_error, first_line
from decode.common.files import write_atomically
from decode.model.formats.gguf_architectures import build_config, list_weights
from decode.model.formats.gguf_reader import part_names, read_gguf, write_safetensors
from decode.model.formats.gguf_tokenizers import (
    build_tokenizer,
    check_ids,
    check_tokens,
    read_vocabulary,
)
from decode.model.formats.made_folders import copy_files, files_named, made_folder
from decode.model.names import cache_error

SOURCE_FILE = "gguf.json"
"""Written last into a folder, so that a folder with it is whole."""
FORMAT = 3
"""Of what is in a folder: those of another number are not used."""
LARGE = 100_000_000
"""Bytes from which on converting a file takes seconds, and is said."""


def gguf_folder(
    name: str,
    revision: str | None = None,
    dtype: torch.dtype | None = None,
    tokenizer: Any = None,
) -> str | None:
    """The cached model folder of the GGUF that `name` means, with weights in `dtype`, without any where it is None.

    `name` is a .gguf file or any part of a split one, a folder that holds one and no config.json, such a file as
    `owner/name/FILE.gguf` on the Hub, or a Hub repository with GGUF in its name and one such file. None when `name`
    means no GGUF. With a `tokenizer` that has the file's tokens the folder is made with it, whatever the keys say of
    the file's own, and stays so. UserError for several files, for missing parts, for a disk that does not take the
    folder, and for a GGUF that is damaged or whose architecture, keys, tensors or tokenizer are not followed to the
    last one.
    """
    path = Path(name)
    if path.is_dir():
        if (path / "config.json").is_file():
            return None
        files = sorted(file.name for file in path.glob("*.gguf"))
        if not files:
            return None
        return str(dequantise(_local_parts(path / _only_file(files, name)), name, dtype, tokenizer))
    if path.suffix == ".gguf" and (path.is_file() or name.count("/") != 2):
        if not path.is_file():
            raise UserError(f"{name} does not exist: check the path")
        return str(dequantise(_local_parts(path), path.name, dtype, tokenizer))
    if path.suffix != ".gguf" and ("gguf" not in name.lower() or name.count("/") != 1):
        return None
    owner, repository, *files = name.split("/")
    with _errors_named(name):
        if not files:
            listed = list_repo_files(f"{owner}/{repository}", revision=revision)
            files = [file for file in listed if file.endswith(".gguf")]
        parts = [
            Path(hf_hub_download(f"{owner}/{repository}", part, revision=revision))
            for part in part_names(_only_file(files, name))
        ]
    return str(dequantise(parts, name, dtype, tokenizer))


def _only_file(files: list[str], name: str) -> str:
    """The only one of the files, or the first one of parts that make up one file."""
    if not files or not set(files) <= set(part_names(files[0])):
        held = ", ".join(files) or "none"
        raise UserError(f"{name!r} must hold one .gguf file, or name one of them: {held}")
    return files[0]


def _local_parts(file: Path) -> list[Path]:
    """All parts of the file of which `file` is one. UserError for those that are not there."""
    parts = [file.with_name(part) for part in part_names(file.name)]
    absent = [part.name for part in parts if not part.is_file()]
    if absent:
        raise UserError(
            f"{file} is one of {len(parts)} parts of a file, and {', '.join(absent)} is not beside it: get it too"
        )
    return parts


def dequantise(
    parts: list[Path], source: str, dtype: torch.dtype | None = None, tokenizer: Any = None
) -> Path:
    """The cached folder of the GGUF in `parts`, made now unless it is there. `source` is noted in it."""
    with _errors_named(source):
        digest = _digest(parts)
        name, what = f"{digest[:16]}-v{FORMAT}", f"GGUF {source!r}"
        save = partial(_save_config, parts, source, digest, tokenizer)
        plain = made_folder("gguf", name, SOURCE_FILE, what, save)
        if dtype is None:
            return plain
        name += f"-{str(dtype).removeprefix('torch.')}"
        save = partial(_save_weights, parts, plain, dtype)
        return made_folder("gguf", name, SOURCE_FILE, what, save)


def _save_config(parts: list[Path], source: str, digest: str, tokenizer: Any, folder: Path) -> None:
    """Writes all but the weights: config, generation config, tokenizer (the file's or the given one), the note."""
    size = sum(part.stat().st_size for part in parts)
    if size > LARGE:
        sys.stderr.write(f"{parts[0]} is converted, once ({size / 1e9:.2f} GB)\n")
    content = read_gguf(parts)
    config = build_config(content, str(parts[0]))
    list_weights(content, config, str(parts[0]))
    keys = content.keys
    config.save_pretrained(folder)
    ends = [keys.get(f"tokenizer.ggml.{role}_token_id") for role in ("eos", "eot", "eom")]
    GenerationConfig(
        bos_token_id=config.bos_token_id,
        eos_token_id=sorted({held for held in ends if held is not None}) or None,
        pad_token_id=config.pad_token_id,
    ).save_pretrained(folder)
    if tokenizer is None:
        vocabulary = read_vocabulary(keys, str(parts[0]))
        built = build_tokenizer(vocabulary)
        check_ids(vocabulary, built, str(parts[0]))
    else:
        check_tokens(keys, tokenizer, str(parts[0]))
        built = tokenizer
    _save_tokenizer(built, keys, folder)
    note = {
        "file": parts[0].name,
        "source": source,
        "sha256": digest,
        "name": keys.get("general.name"),
        "architecture": keys.get("general.architecture"),
        "licence": keys.get("general.license"),
        "file_type": keys.get("general.file_type"),
    }
    write_atomically(folder / SOURCE_FILE, json.dumps(note, indent=2) + "\n")


def _save_weights(parts: list[Path], plain: Path, dtype: torch.dtype, folder: Path) -> None:
    """Writes what is in the folder `plain`, and the weights in `dtype`."""
    content = read_gguf(parts)
    config = AutoConfig.from_pretrained(plain)
    weights = list_weights(content, config, str(parts[0]))
    needed = sum(math.prod(weight.stored.shape) for weight in weights) * dtype.itemsize
    free = shutil.disk_usage(folder.parent).free
    if free < needed:
        raise OSError(
            errno.ENOSPC, f"{needed / 1e9:.2f} GB are needed and {free / 1e9:.2f} GB are free"
        )
    config.dtype = dtype
    config.save_pretrained(folder)
    made = ("config.json", SOURCE_FILE)
    beside = files_named(plain, ["*", "*/*"])  # with named chat templates
    copy_files([file for file in beside if file.name not in made], plain, folder)
    write_safetensors(weights, folder / "model.safetensors", dtype)
    shutil.copyfile(plain / SOURCE_FILE, folder / SOURCE_FILE)


def _save_tokenizer(tokenizer: Any, header: dict[str, Any], folder: Path) -> None:
    """Writes the tokenizer with the chat template that the GGUF holds, if it holds one."""
    template = header.get("tokenizer.chat_template")
    named = {
        name: header[f"tokenizer.chat_template.{name}"]
        for name in header.get("tokenizer.chat_templates", [])
    }
    if named:
        tokenizer.chat_template = named | ({} if template is None else {"default": template})
    elif template is not None:
        tokenizer.chat_template = template
    tokenizer.save_pretrained(folder)


def _digest(parts: list[Path]) -> str:
    """The checksum of a file, or one of the checksums of its parts."""
    digests = [damage.sha256_once(part) for part in parts]
    return digests[0] if len(parts) == 1 else hashlib.sha256("".join(digests).encode()).hexdigest()


@contextmanager
def _errors_named(name: str) -> Iterator[None]:
    """Turns what readers and converters raise for a bad file into one UserError."""
    try:
        yield
    except UserError:
        raise
    except Exception as error:  # a damaged file fails in any of a dozen ways
        refused = cache_error(error) or disk_error(error)
        if refused is not None:
            raise UserError(f"GGUF {name!r}: {refused}") from error
        if isinstance(error, OSError) and error.filename is not None:
            reason = f"{error.filename} cannot be read ({error.strerror})"
            raise UserError(f"GGUF {name!r}: {reason}") from error
        raise UserError(
            f"GGUF {name!r} cannot be converted: {first_line(error)}: download it again, or take the model's original "
            "folder"
        ) from error
