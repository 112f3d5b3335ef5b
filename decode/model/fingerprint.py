"""What a target is: its weights and the settings of its arithmetic, wherever its folder lies.

A fingerprint is of the files and needs no loaded model, so it is the same on every machine, on every device and for
every placement. Each value of each tensor counts; how the tensors are shared out over files, the dtype that they are
stored in, and whether a tied head is stored do not.

Results keep it (decode/common/target_record.py).
"""

import contextlib
import hashlib
import json
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import constants, snapshot_download
from safetensors import safe_open
from torch import Tensor
from transformers import AutoConfig

from decode.common import damage
from decode.common.files import read_json_object, write_atomically
from decode.common.machine import cpu_count

CHUNK = 1 << 22
"""Values of a tensor that are converted together."""
EXACT_DTYPES = (torch.bfloat16, torch.float32, torch.float64)
"""A tensor counts as the first of these that holds all its values exactly."""
TIED = (
    "lm_head.weight",
    "embed_out.weight",
    "decoder.embed_tokens.weight",
    "encoder.embed_tokens.weight",
)
"""Endings of names of tensors that may be stored beside the equal embedding, or left out."""
WITHOUT_EFFECT = frozenset(
    ("transformers_version", "_name_or_path", "_commit_hash", "architectures", "dtype", "torch_dtype", "use_cache")
    + ("bos_token_id", "eos_token_id", "pad_token_id", "initializer_range", "initializer_factor", "init_std")
    + ("output_attentions", "output_hidden_states", "return_dict", "id2label", "label2id", "problem_type")
    + ("pretraining_tp", "chunk_size_feed_forward", "quantization_config", "task_specific_params")
    + ("attention_dropout", "hidden_dropout", "resid_pdrop", "embd_pdrop", "attn_pdrop", "dropout", "dropout_rate")
    + ("tie_word_embeddings",)
)  # fmt: skip
"""Fields of config.json on which no logits depend. Of `tie_word_embeddings` see `tensors_digest`."""
CACHED_BYTES = 1 << 26
"""Digests of larger files are kept on disk: reading some GB takes as long as loading them."""


def weights_fingerprint(name: str, revision: str | None = None) -> str | None:
    """16 hex digits of the weights and config of what transformers loads under `name`; None without safetensors.

    `name` is a model folder (`loading.model_folder`), or a name on the Hub whose files are in its cache.
    """
    folder = Path(name)
    if not folder.is_dir():
        patterns = ["*.safetensors", "*.json"]
        folder = Path(
            snapshot_download(
                name, revision=revision, allow_patterns=patterns, local_files_only=True
            )
        )
    config = AutoConfig.from_pretrained(folder, trust_remote_code=False)
    tensors = _source_digest(folder) or tensors_digest(folder)
    if tensors is None:
        return None
    # T5 scales the input of a head that its config calls tied.
    scaled = config.is_encoder_decoder and bool(vars(config).get("tie_word_embeddings"))
    return _hash([tensors, scaled, arithmetic(config.to_dict(), type(config)().to_dict())])[:16]


def arithmetic(config: Mapping[str, Any], default: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of a config on which logits may depend and which differ from their defaults.

    Defaults are left out so that a field which a newer transformers adds changes nothing.
    """
    found: dict[str, Any] = {}
    for name, value in config.items():
        usual = default.get(name)
        if name in WITHOUT_EFFECT or (value == usual and name != "model_type"):
            continue
        if isinstance(value, Mapping):
            found[name] = arithmetic(value, usual if isinstance(usual, Mapping) else {})
        else:
            found[name] = float(value) if type(value) is int else value
    return found


def tensors_digest(folder: Path) -> str | None:
    """A hash of every tensor's name, shape and values; None if the folder has no safetensors.

    A tied head counts as the embedding, stored or not. What config.json says of it does not count: the tensors decide
    (decode/model/formats/tied_heads.py).
    """
    files = weight_files(folder)
    if not files:
        return None
    found = {name: digest for file in files for name, digest in file_digests(file).items()}
    ranks = {name: _tied_rank(name) for name in found}
    best: dict[str, int] = {}
    for name, digest in found.items():
        best[digest] = max(best.get(digest, 0), ranks[name])
    kept = {name: digest for name, digest in found.items() if ranks[name] == best[digest]}
    return _hash(sorted(kept.items()))


def weight_files(folder: Path) -> list[Path]:
    """The safetensors that transformers reads from a folder."""
    single, index = folder / "model.safetensors", folder / "model.safetensors.index.json"
    if single.is_file() or not index.is_file():
        return [single] if single.is_file() else []
    listed = read_json_object(index, "an index of safetensors", ["weight_map"])["weight_map"]
    return [folder / name for name in sorted(set(listed.values()))]


def file_digests(file: Path) -> dict[str, str]:
    """{name: hash of shape and values} of the tensors in a file, read once for each state of it."""
    return _file_digests(str(file.resolve()), *damage.file_state(file))


@cache
def _file_digests(path: str, size: int, *state: int) -> dict[str, str]:
    cache = Path(constants.HF_HOME) / "draftsmith" / "fingerprints"
    kept = cache / f"{_hash([path, size, state])}.json"
    if size >= CACHED_BYTES and kept.is_file():
        return read_json_object(kept, "a list of checksums")
    with safe_open(path, framework="pt") as tensors, ThreadPoolExecutor(cpu_count()) as pool:
        names = list(tensors.keys())
        hashes = pool.map(lambda name: tensor_digest(tensors.get_tensor(name)), names)
        digests = dict(zip(names, hashes, strict=True))
    if size >= CACHED_BYTES:
        # A full disk, say: the next process reads the file again
        with contextlib.suppress(OSError):
            write_atomically(kept, json.dumps(digests))
    return digests


def tensor_digest(tensor: Tensor) -> str:
    """A hash of shape and values; floating-point values count in the first of EXACT_DTYPES that holds them all."""
    chunks = tensor.reshape(-1).split(CHUNK)
    dtype = tensor.dtype
    if dtype.is_floating_point:
        dtype = next(narrow for narrow in EXACT_DTYPES if all(_holds(narrow, c) for c in chunks))
    sha = hashlib.sha256(f"{list(tensor.shape)} {dtype}".encode())
    for chunk in chunks:
        sha.update(chunk.to(dtype).contiguous().view(torch.uint8).numpy().data)
    return sha.hexdigest()


def _holds(dtype: torch.dtype, values: Tensor) -> bool:
    """Whether every value is one of `dtype`; the last of EXACT_DTYPES holds NaN as well."""
    if values.dtype == dtype or values.element_size() == 1 or dtype == EXACT_DTYPES[-1]:
        return True
    return bool(values.to(dtype).to(values.dtype).equal(values))


def _tied_rank(name: str) -> int:
    """The place of its ending in TIED, or behind them: of equal tensors the last in this order counts."""
    places = (i for i, ending in enumerate(TIED) if f".{name}".endswith(f".{ending}"))
    return next(places, len(TIED))


def _source_digest(folder: Path) -> str | None:
    """The checksum of the GGUF that one of our cached folders was made from, which is one target in every dtype that it
    was converted to."""
    cache = Path(constants.HF_HOME) / "draftsmith" / "gguf"
    if not folder.resolve().is_relative_to(cache.resolve()):
        return None
    note = folder / "gguf.json"
    return read_json_object(note, "what a GGUF became").get("sha256") if note.is_file() else None


def _hash(content: Any) -> str:
    return hashlib.sha256(json.dumps(content, sort_keys=True, default=str).encode()).hexdigest()
