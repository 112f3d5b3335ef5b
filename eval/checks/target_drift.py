"""Measures how much a target that was trained itself (Medusa-2, LayerSkip's recipe) differs from the original target.

Speculative decoding is lossless with respect to the new target; this measures what the new target itself lost. The
original answers the prompts at temperature 1, and both are scored on those answers.
"""

from collections.abc import Sequence

import numpy as np
import torch

from decode.common.errors import UserError
from decode.engine.engine import decode
from decode.model.loading import Target, load_config, load_tokenizer, tokenizer_fingerprint
from decode.verification.sampling import SamplingParams
from eval.metrics.bootstrap import Ratio
from eval.results.report import TargetDrift
from eval.tasks.loading import TaskPrompt


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
    scores = np.array([_score_answer(old, new, x.prompt_ids, x.output_ids) for x in answers])
    tokens, nll_old, nll_new, kl, same = scores.T
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


@torch.inference_mode()
def _score_answer(old: Target, new: Target, prompt: list[int], answer: list[int]) -> list[float]:
    """[tokens, -log p_old, -log p_new, KL(old || new), equal argmaxes], each summed over the answer's tokens."""
    text = torch.tensor([prompt + answer], device=old.runner.device)
    start = torch.zeros(1, dtype=torch.long, device=text.device)
    log_probs = []
    for runner in (old.runner, new.runner):
        runner.capture_hidden_states(None)
        runner.allocate(1, text.shape[1])
        logits = runner.step(text[:, :-1], start)[0, len(prompt) - 1 :]
        log_probs.append(torch.log_softmax(logits.float(), -1))
    log_p, log_q = log_probs
    label = text[0, len(prompt) :, None]
    return [
        float(len(answer)),
        -float(log_p.gather(1, label).sum()),
        -float(log_q.gather(1, label).sum()),
        float((log_p.exp() * (log_p - log_q)).sum()),
        float((log_p.argmax(-1) == log_q.argmax(-1)).sum()),
    ]
