"""A Hugging Face causal LM behind fixed-shape steps, and the identity of its tokenizer."""

import copy
import hashlib
import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.utils import logging

from decode import attention, few_rows
from decode.cache import Nodes, Store
from decode.settings import UserError
from decode.support import batch_experts, context, refuse
from decode.taps import Catch, Taps

logging.disable_progress_bar()  # a bar a shard hides the one bar of the command


PREFILL_CHUNK = 1024
"""Prompt tokens in one forward: bounds the memory that long prompts take."""


class Decoder:
    """One causal LM with its own fixed-shape K/V store, for ragged rows. UserError for one that cannot be decoded."""

    def __init__(self, model: Any):
        refuse(model)
        self.model = model.eval()
        self.model.set_attn_implementation(attention.NAME)
        batch_experts(self.model)
        few_rows.speed_up(self.model)
        self.config = model.config.get_text_config(decoder=True)
        self.device: torch.device = model.device
        self.context: int = context(self.config)
        self.vocab_size: int = model.get_output_embeddings().weight.shape[0]
        self.shape = 0, 0  # rows and slots of the buffers
        self.taps: Taps | None = None
        self.catch: Catch | None = None
        self.features: torch.Tensor
        """[B, T, F] tapped states of the last prefill or step."""

    def allocate(self, rows: int, size: int) -> None:
        """Buffers for `rows` sequences of up to `size` tokens each; what they held is stale.

        Equal shapes are used again: compiled code and captured graphs know the buffers by their addresses.
        """
        layers = self.config.num_hidden_layers
        if (rows, size) != self.shape:
            self.cache = Store(layers, rows, size, self.device)
            self.shape = rows, size

    def tap(self, taps: Taps | None) -> None:
        """From now on `features` hold these states; None: nothing is kept."""
        if taps != self.taps:
            if self.catch is not None:
                self.catch.remove()
            self.catch = self.taps = None  # and so it stays if these taps are refused
            self.catch = None if taps is None else Catch(self.model, taps)
            self.taps = taps

    def grow(self, size: int) -> None:
        """Room for `size` tokens a row from now on; what the rows hold stays."""
        rows, held = self.shape
        if held < size:
            self.cache.grow(size)
            self.shape = rows, size

    @torch.inference_mode()
    def prefill(
        self, tokens: torch.Tensor, length: torch.Tensor, row: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Logits [b, V] of each row's last prompt token; tokens [b, W] right-padded, length [b].

        `row` [b] says which rows are filled (None: all of them); the others stay as they are.
        """
        rows, width = tokens.shape
        logits = torch.zeros(rows, self.vocab_size, device=self.device, dtype=self.model.dtype)
        each = torch.arange(rows, device=self.device)
        features = []
        for start in range(0, width, PREFILL_CHUNK):
            piece = tokens[:, start : start + PREFILL_CHUNK]
            count = piece.shape[1]
            self.cache.slots.place(torch.full_like(length, start), count, row=row, fresh=start == 0)
            last = length - 1 - start
            at = last.clamp(0, count - 1)
            with logits_only_at(self.model, partial(_at, each, at)):
                here = self._forward(piece)[:, 0]
            inside = (last >= 0) & (last < count)
            logits = torch.where(inside[:, None], here, logits)
            if self.catch is not None:
                features.append(self.features)
        if self.catch is not None:
            self.features = torch.cat(features, 1)
        return logits

    def step(
        self, tokens: torch.Tensor, base: torch.Tensor, nodes: Nodes | None = None
    ) -> torch.Tensor:
        """Logits [B, T, V] of tokens [B, T] put behind the first `base` [B] slots of each row.

        They are a chain, or the given nodes of a token tree.
        """
        self.cache.slots.place(base, tokens.shape[1], nodes=nodes)
        return self._forward(tokens)

    def keep(self, base: torch.Tensor, path: torch.Tensor) -> None:
        """Moves the accepted nodes `path` [B, P] of a tree, rooted at slot `base` [B], into chain order."""
        self.cache.move(base, path)

    def first_layers(self, count: int) -> "Decoder":
        """The first `count` layers with the same norm, head and K/V store: a draft at no cost in memory.

        What it writes into the shared store for drafted tokens, verification overwrites.
        """
        layers = self.config.num_hidden_layers
        if not 0 < count < layers:
            raise UserError(
                f"early exit needs 1 to {layers - 1} layers of this target, not {count}"
            )
        shorter = copy.copy(self)
        shorter.catch = shorter.taps = None
        shorter.model = _cut(self.model, layers, count)
        return shorter

    def _forward(self, tokens: torch.Tensor) -> torch.Tensor:
        # Drafts near the end of the context get a position that exists; their verdict is never used.
        position = self.cache.slots.position.clamp_max(self.context - 1)
        with attention.over(self.cache.slots):
            logits = self.model(
                input_ids=tokens,
                position_ids=position,
                past_key_values=self.cache,
                use_cache=True,
            ).logits
        if self.catch is not None:
            self.features = self.catch.states()
        return logits


def _at(row: torch.Tensor, column: torch.Tensor, hidden: torch.Tensor) -> torch.Tensor:
    return hidden[row, column][:, None]


def _cut(module: Any, layers: int, count: int) -> Any:
    """A copy of `module` that shares all weights and ends after its first `count` of `layers` blocks.

    Blocks are those of the one ModuleList of that length. A prefix keeps every index, which models look their
    layer types up by.
    """
    cut = copy.copy(module)
    cut._modules = dict(module._modules)
    for name, child in module._modules.items():
        if isinstance(child, torch.nn.ModuleList) and len(child) == layers:
            cut._modules[name] = torch.nn.ModuleList(child[:count])
        elif child is not None and any(isinstance(m, torch.nn.ModuleList) for m in child.modules()):
            cut._modules[name] = _cut(child, layers, count)
    return cut


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

    @cached_property
    def eos_ids(self) -> torch.Tensor:
        """The same [E] on the device."""
        return torch.tensor(sorted(self.eos), dtype=torch.long, device=self.decoder.device)


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
