"""Does sampled output follow the target's law? Statistics on a real vocabulary, through the real cached path.

Probability integral transform: if a token x was drawn from p, then u = P(tokens ordered before x) + U · p(x) is
uniform, whatever the order, and independent of all earlier ones. p comes from plain transformers, which reads the
finished text in one pass; a bug of the rule, of positions or of the cache moves u, and a Kolmogorov-Smirnov test sees
it. Orders:

* by p: sees a wrong temperature, a context that is off, a token from another position's law;
* by token id, the order in which tokens are drawn: sees random numbers that are used twice, anything else a little;
* by p - q (chains of drawn tokens, one round at a time): sees what leaks from the draft.

The first two also at the bonus position alone. Given that a position of a round was reached, its token follows p: so
these are tests of the same kind. (Given that a draft was accepted, it does not: p and min(p, q) differ.)

Two controls go with it: plain decoding must pass, and the same drafts with a rule that is known to be lossy must fail.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch

from decode.drafts.base import Draft, Proposal
from decode.engine.engine import RequestOutput, SpeculativeEngine, add_record
from decode.model.loading import Target
from decode.verification.rules import NO_DRAFT
from decode.verification.sampling import SamplingParams, warp
from eval.benchmark.config import EvalConfig
from eval.benchmark.journal import Journal
from eval.benchmark.methods import simulated_alpha
from eval.benchmark.timing import Method
from eval.metrics.bootstrap import Array
from eval.metrics.ks_test import SIGNIFICANCE_LEVEL, holm_correction, ks_distance, ks_p_value
from eval.tasks.loading import TaskPrompt

BATCH_SIZE = 16
TOKENS_PER_PROMPT = 48
"""Tokens drawn behind each prompt: shorter texts from more prompts, and less of the draft's laws to keep."""


@dataclass(frozen=True)
class PITValues:
    """Emitted tokens [n] as numbers that are uniform if the law holds, by order; `bonus` marks bonus positions."""

    by_probability: Array
    by_token_id: Array
    by_p_minus_q: Array  # NaN where the draft's law is not known
    bonus: Array
    impossible: Array  # p of the token is 0


def check_sampling_distribution(
    s: EvalConfig,
    target: Target,
    model: Any,
    methods: Sequence[Method],
    items: Sequence[TaskPrompt],
    journal: Journal,
) -> dict[str, Any] | None:
    """The `law` field of a report, at the run's highest temperature; None unless `check_law` asks for it."""
    if not s.check_law:
        return None
    sampling = SamplingParams(max(s.temperatures), s.top_k, s.top_p)
    real = [m for m in methods if simulated_alpha(m) is None]

    def drawn(method: Method, seed: int) -> dict[str, Any]:
        key = ["law", method.name, method.rule, sampling.temperature]
        return journal.once(
            key,
            lambda: run_ks_tests(
                sample_pit_values(target, model, method, items, sampling, s.check_law, seed)
            ),
        )

    tests, verdicts = [], []
    for number, method in enumerate(real):
        tests += [
            {"method": method.name, **test} for test in drawn(method, s.seed + 2 * number)["tests"]
        ]
    tests = holm_correction(tests)
    for number, method in enumerate(real):
        own = [t for t in tests if t["method"] == method.name]
        control = None
        if method.draft is not None and method.rule != "typical":
            lossy = replace(method, rule="typical")
            control = not all(
                t["passed"] for t in holm_correction(drawn(lossy, s.seed + 2 * number + 1)["tests"])
            )
        verdicts.append(
            {
                "name": method.name,
                "lossy": method.rule == "typical",
                "passed": all(t["passed"] for t in own),
                "control_caught": control,
            }
        )
    exact = [v for v in verdicts if not v["lossy"]]
    return {
        "temperature": sampling.temperature,
        "top_k": s.top_k,
        "top_p": s.top_p,
        "level": SIGNIFICANCE_LEVEL,
        "passed": all(v["passed"] and v["control_caught"] is not False for v in exact),
        "methods": verdicts,
        "tests": tests,
    }


def sample_pit_values(
    target: Target,
    model: Any,
    method: Method,
    items: Sequence[TaskPrompt],
    sampling: SamplingParams,
    tokens: int,
    seed: int,
) -> PITValues:
    """At least `tokens` tokens behind the items' prompts, taken again and again with fresh seeds; eager mode."""
    engine = SpeculativeEngine(
        target, method.draft, k=max(1, method.k), sampling=sampling, rule=method.rule
    )
    rng = np.random.default_rng(seed)
    room = target.decoder.context
    prompts = [item.prompt_ids for item in items if len(item.prompt_ids) < room]
    parts: list[PITValues] = []
    total = batch = 0
    while total < tokens:
        chosen = [prompts[(batch * BATCH_SIZE + i) % len(prompts)] for i in range(BATCH_SIZE)]
        seeds = [((seed + 1) << 40) + batch * BATCH_SIZE + i for i in range(BATCH_SIZE)]
        laws: list[Proposal] = []
        with record_proposals(method.draft, laws):
            outputs = [RequestOutput(prompt) for prompt in chosen]
            for record in engine.speculate(chosen, max_new_tokens=TOKENS_PER_PROMPT, seeds=seeds):
                add_record(outputs[record.prompt], record)
        for row, output in enumerate(outputs):
            known = laws if method.rule == "exact" else []
            parts.append(_pit_values(model, output, known, row, sampling, rng))
            total += len(output.output_ids)
        batch += 1
    return PITValues(
        *(np.concatenate(column) for column in zip(*map(_as_tuple, parts), strict=True))
    )


@contextmanager
def record_proposals(draft: Draft | None, seen: list[Proposal]) -> Iterator[None]:
    """While it lasts, what `draft` proposes is also appended to `seen`: the n-th is that of each row's n-th round."""
    if draft is None:
        yield
        return
    propose = draft.propose

    def watch(history: torch.Tensor, length: torch.Tensor, k: int) -> Proposal:
        proposal = propose(history, length, k)
        q = None if proposal.q is None else proposal.q.clone()
        seen.append(Proposal(proposal.tokens.clone(), q, proposal.tree))
        return proposal

    vars(draft)["propose"] = watch
    try:
        yield
    finally:
        del vars(draft)["propose"]


@torch.inference_mode()
def _pit_values(
    model: Any,
    output: RequestOutput,
    laws: Sequence[Proposal],
    row: int,
    sampling: SamplingParams,
    rng: np.random.Generator,
) -> PITValues:
    """The numbers of one text, by one teacher-forced pass of the plain model."""
    ids = torch.tensor([output.prompt_ids + output.output_ids], device=model.device)
    n = len(output.output_ids)
    logits = model(ids, use_cache=False).logits[0, -n - 1 : -1]
    p = warp(logits, sampling).double()
    x = ids[0, -n:]
    u = torch.from_numpy(rng.random(n)).to(p.device)
    p_x = p.gather(1, x[:, None])[:, 0]

    def transform(score: torch.Tensor) -> torch.Tensor:
        """u for tokens in falling order of `score` [n, V] or [V]; equal ones share their place."""
        score = score.expand_as(p)
        own = score.gather(1, x[:, None])
        before = (p * (score > own)).sum(1)
        tied = (p * (score == own)).sum(1)
        return before + u * tied

    # A tie group has p's own mass: sharing its place keeps u uniform, as long as it is the group that was drawn.
    q, bonus = _draft_distributions(output, laws, row, p)
    by_draft = torch.where(q.isnan().any(1), torch.nan, transform(p - q.nan_to_num()))
    columns = (
        transform(p),
        transform(-torch.arange(p.shape[1], device=p.device).double()),
        by_draft,
        bonus,
        p_x == 0,
    )
    return PITValues(*(column.cpu().numpy() for column in columns))


def _draft_distributions(
    output: RequestOutput, laws: Sequence[Proposal], row: int, p: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """(q [n, V] at each emitted token, NaN where there is none; bool [n]: it stands at a bonus position).

    Known only for chains: the law that the drafted token was drawn from, or a point mass at it.
    """
    q = torch.full_like(p, torch.nan)
    bonus = torch.zeros(len(p), dtype=torch.bool, device=p.device)
    at = 1  # the first token comes from prefill
    for number, (drafted, accepted) in enumerate(output.rounds):
        if not laws or laws[number].tree is not None:
            break
        tokens = laws[number].tokens[row]
        for place in range(accepted + 1):
            if at >= len(p):
                break
            if place == drafted:
                bonus[at] = True
            elif laws[number].q is not None:
                q[at] = laws[number].q[row, place].double()  # type: ignore[index]
            elif tokens[place] != NO_DRAFT:
                q[at] = torch.zeros_like(q[at]).scatter(0, tokens[place].clamp_min(0), 1.0)
            at += 1
    return q, bonus


def run_ks_tests(drawn: PITValues) -> dict[str, Any]:
    """{tests: [{order, tokens, distance, p_value, impossible}]}; tests of fewer than 200 tokens are left out."""
    known = ~np.isnan(drawn.by_p_minus_q)
    sets = {
        "p": drawn.by_probability,
        "id": drawn.by_token_id,
        "p - q": drawn.by_p_minus_q[known],
        "p, bonus": drawn.by_probability[drawn.bonus],
        "id, bonus": drawn.by_token_id[drawn.bonus],
    }
    impossible = float(drawn.impossible.mean())
    found = []
    for order, values in sets.items():
        if len(values) < 200:
            continue
        distance = ks_distance(values)
        found.append(
            {
                "order": order,
                "tokens": len(values),
                "distance": distance,
                "p_value": ks_p_value(distance, len(values)),
                "impossible": impossible,
            }
        )
    return {"tests": found}


def _as_tuple(drawn: PITValues) -> tuple[Array, ...]:
    return (
        drawn.by_probability,
        drawn.by_token_id,
        drawn.by_p_minus_q,
        drawn.bonus,
        drawn.impossible,
    )
