"""The round: propose K tokens, verify them in one target pass, commit what stays.

Plain decoding is the same loop with nothing proposed, so a baseline runs on the very engine it is compared with.
"""

import time
from collections.abc import Iterator
from dataclasses import dataclass, field

import torch

from decode.drafts.base import Draft, Proposal, Request
from decode.sampling import Choose, Dice, Sampling, warp
from decode.settings import UserError
from decode.target import Target
from decode.verify import NO_DRAFT, Verdict, verify_chain, verify_greedy


@dataclass(frozen=True)
class RoundRecord:
    """What one round did to one row. `drafted` and `accepted` are counted before trimming at EOS and the limit."""

    row: int
    prefill: bool  # the first token, which comes before any round
    drafted: int
    accepted: int
    proposed: list[int]  # the drafted ids
    tokens: list[int]  # the ids that were emitted: accepted ones and the bonus, trimmed
    finished: str | None  # "eos" | "length" | None
    seconds: float  # of the whole batch's round


@dataclass
class Output:
    """One prompt's decoding. output_ids end with EOS if that was met; rounds are (drafted, accepted)."""

    prompt_ids: list[int]
    output_ids: list[int] = field(default_factory=list)
    rounds: list[tuple[int, int]] = field(default_factory=list)
    finish_reason: str = ""
    first_token_seconds: float = 0.0
    round_seconds: list[float] = field(default_factory=list)


@dataclass
class Phases:
    """Seconds a phase, summed over rounds; filled only when asked for, since the clock stops the device."""

    draft: float = 0.0
    verify: float = 0.0
    overhead: float = 0.0
    rounds: int = 0


def speculate(
    target: Target,
    draft: Draft | None,
    prompts: list[list[int]],
    *,
    k: int = 4,
    sampling: Sampling = Sampling(),  # noqa: B008 (frozen)
    max_new_tokens: int = 128,
    seed: int = 0,
    seeds: list[int] | None = None,
    choose: Choose | None = None,
    phases: Phases | None = None,
) -> Iterator[RoundRecord]:
    """Decodes a ragged batch of token ids, yielding each row's record as soon as its round is done.

    The emitted text follows the target's own law under `sampling` (its argmax at temperature 0) whatever the
    draft; draft None is plain decoding. `seeds` gives each row its own randomness, so that a row's text does not
    depend on the batch it sits in. `choose` replaces all randomness (tests enumerate with it).
    UserError for an empty prompt or one that leaves no room in the target's context.
    """
    decoder, device = target.decoder, target.decoder.device
    _check(prompts, decoder.context, max_new_tokens, k)
    k = 0 if draft is None else k
    limit = [min(len(prompt) + max_new_tokens, decoder.context) for prompt in prompts]
    slots = max(limit) + 2 * k + 2  # frozen rows go on drafting behind their limit
    if choose is None:
        row_seeds = row_seeds_of(seed, len(prompts)) if seeds is None else seeds
        choose = Dice(torch.tensor(row_seeds, device=device))
    start = _clock(device)
    width = max(map(len, prompts))
    history = torch.zeros(len(prompts), slots, dtype=torch.long)
    for row, prompt in enumerate(prompts):
        history[row, : len(prompt)] = torch.tensor(prompt)
    history = history.to(device)
    length = torch.tensor([len(prompt) for prompt in prompts], device=device)
    decoder.allocate(len(prompts), slots)
    first = _draw(decoder.prefill(history[:, :width], length), sampling, choose)
    if draft is not None:
        draft.begin(Request(history[:, :width], length, slots, sampling, choose))
    history.scatter_(1, length[:, None], first[:, None])
    length = length + 1
    seconds = _clock(device) - start
    written = [len(prompt) for prompt in prompts]
    finished: list[str | None] = [None] * len(prompts)
    for row, token in enumerate(first.tolist()):
        written[row] += 1
        finished[row] = _reason(token, written[row], limit[row], target.eos)
        yield RoundRecord(row, True, 0, 0, [], [token], finished[row], seconds)

    while not all(finished):
        start = _clock(device)
        proposal = _propose(draft, history, length, k, decoder.context)
        drafted_at = _clock(device, phases)
        tokens = proposal.tokens
        logits = decoder.step(
            torch.cat([history.gather(1, length[:, None] - 1), tokens.clamp_min(0)], 1), length - 1
        )
        verified_at = _clock(device, phases)
        verdict = _verify(proposal, logits, sampling, choose)
        length = _commit(history, length, tokens, verdict)
        accepted, bonus, rows = (x.tolist() for x in (verdict.accepted, verdict.bonus, tokens))
        end = _clock(device)
        if phases is not None:
            phases.draft += drafted_at - start
            phases.verify += verified_at - drafted_at
            phases.overhead += end - verified_at
            phases.rounds += 1
        for row, n in enumerate(accepted):
            if finished[row] is not None:
                continue
            proposed = [token for token in rows[row] if token != NO_DRAFT]
            emitted, finished[row] = _trim(
                [*proposed[:n], bonus[row]], written[row], limit[row], target.eos
            )
            written[row] += len(emitted)
            yield RoundRecord(
                row, False, len(proposed), n, proposed, emitted, finished[row], end - start
            )
        if any(finished):  # a finished row stays where it is and computes along unseen
            ceiling = [w if f else slots for w, f in zip(written, finished, strict=True)]
            length = torch.minimum(length, torch.tensor(ceiling, device=device))


def decode(
    target: Target, draft: Draft | None, prompts: list[list[int]], **kwargs: object
) -> list[Output]:
    """`speculate` run to its end: one Output for each prompt, in order. Takes the same keywords."""
    outputs = [Output(prompt) for prompt in prompts]
    for record in speculate(target, draft, prompts, **kwargs):  # type: ignore[arg-type]
        add(outputs[record.row], record)
    return outputs


def add(output: Output, record: RoundRecord) -> None:
    """Appends a record of this row to its output."""
    output.output_ids += record.tokens
    output.finish_reason = record.finished or ""
    if record.prefill:
        output.first_token_seconds = record.seconds
    else:
        output.rounds.append((record.drafted, record.accepted))
        output.round_seconds.append(record.seconds)


def row_seeds_of(seed: int, rows: int) -> list[int]:
    """One seed a row, distinct for distinct (seed, row) below 2**31 rows."""
    return [(seed << 31) + row for row in range(rows)]


@torch.inference_mode()
def _propose(
    draft: Draft | None, history: torch.Tensor, length: torch.Tensor, k: int, context: int
) -> Proposal:
    if draft is None:
        return Proposal(history[:, :0], None)
    proposal = draft.propose(history, length, k)
    room = context - length  # a draft beyond the context has no position to be verified at
    tokens = torch.where(
        torch.arange(k, device=length.device) < room[:, None], proposal.tokens, NO_DRAFT
    )
    if length.device.type == "cpu":  # reading a tensor is free here: do not verify empty columns
        used = int((tokens != NO_DRAFT).sum(1).max())
        return Proposal(tokens[:, :used], None if proposal.q is None else proposal.q[:, :used])
    return Proposal(tokens, proposal.q)


@torch.inference_mode()
def _verify(
    proposal: Proposal, logits: torch.Tensor, sampling: Sampling, choose: Choose
) -> Verdict:
    if sampling.greedy:
        return verify_greedy(proposal.tokens, logits.argmax(-1))
    return verify_chain(proposal.tokens, warp(logits, sampling), proposal.q, choose)


@torch.inference_mode()
def _draw(logits: torch.Tensor, sampling: Sampling, choose: Choose) -> torch.Tensor:
    return logits.argmax(-1) if sampling.greedy else choose(warp(logits, sampling))


@torch.inference_mode()
def _commit(
    history: torch.Tensor, length: torch.Tensor, tokens: torch.Tensor, verdict: Verdict
) -> torch.Tensor:
    """Writes drafts and bonus behind the committed ids and returns the new lengths; the rest is stale."""
    place = length[:, None] + torch.arange(tokens.shape[1], device=length.device)
    history.scatter_(1, place, tokens)
    history.scatter_(1, (length + verdict.accepted)[:, None], verdict.bonus[:, None])
    return length + verdict.accepted + 1


def _trim(
    tokens: list[int], written: int, limit: int, eos: frozenset[int]
) -> tuple[list[int], str | None]:
    """The tokens up to and with the first EOS and no further than the limit, and why the row ended."""
    for i, token in enumerate(tokens):
        reason = _reason(token, written + i + 1, limit, eos)
        if reason is not None:
            return tokens[: i + 1], reason
    return tokens, None


def _reason(token: int, written: int, limit: int, eos: frozenset[int]) -> str | None:
    return "eos" if token in eos else "length" if written >= limit else None


def _check(prompts: list[list[int]], context: int, max_new_tokens: int, k: int) -> None:
    if len(prompts) == 0:
        raise UserError("there is no prompt to decode")
    if max_new_tokens < 1 or k < 1:
        raise UserError(f"need max_new_tokens >= 1 and k >= 1, got {max_new_tokens} and {k}")
    for i, prompt in enumerate(prompts):
        if len(prompt) == 0:
            raise UserError(f"prompt {i} is empty: give at least one token")
        if len(prompt) >= context:
            raise UserError(
                f"prompt {i} has {len(prompt)} tokens and the target's context holds {context}: shorten it"
            )


def _clock(device: torch.device, wanted: Phases | bool | None = True) -> float:
    """Seconds now, after the device has finished; 0 when nobody asked."""
    if wanted is None:
        return 0.0
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()
