"""Which fields of draftsmith.json, of reports and of manifests are published, each with its type. All others, such as
command lines, folders of outputs and W&B runs, are left out: `select` of train/hub/redaction.py applies these schemas.
"""

import hashlib
import re
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

from decode.common.secret_patterns import find_secret
from decode.common.typed_json import WrongTypeError
from train.hub.redaction import NAME, Names, flag, match, name, number, word

WITHHELD = "not published"
"""Stands for a text that is not published."""
SHORT_COMMIT = 12
"""Digits of a published commit or checksum of another file: enough to find it, too few for a key."""
PLACE = r"\w[\w.@+-]*(?:/\w[\w.@+-]*){0,5}|"
OUTSIDE = r"[/~.]|[A-Za-z][\w.+-]*:[/\\]"
TREE_SETTING = r"(?:static )?tree of \d{1,5}(?:, (?:width|depth) \d{1,4}|, K = \d{1,4}){0,2}"
SETTING = rf"(?:E = \d{{1,4}}, )?(?:K = \d{{1,4}}|{TREE_SETTING})"


def prompt_id(value: Any, known: Collection[str]) -> str:
    """The id of a prompt; a hash of it if it is no short name."""
    text = match(r"(?s).*", value, "a text")
    return text if NAME.fullmatch(text) else hashlib.sha256(text.encode()).hexdigest()[:12]


def withheld(value: Any, known: Collection[str]) -> str:
    """A text of other software, such as an error: only that there was one."""
    return WITHHELD


def sentence(value: Any, known: Collection[str]) -> str:
    """A sentence of this program if it has no path, link or address."""
    return (
        value if re.fullmatch(r"[\w ,.;()%=<>×–-]{1,300}", str(value)) else withheld(value, known)
    )


def place(value: Any, known: Collection[str]) -> str:
    """A Hub name or a folder below the current one; of any other path, or of a link, the last part."""
    text = match(r".*", value, "a path or a Hub name")
    inside = text.startswith("/") and Path(text).is_relative_to(Path.cwd())
    text = str(Path(text).relative_to(Path.cwd())) if inside else text
    if re.fullmatch(PLACE, text):
        return text
    folders = re.findall(r"[0-9a-f]{32,64}", text)  # caches name folders by checksums
    if not re.match(OUTSIDE, text) or find_secret(text, strict=True, known=folders):
        raise WrongTypeError("a path or a Hub name")
    return name(re.split(r"[/\\]", text.rstrip("/\\"))[-1], known)


def served_name(value: Any, known: Collection[str]) -> str:
    """A server's name for a model; of one that is no path and no Hub name only that there was one."""
    try:
        return place(value, known)
    except WrongTypeError:
        return withheld(value, known)


def version(value: Any, known: Collection[str]) -> str:
    """The version of a library."""
    return match(r"\d{1,4}(?:[.+-]?[a-z0-9]{1,12}){0,8}", value, "a version")


def setting(value: Any, known: Collection[str]) -> str:
    """A draft length or tree as tables show it."""
    return match(SETTING, value, "a draft length or tree")


def digest(value: Any, known: Collection[str]) -> str:
    """A commit or checksum: in full if it is in `known` or has at most 16 digits, else its first 12."""
    text = match(r"[0-9a-f]{4,64}(?:\+dirty)?", value, "a commit or checksum")
    plain, dirty, _ = text.partition("+dirty")
    return text if plain in known or len(plain) <= 16 else plain[:SHORT_COMMIT] + dirty


def revision(value: Any, known: Collection[str]) -> str:
    """A branch, a tag, or a commit as `digest` gives it."""
    text = match(r"[\w.@+/-]{1,64}", value, "a branch, tag or commit")
    return digest(text, known) if re.fullmatch(r"[0-9a-f]{4,64}", text) else text


def option(value: Any, known: Collection[str]) -> Any:
    """A number, true or false, or a word."""
    if isinstance(value, bool):
        return value
    return word(value, known) if isinstance(value, str) else number(value, known)


def argument(value: Any, known: Collection[str]) -> Any:
    """An argument of a chat template: a number, true, false or a short text; of others only that there was one."""
    if isinstance(value, bool | int | float):
        return value
    plain = isinstance(value, str) and re.fullmatch(r"[\w][\w ,.:-]{0,31}", value)
    return value if plain else withheld(value, known)


NUMBERS = [number]


def lists(names: str) -> dict[str, Any]:
    """The schema of these fields, all lists of numbers."""
    return dict.fromkeys(names.split(), NUMBERS)


def numbers(names: str) -> dict[str, Any]:
    """The schema of these fields, all numbers."""
    return dict.fromkeys(names.split(), number)


TREE = {**numbers("width nodes"), "paths": [NUMBERS]}
HARDWARE = {"device": name, **numbers("gpus threads"), "machine": name}
VERSIONS = dict.fromkeys(("python", "torch", "transformers", "accelerate", "datasets"), version)
PROVENANCE = {"git": digest, "versions": VERSIONS, "hardware": HARDWARE}
FINGERPRINT = {
    "weights": digest,
    "dtype": word,
    "revision": revision,
    "served_as": served_name,
    "chat_template": digest,
}
TEMPLATE = Names(argument)
TARGET = {"name": place, "tokenizer": digest, "template": TEMPLATE, **FINGERPRINT}
SAMPLING = numbers("temperature top_k top_p")
MANIFEST = {
    "target": place,
    "revision": revision,
    "tokenizer_hash": digest,
    "chat_template_hash": digest,
    "sampling": {**SAMPLING, "max_new_tokens": number},
    "seed": number,
    "counts": numbers(
        "asked answered failed answers_too_short dropped_as_repeats dropped_as_evaluation dropped_by_length "
        "dropped_as_near_duplicates dropped_as_empty dropped_without_answer skipped skipped_round_trip skipped_end"
    ),
    "git_sha": digest,
    "versions": VERSIONS,
    "engine": word,
    "encoder_decoder": flag,
    "fingerprints": [FINGERPRINT],
    "template": TEMPLATE,
    "row_templates": [{"arguments": TEMPLATE, "prompts": number}],
}
"""manifest.json of a sampled set."""
TRAINING = {
    "target": place,
    "revision": revision,
    "data": place,
    "supervise": word,
    "on_policy": {**numbers("share every max_new_tokens batch_size"), "sampling": SAMPLING},
    "draft": {
        "family": word,
        "init": place,
        "init_config": Names(option),
        **lists("layers taps"),
        "norms": [word],
        **numbers(
            "lora_rank heads head_layers target_lora_rank steps vocab width keep_layers choice_tokens"
        ),
        **numbers(
            "block depth anchors markov_rank retention min_retention exit_layer exit_width mask_token "
            "layer_dropout exit_scale exit_period"
        ),
        "attention": word,
        "activation_checkpointing": flag,
    },
    "loss": word,
    "divergence": {**numbers("temperature top beta"), "mix": Names(number)},
    "weights": {"positions": word, **numbers("decay feature divergence heads")},
    "features_top": number,
    "loop": {
        **numbers(
            "steps epochs batch_size micro_batch lr muon_lr warmup weight_decay clip max_length log_every eval_every "
            "save_every keep"
        ),
        "pack": flag,
        "keep_best": flag,
    },
    "check": numbers("prompts k max_new_tokens"),
    "mixed_precision": word,
    "target_dtype": word,
    "seed": number,
}
"""The settings of train/distill.py that say how the draft was made."""


def draft_schema(facts: Mapping[str, Any]) -> dict[str, Any]:
    """The schema of this draftsmith.json, whose draft was trained on one sampled set or on several."""
    training: dict[str, Any] = TRAINING
    mixture: Any = MANIFEST
    if isinstance(facts.get("data_manifest"), list):
        part = {"path": place, "weight": number, "limit": number}
        training, mixture = {**TRAINING, "data": [part]}, [{**part, "manifest": MANIFEST}]
    return {
        "family": word,
        "target": TARGET,
        "original_target": TARGET,
        "tokenizer_hash": digest,
        "training": training,
        **numbers("trained_steps samples processes"),
        "data_manifest": mixture,
        "templates": [TEMPLATE],
        "inputs": [{"target": FINGERPRINT, "data": [digest], "init": digest}],
        "measured_in_training": Names(number),
        "cost": numbers("wall_seconds tokens"),
        "vocabulary": {**numbers("size coverage"), "digest": digest},
        "layer_choice": {
            **numbers("depth tokens acceptance"),
            "removed": [numbers("layer acceptance")],
            **lists("kept"),
        },
        "norms": [word],
        **PROVENANCE,
        "draft_sha256": digest,
        "exported_from": digest,
    }


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
    "target": TARGET,
    "earlier_targets": [FINGERPRINT],
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
    "target_model": {"name": place, "revision": revision},
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
    "target": TARGET,
    "earlier_targets": [FINGERPRINT],
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
    "target": TARGET,
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
    "target": TARGET,
    "earlier_targets": [FINGERPRINT],
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
