"""GGUF models: dequantised once into a cached folder of safetensors, which is then loaded like any other model.

A GGUF keeps quantised weights, the tokenizer and the chat template in one file. The folder holds the weights in
float32, exactly as the file's quantisation defines them, and `gguf.json`, which says what they were made from.
"""

import json
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import constants, hf_hub_download, list_repo_files
from tokenizers import Regex, pre_tokenizers
from transformers import AutoModelForCausalLM, AutoTokenizer

from decode.common import damage
from decode.common.errors import UserError, first_line
from decode.common.files import write_atomically

SOURCE_FILE = "gguf.json"
"""Written last into a folder, so that a folder with it is whole."""

_WORDS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+"
_REST = r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"


def _split(digits: str) -> Any:
    """Splits words, up to three or single digits, signs and spaces, as Llama 3 and Qwen 2 do."""
    return pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(f"{_WORDS}|{digits}|{_REST}"), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )


def _words() -> Any:
    return pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)


PRE_TOKENIZERS = {
    **dict.fromkeys(("gpt-2", "phi-2", "olmo", "mpt"), _words),
    **dict.fromkeys(
        ("smollm", "starcoder", "refact", "command-r", "codeshell"),
        lambda: pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), _words()]),
    ),
    **dict.fromkeys(("llama-bpe", "llama3", "llama-v3"), lambda: _split(r"\p{N}{1,3}")),
    **dict.fromkeys(("qwen2", "deepseek-r1-qwen"), lambda: _split(r"\p{N}")),
}
"""How byte-level vocabularies cut a text before merging, by the name that GGUF gives it (tokenizer.ggml.pre)."""


def gguf_folder(name: str, revision: str | None = None) -> str | None:
    """The cached model folder of the GGUF that `name` means; None when `name` means no GGUF.

    `name` is a .gguf file, a folder that holds one and no config.json, `owner/name/FILE.gguf` on the Hub, or a Hub
    repository with GGUF in its name and one such file. UserError for several files, and for a GGUF that is damaged or
    of an architecture, quantisation or tokenizer that cannot be converted.
    """
    path = Path(name)
    if path.is_dir():
        if (path / "config.json").is_file():
            return None
        files = sorted(file.name for file in path.glob("*.gguf"))
        return str(dequantise(path / _only_file(files, name), name)) if files else None
    if path.suffix == ".gguf" and (path.is_file() or name.count("/") != 2):
        if not path.is_file():
            raise UserError(f"{name} does not exist: check the path")
        return str(dequantise(path, path.name))
    if path.suffix != ".gguf" and ("gguf" not in name.lower() or name.count("/") != 1):
        return None
    owner, repository, *files = name.split("/")
    with _errors_named(name):
        if not files:
            listed = list_repo_files(f"{owner}/{repository}", revision=revision)
            files = [file for file in listed if file.endswith(".gguf")]
        file = hf_hub_download(f"{owner}/{repository}", _only_file(files, name), revision=revision)
    return str(dequantise(Path(file), name))


def _only_file(files: list[str], name: str) -> str:
    if len(files) != 1:
        held = ", ".join(files) or "none"
        raise UserError(f"{name!r} must hold one .gguf file, or name one of them: {held}")
    return files[0]


def dequantise(file: Path, source: str) -> Path:
    """The cached folder with the weights of `file` in float32; made now unless it is there. `source` is noted in it."""
    with _errors_named(str(file)):
        stat = file.stat()
        digest = _sha256(file, stat.st_size, stat.st_mtime_ns)
        folder = Path(constants.HF_HOME) / "draftsmith" / "gguf" / digest[:16]
        if (folder / SOURCE_FILE).is_file():
            return folder
        header = read_header(file)
        partial = folder.with_name(f"{folder.name}.{os.getpid()}")
        try:
            _save_model(file, header, partial)
            _save_tokenizer(file, header, partial)
            note = {
                "file": file.name,
                "source": source,
                "sha256": digest,
                "name": header.get("general.name"),
                "architecture": header.get("general.architecture"),
                "licence": header.get("general.license"),
                "file_type": header.get("general.file_type"),
            }
            write_atomically(partial / SOURCE_FILE, json.dumps(note, indent=2) + "\n")
            if not folder.exists():  # another process may have made it meanwhile
                partial.rename(folder)
        finally:
            shutil.rmtree(partial, ignore_errors=True)
    return folder


def read_header(file: Path) -> dict[str, Any]:
    """The metadata of a GGUF file by key: strings, numbers and lists."""
    import gguf  # heavy, and needed only here

    fields = gguf.GGUFReader(file).fields
    return {name: field.contents() for name, field in fields.items()}


def _save_model(file: Path, header: dict[str, Any], folder: Path) -> None:
    """Writes config.json and safetensors. UserError when tensors are missing or not numbers."""
    loaded: Any = AutoModelForCausalLM.from_pretrained(
        file.parent, gguf_file=file.name, dtype=torch.float32, output_loading_info=True
    )
    model, info = loaded
    absent = sorted(info["missing_keys"])
    if model.config.tie_word_embeddings:
        absent = [name for name in absent if name != "lm_head.weight"]
    if absent:
        raise UserError(f"{file} lacks {len(absent)} weights ({absent[0]}, …): download it again")
    if not all(weight.isfinite().all() for weight in model.parameters()):
        raise UserError(f"{file} holds weights that are not finite: download it again")
    model.config.__dict__.pop("quantization_config", None)  # the weights are plain numbers now
    plain = type(model)(model.config)
    plain.load_state_dict(model.state_dict())
    ends = [header.get(f"tokenizer.ggml.{role}_token_id") for role in ("eos", "eot", "eom")]
    plain.generation_config = model.generation_config
    plain.generation_config.eos_token_id = sorted({held for held in ends if held is not None})
    plain.save_pretrained(folder)


def _save_tokenizer(file: Path, header: dict[str, Any], folder: Path) -> None:
    """Writes the tokenizer. UserError unless it has the ids, special tokens and chat template that the GGUF holds."""
    byte_level = header.get("tokenizer.ggml.model") == "gpt2"
    split = str(header.get("tokenizer.ggml.pre"))
    if byte_level and split not in PRE_TOKENIZERS:
        raise UserError(
            f"{file} cuts texts as {split!r} does, which is not one of {', '.join(sorted(PRE_TOKENIZERS))}: "
            "take the model's original folder instead"
        )
    tokenizer: Any = AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name)
    if byte_level:
        tokenizer.backend_tokenizer.pre_tokenizer = PRE_TOKENIZERS[split]()
    tokens = header["tokenizer.ggml.tokens"]
    if tokenizer.convert_ids_to_tokens(list(range(len(tokens)))) != tokens:
        raise UserError(
            f"{file}: its tokenizer cannot be rebuilt: take the model's original folder"
        )
    for role in ("bos", "eos", "unk", "pad"):
        key = {"unk": "unknown", "pad": "padding"}.get(role, role)
        if (held := header.get(f"tokenizer.ggml.{key}_token_id")) is not None:
            setattr(tokenizer, f"{role}_token", tokens[held])
    template = header.get("tokenizer.chat_template")
    if template is not None:
        tokenizer.chat_template = template
    tokenizer.save_pretrained(folder)


@cache
def _sha256(file: Path, size: int, changed: int) -> str:
    """The checksum of a file of this size that was last changed then: a large one is read once in a process."""
    return damage.sha256(file)


@contextmanager
def _errors_named(name: str) -> Iterator[None]:
    """Turns what readers and converters raise for a bad file into one UserError."""
    try:
        yield
    except UserError:
        raise
    except Exception as error:  # a damaged file fails in any of a dozen ways
        raise UserError(
            f"GGUF {name!r} cannot be converted: {first_line(error)}: download it again, or take the model's original "
            "folder"
        ) from error
