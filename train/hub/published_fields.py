"""Which fields of reports are published, each with its type. All others, such as command lines and folders of outputs,
are left out: `select` of train/hub/redaction.py applies these schemas.
"""

from typing import Any

from decode.common.provenance import Hardware
from decode.common.published import (
    FLAG,
    NAME,
    NUMBER,
    WORD,
    Digest,
    Place,
    PromptId,
    Revision,
    Sentence,
    Setting,
    Version,
    Withheld,
    Word,
)
from decode.common.typed_json import arms_of
from decode.model.fingerprint import ModelFingerprint, TargetRecord
from train.hub.redaction import Names

name, word, number, flag = NAME, WORD, NUMBER, FLAG
place, digest, version, setting, prompt_id, sentence, withheld = (
    arms_of(kind)[0][1][0]
    for kind in (Place, Digest, Version, Setting, PromptId, Sentence, Withheld)
)
NUMBERS = [number]


def lists(names: str) -> dict[str, Any]:
    """The schema of these fields, all lists of numbers."""
    return dict.fromkeys(names.split(), NUMBERS)


def numbers(names: str) -> dict[str, Any]:
    """The schema of these fields, all numbers."""
    return dict.fromkeys(names.split(), number)


TREE = {**numbers("width nodes"), "paths": [NUMBERS]}
PROVENANCE = {"git": digest, "versions": dict[Word, Version], "hardware": Hardware}
FAILED = [{"task": name, "id": prompt_id, "error": withheld}]
MISMATCH = {"task": name, "id": prompt_id, **numbers("position gap noise"), "tie": flag}
SPREAD = numbers("p50 p95 mean variance")
SPEED = numbers("seconds tokens tokens_per_second ms_per_token")
GROUP = {"task": name, **numbers("temperature batch_size prompts")}
"""Which prompts were decoded, and how."""
QUALITY = {"metric": name, **numbers("prompts value plain difference"), **lists("ci difference_ci")}
ENTRY = {
    "name": name,
    "draft": place,
    "draft_sha256": digest,
    "draft_altered": flag,
    "trained_for": digest,
    "family": word,
    "prediction_missing": sentence,
    "tree": TREE,
    "lookup": {"name": word, "min_match": number},
    "adaptive": {"by": word, "confidence": number},
    "mirror": {
        **numbers("exit_layer branches reuse_rate exit_hit_rate hidden_share"),
        "overlap": flag,
    },
    **GROUP,
    "domain": name,
    **numbers(
        "k top_k top_p tau alpha acceptance_rate mean_output_tokens tokens_per_second ms_per_token speedup "
        "predicted_speedup tokens_after_eos speedup_of_sums stalled repeated_turns"
    ),
    **lists(
        "tau_ci alpha_ci alpha_by_position acceptance_rate_ci unconditional_by_position histogram "
        "tokens_per_second_ci speedup_ci simulated"
    ),
    "alpha_by_position_ci": [NUMBERS],
    "unconditional_by_position_ci": [NUMBERS],
    "mean_accept_length": {**numbers("pooled per_request"), **lists("ci per_request_ci")},
    "counts": {
        **numbers("rounds drafted accepted forced emitted output_tokens"),
        **lists("rounds_by_position accepted_by_position"),
    },
    "latency_ms": {
        **SPREAD,
        **numbers("first_token first_token_p50 first_token_p95"),
        "token": SPREAD,
    },
    "prefill": SPEED,
    "decode": SPEED,
    "failed": FAILED,
    "finish": numbers("eos length stop grammar"),
    "quality": [QUALITY],
    "mode": word,
    "dtype": word,
    "draft_dtype": word,
    "verification": word,
    "lossy": flag,
    "phase_ms": numbers("draft verify overhead"),
    "lossless": {
        "greedy_identical": flag,
        **numbers("prompts identical exact tied failed noise"),
        "ties": [MISMATCH],
        "failures": [MISMATCH],
    },
}
"""A method of report.json."""
ENGINE = {
    "engine": word,
    "name": name,
    **GROUP,
    "in_turn": flag,
    **numbers("k output_tokens tau tokens_per_second ms_per_token speedup gain same_as_ours"),
    **numbers("speedup_of_sums gain_of_sums stalled"),
    **lists("speedup_ci gain_ci"),
    "failed": FAILED,
    "transformers": version,
    "repaired": [name],
}
LAW_VERDICT = {"name": name, "lossy": flag, "passed": flag, "control_caught": flag}
LAW_TEST = {
    "method": name,
    "order": name,
    **numbers("tokens distance p_value impossible detects"),
    "passed": flag,
}
MODEL_SIZE = {**numbers("parameters kv_values"), "experts": flag}
REPORT = {
    "schema": number,
    "target": TargetRecord,
    "earlier_targets": list[ModelFingerprint],
    "tasks": [name],
    **PROVENANCE,
    **numbers("seed resumed gpu_utilisation"),
    "baseline": numbers("tokens_per_second ms_per_token"),
    "methods": [ENTRY],
    "domains": [ENTRY],
    "comparisons": [
        {
            "a": name,
            "b": name,
            "task": name,
            "metric": word,
            **numbers("temperature difference prompts"),
            "ci": NUMBERS,
        }
    ],
    "engines": [ENGINE],
    "law": {
        **numbers("temperature top_k top_p level"),
        "passed": flag,
        "methods": [LAW_VERDICT],
        "tests": [LAW_TEST],
    },
    "target_quality": {
        "old": place,
        "new": place,
        **numbers("prompts tokens perplexity_old perplexity_new log_perplexity_change kl"),
        "log_perplexity_change_ci": NUMBERS,
    },
    "models": {"target": MODEL_SIZE, "drafts": Names(MODEL_SIZE)},
}
"""report.json of eval/run.py."""
RATES = {
    **lists("conditional_accept_rates marginal_accept_rates mean_accept_length_ci tau_ci"),
    "marginal_accept_rates_ci": [NUMBERS],
    **numbers("mean_accept_length tau"),
}
ONE_PROFILE = {
    "schema_version": version,
    "measured": flag,
    "method": word,
    "name": name,
    "draft_checkpoint": {"name": place, "sha256": digest},
    "target_model": {"name": place, "revision": Revision},
    **numbers("num_speculative_tokens block_size max_supported_k mean_accept_length_per_request"),
    "verification_method": word,
    "lossy": flag,
    **RATES,
    **lists("alpha_by_position mean_accept_length_per_request_ci"),
    "alpha_by_position_ci": [NUMBERS],
    "accept_length_model": word,
    "accept_length_by_k": Names(number),
    "acceptance_length_histogram": Names(number),
    "per_category": Names({**RATES, "num_samples": number}),
    "measurement_conditions": {
        **numbers("temperature concurrency num_samples seed"),
        "engine": word,
        "dtype": word,
        "tree": TREE,
    },
    "validation": {
        "mean_consistency": {
            **numbers("implied_mean_accept_length reported_mean_accept_length abs_delta tolerance"),
            "passed": flag,
        },
        "marginal_monotonicity": {
            "passed": flag,
            "violations": [numbers("position value previous")],
        },
    },
}
PROFILE = {**ONE_PROFILE, "other_profiles": [ONE_PROFILE]}
"""speculation_profile.json, made from the entries of report.json."""
CELL = {
    "method": name,
    "setting": setting,
    "tree": TREE,
    **GROUP,
    **numbers("k layers tau alpha speedup speedup_of_sums"),
    "ci": NUMBERS,
}
TUNED = {
    "schema": number,
    "target": TargetRecord,
    "earlier_targets": list[ModelFingerprint],
    "tasks": [name],
    "drafts": Names(digest),
    **PROVENANCE,
    **numbers("seed bandwidth repeated_turns"),
    "chosen": [{**CELL, "rule": word, "held_out": number, "guide": NUMBERS}],
    "predictions": {
        "cells": [
            {
                "method": name,
                **GROUP,
                **numbers("fold k layers predicted measured error"),
                "ci": NUMBERS,
                "counted": flag,
            }
        ],
        **numbers("counted median_error"),
    },
    "trees": [{"method": name, "setting": setting, **numbers("temperature predicted_tau tau")}],
    "cells": [
        {
            **CELL,
            "stage": word,
            "tokens_per_second": number,
            "round_ms": SPREAD,
            "token_ms": SPREAD,
        }
    ],
}
"""tuned.json of eval/tune.py."""
CURVE_POINT = {
    **numbers("temperature size tokens rows steps tau alpha"),
    **lists("tau_ci alpha_ci tau_seeds alpha_seeds"),
}
DATA_CURVE = {
    "schema": number,
    "target": TargetRecord,
    "data": place,
    "family": word,
    "loss": word,
    "tasks": [name],
    **numbers("k max_new_tokens worth passes least_steps steps"),
    **lists("temperatures seeds"),
    "points": [CURVE_POINT],
    "before": [CURVE_POINT],
    "forecasts": [
        {
            "metric": word,
            "law": numbers("largest level slope exponent"),
            **numbers("temperature limit at_double gain"),
            **lists("exponent_ci at_double_ci gain_ci"),
            "identified": flag,
            "verdict": name,
        }
    ],
    "verdict": name,
    **PROVENANCE,
}
"""data_curve.json of scripts/lab/data_curve.py."""
FORECAST = {
    "schema": number,
    "target": TargetRecord,
    "earlier_targets": list[ModelFingerprint],
    "draft": {"name": place, "family": word, "sha256": digest},
    "tasks": [name],
    **numbers("max_new_tokens seed"),
    "rows": [
        {
            "task": name,
            "rule": word,
            **numbers("temperature k prompts texts tau mean_accept_length alpha acceptance_rate"),
            **lists("tau_ci mean_accept_length_ci alpha_ci alpha_by_position"),
            "alpha_by_position_ci": [NUMBERS],
            **lists("unconditional_by_position"),
            "unconditional_by_position_ci": [NUMBERS],
            "counts": {**numbers("emitted rounds drafting_rounds"), "accepted": NUMBERS},
        }
    ],
    **PROVENANCE,
}
"""forecast.json of eval/forecast.py without its speeds, which are of one machine."""
SIDE = {**numbers("rounds drafted accepted"), "by_position": NUMBERS}
DISAGREEMENT = {"task": name, "id": prompt_id, "gap": number}
REFEREE = {
    "draft": place,
    "draft_sha256": digest,
    "family": word,
    "vllm": version,
    **numbers("k prompts same"),
    "ties": [DISAGREEMENT],
    "differ": [DISAGREEMENT],
    "totals": {"ours": SIDE, "vllm": SIDE},
    **PROVENANCE,
}
"""The greedy result of scripts/referee.py."""
