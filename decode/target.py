"""A Hugging Face causal LM behind fixed-shape steps, and the identity of its tokenizer."""

import hashlib
import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.utils import logging

from decode import attention
from decode.cache import Slots, new_cache
from decode.settings import UserError

logging.disable_progress_bar()  # a bar a shard hides the one bar of the command


class Decoder:
    """One causal LM with its own fixed-shape K/V store, for ragged rows."""

    def __init__(self, model: Any):
        self.model = model.eval()
        self.model.set_attn_implementation(attention.NAME)
        self.config = model.config.get_text_config(decoder=True)
        self.device: torch.device = model.device
        self.context: int = self.config.max_position_embeddings
        self.vocab_size: int = model.get_output_embeddings().weight.shape[0]

    def allocate(self, rows: int, slots: int) -> None:
        """Empty buffers for `rows` sequences of up to `slots` tokens each."""
        self.slots = Slots(rows, slots, self.device)
        self.cache = new_cache(self.config.num_hidden_layers, self.slots)

    @torch.inference_mode()
    def prefill(self, tokens: torch.Tensor, length: torch.Tensor) -> torch.Tensor:
        """Logits [B, V] of each row's last prompt token; tokens [B, W] right-padded, length [B]."""
        self.slots.place(torch.zeros_like(length), tokens.shape[1], prefill=True)
        row = torch.arange(len(length), device=length.device)
        with logits_only_at(self.model, lambda hidden: hidden[row, length - 1][:, None]):
            return self._forward(tokens)[:, 0]

    @torch.inference_mode()
    def step(self, tokens: torch.Tensor, length: torch.Tensor) -> torch.Tensor:
        """Logits [B, T, V] of tokens [B, T] put behind the first `length` [B] slots of each row."""
        self.slots.place(length, tokens.shape[1])
        return self._forward(tokens)

    def _forward(self, tokens: torch.Tensor) -> torch.Tensor:
        # Drafts near the end of the context get a position that exists; their verdict is never used.
        position = self.slots.write.clamp_max(self.context - 1)
        return self.model(
            input_ids=tokens,
            position_ids=position,
            past_key_values=self.cache,
            use_cache=True,
            slots=self.slots,
        ).logits


@contextmanager
def logits_only_at(model: Any, select: Callable[[torch.Tensor], torch.Tensor]) -> Iterator[None]:
    """Within it, `model` projects `select(hidden [B, T, H])` to the vocabulary instead of every position.

    A hook on the output projection, because `logits_to_keep` takes one position a row only in newer versions
    of transformers and silently means something else in older ones.
    """
    handle = model.get_output_embeddings().register_forward_pre_hook(
        lambda module, args: (select(args[0]), *args[1:])
    )
    try:
        yield
    finally:
        handle.remove()


@dataclass(frozen=True)
class Target:
    """The model to be made faster, its tokenizer, and how it is named in artefacts."""

    decoder: Decoder
    tokenizer: Any
    name: str
    revision: str | None
    fingerprint: str
    eos: frozenset[int]


def fingerprint(tokenizer: Any) -> str:
    """16 hex digits over the vocabulary and a probe text: equal for tokenizers that agree on ids."""
    probe = "def f(x):\n    return x ** 2  # 1234567 Ünïcode → ok\n\n\t\tend"
    content = [sorted(tokenizer.get_vocab().items()), tokenizer(probe)["input_ids"]]
    return hashlib.sha256(json.dumps(content).encode()).hexdigest()[:16]


def check_path(name: str, what: str) -> None:
    """UserError for something that looks like a local path but is not a model folder."""
    path = Path(name)
    local = path.exists() or name.startswith((".", "/", "~")) or name.count("/") != 1
    if local and "/" in name and not (path / "config.json").is_file():
        raise UserError(f"{what} {name!r} holds no config.json: give a model folder or a hub name")


def load_model(name: str, what: str, device: str, dtype: str, revision: str | None = None) -> Any:
    """An HF causal LM in eval mode; UserError when it is not there, damaged, or lacks weights."""
    check_path(name, what)
    try:
        result: Any = AutoModelForCausalLM.from_pretrained(
            name,
            revision=revision,
            dtype=DTYPES[dtype],
            use_safetensors=True,
            output_loading_info=True,
        )
    except Exception as error:  # any of a dozen kinds, from HTTP to a truncated safetensors file
        raise UserError(f"{what} {name!r} cannot be loaded: {_first_line(error)}") from error
    model, info = result
    absent = sorted(info["missing_keys"]) + sorted(str(key) for key in info["mismatched_keys"])
    if absent:  # transformers fills them at random and only warns
        raise UserError(
            f"{what} {name!r} lacks {len(absent)} weights ({absent[0]}, …): save it again in full"
        )
    return model.to(device)


def load_tokenizer(name: str, revision: str | None = None) -> Any:
    check_path(name, "tokenizer")
    try:
        return AutoTokenizer.from_pretrained(name, revision=revision)
    except Exception as error:
        raise UserError(f"tokenizer of {name!r} cannot be loaded: {_first_line(error)}") from error


DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def pick_device(device: str) -> str:
    """`auto` becomes cuda where there is one, else cpu."""
    return ("cuda" if torch.cuda.is_available() else "cpu") if device == "auto" else device


def load_target(
    name: str, device: str = "auto", dtype: str = "float32", revision: str | None = None
) -> Target:
    """The target `name` (folder or hub name) ready to decode."""
    device = pick_device(device)
    model = load_model(name, "target", device, dtype, revision)
    tokenizer = load_tokenizer(name, revision)
    eos = model.generation_config.eos_token_id
    eos = [] if eos is None else eos if isinstance(eos, list) else [eos]
    return Target(
        decoder=Decoder(model),
        tokenizer=tokenizer,
        name=name,
        revision=vars(model.config).get("_commit_hash") or revision,
        fingerprint=fingerprint(tokenizer),
        eos=frozenset(eos),
    )


def _first_line(error: Exception) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0]
