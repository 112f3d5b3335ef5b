"""A small language model whose tokenizer is not the target's: chains by way of the text.

Each row's committed text is kept in the draft's own tokens, with which the draft continues it. Greedily the draft is
free in what it writes, and its text is spelt in the target's tokens. Sampled, under a grammar or ended by confidence it
is restricted to the tokens that both vocabularies have, and its distribution over those is the q of verification: the
token-level intersection of Timor et al. (arXiv 2502.05202).

Only how many tokens are accepted depends on how well the two tokenizers agree. The text is the target's whatever is
proposed, also where a text does not survive its way into bytes and back.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import takewhile
from os.path import commonprefix

import torch
from torch import Tensor

from decode.common import damage
from decode.common.errors import UserError
from decode.drafts import causal
from decode.drafts.base import Draft, DraftBuffers, DraftContext, Proposal, Reads, cut_proposal
from decode.drafts.drafting import ReducedVocab, draft_tokens
from decode.model import loading
from decode.model.compatibility import position_limit
from decode.model.kv_cache import TreeNodes
from decode.model.loading import Target
from decode.model.runner import ModelRunner
from decode.model.vocabularies import Spelling, disagreement, shared_tokens, whole_characters
from decode.verification.rules import NO_DRAFT

REVISED = 48
"""Bytes at the end of a text whose tokens may change when the text goes on: what follows may merge with them."""
BEFORE = 16
"""Committed tokens in front of a drafted text when it is spelt in the target's tokens."""


@dataclass
class RowText:
    """The committed text of a row as the draft reads it."""

    text: bytes = b""
    ids: list[int] = field(default_factory=lambda: [0])
    """How the draft's tokenizer spells it; never empty."""
    cached: list[int] = field(default_factory=list)
    """The tokens whose keys and values the KV cache has, from slot 0 on."""
    committed: list[int] = field(default_factory=list)
    """The last of the target's tokens."""
    prompt: int = 0
    """Tokens that the next `on_commit` brings although they are here."""


class OtherTokenizerDraft(Draft):
    """Has its own KV cache, of which what the text's tokens share with it stays."""

    runs = "host"

    def __init__(self, runner: ModelRunner, own: Spelling, target: Spelling, vocab_size: int):
        """`vocab_size` is the number of the target's logits. UserError for a model with recurrent layers, and for two
        vocabularies without a common token."""
        if not runner.takes_trees:
            raise UserError(
                "it has another tokenizer than the target and recurrent layers, which do not roll back to a token of "
                "the text: give it the target's tokenizer first (scripts/export.py --format transplant)"
            )
        self.runner, self.name, self.own, self.target = runner, "causal", own, target
        pairs = sorted(shared_tokens(own, target).items())
        special = dict.fromkeys(target.special, b"")
        self.heard = target.pieces | special | {theirs: own.pieces[ours] for theirs, ours in pairs}
        """{the target's id: its text for the draft}, of a special one its counterpart's name, or nothing."""
        can = set(own.pieces if runner.ids is None else runner.ids.tolist())
        self.shared = {theirs: ours for theirs, ours in pairs if ours in can}
        """{the target's id: the draft's} of the tokens that both have and the draft can draft."""
        if not self.shared:
            raise UserError("it has another tokenizer than the target, and they share no token")
        self.back = {own_id: target_id for target_id, own_id in self.shared.items()}
        device = runner.device
        self.columns = torch.tensor(list(self.shared.values()), device=device)
        self.vocab = ReducedVocab(torch.tensor(list(self.shared), device=device), vocab_size)
        self.own_ids = self.columns[:1].repeat(vocab_size)
        self.own_ids[self.vocab.ids] = self.columns
        first = own.tokenizer("a")["input_ids"]
        self.lead = own.join(list(takewhile(lambda one: one in own.special, first)))
        """What the draft's tokenizer puts in front of a text, such as BOS."""
        self.reads = Reads(context=position_limit(runner.config))

    def begin_batch(self, request: DraftContext) -> None:
        """UserError for trees."""
        if self.shape is not None:
            raise UserError(
                f"draft {self.name!r} has another tokenizer than the target and drafts chains only: give it no tree"
            )
        self.request = request
        self.runner.allocate(request.rows, request.size)
        self.rows = [RowText() for _ in range(request.rows)]

    def buffers(self) -> DraftBuffers:
        return DraftBuffers([self], self, [self.runner.cache])

    # ---- the text in the draft's tokens ----

    def prefill(
        self, row: Tensor, prompts: Tensor, length: Tensor, features: Tensor | None
    ) -> None:
        read = []
        for at, prompt, count in zip(row.tolist(), prompts.tolist(), length.tolist(), strict=True):
            text = self.text_of(prompt[:count])
            text = text if text.startswith(self.lead) else self.lead + text
            ids = self.own.encode(text) or [int(self.columns[0])]
            self.rows[at] = RowText(
                text, ids, ids[: self.reads.context], prompt[:count][-BEFORE:], count
            )
            read.append(self.rows[at].cached)
        lengths = torch.tensor([len(ids) for ids in read], device=row.device)
        width = max(map(len, read))
        self.provide(width)
        tokens = [ids + [0] * (width - len(ids)) for ids in read]
        self.runner.prefill(torch.tensor(tokens, device=row.device), lengths, row)

    def on_commit(self, row: int, tokens: list[int]) -> None:
        state = self.rows[row]
        new, state.prompt = tokens[state.prompt :], 0
        state.committed = (state.committed + new)[-BEFORE:]
        self.extend(state, new)

    def text_of(self, tokens: Sequence[int]) -> bytes:
        return b"".join(self.heard.get(one, b"") for one in tokens)

    def extend(self, state: RowText, tokens: Sequence[int]) -> None:
        """Adds the target's tokens to the text, whose end is spelt again as the tokenizer would spell the whole."""
        new = self.text_of(tokens)
        text, begin, count = state.text + new, len(state.text), len(state.ids)
        kept = {begin: count}  # {place in the text: tokens before it}
        while count > 0 and begin > 0 and len(state.text) - begin < REVISED:
            count -= 1
            begin = max(0, begin - len(self.own.pieces[state.ids[count]]))
            kept[begin] = count
        # A token that begins where the encoded text does may be another one there than in the whole.
        starts = [place - begin for place in sorted(kept) if place > begin or begin == 0]
        found = self.own.encode_from(text[begin:], starts)
        state.text = text
        if found is None:
            state.ids = state.ids + self.own.encode(new)
        else:
            state.ids = state.ids[: kept[begin + found[0]]] + found[1]

    # ---- drafting ----

    def propose(self, history: Tensor, length: Tensor, k: int) -> Proposal:
        """A row whose text has more tokens than the draft's context drafts nothing."""
        request, device = self.request, self.runner.device
        spelt = [state.ids[: self.reads.context] for state in self.rows]
        new = [
            len(ids) - min(len(commonprefix([ids, state.cached])), len(ids) - 1)
            for ids, state in zip(spelt, self.rows, strict=True)
        ]
        count = max(new)
        ends = torch.tensor([len(ids) for ids in spelt], device=device)
        self.provide(max(map(len, spelt)) + k)
        # A row's step may start before its first token, which is then repeated.
        last = [[ids[max(0, len(ids) - back)] for back in range(count, 0, -1)] for ids in spelt]
        for state, ids in zip(self.rows, spelt, strict=True):
            state.cached = list(ids)
        logits = self.runner.step(torch.tensor(last, device=device), ends - count, last=1)[:, -1]
        free = request.sampling.greedy and request.constraint is None and request.stop is None

        def step(tokens: Tensor, at: Tensor, nodes: TreeNodes | None, above: Tensor) -> Tensor:
            read = tokens if free else self.own_ids[tokens]
            for state, token in zip(self.rows, read[:, 0].tolist(), strict=True):
                state.cached.append(token)
            found = self.runner.step(read, at)
            return found if free else found[..., self.columns]

        if free:
            proposal = draft_tokens(step, logits, ends, k, None, request)
            proposal = replace(proposal, tokens=self.in_target_tokens(proposal.tokens))
        else:
            shared = logits[..., self.columns]
            proposal = draft_tokens(step, shared, ends, k, None, request, self.vocab)
        if self.reads.context is None:
            return proposal
        room = [self.reads.context - len(state.ids) for state in self.rows]
        return cut_proposal(proposal, torch.tensor(room, device=device))

    def provide(self, size: int) -> None:
        """Slots for `size` of the draft's tokens a row; the engine counts the target's."""
        self.runner.reserve(size)
        slots = self.runner.cache.slots
        slots.limit_to(max(size, len(slots.slot)))

    def in_target_tokens(self, drafted: Tensor) -> Tensor:
        """[B, K] the target's tokens of what the draft wrote [B, K]; NO_DRAFT behind them."""
        k = drafted.shape[1]
        spelt = [
            self.spelt_for_target(state.committed, ids) + k * [NO_DRAFT]
            for state, ids in zip(self.rows, drafted.tolist(), strict=True)
        ]
        return torch.tensor([ids[:k] for ids in spelt], device=drafted.device)

    def spelt_for_target(self, committed: list[int], drafted: list[int]) -> list[int]:
        """How the target's tokenizer goes on behind the committed tokens with the text that was drafted: without a
        character that is not whole, and up to a special token. Where it would merge the text with a committed token,
        or spells it otherwise, the drafted tokens that both vocabularies have."""
        own, target = self.own, self.target
        plain = list(takewhile(lambda one: one in own.pieces and one not in own.special, drafted))
        ending = [
            self.back[one] for one in drafted[len(plain) : len(plain) + 1] if one in self.back
        ]
        tail = list(takewhile(lambda one: one not in target.special, reversed(committed)))[::-1]
        before = b"".join(target.pieces.get(one, b"") for one in tail)
        text = before + own.join(plain)
        whole = whole_characters(text)
        found = target.encode_from(whole, [len(before)]) if len(whole) > len(before) else None
        if found is None:
            return [self.back[one] for one in takewhile(self.back.__contains__, drafted)]
        return found[1] + (ending if whole == text else [])


def load(path: str, target: Target, device: str, dtype: str) -> Draft:
    """A Hugging Face causal LM from a folder or the Hub: as `causal.load` gives it where its token ids are the
    target's, else one of its own tokenizer, which a line says. UserError for one that can be neither."""
    causal.check_not_the_target(path, target)
    try:
        tokenizer = loading.load_tokenizer(path)
    except UserError:  # a head may have none: what is wrong is in its tensors
        return causal.load(path, target, device, dtype)
    same = loading.tokenizer_fingerprint(tokenizer) == target.fingerprint
    if same or disagreement(tokenizer, target.tokenizer) is None:
        return causal.load(path, target, device, dtype)
    model = loading.load_model(path, "draft", device, dtype)
    if model.config.is_encoder_decoder or target.is_encoder_decoder:
        raise UserError(
            "it has another tokenizer than the target, which only causal models may have"
        )
    ids = causal.load_ids(path, model.get_output_embeddings().out_features)
    runner, wanted = loading.build_runner(model, None, ids), target.runner
    own, other = (
        Spelling(tokens, min(one.embedding_rows, one.vocab_size))
        for tokens, one in ((tokenizer, runner), (target.tokenizer, wanted))
    )
    draft = OtherTokenizerDraft(runner, own, other, wanted.vocab_size)
    damage.warn_once(
        f"draft {path!r} has another tokenizer than {target.name!r}: {len(draft.shared)} of the target's "
        f"{len(draft.target.pieces)} tokens are its own too; sampled drafts are among these, greedy ones are spelt anew"
    )
    return draft
