"""The one measurement behind a forecast: the target writes its answers, then the draft is asked behind each of their
tokens for a chain that is made to follow the text."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from decode.common.errors import UserError
from decode.drafts.base import Draft, DraftContext, Proposal
from decode.engine.engine import decode, row_seeds
from decode.model.linear import begin_request
from decode.model.loading import Target
from decode.verification.rules import NO_DRAFT
from decode.verification.sampling import SamplingParams, warp
from eval.forecasting.rounds import TextChains
from eval.metrics.bootstrap import Array
from eval.results.speculation_profile import AUTOREGRESSIVE
from eval.tasks.loading import TaskPrompt

LOOKUPS = frozenset(("ngram", "vllm-ngram"))
"""Drafts that copy from the text, of which a chain of K tokens begins with that of K - 1."""


@dataclass(frozen=True)
class ChainSettings:
    """What is measured: chains of `k` tokens at one temperature along answers of up to `max_new_tokens`."""

    k: int
    temperature: float
    max_new_tokens: int
    rows: int
    """Prompts decoded together."""


class TextFollower:
    """A Sampler for drafts that picks the tokens of `follow` one after the other instead of drawing.

    A token outside the draft's vocabulary cannot be picked; its q is 0, so what the chain holds behind it is not used.
    """

    def __init__(self, vocab_size: int, vocab_ids: torch.Tensor | None):
        self.index = torch.arange(vocab_size)
        if vocab_ids is not None:
            self.index = torch.full((vocab_size,), -1)
            self.index[vocab_ids.cpu()] = torch.arange(len(vocab_ids))

    def follow(self, tokens: torch.Tensor) -> None:
        """The next draws are the columns of tokens [B, K]."""
        self.index = self.index.to(tokens.device)
        self.tokens, self.draws = tokens, 0

    def __call__(self, weights: torch.Tensor) -> torch.Tensor:
        index = self.index[self.tokens[:, self.draws]]
        self.draws += 1
        return torch.where(index < 0, weights.argmax(-1), index)


def check_draft(draft: Draft) -> None:
    """UserError for a draft of which one K does not say what a shorter one would draft."""
    if draft.shape is not None or draft.name not in AUTOREGRESSIVE | LOOKUPS:
        known = ", ".join(sorted(AUTOREGRESSIVE | LOOKUPS))
        raise UserError(
            f"a draft of family {draft.name!r} drafts other tokens with another K: measure each K with eval/run.py; "
            f"forecasts are for chains of {known}"
        )


def check_room(target: Target, items: Sequence[TaskPrompt], s: ChainSettings) -> None:
    """UserError if answers have no rounds, or do not fit the context."""
    if s.max_new_tokens < 2:
        raise UserError("max_new_tokens is 1: give at least 2, since prefill gives the first token")
    size = max(len(item.prompt_ids) for item in items) + s.max_new_tokens + 2 * s.k
    if size > target.runner.context:
        raise UserError(
            f"prompts, answers and drafts take up to {size} tokens and the context of {target.name} holds "
            f"{target.runner.context}: give shorter prompts, a smaller max_new_tokens or k"
        )


def measure_chains(
    target: Target, draft: Draft, items: Sequence[TaskPrompt], s: ChainSettings, seed: int
) -> list[TextChains]:
    """The chains along one answer of the target to each prompt; a prompt may stand there several times.

    UserError if the draft cannot be measured or an answer does not fit the context.
    """
    check_draft(draft)
    check_room(target, items, s)
    sampling = SamplingParams(s.temperature)
    endless = replace(target, eos=frozenset())  # the text goes on behind its end
    prompts, limit = [item.prompt_ids for item in items], s.max_new_tokens + s.k - 1
    seeds = row_seeds(seed, len(items))
    records = decode(
        endless, None, prompts, max_new_tokens=limit, sampling=sampling, rows=s.rows, seeds=seeds
    )
    found = []
    for start in range(0, len(items), s.rows):
        group = records[start : start + s.rows]
        texts = [record.output_ids for record in group]
        parts = follow_texts(target, draft, [record.prompt_ids for record in group], texts, s)
        for row, (item, text) in enumerate(zip(items[start : start + s.rows], texts, strict=True)):
            ends = (i + 1 for i, token in enumerate(text) if token in target.eos)
            length = min(next(ends, s.max_new_tokens), s.max_new_tokens)  # with its EOS
            found.append(TextChains(item.task, item.id, length, *(part[row] for part in parts)))
    return found


@torch.inference_mode()
def follow_texts(
    target: Target,
    draft: Draft,
    prompts: Sequence[list[int]],
    texts: Sequence[list[int]],
    s: ChainSettings,
) -> tuple[Array, Array, Array, Array]:
    """(p, q, best, drafted) of TextChains with a row for each text in front: [B, S, K], and [B, S] of `drafted`.

    The texts are equally long. Each step of the target commits one token, as a round would that accepts nothing, so
    that a draft's state is what decoding gives it.
    """
    runner, rows = target.runner, len(prompts)
    text = torch.tensor(texts, device=runner.device)
    count, starts = text.shape[1], s.max_new_tokens - 1
    greedy = s.temperature == 0
    sampling = SamplingParams(1.0 if greedy else s.temperature)  # only the order of q counts then
    follower = TextFollower(runner.vocab_size, draft.vocab_ids)
    history, length, logits = begin(target, draft, prompts, count, s.k, sampling, follower)
    p, chains = [], []
    for i in range(count):
        token = text[:, i : i + 1]
        p.append(torch.ones(rows) if greedy else token_share(warp(logits, sampling), token[:, 0]))
        history.scatter_(1, length[:, None], token)
        length = length + 1
        for row, prompt in enumerate(prompts):
            draft.on_commit(row, [*prompt, texts[row][0]] if i == 0 else [texts[row][i]])
        if i < starts:
            follower.follow(text[:, i + 1 : i + 1 + s.k])
            chains.append(read_chain(draft.propose(history, length, s.k), follower.tokens))
        if i + 1 < count:
            logits = runner.step(token, length - 1)[:, -1]
            if draft.aux_layers is not None:
                reader, states = draft.state_reader(), runner.features
                reader.update_hidden_states(states, torch.ones_like(length))
    runner.capture_hidden_states(None)
    window = torch.arange(starts)[:, None] + 1 + torch.arange(s.k)
    chances = torch.stack(p, 1).double()[:, window]  # [B, S, K]
    q, best, drafted = (torch.stack(column, 1).numpy() for column in zip(*chains, strict=True))
    return chances.numpy(), q, best, drafted


def begin(
    target: Target,
    draft: Draft,
    prompts: Sequence[list[int]],
    count: int,
    k: int,
    sampling: SamplingParams,
    follower: TextFollower,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(history [B, S], length [B], logits [B, V]) once target and draft have read the prompts and have room for `count`
    more tokens."""
    runner = target.runner
    length = torch.tensor([len(x) for x in prompts], device=runner.device)
    width, rows = int(length.max()), len(prompts)
    size = width + count + 2 * draft.max_slots(k) + 2
    history = torch.zeros(rows, size, dtype=torch.long, device=runner.device)
    for line, prompt in zip(history, prompts, strict=True):
        line[: len(prompt)] = torch.tensor(prompt, device=runner.device)
    begin_request()
    runner.allocate(rows, size)
    runner.capture_hidden_states(draft.aux_layers)
    draft.begin_batch(DraftContext(rows, size, k, sampling, follower))
    for cache in [runner.cache, *draft.kv_caches()]:
        cache.slots.limit_to(size)
    row = torch.arange(rows, device=runner.device)
    logits = runner.prefill(history[:, :width], length, row)
    features = None if draft.aux_layers is None else runner.features
    draft.prefill(row, history[:, :width], length, features)
    return history, length, logits


def read_chain(
    proposal: Proposal, text: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(q [B, K], best [B, K], drafted [B]) of one chain that followed the text's tokens [B, K], on the host."""
    drafted = (proposal.tokens != NO_DRAFT).sum(1).cpu()
    if proposal.q is None:
        match = (proposal.tokens == text).cpu()
        return match.double(), match, drafted
    best = (proposal.q.argmax(-1) == text).cpu()
    return token_share(proposal.q, text), best, drafted


def token_share(probabilities: torch.Tensor, token: torch.Tensor) -> torch.Tensor:
    """[...] the probability of token [...] under probabilities [..., V]."""
    return probabilities.gather(-1, token[..., None])[..., 0].double().cpu()


class VllmNgramDraft(Draft):
    """Continues the longest suffix of `longest` … `shortest` tokens that occurs earlier; of several, the first.

    As vLLM 0.32 does (vllm/v1/spec_decode/ngram_proposer.py; its prompt_lookup_max and prompt_lookup_min). It copies no
    token that the text does not have yet, so chains may be shorter than K.
    """

    name = "vllm-ngram"

    def __init__(self, longest: int, shortest: int):
        self.longest, self.shortest = longest, shortest

    def propose(self, history: torch.Tensor, length: torch.Tensor, k: int) -> Proposal:
        tokens = torch.full((len(history), k), NO_DRAFT, device=history.device)
        for row, (line, count) in enumerate(zip(history.tolist(), length.tolist(), strict=True)):
            found = self.continuation(line[:count], k)
            tokens[row, : len(found)] = torch.tensor(found, device=history.device)
        return Proposal(tokens, None)

    def continuation(self, text: list[int], k: int) -> list[int]:
        """Up to k tokens that followed the match; [] without one."""
        for n in range(min(self.longest, len(text) - 1), self.shortest - 1, -1):
            suffix = text[-n:]
            for start in range(len(text) - n):
                if text[start : start + n] == suffix:
                    return text[start + n : start + n + k]
        return []
