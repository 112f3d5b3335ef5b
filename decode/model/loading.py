"""Models and tokenizers from a folder or the Hub, and the target with everything that belongs to it."""

import hashlib
import json
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from decode.common.errors import UserError, first_line
from decode.model.gguf import gguf_folder
from decode.model.runner import ModelRunner

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
"""The values of `dtype` settings."""


@dataclass(frozen=True)
class Target:
    """The model whose text is wanted faster, and its tokenizer."""

    decoder: ModelRunner
    tokenizer: Any
    name: str
    """Folder or Hub name, as written into results."""
    revision: str | None
    """Commit, tag or branch on the Hub."""
    fingerprint: str
    """That of its tokenizer (`tokenizer_fingerprint`)."""
    eos: frozenset[int]
    """Ids that end a text; empty when the model has none."""

    @cached_property
    def eos_ids(self) -> torch.Tensor:
        """`eos` [E] in rising order, on the device of the model."""
        return torch.tensor(sorted(self.eos), dtype=torch.long, device=self.decoder.device)


def tokenizer_fingerprint(tokenizer: Any) -> str:
    """16 hex digits, a hash of the vocabulary and the ids of a probe text: equal for tokenizers with the same ids."""
    probe = "def f(x):\n    return x ** 2  # 1234567 Ünïcode → ok\n\n\t\tend"
    content = [sorted(tokenizer.get_vocab().items()), tokenizer(probe)["input_ids"]]
    return hashlib.sha256(json.dumps(content).encode()).hexdigest()[:16]


def check_model_path(name: str, what: str) -> None:
    """UserError when `name` looks like a local path but is no model folder; `what` names the model in the message."""
    path = Path(name)
    local = path.exists() or name.startswith((".", "/", "~")) or name.count("/") != 1
    if local and "/" in name and not (path / "config.json").is_file():
        raise UserError(f"{what} {name!r} holds no config.json: give a model folder or a hub name")


def check_revision(name: str, revision: str | None) -> None:
    """UserError for a revision of a local path, which would be ignored."""
    if revision and Path(name).exists():
        raise UserError(
            f"revision {revision!r} is of no use: {name!r} is a local path, which has one version; leave it out"
        )


def load_model(name: str, what: str, device: str, dtype: str, revision: str | None = None) -> Any:
    """A causal LM of transformers in eval mode; UserError when it is not there, damaged, or lacks weights.

    `what` is its role ("target", "draft") in error messages.
    """
    check_revision(name, revision)
    name = gguf_folder(name, revision) or name
    check_model_path(name, what)
    try:
        result: Any = AutoModelForCausalLM.from_pretrained(
            name,
            revision=revision,
            dtype=DTYPES[dtype],
            use_safetensors=True,
            output_loading_info=True,
        )
    except Exception as error:  # any of a dozen kinds, from HTTP to a truncated safetensors file
        raise UserError(f"{what} {name!r} cannot be loaded: {first_line(error)}") from error
    model, info = result
    absent = sorted(info["missing_keys"]) + sorted(str(key) for key in info["mismatched_keys"])
    if absent:  # transformers fills them at random and only warns
        raise UserError(
            f"{what} {name!r} lacks {len(absent)} weights ({absent[0]}, …): save it again in full"
        )
    return model.to(device)


def load_tokenizer(name: str, revision: str | None = None) -> Any:
    """The tokenizer in a folder or on the Hub. UserError when it cannot be loaded."""
    check_revision(name, revision)
    name = gguf_folder(name, revision) or name
    check_model_path(name, "tokenizer")
    try:
        return AutoTokenizer.from_pretrained(name, revision=revision)
    except Exception as error:
        raise UserError(f"tokenizer of {name!r} cannot be loaded: {first_line(error)}") from error


def pick_device(device: str) -> str:
    """`device`, but for `auto`: cuda if there is a GPU, else cpu."""
    return ("cuda" if torch.cuda.is_available() else "cpu") if device == "auto" else device


def load_target(
    name: str, device: str = "auto", dtype: str = "float32", revision: str | None = None
) -> Target:
    """The target `name` (folder or Hub name), ready to decode. UserError when it cannot be loaded or decoded."""
    device = pick_device(device)
    model = load_model(name, "target", device, dtype, revision)
    tokenizer = load_tokenizer(name, revision)
    eos = model.generation_config.eos_token_id
    eos = [] if eos is None else eos if isinstance(eos, list) else [eos]
    return Target(
        decoder=ModelRunner(model),
        tokenizer=tokenizer,
        name=name,
        revision=vars(model.config).get("_commit_hash") or revision,
        fingerprint=tokenizer_fingerprint(tokenizer),
        eos=frozenset(eos),
    )
