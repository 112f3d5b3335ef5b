"""A small language model as draft: chains of sampled or most probable tokens, or trees.

One with recurrent layers drafts chains only.
"""

from pathlib import Path

import torch
from torch import Tensor

from decode.checkpoints import draft_vocab, importers
from decode.checkpoints.draft_folder import check_vocabulary, read_metadata
from decode.common import damage
from decode.common.errors import UserError
from decode.drafts.base import Draft, DraftBuffers, DraftContext, Proposal, Reads
from decode.drafts.drafting import build_tree_plan, decoder_step, draft_tokens
from decode.model.compatibility import position_limit
from decode.model.loading import (
    Target,
    build_runner,
    load_config,
    load_model,
    model_fingerprint,
    model_folder,
    tokenizer_fingerprint,
)
from decode.model.recurrent import RecurrentRunner, States, copy_states, group_by, rows_of, set_rows
from decode.model.runner import ModelRunner
from decode.model.vocabularies import unknown_ids
from decode.verification.tree import TreeShape, max_depth


class LanguageModelDraft(Draft):
    """What drafts with a language model share: its runner, whose KV cache is their own."""

    runner: ModelRunner

    def buffers(self) -> DraftBuffers:
        runner = self.runner
        return DraftBuffers([self], self, [runner.cache], can_grow=runner.can_grow)


# ---- with recurrent layers ----


class RecurrentDraft(LanguageModelDraft):
    """Keeps the states after each row's committed tokens, and drafts from a copy of them.

    A proposal begins by reading the tokens that were committed since the last one, the rows with equally many in one
    forward. So nothing is read twice, and rejected drafts are never in the states that are kept.
    """

    runner: RecurrentRunner

    def __init__(self, runner: RecurrentRunner, name: str = "causal"):
        self.runner, self.name = runner, name
        self.reads = Reads(context=position_limit(runner.config))

    def begin_batch(self, request: DraftContext) -> None:
        """UserError for trees: there is one state a row."""
        if self.shape is not None:
            raise UserError(
                f"draft {self.name!r} has recurrent layers and drafts chains only: give it no tree"
            )
        self.request = request
        self.runner.allocate(request.rows, request.size)
        self.kept: States = copy_states(self.runner.cache.states())
        self.known = torch.zeros(request.rows, dtype=torch.long, device=self.runner.device)

    def prefill(
        self, row: Tensor, prompts: Tensor, length: Tensor, features: Tensor | None
    ) -> None:
        self.runner.prefill(prompts, length, row)
        set_rows(self.kept, row, rows_of(self.runner.cache.states(), row))
        self.known[row] = length

    def propose(self, history: Tensor, length: Tensor, k: int) -> Proposal:
        logits = self._read_committed(history, length)
        step = decoder_step(self.runner)
        return draft_tokens(step, logits, length, k, None, self.request)

    def _read_committed(self, history: Tensor, length: Tensor) -> Tensor:
        """Logits [B, V] after the last committed token; zeros in rows that have ended, whose drafts are not used."""
        runner = self.runner
        runner.cache.set_states(copy_states(self.kept))
        logits = torch.zeros(len(length), runner.vocab_size, device=runner.device)
        for count, members in group_by((length - self.known).tolist()).items():
            if count == 0:
                continue
            row = torch.tensor(members, device=runner.device)
            start = self.known[row]
            position = start[:, None] + torch.arange(count, device=runner.device)
            read = runner.read_rows(history[row].gather(1, position), start, row)
            logits[row] = read.to(logits.dtype)
        self.kept, self.known = copy_states(runner.cache.states()), length.clone()
        return logits


# ---- with attention alone ----

MAX_UNREAD = 64
"""Tokens of skipped rounds after which a draft reads them although no proposal is asked for."""
LATE = 14
"""Tokens of skipped rounds that compiled code reads together with the usual two; it exists for none and for these."""


class CausalDraft(LanguageModelDraft):
    """Has its own KV cache, which is rolled back by length like the target's."""

    def __init__(self, runner: ModelRunner, name: str = "causal", shape: TreeShape = None):
        """UserError for a model with recurrent layers: `causal_draft` has another draft for it."""
        if not runner.takes_trees:
            raise UserError(
                f"draft {name!r} rolls back by length, and its model has recurrent layers: use it as a causal draft "
                "of chains, or take a model with attention alone"
            )
        self.runner, self.name, self.shape = runner, name, shape
        self.reads = Reads(context=position_limit(runner.config))

    def begin_batch(self, request: DraftContext) -> None:
        self.request = request
        self.plan = build_tree_plan(self.shape, self.runner.device)
        # A chain leaves its last drafted token and the bonus token to read. The path of a tree lies at scattered slots
        # of the KV cache and is run again as a whole.
        self.reread = 2 if self.shape is None else max_depth(self.shape, request.k) + 1
        self.unread = 0  # committed tokens at most that the KV cache lacks besides these
        self.runner.allocate(request.rows, request.size)

    def prefill(
        self, row: Tensor, prompts: Tensor, length: Tensor, features: Tensor | None
    ) -> None:
        self.runner.prefill(prompts, length, row)

    def propose(self, history: Tensor, length: Tensor, k: int) -> Proposal:
        """The first step runs all tokens that the KV cache may lack, a fixed number unless rounds were skipped."""
        logits = self._read_committed(history, length)
        return draft_tokens(decoder_step(self.runner), logits, length, k, self.plan, self.request)

    def skip(self, history: Tensor, length: Tensor, k: int, proposed: bool = False) -> None:
        """Runs nothing: the first step of the next `propose` reads these tokens too. They are read here only when there
        are MAX_UNREAD of them, since some models compute logits for each token of a step."""
        if (
            proposed
        ):  # the KV cache has the draft's own tokens, and some of the text's are read again anyway
            self.unread += max(0, k + 1 - self.reread)
            return
        if self.unread >= MAX_UNREAD:
            self._read_committed(history, length)
        self.unread += k + 1

    def plan_compiled_round(self, history: Tensor, length: Tensor, k: int) -> None:
        """An eager pass takes several times as long as compiled code, which reads LATE tokens more where that is
        enough, some of them again."""
        if 0 < self.unread <= LATE and int(length.min()) > LATE + 2:
            self.unread = LATE
        elif self.unread > 0:
            self._read_committed(history, length)

    def _read_committed(self, history: Tensor, length: Tensor) -> Tensor:
        """Logits [B, V] after the last committed token. The step runs all tokens that the KV cache may lack."""
        count = self.unread + self.reread
        self.unread = 0
        back = length[:, None] + torch.arange(-count, 0, device=length.device)
        tokens = history.gather(1, back.clamp_min(0))
        return self.runner.step(tokens, length - count, last=1)[:, -1]


def causal_draft(runner: ModelRunner) -> CausalDraft | RecurrentDraft:
    """The draft for a language model, with recurrent layers or without."""
    return RecurrentDraft(runner) if isinstance(runner, RecurrentRunner) else CausalDraft(runner)


def load(path: str, target: Target, device: str, dtype: str) -> CausalDraft | RecurrentDraft:
    """A Hugging Face causal LM from a folder or the Hub. UserError if its tokenizer and the target's give an id
    to different tokens.

    Tokens that only one of them has are never drafted: their probability is 0, and where the target writes one, the
    draft reads the row of its embedding with that id, or its last one.
    Its embedding may be padded to another number of rows than the target's: the runner gives the target's logits. Of a
    draft with a reduced vocabulary (decode/checkpoints/draft_vocab.py) only those rows of the LM head are kept and
    computed, and all other tokens have probability 0.
    """
    check_not_the_target(path, target)
    model = load_model(path, "draft", device, dtype)
    tokenizer = check_vocabulary(path, target)
    columns = min(target.runner.vocab_size, model.get_output_embeddings().out_features)
    ids = load_ids(path, columns)
    runner = build_runner(model, target.runner.vocab_size, ids)
    if tokenizer_fingerprint(tokenizer) != target.fingerprint:
        runner.leave_out(unknown_ids(tokenizer, target.tokenizer, target.runner.vocab_size))
    return causal_draft(runner)


def check_not_the_target(path: str, target: Target) -> None:
    """A line for a draft that is the target itself, and one for MTP layers beside a language model, which are not used.
    UserError for both at once: who gives a target's folder as draft means its MTP layers."""
    folder = importers.resolve_folder(path)
    names = importers.tensor_files(folder) if any(Path(folder).glob("*.safetensors")) else {}
    mtp = sorted(name for name in names if importers.MTP_NAME.search(name))
    layers = f"its MTP layers ({mtp[0]}, …) have a layout that is not read" if mtp else ""
    if not has_weights_of(path, target):
        if mtp:
            damage.warn_once(f"draft {path!r}: {layers}, and the whole language model drafts")
        return
    if mtp:
        raise UserError(
            f"draft {path!r} is the target, and {layers}: choose a draft without training, such as ngram, or train one"
        )
    damage.warn_once(
        f"draft {path!r} has the target's own weights: what it drafts is accepted, and decoding is slower than without"
    )


def has_weights_of(path: str, target: Target) -> bool:
    """Whether a model in a folder or on the Hub is the target; weights are compared where the sizes are equal."""
    if path == target.name:
        return True
    folder = model_folder(importers.resolve_folder(path), "draft")
    own = load_config(path, "draft", folder=folder).get_text_config(decoder=True)
    sizes = ("hidden_size", "num_hidden_layers", "vocab_size", "model_type", "intermediate_size")
    ours = target.runner.config
    if any(vars(own).get(size) != vars(ours).get(size) for size in sizes):
        return False
    weights = target.identity.weights
    return weights is not None and model_fingerprint(folder).weights == weights


def load_ids(path: str, vocab_size: int) -> Tensor | None:
    """[Vd]: the tokens that the draft in a folder or on the Hub can draft, among the first `vocab_size`; None: all."""
    folder = importers.resolve_folder(path)
    return draft_vocab.read_ids(folder, vocab_size, read_metadata(folder).vocabulary is not None)
