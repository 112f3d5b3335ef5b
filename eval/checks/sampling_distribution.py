"""Tests whether sampled output follows the target's distribution, on a real vocabulary and through the KV cache.

Probability integral transform: if a token x was drawn from p, then u = P(tokens ordered before x) + U · p(x), with U
uniform on [0, 1), is uniform for every order of the tokens, and independent of all earlier ones. p comes from plain
transformers, which reads the finished text in one pass. A bug in the verification rule, in positions or in the KV cache
changes the distribution of u, and a Kolmogorov-Smirnov test detects it. The orders:

* by p: detects a wrong temperature, a wrong context, and a token from the distribution of another position;
* by token id, the order in which tokens are drawn: detects random numbers that are used twice, and other bugs weakly;
* by p - q (chains of drawn tokens under the rule "exact", one round at a time): detects an influence of the draft.

The first two are also applied to bonus tokens alone. Given that a position of a round was reached, its token follows p,
so these tests have the same null hypothesis. (Given that a drafted token was accepted, it does not follow p: p and
min(p, q) differ.)

There are two controls: plain decoding must pass, and the same drafts under a lossy rule must fail.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from decode.common.journal import Journal
from decode.common.typed_json import from_json, to_json
from decode.drafts.base import Proposal
from decode.drafts.wrappers import RecordingDraft
from decode.engine.engine import SpeculativeEngine
from decode.engine.records import DecodeRecord, collect_outputs
from decode.model.loading import Target
from decode.model.seq2seq import answer_logits
from decode.verification.registry import find_rule
from decode.verification.rules import NO_DRAFT
from decode.verification.sampling import SamplingParams, warp
from eval.benchmark.methods import Method
from eval.metrics.bootstrap import Array
from eval.metrics.distribution_tests import (
    SIGNIFICANCE_LEVEL,
    holm_passes,
    ks_distance,
    ks_p_value,
    minimum_detectable_shift,
)
from eval.results.report import LawResult, LawTest, LawVerdict
from eval.settings.evaluation import EvalConfig
from eval.tasks.loading import TaskPrompt

BATCH_SIZE = 16
MIN_TOKENS = 200  # a test of fewer tokens is left out


PITValues = dict[str, Array]
"""u of n emitted tokens by the name of an order, uniform if the tokens follow p; NaN for tokens of which the order says
nothing. Under `impossible`: 1 where p(token) is 0."""


def check_sampling_distribution(
    s: EvalConfig,
    target: Target,
    model: Any,
    methods: Sequence[Method],
    items: Sequence[TaskPrompt],
    journal: Journal,
) -> LawResult | None:
    """The tests at the run's highest temperature; None if `check_law` is 0."""
    if not s.check_law:
        return None
    sampling = SamplingParams(max(s.temperatures), s.top_k, s.top_p)

    def run_tests(method: Method, seed: int) -> list[LawTest]:
        def measure() -> Any:
            values = sample_pit_values(target, model, method, items, sampling, s.check_law, seed)
            return {"tests": to_json(run_ks_tests(values, method.name))}

        key = ["law", method.name, method.rule, sampling.temperature]
        kept = journal.get_or_measure(key, measure)["tests"]
        return [from_json(LawTest, {"method": method.name, **test}) for test in kept]

    tests = [run_tests(method, s.seed + 2 * number) for number, method in enumerate(methods)]
    judged = judge_tests([test for own in tests for test in own])
    verdicts = []
    for number, method in enumerate(methods):
        lossless = find_rule(method.rule).lossless
        caught: bool | None = None
        if method.draft is not None and lossless:
            control = replace(method, rule="typical")  # which the tests must reject
            found = judge_tests(run_tests(control, s.seed + 2 * number + 1))
            caught = not all(test.passed for test in found)
        passed = all(test.passed for test in judged if test.method == method.name)
        verdicts.append(LawVerdict(method.name, not lossless, passed, caught))
    claims = [v for v in verdicts if not v.lossy]
    return LawResult(
        temperature=sampling.temperature,
        top_k=s.top_k,
        top_p=s.top_p,
        level=SIGNIFICANCE_LEVEL,
        passed=all(v.passed and v.control_caught is not False for v in claims),
        methods=verdicts,
        tests=judged,
    )


def judge_tests(tests: Sequence[LawTest]) -> list[LawTest]:
    """With what Holm's correction says of them together. Too many tokens that p excludes fail a test as well: a few may
    lie just outside top-k or top-p, because two passes round differently."""
    level = SIGNIFICANCE_LEVEL / max(1, len(tests))
    return [
        replace(
            test,
            passed=ok and test.impossible <= 1e-3,
            detects=minimum_detectable_shift(test.tokens, level),
        )
        for test, ok in zip(tests, holm_passes([test.p_value for test in tests]), strict=True)
    ]


def sample_pit_values(
    target: Target,
    model: Any,
    method: Method,
    items: Sequence[TaskPrompt],
    sampling: SamplingParams,
    tokens: int,
    seed: int,
) -> PITValues:
    """PIT values of at least `tokens` sampled tokens after the items' prompts, in eager mode. The prompts are used
    again, with other seeds, until there are enough tokens."""
    draft = None if method.draft is None else RecordingDraft(method.draft)
    engine = SpeculativeEngine(
        target, draft, k=max(1, method.k), sampling=sampling, rule=method.rule
    )
    rng = np.random.default_rng(seed)
    room = target.runner.context
    prompts = [item.prompt_ids for item in items if len(item.prompt_ids) < room]
    parts: list[PITValues] = []
    total = batch = 0
    while total < tokens:
        chosen = [prompts[(batch * BATCH_SIZE + i) % len(prompts)] for i in range(BATCH_SIZE)]
        seeds = [((seed + 1) << 40) + batch * BATCH_SIZE + i for i in range(BATCH_SIZE)]
        if draft is not None:
            draft.proposals.clear()
        # Short texts use more prompts and keep fewer of the draft's distributions.
        rounds = engine.speculate(chosen, max_new_tokens=48, seeds=seeds)
        outputs = collect_outputs(chosen, rounds)
        # Of the rules this one alone accepts drafted tokens one by one: only then each token follows p given that its
        # position was reached.
        recorded = draft.proposals if draft is not None and method.rule == "exact" else []
        for row, output in enumerate(outputs):
            parts.append(_pit_values(model, output, recorded, row, sampling, rng))
            total += len(output.output_ids)
        batch += 1
    return {name: np.concatenate([x[name] for x in parts]) for name in parts[0]}


@torch.inference_mode()
def _pit_values(
    model: Any,
    output: DecodeRecord,
    proposals: Sequence[Proposal],
    row: int,
    sampling: SamplingParams,
    rng: np.random.Generator,
) -> PITValues:
    """The PIT values of one text, with p from one teacher-forced pass of the plain model. `proposals`: that of each
    round, empty where the draft's distributions are not used. `row`: the text's row in them."""
    n = len(output.output_ids)
    logits = answer_logits(model, output.prompt_ids, output.output_ids)
    p = warp(logits, sampling).double()
    x = torch.tensor(output.output_ids, device=p.device)
    u = torch.from_numpy(rng.random(n)).to(p.device)

    def transform(score: torch.Tensor) -> torch.Tensor:
        """u for tokens in descending order of `score` [n, V] or [V]; tokens of equal score form one group."""
        score = score.expand_as(p)
        own = score.gather(1, x[:, None])
        return (p * (score > own)).sum(1) + u * (p * (score == own)).sum(1)

    # A group of ties has the probability of its tokens' sum under p, so u stays uniform.
    q, bonus = _draft_distributions(output, proposals, row, p)
    by_draft = torch.where(q.isnan().any(1), torch.nan, transform(p - q.nan_to_num()))
    by_id = transform(-torch.arange(p.shape[1], device=p.device).double())
    by_p, nowhere = transform(p), torch.full_like(by_id, torch.nan)
    columns = {
        "p": by_p,
        "id": by_id,
        "p - q": by_draft,
        "p, bonus": torch.where(bonus, by_p, nowhere),
        "id, bonus": torch.where(bonus, by_id, nowhere),
        "impossible": p.gather(1, x[:, None])[:, 0] == 0,
    }
    return {name: column.cpu().numpy() for name, column in columns.items()}


def _draft_distributions(
    output: DecodeRecord, proposals: Sequence[Proposal], row: int, p: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """(q [n, V] of each emitted token's position, NaN where unknown; bool [n]: it is a bonus token). q is known only
    for chains: the distribution that the drafted token was drawn from, or a point mass at that token."""
    q = torch.full_like(p, torch.nan)
    bonus = torch.zeros(len(p), dtype=torch.bool, device=p.device)
    at = 1  # the first token comes from prefill
    for number, (drafted, accepted) in enumerate(output.rounds):
        if not proposals or proposals[number].tree is not None:
            break
        proposal = proposals[number]
        for place in range(accepted + 1):
            if at >= len(p):
                break
            if place == drafted:
                bonus[at] = True
            elif proposal.q is not None:
                q[at] = proposal.q[row, place].double()
            elif (token := proposal.tokens[row, place]) != NO_DRAFT:
                q[at] = torch.zeros_like(q[at]).scatter(0, token.clamp_min(0), 1.0)
            at += 1
    return q, bonus


def run_ks_tests(values: PITValues, method: str = "") -> list[LawTest]:
    """A test of each order with at least MIN_TOKENS tokens, not judged yet."""
    impossible = float(values["impossible"].mean())
    tests = []
    for order in (order for order in values if order != "impossible"):
        u = values[order][~np.isnan(values[order])]
        if len(u) >= MIN_TOKENS:
            distance = ks_distance(u)
            p_value = ks_p_value(distance, len(u))
            tests.append(LawTest(method, order, len(u), distance, p_value, impossible))
    return tests
