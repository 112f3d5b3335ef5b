"""SWIFT (Xia et al. 2024): the target drafts for itself without some of its attention and MLP sub-layers.

They run in the target's own KV cache: committed tokens have the keys and values of the whole target there, and
verification overwrites what drafting wrote for drafted tokens. Which sub-layers are skipped is given or searched for
on line, on the answers that are being decoded; one set is tried in each round until the search ends. That costs a pass
over the window, counted as time of the draft. The search goes on from prompt to prompt, and from process to process if
it is given a folder. While it lasts, a sampled text depends on what was decoded before, as q does; its distribution
does not.
"""

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from decode.checkpoints import importers
from decode.checkpoints.draft_folder import (
    DraftMetadata,
    check_target,
    check_target_weights,
    write_metadata,
)
from decode.common.errors import UserError
from decode.drafts.base import ChainStop, Draft, DraftContext, Proposal, Reads
from decode.drafts.drafting import decoder_step, draft_tokens
from decode.drafts.early_exit import check_device
from decode.drafts.swift_search import SkipSearch, SwiftConfig, load_search
from decode.model.cut_layers import output_counts
from decode.model.layer_stack import (
    check_all_weights,
    layer_stack,
    layer_stack_name,
    shallow_copy,
    with_module,
)
from decode.model.loading import Target
from decode.model.runner import ModelRunner

# ---- skipped sub-layers ----

ATTENTION_NAMES = ("self_attn", "attn", "attention")
MLP_NAMES = ("mlp", "feed_forward", "block_sparse_moe")


@dataclass(frozen=True)
class SkipSet:
    """The layers without their attention and those without their MLP. The first and the last layer keep both."""

    attention: tuple[int, ...]
    mlp: tuple[int, ...]


def from_bits(bits: str) -> SkipSet:
    """The set of a text of 2 (L - 2) digits: attention of layers 1 to L - 2, then their MLPs; 1 means skipped."""
    half = len(bits) // 2
    found = [
        tuple(i + 1 for i in range(half) if part[i] == "1") for part in (bits[:half], bits[half:])
    ]
    return SkipSet(*found)


class SkippedSublayer(nn.Module):
    """Takes the place of a sub-layer and adds zero to the residual stream, in the form in which that returns it."""

    def __init__(self, returns_tuple: bool):
        super().__init__()
        self.returns_tuple = returns_tuple

    def forward(self, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Any:
        zeros = torch.zeros_like(hidden_states)
        return (zeros, None) if self.returns_tuple else zeros


class SublayerSkipper:
    """Makes copies of `model` that lack some sub-layers and share everything else with it.

    Norms beside a skipped sub-layer still run. UserError for a model whose sub-layers are not modules of their own, and
    for one in which layers use the keys of others.
    """

    def __init__(self, model: Any):
        config = model.config.get_text_config(decoder=True)
        self.model, self.layers = model, list(layer_stack(model))
        check_all_weights(self.layers)
        shares_keys = bool(config.to_dict().get("num_kv_shared_layers"))
        names = [
            (_child(layer, ATTENTION_NAMES), _child(layer, MLP_NAMES)) for layer in self.layers
        ]
        if shares_keys or not all(attention and mlp for attention, mlp in names):
            raise UserError(
                f"SWIFT skips sub-layers, which cannot be told apart or left out in {config.model_type}: use early exit"
            )
        if len(self.layers) < 3:
            raise UserError("SWIFT keeps the first and the last layer: it needs at least 3 layers")
        self.names = names
        self.mlp_outputs = output_counts(
            model,
            [layer.get_submodule(mlp) for layer, (_, mlp) in zip(self.layers, names, strict=True)],
        )

    def without(self, skipped: SkipSet) -> Any:
        """The model without these sub-layers."""
        layers = []
        for number, layer in enumerate(self.layers):
            attention, mlp = self.names[number]
            if number in skipped.attention or number in skipped.mlp:
                layer = shallow_copy(layer)
            if number in skipped.attention:
                layer._modules[attention] = SkippedSublayer(True)
            if number in skipped.mlp:
                layer._modules[mlp] = SkippedSublayer(self.mlp_outputs[number] > 0)
            layers.append(layer)
        return with_module(self.model, layer_stack_name(self.model), nn.ModuleList(layers))


def _child(layer: nn.Module, names: tuple[str, ...]) -> str:
    """The one of `names` that `layer` has as a child; empty if there is none."""
    return next((name for name, _ in layer.named_children() if name in names), "")


# ---- the draft ----

STATE_FILE = "swift.json"


class SwiftDraft(Draft):
    """The target without the sub-layers of `search`; it drafts chains that end where the draft is unsure."""

    name = "swift"
    runs = "host"  # the search reads the answers, and the end of a chain is read in each step

    def __init__(
        self,
        target: Target,
        config: SwiftConfig,
        search: SkipSearch | None = None,
        folder: Path | None = None,
    ):
        """With `folder` the search is saved there after each set that it tries.

        UserError for a target whose sub-layers cannot be skipped, or a `search` for another number of layers.
        """
        self.target, self.reads = target, Reads(target=target)
        self.config, self.folder = config, folder
        self.skipper = SublayerSkipper(target.runner.model)
        self.search = search or SkipSearch(len(self.skipper.layers), config)
        self.runner = self.runner_without(self.search.state.best)
        self.texts: list[list[int]] = []
        self.prompts: list[int] = []  # lengths

    def runner_without(self, bits: str) -> ModelRunner:
        """The target without a set of sub-layers; it has no K/V buffers."""
        return self.target.runner.with_model(self.skipper.without(from_bits(bits)))

    def begin_batch(self, request: DraftContext) -> None:
        stop = request.stop or ChainStop([request.k] * request.rows)
        self.request = replace(request, stop=replace(stop, token=self.config.skip_threshold))
        self.texts = [[] for _ in range(request.rows)]
        self.prompts = [0] * request.rows
        self.runner.share_kv_cache(self.target.runner)

    def prefill(
        self, row: Tensor, prompts: Tensor, length: Tensor, features: Tensor | None
    ) -> None:
        for at, count in torch.stack([row, length], 1).tolist():
            self.texts[at], self.prompts[at] = [], count

    def on_commit(self, row: int, tokens: list[int]) -> None:
        self.texts[row] += tokens

    def propose(self, history: Tensor, length: Tensor, k: int) -> Proposal:
        self._search_once()
        last = history.gather(1, length[:, None] - 1)
        logits = self.runner.step(last, length - 1)[:, -1]
        return draft_tokens(decoder_step(self.runner), logits, length, k, None, self.request)

    def _search_once(self) -> None:
        """Tries one set on the first row whose answer is long enough, unless the search has ended."""
        window = self.config.window
        ready = [
            row
            for row, text in enumerate(self.texts)
            if len(text) > self.prompts[row] + window and not self.search.finished
        ]
        if not ready:
            return
        bits = self.search.candidate()
        if self.search.record(bits, self.matchness(bits, ready[0])):
            self.runner = self.runner_without(bits)
            self.runner.share_kv_cache(self.target.runner)
        if self.folder is not None:
            self.save(self.folder)

    def matchness(self, bits: str, row: int) -> float:
        """Share of the first `window` tokens of a row's answer after which the target without these sub-layers gives
        the answer's next token the highest probability.

        It runs on a copy of the row's keys and values: the committed ones must stay those of the whole target.
        """
        start, window, device = self.prompts[row], self.config.window, self.target.runner.device
        text = torch.tensor(self.texts[row][start : start + window + 1], device=device)
        candidate = self.runner_without(bits)
        candidate.cache = self.target.runner.cache.copy_row(row, start + window)
        logits = candidate.step(text[None, :-1], torch.tensor([start], device=device))[0]
        return float((logits.argmax(-1) == text[1:]).float().mean())

    def save(self, folder: Path) -> None:
        """Writes the search, from which `load` goes on, into a draft directory."""
        folder.mkdir(parents=True, exist_ok=True)
        self.search.save(folder / STATE_FILE)
        target = self.target
        write_metadata(
            folder, DraftMetadata(self.name, target.describe(), tokenizer_hash=target.fingerprint)
        )


def load(path: str, target: Target, device: str, dtype: str) -> SwiftDraft:
    """The draft that `SwiftDraft.save` wrote. UserError for another tokenizer or number of layers, and for a
    `device` that is not the target's."""
    check_device(path, target, device)
    folder = importers.resolve_folder(path)
    check_target(folder, target)
    search = load_search(Path(folder) / STATE_FILE, target.runner.config.num_hidden_layers)
    return SwiftDraft(target, search.config, search)


def open_search(target: Target, config: SwiftConfig, folder: str) -> SwiftDraft:
    """A draft that keeps its search in `folder` and goes on from what is there; empty: a new search, kept nowhere.

    The settings are `config`, not those of the saved search. UserError for a search of another tokenizer, another
    number of layers or skipped sub-layers, or with another window: its scores say nothing about this one's sets.
    """
    if not folder:
        return SwiftDraft(target, config)
    file, layers = Path(folder) / STATE_FILE, target.runner.config.num_hidden_layers
    search = SkipSearch(layers, config)
    if file.is_file():
        check_target(folder, target)
        check_target_weights(folder, target)
        saved = load_search(file, layers)
        for what, old, new in (
            ("number of skipped sub-layers (ratio, min_layers)", saved.count, search.count),
            ("window", saved.config.window, config.window),
        ):
            if old != new:
                raise UserError(
                    f"the search in {folder} has another {what}: {old}, not {new}; give the same or another folder"
                )
        search = SkipSearch(layers, config, saved.state)
    return SwiftDraft(target, config, search, Path(folder))
