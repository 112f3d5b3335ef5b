"""SGLang. Its rules are from notes on 0.5.23, and from its source where a file is named; they were not run here.

It drops unknown tensors and reports no missing one, so that nearly every mistake is silent.
"""

import re
from collections.abc import Iterator, Sequence
from typing import Any

from decode.common.errors import UserError
from decode.serving import family_rules as family
from decode.serving import prometheus
from decode.serving.engine import (
    AcceptanceRule,
    KRange,
    LogReader,
    Served,
    ServedDraft,
    ServingEngine,
    shell_script,
)
from decode.serving.log_counts import (
    LENGTH_ERROR,
    EngineLog,
    RequestCounts,
    Response,
    answer_tokens,
    by_position,
    check_answer,
    checked,
    first_choice,
    log_lines,
    part,
    prompt_tokens,
    read_count,
    read_histogram,
)
from decode.serving.rules import (
    COMMON_RULES,
    COVERED_EVERYWHERE,
    EAGLE_FAMILIES,
    IGNORED,
    REFUSED,
    SILENT,
    DraftFiles,
    Rule,
    context_at_least_targets,
    dtype_mismatch,
    require_keys,
    require_value,
    unsupported,
    vocab_size_mismatch,
    when,
)

EAGLE3_PY = "python/sglang/srt/models/llama_eagle3.py"
EAGLE1_PY = "python/sglang/srt/models/llama_eagle.py"
CONTEXT_PY = "python/sglang/srt/configs/model_config.py (_derive_context_length)"
NOTES = "SGLang 0.5.23"

ARCHITECTURES = {"eagle1": "LlamaForCausalLMEagle", "eagle3": "LlamaForCausalLMEagle3"}


def wrong_architecture(d: DraftFiles) -> Iterator[str]:
    names = d.get("architectures", [])
    if ARCHITECTURES[d.family] not in names:
        yield f"architectures {names} do not contain {ARCHITECTURES[d.family]}"


def wrong_aux_layers(d: DraftFiles) -> Iterator[str]:
    """SGLang reads only the key in `eagle_config`, plus one, else the default layers."""
    if d.target_layers is not None:
        _, outputs = family.named_layers(d)
        ids = tuple(i + 1 for i in outputs or ())
        yield from family.wrong_aux_layers(d, ids or family.default_aux_layers(d.target_layers))


RULES = (
    *COMMON_RULES,
    Rule("dtype", COVERED_EVERYWHERE, IGNORED, "--dtype of the server decides", dtype_mismatch),
    Rule("vocabulary", ("causal", *EAGLE_FAMILIES), REFUSED, NOTES, vocab_size_mismatch),
    Rule("context", ("causal", *EAGLE_FAMILIES), REFUSED, CONTEXT_PY, context_at_least_targets(
        "the server starts with --context-length of at most that alone, or with "
        "SGLANG_ALLOW_OVERWRITE_LONGER_CONTEXT_LEN=1, and then few tokens are accepted beyond it"
    )),
    Rule("medusa", ("medusa",), REFUSED, f"{NOTES} has no Medusa among its algorithms", unsupported(
        "SGLang has no Medusa: serve it with vLLM 0.32 or older"
    )),
    Rule("architecture", EAGLE_FAMILIES, REFUSED, EAGLE3_PY, wrong_architecture),
    Rule("nested-config", ("eagle3",), REFUSED, EAGLE3_PY, family.speculators_config),
    Rule("norm-before-residual", ("eagle3",), SILENT, EAGLE3_PY, family.norm_before_residual),
    Rule("norm-flags", ("eagle3",), SILENT, EAGLE3_PY, family.changed_norm_flags),
    Rule("shapes", EAGLE_FAMILIES, REFUSED, EAGLE3_PY, family.wrong_shapes),
    Rule("missing-tensor", EAGLE_FAMILIES, SILENT, f"{EAGLE3_PY}: load_weights", family.missing_tensors),
    Rule("unknown-tensor", EAGLE_FAMILIES, SILENT, f"{EAGLE3_PY}: load_weights", family.unknown_tensors),
    Rule("layer-name", ("eagle3",), SILENT, f"{EAGLE3_PY} at 03d5a77", when(
        lambda d: any(name.startswith("layers.0.") for name in d.name_in_file.values()),
        "tensors of the layer are named layers.0: some older versions drop them, all versions read midlayer",
    ), before="0.5.23"),
    Rule("dropped-bias", EAGLE_FAMILIES, SILENT, EAGLE3_PY, lambda d: (
        what for what in family.dropped_biases(d) if not what.startswith("fc.bias")
    )),
    Rule("bias-flags", EAGLE_FAMILIES, SILENT, EAGLE3_PY, family.unfilled_bias_flags),
    Rule("fc-bias", ("eagle1",), SILENT, EAGLE1_PY, when(
        lambda d: "fc.bias" not in d.tensors, "fc.bias is missing and stays random: save zeros"
    )),
    Rule("activation", EAGLE_FAMILIES, REFUSED, EAGLE3_PY, require_value("hidden_act", "silu")),
    Rule("layers", EAGLE_FAMILIES, SILENT, EAGLE3_PY, family.wrong_layer_count),
    Rule("tied", ("eagle3",), SILENT, EAGLE3_PY, require_value("tie_word_embeddings", False, False)),
    Rule("rope", EAGLE_FAMILIES, SILENT, EAGLE3_PY, family.rope_mismatch),
    Rule("rope-keys", EAGLE_FAMILIES, SILENT, "older versions read rope_theta", require_keys("rope_theta")),
    Rule("draft-vocabulary", ("eagle3",), REFUSED, EAGLE3_PY, require_keys("draft_vocab_size")),
    Rule("map-missing", ("eagle3",), SILENT, EAGLE3_PY, family.map_missing),
    Rule("map-superfluous", ("eagle3",), IGNORED, EAGLE3_PY, family.unneeded_map),
    Rule("map", ("eagle3",), SILENT, EAGLE3_PY, family.map_wrong),
    Rule("map-dtype", ("eagle3",), SILENT, EAGLE3_PY, family.map_dtype),
    Rule("members-dtype", ("eagle3",), IGNORED, f"{EAGLE3_PY}: t2d is skipped", family.t2d_dtype),
    Rule("taps", ("eagle3",), SILENT, f"{NOTES}: eagle_config alone is read", wrong_aux_layers),
    Rule("taps-unread", ("eagle3",), SILENT, f"{NOTES}: eagle_config alone is read", when(
        lambda d: family.named_layers(d)[0] and not family.named_layers(d)[1],
        "eagle_aux_hidden_state_layer_ids is ignored without eagle_config: the default layers are read",
    )),
    Rule("taps-disagree", ("eagle3",), SILENT, NOTES, family.conflicting_aux_layers),
    Rule("target-width", ("eagle3",), REFUSED, EAGLE3_PY, family.target_width_mismatch),
    Rule("parallel", ("pard",), SILENT, f"{NOTES} has no parallel drafting", unsupported(
        "SGLang has no parallel drafting: it would run this model token by token, without masks"
    )),
    *family.CAUSAL_RULES,
    Rule("missing-tensor", ("causal",), SILENT, NOTES, family.missing_tensors),
    Rule("shapes", ("causal",), REFUSED, NOTES, family.wrong_shapes),
    Rule("tied", ("causal",), SILENT, NOTES, family.dropped_lm_head),
    Rule("tokenizer", ("causal",), REFUSED, f"{NOTES}: STANDALONE compares get_vocab()", family.wrong_tokenizer),
)  # fmt: skip


# ---- how it is started ----


def speculative_flags(k: int) -> list[tuple[str, int]]:
    """For chains of K tokens. The number of draft tokens counts the root as well."""
    sizes = {"num-steps": k, "eagle-topk": 1, "num-draft-tokens": k + 1}
    return [(f"--speculative-{name}", value) for name, value in sizes.items()]


def serving_files(d: ServedDraft) -> dict[str, str]:
    words = ["python", "-m", "sglang.launch_server", "--model", d.target]
    words += ["--speculative-algorithm", SGLANG.method(d.family)]
    words += ["--speculative-draft-model-path", d.repo]
    words += [str(word) for flag in speculative_flags(d.k) for word in flag]
    return {"sglang.sh": shell_script(words, d.revision)}


def schedule(ranges: Sequence[KRange]) -> dict[str, Any]:
    """K is the same for every batch size: that of one request; no flags where none pays there."""
    k = ranges[0][2]
    return {"flags": [f"{flag} {value}" for flag, value in speculative_flags(k)] if k else []}


# ---- its logs ----

ACCEPTED = ("spec_num_correct_drafts", "spec_accepted_drafts", "spec_accept_token_num")
DRAFTED = ("spec_num_proposed_drafts", "spec_proposed_drafts", "spec_draft_token_num")
HISTOGRAM = ("spec_correct_drafts_histogram", "spec_accept_histogram")  # newest name first
GAUGES = ("sglang:spec_accept_length", "sglang:spec_accept_rate")
"""Of the last interval, not of the whole run; everything else that is read of a dump is a counter."""
PRINTED = re.compile(r"Decode batch.*?\baccept len: (\S+?),(?: accept rate: (\S+?),)?")
"""A line of the server's log that tells how a few dozen steps were accepted."""
MOST_DRAFTS = 256  # tokens that a round drafts at most when their number is looked for


def meta_info(body: Response) -> Response:
    return part(body, "meta_info") or part(first_choice(body), "meta_info")


def read_response(body: Response, where: str) -> RequestCounts:
    """The counts of one response. UserError without meta_info, or if it says nothing of speculation. spec_accept_length
    is completion_tokens ÷ verification steps: the first token, which prefill gives, counts there and not here."""
    found = meta_info(body)
    if not found:
        raise UserError(f"{where} has no meta_info: log what /generate of SGLang answers")
    usage = part(body, "usage") or found
    if "spec_verify_ct" not in found and read_count(found, "completion_tokens", where) <= 1:
        # The answer ended with prefill's token.
        return RequestCounts(0, 0, 0, prompt_tokens=prompt_tokens(usage))
    rounds = read_count(found, "spec_verify_ct", where)
    accepted, drafted = (
        read_count(found, next((x for x in names if x in found), names[0]), where)
        for names in (ACCEPTED, DRAFTED)
    )
    accepted_at, reached_at = by_position({})
    key = next((name for name in HISTOGRAM if name in found), None)
    if key is not None and rounds > 0:
        histogram, k = read_histogram(found[key], key, where), drafted // rounds
        histogram += [0] * (k + 1 - len(histogram))
        if sum(histogram) != rounds:
            raise UserError(f"{where}: {key} is not of {rounds} steps: the log is damaged")
        accepted_at, reached_at = by_position({len(histogram) - 1: histogram})
        if drafted != k * rounds or len(histogram) != k + 1:
            reached_at = ()  # rounds of several lengths
    counts = RequestCounts(
        rounds, drafted, accepted, accepted_at, reached_at,
        prompt_tokens=prompt_tokens(usage), engine_length=found.get("spec_accept_length"),
    )  # fmt: skip
    check_answer(checked(counts, where), answer_tokens(body, usage), True, where)
    return counts


def read_dump(path: str, before: str = "") -> EngineLog:
    """The totals of a /metrics dump, less those of an earlier one; with its gauges. SGLang counts neither drafted nor
    accepted tokens there. Accepted ones follow from generated tokens: each request has one from prefill and each
    verification step one that the target adds."""
    samples = prometheus.read_dump(path, before, GAUGES)
    rounds, generated, requests = (
        prometheus.total(samples, f"sglang:{name}", path)
        for name in ("spec_verify_calls", "generation_tokens", "num_requests")
    )
    accepted = generated - requests - rounds
    if accepted < 0:
        raise UserError(
            f"{path}: {generated} tokens of {requests} requests in {rounds} steps: not all were speculated"
        )
    values = {name: [x for (own, _), x in samples.items() if own == name] for name in GAUGES}
    gauges = {name: sum(own) / len(own) for name, own in values.items() if own}
    notes = ("accepted tokens derived: generated − requests − verification steps",)
    counts = [RequestCounts(rounds, 0, accepted)]
    return EngineLog(path, "sglang", counts, per_request=False, gauges=gauges, notes=notes)


def read_printed(text: str, path: str) -> EngineLog:
    """The figures of a server's log, as means over its lines: SGLang prints no counts there, so nothing is pooled. Its
    accept len is τ of some dozens of steps. Its accept rate counts the target's token among the accepted and the
    drafted ones in older versions and not in newer ones; ours follows from accept len, and from the number of drafts
    that makes both figures agree in every line under one of these readings. If more than one does, it is not given."""
    pairs: list[tuple[float, float | None]] = []
    for where, line in log_lines(text, path):
        found = PRINTED.search(line)
        if found is None:
            continue
        try:
            length, rate = float(found[1]), None if found[2] is None else float(found[2])
        except ValueError:
            raise UserError(
                f"{where}: accept len or rate is no number: the line is damaged"
            ) from None
        if not 1 <= length < MOST_DRAFTS or not (rate is None or 0 <= rate <= 1):
            raise UserError(
                f"{where}: an accept len of {found[1]} with an accept rate of {found[2]} is impossible: the line is "
                "damaged"
            )
        pairs.append((length, rate))
    if not pairs:
        raise UserError(f"{path} has no accept len: speculative decoding was off")
    figures = {"tau": sum(length for length, _ in pairs) / len(pairs)}
    notes = ["SGLang's log has no counts, so intervals cannot be pooled: take meta_info or /metrics"]  # fmt: skip
    drafts = _drafts_per_round(pairs)
    if len(drafts) == 1:
        figures["acceptance_rate"] = (figures["tau"] - 1) / drafts.pop()
    else:
        notes.append(
            "these lines do not tell how many tokens a round drafts, so there is no acceptance rate"
        )
    one = len(pairs) == 1
    return EngineLog(
        path,
        "sglang",
        [],
        per_request=False,
        gauges={} if one else figures,
        gauges_of=f"mean of {len(pairs)} intervals",
        given=figures if one else {},
        notes=tuple(notes),
    )


def _drafts_per_round(pairs: Sequence[tuple[float, float | None]]) -> set[int]:
    """The numbers of drafted tokens in a round that explain all pairs of accept len and rate."""
    return {
        drafts
        for drafts in range(1, MOST_DRAFTS)
        # (what is not counted of the length, what the rate divides by), in older and newer versions
        for bonus, divisor in ((0, drafts + 1), (1, drafts))
        if all(
            rate is not None
            and abs((length - bonus) / divisor - rate) <= LENGTH_ERROR * (1 + 1 / divisor)
            for length, rate in pairs
        )
    }


LOG = LogReader(
    lambda body: bool(meta_info(body)),
    read_response,
    note="α is that of chains (--speculative-eagle-topk 1)",
    figures="SGLang's gauges are pooled over the last interval; spec_accept_length of a response counts prefill's "
    "token too, and so does the mean of requests that averaging those gives.",
    mark=re.compile(r"Decode batch.*\baccept len: "),
    printed=read_printed,
    dump=read_dump,
)

SGLANG = ServingEngine(
    "SGLang",
    version="0.5.23",
    versions="0.5",
    methods={  # --speculative-algorithm
        "causal": Served("STANDALONE"),
        "eagle1": Served("EAGLE"),
        "eagle3": Served("EAGLE3"),
        "dflash": Served("DFLASH"),
        "dspark": Served("DSPARK"),
    },
    rules=RULES,
    files=serving_files,
    note="{versions}; its number of draft tokens counts the root: one more than vLLM's",
    captures_embedding=False,
    # Read in copies of its kernel tree_speculative_sampling_target_only, which accepts with p.
    accepts=(
        AcceptanceRule("greedy", "default, with --speculative-eagle-topk 1 and thresholds of 1"),
    ),
    log=LOG,
)
