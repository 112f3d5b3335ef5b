"""Measures how much one target differs from another on answers of the other one: after training, or in another dtype.

Speculative decoding is lossless with respect to the new target; this measures what the new target itself lost. For one
that was trained itself (Medusa-2, LayerSkip's recipe) the original answers the prompts at temperature 1, and both are
scored on those answers; eval/fidelity.py does the same for dtypes.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from decode.common.errors import UserError
from decode.engine.engine import decode
from decode.model.loading import Target, load_config, load_tokenizer, tokenizer_fingerprint
from decode.verification.sampling import SamplingParams
from eval.metrics.bootstrap import Array, Ratio
from eval.results.report import TargetDrift
from eval.tasks.loading import TaskPrompt

ROWS = 128
"""Positions whose distributions over the vocabulary are in memory at once."""


def check_original(name: str, target: Target) -> None:
    """UserError if there is no such model, or if its tokenizer is not the target's."""
    load_config(name, "original")
    if tokenizer_fingerprint(load_tokenizer(name)) != target.fingerprint:
        raise UserError(
            f"original {name!r} and target {target.name!r} have different tokenizers: name the model that the target "
            "was trained from"
        )


def measure_target_drift(
    old: Target, new: Target, items: Sequence[TaskPrompt], max_new_tokens: int, rows: int, seed: int
) -> TargetDrift:
    """On the old target's answers. rows: prompts decoded in one batch. Both have one tokenizer (`check_original`)."""
    prompts = [item.prompt_ids for item in items]
    answers = decode(
        old, None, prompts, rows=rows, max_new_tokens=max_new_tokens, seed=seed, sampling=SamplingParams(1.0)
    )  # fmt: skip
    found = [
        compare_on_text(old, new, [*x.prompt_ids, *x.output_ids], len(x.prompt_ids) - 1)
        for x in answers
    ]
    tokens = np.array([len(x.kl) for x in found])
    nll_old, nll_new, kl, same = (
        np.array([vars(x)[name].sum() for x in found])
        for name in ("nll_old", "nll_new", "kl", "same")
    )
    return TargetDrift(
        old=old.name,
        new=new.name,
        prompts=len(prompts),
        tokens=int(tokens.sum()),
        perplexity_old=float(np.exp(nll_old.sum() / tokens.sum())),
        perplexity_new=float(np.exp(nll_new.sum() / tokens.sum())),
        log_perplexity_change=Ratio(nll_new - nll_old, tokens).estimate(seed),
        kl=float(kl.sum() / tokens.sum()),
        same_top1=float(same.sum() / tokens.sum()),
    )


@dataclass(frozen=True)
class TokenDrift:
    """Two targets at positions of a text, a number for each, [n]."""

    tv: Array
    """Total variation between their distributions of the next token."""
    kl: Array
    """KL(old || new) in nats."""
    same: Array
    """1 where both have one most probable token, else 0."""
    nll_old: Array
    """-log p of the token that follows, by the old target."""
    nll_new: Array


@torch.inference_mode()
def compare_on_text(old: Target, new: Target, text: Sequence[int], first: int = 0) -> TokenDrift:
    """Both at the positions of `text` from `first` on, each against the token after it."""
    ids = torch.tensor([*text], device=old.runner.device)[None]
    start = torch.zeros(1, dtype=torch.long, device=ids.device)
    logits = []
    for target in (old, new):
        target.runner.capture_hidden_states(None)
        target.runner.allocate(1, ids.shape[1])
        read = ids.to(target.runner.device)
        logits.append(target.runner.step(read[:, :-1], start.to(read.device))[0, first:])
    pieces = []
    labels = ids[0, first + 1 :, None]
    for p, q, label in zip(*(x.split(ROWS) for x in (*logits, labels)), strict=True):
        log_p, log_q = (torch.log_softmax(x.float(), -1) for x in (p, q.to(p.device)))
        pieces.append(
            [
                (log_p.exp() - log_q.exp()).abs().sum(-1) / 2,
                (log_p.exp() * (log_p - log_q)).sum(-1),
                (log_p.argmax(-1) == log_q.argmax(-1)).float(),
                -log_p.gather(1, label)[:, 0],
                -log_q.gather(1, label)[:, 0],
            ]
        )
    columns = (torch.cat(column).double().cpu().numpy() for column in zip(*pieces, strict=True))
    return TokenDrift(*columns)
