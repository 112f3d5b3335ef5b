"""What servers print, streamed answers and failed requests: lines in the servers' own formats, with figures by hand."""

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from decode.common.errors import UserError
from decode.serving.log_counts import EngineLog, PrintedLine, recover
from decode.serving.logs import BROKE_OFF, read_log
from eval import rescore
from eval.served.scoring import compare, match_prompts, score


def read(tmp_path: Path, text: str, **options: Any) -> EngineLog:
    (tmp_path / "log").write_text(text)
    return read_log(str(tmp_path / "log"), **options)


def scored(log: EngineLog) -> dict[str, Any]:
    return score(log).to_json()


def pooled(found: dict[str, Any]) -> dict[str, Any]:
    names = ("tau", "alpha", "acceptance_rate")
    return {k: found[k]["pooled"] for k in names if k in found}


def positions(found: dict[str, Any], key: str = "unconditional") -> list[Any]:
    return [x[key] for x in found["by_position"]]


# ---- vLLM ----


def vllm_line(
    rounds: int, drafted: int, at: list[int], prefix: str = "INFO 11-24 10:00:01 "
) -> str:
    """One interval as vllm/v1/spec_decode/metrics.py formats it."""
    accepted = sum(at)
    rates = ", ".join(f"{n / rounds:.3f}" for n in at)
    return (
        f"{prefix}[metrics.py:100] SpecDecoding metrics: Mean acceptance length: {1 + accepted / rounds:.2f}, "
        f"Accepted throughput: 12.00 tokens/s, Drafted throughput: 30.00 tokens/s, Accepted: {accepted} tokens, "
        f"Drafted: {drafted} tokens, Per-position acceptance rate: {rates}, "
        f"Avg Draft acceptance rate: {accepted / drafted * 100:.1f}%\n"
    )


OTHER = "INFO 11-24 10:00:01 [loggers.py:123] Engine 000: Avg prompt throughput: 10.0 tokens/s, Running: 1 reqs\n"


def test_intervals_of_vllm_are_pooled_by_their_rounds(tmp_path: Path) -> None:
    """Catches means of intervals: 100 rounds accepted 120 of 300, and 50 accepted 90 of 150: τ 2.4, not 2.5."""
    text = OTHER + vllm_line(100, 300, [70, 35, 15]) + OTHER + vllm_line(50, 150, [40, 30, 20])
    found = scored(read(tmp_path, text))
    assert (found["engine"], found["requests"]) == ("vllm", None)
    assert found["counts"] == {"rounds": 150, "drafted": 450, "accepted": 210}
    assert pooled(found) == pytest.approx(
        {"tau": 2.4, "alpha": 210 / 325, "acceptance_rate": 210 / 450}
    )
    assert positions(found) == pytest.approx([110 / 150, 65 / 150, 35 / 150])
    assert positions(found, "alpha") == pytest.approx([110 / 150, 65 / 110, 35 / 65])
    assert found["tau"]["ci"] is None


def test_rounds_that_drafted_less_give_no_alpha_by_guess(tmp_path: Path) -> None:
    """10 rounds with 27 drafts of 3 positions: which rounds were shorter is not said, so α is not; τ is."""
    found = scored(read(tmp_path, vllm_line(10, 27, [8, 5, 2])))
    assert pooled(found) == pytest.approx({"tau": 2.5, "acceptance_rate": 15 / 27})
    assert positions(found) == [0.8, 0.5, 0.2]
    assert positions(found, "alpha") == [None] * 3


def test_many_rounds_are_known_as_far_as_they_are_printed(tmp_path: Path) -> None:
    """61,234 rounds: the two digits of the length leave some hundred. τ is within the bounds that are said."""
    found = scored(read(tmp_path, vllm_line(61234, 61234 * 4, [45678, 23456, 9876, 1234])))
    true = 1 + (45678 + 23456 + 9876 + 1234) / 61234
    assert found["tau"]["pooled"] == pytest.approx(true, abs=0.005)
    shares = [n / 61234 for n in (45678, 23456, 9876, 1234)]
    assert positions(found) == pytest.approx(shares, abs=1e-3)
    assert "alpha" not in found
    [said] = [note for note in found["notes"] if "τ lies between" in note]
    low, high = (float(word) for word in said.split() if word.startswith("2."))
    assert low <= true <= high


def test_the_first_lines_of_vllm_without_rounds(tmp_path: Path) -> None:
    """Earlier releases printed no length: the acceptance rate is there, τ is not made up."""
    line = "SpecDecoding metrics: Draft acceptance rate: {}%, Accepted: {} tokens, Drafted: {} tokens\n"
    found = scored(read(tmp_path, line.format(62.5, 120, 192) + line.format("nan", 0, 0)))
    assert pooled(found) == {"acceptance_rate": 120 / 192}
    assert (found["counts"]["rounds"], found["by_position"]) == (None, [])


def test_the_rounds_of_a_printed_line_hold_the_true_ones() -> None:
    """Against 300 random lines of servers: the true number of rounds is always among those that are possible, and alone
    where there are few of them."""
    random = np.random.default_rng(0)
    for _ in range(300):
        rounds, depth = int(random.integers(1, 3000)), int(random.integers(1, 9))
        at = sorted((int(x) for x in random.integers(0, rounds + 1, depth)), reverse=True)
        drafted = rounds * depth - int(random.integers(0, 2)) * min(rounds, depth) // 2
        drafted = max(drafted, sum(at), rounds)
        rates = tuple(round(n / rounds, 3) for n in at)
        line = PrintedLine(drafted, sum(at), round(1 + sum(at) / rounds, 2), rates)
        found = recover(line, "x")
        assert found.fewest <= rounds <= found.most
        assert sum(found.counts.accepted_at) == sum(at)
        assert found.counts.accepted_at == pytest.approx(at, abs=0.0011 * found.most + 1)
        if rounds <= 100 and sum(at) > 0 and found.fewest == found.most:
            assert found.counts.accepted_at == tuple(at)


# ---- llama.cpp ----


def llama_lines(task: int, tokens: int, drafts: str, positions: str = "", slot: int = 0) -> str:
    """What print_timings of a present llama-server writes of one request."""
    head = f"0.06.895 I slot print_timing: id {slot:2d} | task {task} | "
    speed = "(    8.97 ms per token,   111.46 tokens per second)\n"
    text = f"{head}prompt eval time =     300.11 ms /    20 tokens {speed}"
    text += f"{head}       eval time =    2296.72 ms / {tokens:5d} tokens {speed}"
    text += f"{head}      total time =    2596.83 ms / {tokens + 20:5d} tokens\n{head}   graphs reused =        12\n"
    text += f"{head}draft acceptance = {drafts}\n" if drafts else ""
    return text + (f"{head}     acc per pos = ({positions})\n" if positions else "")


def drafts_of(accepted: int, drafted: int, length: str) -> str:
    return f"{accepted / drafted:.5f} ({accepted:5d} accepted / {drafted:5d} generated){length}"


def test_a_request_of_llama_server(tmp_path: Path) -> None:
    """167 of 259 accepted at 2.92 are 87 rounds with a draft, 70, 55 and 42 by position. The answer of 256 tokens had
    one more step: τ counts it, as in the JSON of the same request."""
    figures = (
        ", mean acceptance length =  2.92, acceptance rate per position = (0.805, 0.632, 0.483)"
    )
    drafts = drafts_of(167, 259, figures)
    found = scored(read(tmp_path, llama_lines(0, 256, drafts, slot=1)))
    assert (found["engine"], found["requests"]) == ("llamacpp", 1)
    assert found["counts"] == {"rounds": 88, "drafted": 259, "accepted": 167}
    assert pooled(found) == pytest.approx({"tau": 255 / 88, "acceptance_rate": 167 / 259})
    assert positions(found) == pytest.approx([70 / 88, 55 / 88, 42 / 88])
    assert found["engine_mean_length"] == 2.92
    timings = {"timings": {"predicted_n": 256, "draft_n": 259, "draft_n_accepted": 167}}
    assert scored(read(tmp_path, json.dumps(timings)))["tau"] == found["tau"]


OLD = """slot launch_slot_: id  0 | task 7 | processing task
slot print_timing: id  0 | task 7 |
prompt eval time =     228.52 ms /     5 tokens (   45.70 ms per token,    21.88 tokens per second)
       eval time =   11082.61 ms /   200 tokens (   55.41 ms per token,    18.05 tokens per second)
      total time =   11311.13 ms /   205 tokens
slot print_timing: id  0 | task 7 |
draft acceptance rate = 0.18732 (   65 accepted /   347 generated)
llama_perf_context_print: prompt eval time =  9.10 ms /    20 tokens (    0.46 ms per token,  2197.80 tokens per second)
llama_perf_context_print:        eval time =  9.10 ms /   255 runs   (    0.46 ms per token,  2197.80 tokens per second)
"""  # fmt: skip


def test_older_and_other_lines_of_llama_server(tmp_path: Path) -> None:
    """Catches a log whose drafts stand on a line of their own, positions that follow later, requests that end in
    another order than they began, and one that drafted nothing."""
    found = scored(read(tmp_path, OLD))
    assert found["counts"] == {"rounds": 134, "drafted": 347, "accepted": 65}
    assert found["by_position"] == []
    drafts = drafts_of(9, 12, ", mean len =  3.25")
    second = llama_lines(9, 16, drafts, "1.000, 0.750, 0.500", slot=1)
    first = llama_lines(4, 5, "")
    log = read(tmp_path, second + first)
    assert [(r.rounds, r.drafted, r.accepted) for r in log.requests] == [(4, 0, 0), (6, 12, 9)]
    assert (log.requests[1].accepted_at, log.requests[1].reached_at) == ((4, 3, 2), (4, 4, 3))
    both = zip(second.splitlines(True), (first + "\n\n").splitlines(True), strict=False)
    assert read(tmp_path, "".join(a + b for a, b in both)).requests == log.requests
    again = read(tmp_path, second + first + second)  # started again: its tasks begin anew
    assert [r.accepted for r in again.requests] == [9, 0, 9]


def test_a_log_that_begins_within_a_request(tmp_path: Path) -> None:
    """tail -n: drafts without the length of the answer. Without a mean length there are no rounds, so no τ."""
    line = "slot print_timing: id 0 | task 3 | draft acceptance = 0.50000 (   20 accepted /   40 generated)\n"
    log = read(tmp_path, line)
    assert pooled(scored(log)) == {"acceptance_rate": 0.5}
    with pytest.raises(UserError, match="does not tell the rounds, so τ cannot be compared"):
        compare(log, log)


# ---- SGLang ----


def sglang_line(length: float, rate: str = "", prefix: str = "[2025-11-19 15:25:25 TP0] ") -> str:
    return (
        f"{prefix}Decode batch, #running-req: 1, #token: 353, token usage: 0.01, accept len: {length:.2f}, {rate}"
        "cuda graph: True, gen throughput (token/s): 242.08, #queue-req: 0\n"
    )


def test_one_interval_of_sglang_has_its_tau(tmp_path: Path) -> None:
    """accept rate 0.66 is 2.64 ÷ 4, which counts the target's token: of three drafts 1.64 were accepted."""
    found = scored(read(tmp_path, sglang_line(2.64, "accept rate: 0.66, ")))
    assert (found["engine"], found["requests"], found["gauges"]) == ("sglang", None, {})
    assert pooled(found) == pytest.approx({"tau": 2.64, "acceptance_rate": 1.64 / 3})
    assert found["by_position"] == []


@pytest.mark.parametrize("newer", [False, True])
def test_both_meanings_of_sglangs_rate_give_ours(newer: bool, tmp_path: Path) -> None:
    """Older: accepted and target's tokens ÷ (drafts + 1). Newer: accepted ÷ drafts. Five drafts in both."""
    lengths = [2.64, 3.4, 4.05, 1.2]
    rates = [(x - 1) / 5 if newer else x / 6 for x in lengths]
    pairs = zip(lengths, rates, strict=True)
    text = "".join(sglang_line(x, f"accept rate: {y:.2f}, ") for x, y in pairs)
    found = scored(read(tmp_path, "[2025-11-19 15:25:20] Prefill batch, #new-seq: 1\n" + text))
    assert found["gauges_of"] == "mean of 4 intervals"
    assert found["gauges"] == pytest.approx({"tau": 2.8225, "acceptance_rate": 1.8225 / 5})
    assert pooled(found) == {}  # nothing says how much each interval weighs


def test_an_ambiguous_rate_of_sglang_is_left_out(tmp_path: Path) -> None:
    """accept len 2.00 at rate 0.50 is 2 of 4 tokens with three drafts, or 1 of 2 drafts. Without a rate: none."""
    for rate in ("accept rate: 0.50, ", ""):
        assert pooled(scored(read(tmp_path, sglang_line(2.0, rate)))) == {"tau": 2.0}
    old = sglang_line(2.0, prefix="[2025-02-01 10:00:00 TP0] ").replace("batch,", "batch.")
    assert pooled(scored(read(tmp_path, old))) == {"tau": 2.0}


# ---- what others put around lines ----


def each_line(form: str) -> Callable[[str], str]:
    return lambda text: "".join(form.format(line) + "\n" for line in text.splitlines())


def docker(text: str) -> str:
    rows = ({"log": x, "stream": "stderr", "time": "t"} for x in text.splitlines(True))
    return "".join(json.dumps(row, separators=(",", ":")) + "\n" for row in rows)


DRESSES: dict[str, Callable[[str], str]] = {
    "colours": each_line("\x1b[1;36m(EngineCore pid=17)\x1b[0;0m {}"),
    "colours within": lambda text: re.sub("accept(ance)?", "\x1b[33m\\g<0>\x1b[0m", text),
    "kubernetes": each_line("2026-11-24T10:00:01.123456Z stdout F {}"),
    "journal": each_line("Nov 24 10:00:01 host server[123]: {}"),
    "compose": each_line("server-1  | {}"),
    "mark and CRLF": lambda text: "\ufeff" + text.replace("\n", "\r\n"),
    "docker": docker,
    "no line end": lambda text: text.rstrip("\n"),
    "newer vLLM": lambda text: text.replace("%\n", "%, Draft time/step: 1.250 ms\n"),
    "newer SGLang": lambda text: text.replace("#token: 353", "#full token: 353, #swa token: 3"),
}
PRINTED = {
    "vllm": (vllm_line(40, 120, [30, 20, 10]) + vllm_line(10, 30, [5, 5, 0]), (50, 150, 70)),
    "llamacpp": (llama_lines(9, 16, drafts_of(9, 12, ", mean len =  3.25"), "1.000, 0.750, 0.500"), (6, 12, 9)),
    "older llamacpp": (OLD, (134, 347, 65)),
    "sglang": (sglang_line(2.64, "accept rate: 0.66, "), (None, 0, 0)),
}  # fmt: skip


@pytest.mark.parametrize("dress", DRESSES)
def test_lines_of_servers_behind_what_others_put_before_them(dress: str, tmp_path: Path) -> None:
    """Catches a log that is only read as it left the process. Before, colours within a line were read as JSON."""
    for text, counts in PRINTED.values():
        found = scored(read(tmp_path, DRESSES[dress](text)))
        assert tuple(found["counts"].values()) == counts
    assert pooled(found) == pytest.approx({"tau": 2.64, "acceptance_rate": 1.64 / 3})


# ---- streams ----


def events(*chunks: dict[str, Any], end: bool = True) -> str:
    return "".join(f"data: {json.dumps(x)}\n\n" for x in chunks) + (
        "data: [DONE]\n\n" if end else ""
    )


def delta(text: str = "", finish: str | None = None, **more: Any) -> dict[str, Any]:
    choice = {"index": 0, "delta": {"content": text}, "finish_reason": finish}
    return {"id": "chatcmpl-1", "object": "chat.completion.chunk", "choices": [choice], **more}


LLAMA: dict[str, Any] = {"timings": {"predicted_n": 16, "draft_n": 12, "draft_n_accepted": 9}}
SPEC = {"acceptance_histogram": [2, 3, 1, 4], "num_spec_steps": 10}
SPEC |= {"num_draft_tokens": 30, "num_accepted_draft_tokens": 17}
VLLM = {
    "metrics": {"speculative_decoding": SPEC},
    "usage": {"prompt_tokens": 5, "completion_tokens": 28},
}
SGLANG = {
    "spec_verify_ct": 10,
    "spec_accept_token_num": 6,
    "spec_draft_token_num": 30,
    "completion_tokens": 17,
}


def test_streamed_answers_of_each_server(tmp_path: Path) -> None:
    """Their counts come with the last chunks: of a chat before [DONE], of /completion with stop, of /generate."""
    last = {"id": "chatcmpl-1", "object": "chat.completion.chunk", "choices": []}
    chat = events(delta("a"), delta("", "stop"), {**last, **LLAMA})
    assert [(r.rounds, r.accepted) for r in read(tmp_path, chat).requests] == [(6, 9)]
    assert read(tmp_path, ": ping\n\nevent: message\n" + chat * 2).engine == "llamacpp"
    assert len(read(tmp_path, chat * 2).requests) == 2
    log = read(tmp_path, events(delta("a"), delta("", "length"), {**last, **VLLM}))
    [one] = log.requests
    assert (log.engine, one.accepted_at, one.prompt_tokens) == ("vllm", (8, 5, 4), 5)
    part = {"content": "a", "stop": False, "id_slot": 0}
    whole = {"content": "", "stop": True, "id_slot": 0, "stop_type": "eos", **LLAMA}
    log = read(tmp_path, events(part, whole, end=False) * 3)
    assert [r.drafted for r in log.requests] == [12] * 3
    begun = {"id": "x", "finish_reason": None, "completion_tokens": 3}
    ended = {"id": "x", "finish_reason": {"type": "stop"}, **SGLANG}
    log = read(
        tmp_path, events({"text": "a", "meta_info": begun}, {"text": "ab", "meta_info": ended})
    )
    assert (log.engine, log.requests[0].rounds, log.requests[0].accepted) == ("sglang", 10, 6)


def test_streams_that_alternate_or_lie_in_json_lines(tmp_path: Path) -> None:
    """Catches chunks of two answers in one file, chunks as JSON lines, and the text of a stream as a response."""
    one = [delta("a", **LLAMA), delta("", "stop")]
    other = [delta("b", id="2"), delta("", "stop", id="2", timings={"predicted_n": 5})]
    mixed = [one[0], other[0], other[1], one[1]]
    for text in (events(*mixed, end=False), "".join(json.dumps(x) + "\n" for x in mixed)):
        log = read(tmp_path, text)
        assert [(r.rounds, r.drafted) for r in log.requests] == [(6, 12), (4, 0)]
    line = {"custom_id": "p7", "response": events(*one)}
    log = read(tmp_path, json.dumps(line) + "\n")
    assert [(r.prompt, r.accepted) for r in log.requests] == [("p7", 9)]


def test_a_stream_that_broke_off_is_a_failed_request(tmp_path: Path) -> None:
    """Catches half an answer that counts, and an error within a stream that hides."""
    cut = events(delta("a", id="2", **LLAMA), end=False)
    error = events(delta("a", id="3"), {"error": {"message": "out of memory"}}, end=False)
    log = read(tmp_path, CHAT + cut + error)
    assert [(r.rounds, r.accepted) for r in log.requests] == [(6, 9)]
    assert [(x.index, x.reason) for x in log.failed] == [(1, BROKE_OFF), (2, "out of memory")]


OPEN = delta("a", id="b")
CHAT = events(delta("a", **LLAMA), delta("", "stop"))
SAVED: dict[str, str] = {
    "comments that keep it alive": ": keep-alive\n\n" + CHAT.replace("\n\n", "\n\n: ping\n\n"),
    "CRLF": CHAT.replace("\n", "\r\n"),
    "no space": CHAT.replace("data: ", "data:"),
    "names of events": "event: message\nid: 3\nretry: 100\n" + CHAT,
    "headers": "HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\n\r\n" + CHAT,
    "progress of curl": "  % Total    % Received\n" + CHAT,
    "DONE twice": CHAT + "data: [DONE]\n\n",
    "mark": "\ufeff" + CHAT,
    "JSON on many lines": json.dumps(LLAMA, indent=2),
    "a list on many lines": json.dumps([LLAMA], indent=2),
}


@pytest.mark.parametrize("kind", SAVED)
def test_one_answer_however_it_was_saved(kind: str, tmp_path: Path) -> None:
    """Catches lines beside the events taken for answers. Before, JSON that `jq` had written was refused."""
    log = read(tmp_path, SAVED[kind])
    assert [(r.rounds, r.drafted, r.accepted) for r in log.requests] == [(6, 12, 9)]
    assert log.failed == ()


@pytest.mark.parametrize(
    ("text", "failed"),
    [
        ("data: Internal Server Error\n\n" + CHAT, [(0, "Internal Server Error")]),
        ("data: Bad\n\ndata: Worse\n\n" + CHAT, [(0, "Bad"), (1, "Worse")]),
        (CHAT + 'data: {"id": "b", "choices": [{"delta": {"content": "x', [(1, BROKE_OFF)]),
        (CHAT + events(OPEN, end=False) + 'data: {"id": "b", "ch\n', [(1, BROKE_OFF)]),
        (events(OPEN, {"error": "oom"}, {"error": "gone"}, end=False) + CHAT, [(0, "oom"), (1, "gone")]),
        (json.dumps(LLAMA) + "\n" + json.dumps(LLAMA)[:20], [(1, BROKE_OFF)]),
    ],
)  # fmt: skip
def test_what_broke_off_or_is_no_json_is_one_failed_request(
    text: str, failed: list[tuple[int, str]], tmp_path: Path
) -> None:
    """Catches a request that is in no count, and a file that is refused because it was cut off. Before, an event
    without JSON was passed over, a last line that was cut ended the reading, and two errors in a row were one."""
    log = read(tmp_path, text)
    assert [(x.index, x.reason) for x in log.failed] == failed
    assert [r.accepted for r in log.requests] == [9]


def test_damage_before_the_last_line_is_named(tmp_path: Path) -> None:
    whole = json.dumps(LLAMA)
    for text in (CHAT + 'data: {"id": "b\n\n' + CHAT, f"{whole[:20]}\n{whole}"):
        with pytest.raises(UserError, match=r"log:\d+ is not valid JSON"):
            read(tmp_path, text)


# ---- failed requests ----


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        ({"error": {"code": 503, "message": "Loading model", "type": "unavailable_error"}}, "Loading model"),
        ({"object": "error", "message": "context length", "code": 400}, "context length"),
        ({"custom_id": "a", "response": {"status_code": 500, "body": {"error": {"message": "boom"}}}}, "HTTP 500 boom"),
        ({"custom_id": "a", "response": None, "error": {"code": "batch_expired"}}, "batch_expired"),
        ({"response": {"status_code": 429, "body": "slow down"}}, "HTTP 429 slow down"),
        ({"detail": "Not Found"}, "Not Found"),
        ({"text": "", "meta_info": {"finish_reason": {"type": "abort", "message": "x"}}}, "ended with 'abort'"),
        ({"choices": [{"finish_reason": "error"}]}, "ended with 'error'"),
        ("Internal Server Error", "Internal Server Error"),
        (None, "null"),
    ],
)  # fmt: skip
def test_failed_requests_are_counted_and_named(line: Any, reason: str, tmp_path: Path) -> None:
    """Catches one failed request that ends the reading of all, and one that counts as an answer without drafts."""
    failed = line if isinstance(line, str) else json.dumps(line)
    log = read(tmp_path, f"{json.dumps(LLAMA)}\n{failed}\n{json.dumps(LLAMA)}\n")
    assert [r.accepted for r in log.requests] == [9, 9]
    assert [(x.where, x.reason) for x in log.failed] == [(f"{tmp_path}/log:2", reason)]
    found, where = scored(log), f"{tmp_path}/log:2"
    assert (found["requests"], found["counts"]["drafted"]) == (2, 24)
    assert f"1 of 3 requests failed and are in no figure: {where} ({reason})" in found["notes"]
    with pytest.raises(UserError, match="all 1 requests failed, the first with") as error:
        read(tmp_path, f"{{}}\n{failed}\n"[3:] if failed.startswith("{") else f"[]\n{failed}\n")
    assert reason in str(error.value)


def test_logs_with_failed_requests_are_matched_prompt_by_prompt(tmp_path: Path) -> None:
    """Catches pairs that slip by one behind a failed request."""

    def pairs(*logs: list[dict[str, Any]]) -> Any:
        return match_prompts(*(read(tmp_path, "\n".join(map(json.dumps, log))) for log in logs))

    lines = [
        {"timings": {"predicted_n": 20 + i, "draft_n": 12, "draft_n_accepted": i}} for i in range(5)
    ]
    bad = {"error": "boom"}
    both = pairs([lines[0], bad, *lines[2:]], [*lines[:3], bad, lines[4]])
    assert [[r.accepted for r in one] for one in both] == [[0, 2, 4]] * 2
    named = [{"custom_id": f"p{i}", **x} for i, x in enumerate(lines)]
    both = pairs([{"custom_id": "p1", **bad}, *named[2:]], named[:0:-1])
    assert [[r.prompt for r in one] for one in both] == [["p2", "p3", "p4"]] * 2
    with pytest.raises(UserError, match="no prompt was answered in both"):
        pairs([lines[0], bad], [bad, lines[0]])


def test_an_answer_beside_its_counts_is_no_failure(tmp_path: Path) -> None:
    """Catches the text of an answer, saved under a name that batch files have, taken for an error."""
    beside = [{"response": "Internal Server Error"}, {"body": None}, {"error": None}]
    batch = {"custom_id": "a", "error": None, "response": {"status_code": 200, "body": LLAMA}}
    lines = [*({**x, **LLAMA} for x in beside), batch]
    log = read(tmp_path, "".join(json.dumps(x) + "\n" for x in lines))
    assert [r.accepted for r in log.requests] == [9] * 4
    assert log.failed == ()


def test_no_key_of_a_failed_request_is_repeated(tmp_path: Path) -> None:
    key = "sk-" + "a1B2" * 10
    log = read(tmp_path, json.dumps(LLAMA) + "\n" + json.dumps({"error": f"bad key {key}"}) + "\n")
    assert "bad key" in log.failed[0].reason
    assert key not in log.failed[0].reason


# ---- contradictions ----


def spec(length: int, **values: int) -> str:
    metrics = {"speculative_decoding": {**SPEC, **values}}
    return json.dumps({"metrics": metrics, "usage": {"completion_tokens": length}})


def sglang(**values: int) -> str:
    return json.dumps({"text": "", "meta_info": {**SGLANG, **values}})


def llama(tokens: int, accepted: int, **more: Any) -> str:
    timings = {"predicted_n": tokens, "draft_n": 40, "draft_n_accepted": accepted}
    return json.dumps({"timings": timings, **more})


@pytest.mark.parametrize(
    ("text", "says"),
    [
        (spec(20), "log:1: 10 rounds with 17 accepted of 30 drafted tokens contradict the answer's length of 20"),
        (sglang(completion_tokens=9), "contradict the answer's length of 9"),
        (sglang(completion_tokens=170), "contradict the answer's length of 170"),
        (llama(20, 30), "log:1: 30 accepted of 40 drafted tokens contradict the answer's length of 20"),
        (llama(20, 20, stop_type="limit"), "contradict the answer's length of 20"),
        (llama(40, 30, usage={"completion_tokens": 41}), "timings of 40 tokens contradict the answer's length of 41"),
        (llama_lines(0, 9, drafts_of(10, 30, "")), "log:5: 10 accepted of 30 drafted tokens contradict"),
        (llama_lines(0, 20, drafts_of(9, 120, ", mean len =  1.23")), "rounds with a draft and 9 accepted"),
        (llama_lines(0, 90, "0.50000 (   10 accepted /   30 generated)"), "are not 0.50000"),
        (llama_lines(0, 90, "0.50000 (   15 acc"), "log:5 has no numbers of accepted and generated tokens"),
        (vllm_line(100, 300, [70, 35, 15]).replace("2.20", "2.60"), "log:1: 120 accepted of 300 drafted"),
        (vllm_line(100, 300, [70, 35, 15]).replace("0.700", "0.400"), "do not fit together"),
        (vllm_line(100, 300, [70, 35, 15]).replace("40.0%", "60.0%"), "are not 60.0%"),
        (vllm_line(100, 300, [70, 35, 15])[:150], "log:1 has no numbers of accepted and drafted tokens"),
        (vllm_line(100, 300, [70, 35, 15]).replace("Drafted: 300", "Drafted: 30"), "log:1: 120 accepted of 30"),
        (sglang_line(0.4), "an accept len of 0.40"),
        (sglang_line(2.0, "accept rate: 1.40, "), "with an accept rate of 1.40 is impossible"),
        (sglang_line(2.0) + vllm_line(10, 30, [5, 5, 0]), "lines of sglang and vllm"),
        (llama_lines(0, 90, ""), "no request drafted a token"),
        ("SpecDecoding metrics: Accepted: 0 tokens, Drafted: 0 tokens\n", "drafted no token"),
    ],
)  # fmt: skip
def test_counts_that_contradict_are_refused_by_name(text: str, says: str, tmp_path: Path) -> None:
    """Catches a figure from counts that cannot belong to the answer, and damaged lines that count."""
    with pytest.raises(UserError) as error:
        read(tmp_path, text)
    assert says in str(error.value)
    assert "\n" not in str(error.value)


def test_answers_that_were_cut_at_their_end_are_no_contradiction(tmp_path: Path) -> None:
    """The last round may be cut by a stop string or by the limit, within one draft."""
    assert read(tmp_path, spec(25)).requests[0].accepted == 17  # 28 made, 3 cut off
    assert read(tmp_path, sglang(completion_tokens=14)).requests[0].rounds == 10
    assert read(tmp_path, llama(4, 5, stop_type="word")).requests[0].rounds == 1
    two = json.loads(spec(56)) | {"choices": [{}, {}]}  # usage counts both answers
    assert read(tmp_path, json.dumps(two)).requests[0].rounds == 10


def test_a_server_log_has_no_earlier_dump(tmp_path: Path) -> None:
    (tmp_path / "before").write_text("vllm:a 1\n")
    with pytest.raises(UserError, match="holds a server's own log: --before is for /metrics dumps"):
        read(tmp_path, vllm_line(10, 30, [5, 5, 0]), before=str(tmp_path / "before"))


def test_the_command_prints_what_a_log_cannot_give_as_a_dash(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    lines = sglang_line(2.64, "accept rate: 0.66, ") + sglang_line(3.2, "accept rate: 0.80, ")
    (tmp_path / "server.log").write_text(lines)
    rescore.main(rescore.RescoreConfig(str(tmp_path / "server.log"), json=str(tmp_path / "out.json")))  # fmt: skip
    lines = capsys.readouterr().out
    rows = [[cell.strip() for cell in line.split("│")[1:-1]] for line in lines.split("\n")]
    assert ["τ", "–", "–"] in rows
    assert ["τ (mean of 2 intervals)", "2.920", "–"] in rows
    assert ["acceptance rate (mean of 2 intervals)", "0.640", "–"] in rows
    [saved] = json.loads((tmp_path / "out.json").read_text())["logs"]
    assert saved["gauges"] == pytest.approx({"tau": 2.92, "acceptance_rate": 0.64})
    assert "tau" not in saved
