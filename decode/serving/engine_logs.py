"""What vLLM and llama.cpp log of their drafts: responses, and the lines that their servers print.

SGLang's logs, which have other figures, are read in sglang_engine.py.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial

from decode.common.errors import UserError
from decode.serving import log_counts as log
from decode.serving import prometheus
from decode.serving.engine import LogReader
from decode.serving.log_counts import EngineLog, PrintedLine, RequestCounts, Response

# ---- vLLM ----

VLLM_LINE = "SpecDecoding metrics:"
"""What a line of vLLM's log has that counts drafts. It is printed every few seconds, and counts those alone."""


def read_vllm_response(body: Response, where: str) -> RequestCounts:
    """The counts of one response. UserError without metrics.speculative_decoding. A round is counted where drafts were
    scheduled, so steps without a draft are in no figure."""
    found = log.part(log.part(body, "metrics"), "speculative_decoding")
    if not found:
        raise UserError(
            f"{where} has no metrics.speculative_decoding: start vLLM with --per-request-spec-decode-metrics summary, "
            "and ask for one answer a request"
        )
    names = ("num_spec_steps", "num_draft_tokens", "num_accepted_draft_tokens")
    rounds, drafted, accepted = (log.read_count(found, key, where) for key in names)
    histogram = log.read_histogram(found.get("acceptance_histogram"), "acceptance_histogram", where)
    k = len(histogram) - 1
    accepted_at, reached_at = log.by_position({k: histogram})
    by_length = found.get("acceptance_histogram_by_draft_length")
    if isinstance(by_length, Mapping):
        lengths = {name: int(name) if name.isdecimal() else name for name in by_length}
        histograms = {
            log.read_count(lengths, name, where): log.read_histogram(
                counts, f"draft length {name}", where
            )
            for name, counts in by_length.items()
        }
        reached_at = log.by_position(histograms)[1]
        reached_at += (0,) * (k - len(reached_at))
    elif drafted != k * rounds:
        reached_at = ()  # rounds of several lengths, and nothing says how many of each
    if sum(histogram) != rounds:
        raise UserError(f"{where}: the histogram is not of {rounds} steps: the log is damaged")
    usage = log.part(body, "usage")
    counts = RequestCounts(
        rounds, drafted, accepted, accepted_at, reached_at,
        prompt_tokens=log.prompt_tokens(usage), engine_length=found.get("mean_acceptance_length"),
    )  # fmt: skip
    log.check_answer(log.checked(counts, where), log.answer_tokens(body, usage), False, where)
    return counts


def read_vllm_log(text: str, path: str) -> EngineLog:
    """The sums of all intervals in a server's log. UserError that names a line whose figures contradict each other."""
    found = []
    for where, line in log.log_lines(text, path):
        if VLLM_LINE not in line:
            continue
        drafted, accepted = (
            log.number(rf"\b{x}: (\d+) tokens", line, where) for x in ("Drafted", "Accepted")
        )
        if drafted is None or accepted is None:
            raise UserError(
                f"{where} has no numbers of accepted and drafted tokens: the line is cut off, drop it"
            )
        if drafted == 0 == accepted:
            continue
        rate = log.number(r"[Dd]raft acceptance rate: ([\d.]+)%", line, where, float)
        if rate is not None and (drafted == 0 or abs(100 * accepted / drafted - rate) > 0.051):
            raise UserError(
                f"{where}: {accepted} accepted of {drafted} drafted tokens are not {rate}%: the line is damaged"
            )
        length = log.number(r"Mean acceptance length: ([\d.]+)", line, where, float)
        rates = log.numbers(r"Per-position acceptance rate: ([\d., ]+)", line)
        found.append(log.recover(PrintedLine(int(drafted), int(accepted), length, rates), where))
    if not found:
        raise UserError(
            f"{path} drafted no token: speculative decoding was off, or nothing was asked"
        )
    total = log.pool([x.counts for x in found])
    notes = [
        f"totals of {len(found)} intervals that vLLM logged; its rounds are those with a draft"
    ]
    if total.rounds is None:
        notes.append("these lines do not tell the rounds, so there is no τ: take /metrics")
    elif any(x.fewest < x.most for x in found):
        low = 1 + total.accepted / sum(x.most for x in found)
        high = 1 + total.accepted / sum(x.fewest for x in found)
        notes.append(
            "rounds follow from lengths of two digits (/metrics has them exactly), so τ lies between "
            f"{low - 5e-5:.4f} and {high + 5e-5:.4f}"
        )
    return EngineLog(path, "vllm", [total], per_request=False, notes=tuple(notes))


VLLM_LOG = LogReader(
    lambda body: isinstance(body.get("metrics"), Mapping),
    read_vllm_response,
    note="vLLM's rounds are those with a draft",
    figures="vLLM's log line and /metrics give pooled figures (mean acceptance length = τ, draft acceptance rate); its "
    "responses one length a request, and averaging those gives the mean of requests.",
    mark=re.compile(VLLM_LINE),
    printed=read_vllm_log,
    dump=partial(prometheus.read_totals, "vllm"),
)

# ---- llama.cpp ----

TASK = re.compile(r"\bid +\d+ \| task +(-?\d+) \|")
DRAFTS = re.compile(r"\bdraft acceptance(?: rate)? = ")
"""In a line of its log that counts the drafts of a request."""
LONGEST_DRAFT = 64
"""Tokens of the longest draft of any kind that llama-server has by default: so many a stop string may cut off."""


def read_llamacpp_response(body: Response, where: str) -> RequestCounts:
    """The counts of one response. UserError without timings. A response without draft_n drafted nothing. Neither
    verification steps nor positions are in it. Each pass after prefill emits its accepted drafts and one more token, so
    they are predicted_n − 1 − draft_n_accepted; passes that drafted nothing are among them, and the last one may have
    been cut at the end of the answer."""
    timings = body.get("timings")
    if not isinstance(timings, Mapping):
        raise UserError(f"{where} has no timings: log what llama-server answers")
    predicted = log.read_count(timings, "predicted_n", where)
    usage = log.part(body, "usage")
    length = log.answer_tokens(body, usage)
    read = log.prompt_tokens({"prompt_tokens": body.get("tokens_evaluated"), **usage})
    if length not in (None, predicted):
        raise UserError(
            f"{where}: timings of {predicted} tokens contradict the answer's length of {length}: the counts are of "
            "another request, or the log is damaged"
        )
    if "draft_n" not in timings:
        return RequestCounts(max(0, predicted - 1), 0, 0, prompt_tokens=read)
    drafted, accepted = (
        log.read_count(timings, key, where) for key in ("draft_n", "draft_n_accepted")
    )
    log.checked(RequestCounts(None, drafted, accepted), where)
    stop = str(body.get("stop_type", "")), str(log.first_choice(body).get("finish_reason"))
    cut = LONGEST_DRAFT if "word" in stop or "stop" in stop else 0
    rounds = _rounds(predicted, drafted, accepted, cut, where)
    return log.checked(RequestCounts(rounds, drafted, accepted, prompt_tokens=read), where)


def _rounds(tokens: int, drafted: int, accepted: int, cut: int, where: str) -> int:
    """Passes after prefill of an answer of `tokens`. UserError if it is shorter than its accepted tokens. A stop string
    may have cut off up to `cut` of them."""
    if accepted > max(0, tokens - 1) + cut:
        raise UserError(
            f"{where}: {accepted} accepted of {drafted} drafted tokens contradict the answer's length of {tokens}: "
            "the counts are of another request, or the log is damaged"
        )
    return max(int(drafted > 0), tokens - 1 - accepted)


@dataclass
class _PrintedRequest:
    """What the log says of one request."""

    task: int
    tokens: int | None = None
    line: PrintedLine | None = None
    where: str = ""

    def counts(self) -> RequestCounts:
        tokens, line = self.tokens, self.line
        if line is None:
            return RequestCounts(max(0, (tokens or 0) - 1), 0, 0)
        found = replace(log.recover(line, self.where).counts, engine_length=line.length)
        if tokens is None:
            return RequestCounts(None, line.drafted, line.accepted, engine_length=line.length)
        # a stop string cuts off no more than a draft has positions
        rounds = _rounds(tokens, line.drafted, line.accepted, len(line.rates), self.where)
        known = found.rounds or 0
        if known > rounds + max(1, len(line.rates)):
            raise UserError(
                f"{self.where}: {known} rounds with a draft and {line.accepted} accepted tokens contradict the "
                f"answer's length of {tokens}: the log is damaged"
            )
        return log.checked(replace(found, rounds=max(rounds, known)), self.where)


def read_llamacpp_log(text: str, path: str) -> EngineLog:
    """The requests in a server's log, in the order in which they were asked. UserError that names a line whose figures
    contradict each other. A request without a line on drafts drafted nothing. Newer versions tell the rounds with a
    draft and the positions too."""
    current: dict[int, _PrintedRequest] = {}
    requests: list[_PrintedRequest] = []

    def begin(task: int) -> None:
        current[task] = _PrintedRequest(task)
        requests.append(current[task])

    task = -1
    for where, line in log.log_lines(text, path):
        named = TASK.search(line)
        task = int(named[1]) if named else task  # older versions name it once, above several lines
        if "prompt eval time =" in line and "tokens (" in line:
            begin(task)
        elif "eval time =" in line and task in current:
            tokens = log.number(r"/ +(\d+) tokens", line, where)
            current[task].tokens = None if tokens is None else int(tokens)
        elif DRAFTS.search(line):
            if task not in current or current[task].line is not None:
                begin(task)  # the log begins or goes on here
            current[task].line, current[task].where = _printed_line(line, where), where
        elif "acc per pos = (" in line and task in current:
            rates = log.numbers(r"acc per pos = \(([\d., ]*)\)", line)
            known = current[task].line
            current[task].line = known and replace(known, rates=rates)
    told = [x for x in requests if x.tokens is not None or x.line is not None]
    if len({x.task for x in told}) == len(told):  # else the server was started again
        told.sort(key=lambda x: x.task)
    counts = [x.counts() for x in told]
    if not any(x.drafted for x in counts):
        raise UserError(f"{path}: no request drafted a token: speculative decoding was off")
    notes = [
        "rounds derived: tokens of the answer − 1 − accepted; a request without a line on drafts drafted nothing"
    ]
    if any(x.rounds is None for x in counts):
        notes.append(
            "not every request has its eval time in this log, so its rounds and τ are not known"
        )
    return EngineLog(path, "llamacpp", counts, notes=tuple(notes))


def _printed_line(line: str, where: str) -> PrintedLine:
    found = re.search(r"= *([\d.]+) *\( *(\d+) accepted / *(\d+) generated\)", line)
    if found is None:
        raise UserError(
            f"{where} has no numbers of accepted and generated tokens: the line is cut off, drop it"
        )
    rate, accepted, drafted = float(found[1]), int(found[2]), int(found[3])
    if drafted == 0 or abs(accepted / drafted - rate) > 2e-5:
        raise UserError(
            f"{where}: {accepted} accepted of {drafted} drafted tokens are not {found[1]}: the line is damaged"
        )
    length = log.number(r"mean (?:len|acceptance length) = *([\d.]+)", line, where, float)
    rates = log.numbers(r"acceptance rate per position = \(([\d., ]*)\)", line)
    return PrintedLine(drafted, accepted, length, rates)


LLAMACPP_LOG = LogReader(
    lambda body: isinstance(body.get("timings"), Mapping),
    read_llamacpp_response,
    note="rounds derived: predicted_n − 1 − draft_n_accepted; no positions in these responses, so no α",
    figures="llama.cpp prints an acceptance rate and a mean length for each request, so averages of its lines are "
    "means of requests; its /metrics count rounds with a draft, over all requests.",
    mark=re.compile(rf"{DRAFTS.pattern}|\bprint_timings?: +id "),
    printed=read_llamacpp_log,
    dump=partial(prometheus.read_totals, "llamacpp"),
)
