"""SGLang. Its rules are from notes on 0.5.23, and from its source where a file is named; they were not run here.

It drops unknown tensors and reports no missing one, so that nearly every mistake is silent.
"""

import re
from collections.abc import Iterator, Sequence

from decode.common.errors import UserError
from decode.serving import checks, prometheus
from decode.serving import log_counts as log
from decode.serving.engine import (
    LogReader,
    Served,
    ServedDraft,
    ServingEngine,
    shell_script,
)
from decode.serving.log_counts import EngineLog, RequestCounts, Response
from decode.serving.rules import COVERED_EVERYWHERE, IGNORED, REFUSED, SILENT, DraftFiles, Rule

EAGLE3_PY = "python/sglang/srt/models/llama_eagle3.py"
EAGLE1_PY = "python/sglang/srt/models/llama_eagle.py"
CONTEXT_PY = "python/sglang/srt/configs/model_config.py (_derive_context_length)"
NOTES = "SGLang 0.5.23"

EAGLES = ("eagle1", "eagle3")
ARCHITECTURES = {"eagle1": "LlamaForCausalLMEagle", "eagle3": "LlamaForCausalLMEagle3"}


def wrong_architecture(d: DraftFiles) -> Iterator[str]:
    names = d.get("architectures", [])
    if ARCHITECTURES[d.family] not in names:
        yield f"architectures {names} do not contain {ARCHITECTURES[d.family]}"


def wrong_aux_layers(d: DraftFiles) -> Iterator[str]:
    """SGLang reads only the key in `eagle_config`, plus one, else the default layers."""
    if d.target_layers is not None:
        _, outputs = checks.named_layers(d)
        ids = tuple(i + 1 for i in outputs or ())
        yield from checks.wrong_aux_layers(d, ids or checks.default_aux_layers(d.target_layers))


RULES = (
    Rule("dtype", COVERED_EVERYWHERE, IGNORED, "--dtype of the server decides", checks.dtype_mismatch),
    Rule("vocabulary", ("causal", *EAGLES), REFUSED, NOTES, checks.vocab_size_mismatch),
    Rule("context", ("causal", *EAGLES), REFUSED, CONTEXT_PY, checks.context_at_least_targets(
        "the server starts with --context-length of at most that alone, or with "
        "SGLANG_ALLOW_OVERWRITE_LONGER_CONTEXT_LEN=1, and then few tokens are accepted beyond it"
    )),
    Rule("medusa", ("medusa",), REFUSED, f"{NOTES} has no Medusa among its algorithms", checks.unsupported(
        "SGLang has no Medusa: serve it with vLLM 0.32 or older"
    )),
    Rule("architecture", EAGLES, REFUSED, EAGLE3_PY, wrong_architecture),
    Rule("nested-config", ("eagle3",), REFUSED, EAGLE3_PY, checks.speculators_config),
    Rule("norm-before-residual", ("eagle3",), SILENT, EAGLE3_PY, checks.norm_before_residual),
    Rule("norm-flags", ("eagle3",), SILENT, EAGLE3_PY, checks.changed_norm_flags),
    Rule("shapes", EAGLES, REFUSED, EAGLE3_PY, checks.wrong_shapes),
    Rule("missing-tensor", EAGLES, SILENT, f"{EAGLE3_PY}: load_weights", checks.missing_tensors),
    Rule("unknown-tensor", EAGLES, SILENT, f"{EAGLE3_PY}: load_weights", checks.unknown_tensors),
    Rule("layer-name", ("eagle3",), SILENT, f"{EAGLE3_PY} at 03d5a77", checks.when(
        lambda d: any(name.startswith("layers.0.") for name in d.name_in_file.values()),
        "tensors of the layer are named layers.0: some older versions drop them, all versions read midlayer",
    ), before="0.5.23"),
    Rule("dropped-bias", EAGLES, SILENT, EAGLE3_PY, lambda d: (
        what for what in checks.dropped_biases(d) if not what.startswith("fc.bias")
    )),
    Rule("bias-flags", EAGLES, SILENT, EAGLE3_PY, checks.unfilled_bias_flags),
    Rule("fc-bias", ("eagle1",), SILENT, EAGLE1_PY, checks.when(
        lambda d: "fc.bias" not in d.tensors, "fc.bias is missing and stays random: save zeros"
    )),
    Rule("activation", EAGLES, REFUSED, EAGLE3_PY, checks.require_value("hidden_act", "silu")),
    Rule("layers", EAGLES, SILENT, EAGLE3_PY, checks.wrong_layer_count),
    Rule("tied", ("eagle3",), SILENT, EAGLE3_PY, checks.require_value("tie_word_embeddings", False, False)),
    Rule("rope", EAGLES, SILENT, EAGLE3_PY, checks.rope_mismatch),
    Rule("rope-keys", EAGLES, SILENT, "older versions read rope_theta", checks.require_keys("rope_theta")),
    Rule("draft-vocabulary", ("eagle3",), REFUSED, EAGLE3_PY, checks.require_keys("draft_vocab_size")),
    Rule("map-missing", ("eagle3",), SILENT, EAGLE3_PY, checks.map_missing),
    Rule("map-superfluous", ("eagle3",), IGNORED, EAGLE3_PY, checks.unneeded_map),
    Rule("map", ("eagle3",), SILENT, EAGLE3_PY, checks.map_wrong),
    Rule("map-dtype", ("eagle3",), SILENT, EAGLE3_PY, checks.map_dtype),
    Rule("members-dtype", ("eagle3",), IGNORED, f"{EAGLE3_PY}: t2d is skipped", checks.t2d_dtype),
    Rule("taps", ("eagle3",), SILENT, f"{NOTES}: eagle_config alone is read", wrong_aux_layers),
    Rule("taps-unread", ("eagle3",), SILENT, f"{NOTES}: eagle_config alone is read", checks.when(
        lambda d: checks.named_layers(d)[0] and not checks.named_layers(d)[1],
        "eagle_aux_hidden_state_layer_ids is ignored without eagle_config: the default layers are read",
    )),
    Rule("taps-disagree", ("eagle3",), SILENT, NOTES, checks.conflicting_aux_layers),
    Rule("target-width", ("eagle3",), REFUSED, EAGLE3_PY, checks.target_width_mismatch),
    Rule("parallel", ("pard",), SILENT, f"{NOTES} has no parallel drafting", checks.unsupported(
        "SGLang has no parallel drafting: it would run this model token by token, without masks"
    )),
    *checks.CAUSAL_RULES,
    Rule("missing-tensor", ("causal",), SILENT, NOTES, checks.missing_tensors),
    Rule("shapes", ("causal",), REFUSED, NOTES, checks.wrong_shapes),
    Rule("tied", ("causal",), SILENT, NOTES, checks.dropped_lm_head),
    Rule("tokenizer", ("causal",), REFUSED, f"{NOTES}: STANDALONE compares get_vocab()", checks.wrong_tokenizer),
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
    return log.part(body, "meta_info") or log.part(log.first_choice(body), "meta_info")


def read_response(body: Response, where: str) -> RequestCounts:
    """The counts of one response. UserError without meta_info, or if it says nothing of speculation. spec_accept_length
    is completion_tokens ÷ verification steps: the first token, which prefill gives, counts there and not here."""
    found = meta_info(body)
    if not found:
        raise UserError(f"{where} has no meta_info: log what /generate of SGLang answers")
    usage = log.part(body, "usage") or found
    if "spec_verify_ct" not in found and log.read_count(found, "completion_tokens", where) <= 1:
        # The answer ended with prefill's token.
        return RequestCounts(0, 0, 0, prompt_tokens=log.prompt_tokens(usage))
    rounds = log.read_count(found, "spec_verify_ct", where)
    accepted, drafted = (
        log.read_count(found, next((x for x in names if x in found), names[0]), where)
        for names in (ACCEPTED, DRAFTED)
    )
    accepted_at, reached_at = log.by_position({})
    key = next((name for name in HISTOGRAM if name in found), None)
    if key is not None and rounds > 0:
        histogram, k = log.read_histogram(found[key], key, where), drafted // rounds
        histogram += [0] * (k + 1 - len(histogram))
        if sum(histogram) != rounds:
            raise UserError(f"{where}: {key} is not of {rounds} steps: the log is damaged")
        accepted_at, reached_at = log.by_position({len(histogram) - 1: histogram})
        if drafted != k * rounds or len(histogram) != k + 1:
            reached_at = ()  # rounds of several lengths
    counts = RequestCounts(
        rounds, drafted, accepted, accepted_at, reached_at,
        prompt_tokens=log.prompt_tokens(usage), engine_length=found.get("spec_accept_length"),
    )  # fmt: skip
    log.check_answer(log.checked(counts, where), log.answer_tokens(body, usage), True, where)
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
    for where, line in log.log_lines(text, path):
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
            and abs((length - bonus) / divisor - rate) <= log.LENGTH_ERROR * (1 + 1 / divisor)
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
    log=LOG,
)
