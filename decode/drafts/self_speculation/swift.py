"""SWIFT (Xia et al. 2024): the target drafts for itself without some of its attention and MLP sub-layers.

They run in the target's own KV cache: committed tokens have the keys and values of the whole target there, and
verification overwrites what drafting wrote for drafted tokens. Which sub-layers are skipped is given or searched for
on line, on the answers that are being decoded; one set is tried in each round until the search ends. That costs a pass
over the window, counted as time of the draft. The search goes on from prompt to prompt, and from process to process if
it is given a folder. While it lasts, a sampled text depends on what was decoded before, as q does; its law does not.
"""

import json
from dataclasses import replace
from pathlib import Path

import torch

from decode.checkpoints import importers
from decode.common.errors import UserError
from decode.common.files import write_atomically
from decode.common.typed_json import to_json
from decode.drafts.base import (
    METADATA_FILE,
    ChainStop,
    Draft,
    DraftContext,
    Proposal,
    check_target,
    check_target_weights,
)
from decode.drafts.drafting import decoder_step, draft_tokens
from decode.drafts.self_speculation.early_exit import check_device
from decode.drafts.self_speculation.sublayers import SublayerSkipper, from_bits
from decode.drafts.self_speculation.swift_search import SkipSearch, SwiftConfig, load_search
from decode.model.loading import Target
from decode.model.runner import ModelRunner

STATE_FILE = "swift.json"


class SwiftDraft(Draft):
    """The target without the sub-layers of `search`; it drafts chains that end where the draft is unsure."""

    name = "swift"
    on_host = True  # the search reads the answers, and the end of a chain is read in each step

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
        self.target: Target = target
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
        self,
        row: torch.Tensor,
        prompts: torch.Tensor,
        length: torch.Tensor,
        features: torch.Tensor | None,
    ) -> None:
        for at, count in torch.stack([row, length], 1).tolist():
            self.texts[at], self.prompts[at] = [], count

    def on_commit(self, row: int, tokens: list[int]) -> None:
        self.texts[row] += tokens

    def propose(self, history: torch.Tensor, length: torch.Tensor, k: int) -> Proposal:
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
        facts = {
            "family": self.name,
            "target": to_json(target.describe()),
            "tokenizer_hash": target.fingerprint,
        }
        write_atomically(folder / METADATA_FILE, json.dumps(facts, indent=1) + "\n")


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
