"""eval/load.py: throughput, latency and equal texts of servers with and without a draft, in turns."""

import asyncio
import json
import sys
from pathlib import Path

import httpx2
import pytest

from decode.common.errors import UserError
from eval.load import (
    Answer,
    Level,
    LoadConfig,
    ServedModel,
    compare,
    level_requests,
    main,
    vllm_drafts,
)
from tests import worlds
from tests.train.sampling.stand_in import StandIn, serving

TARGET = worlds.ROOT / "assets" / "target"
TASKS = "[{name: code, limit: 3}]"


def run(out: Path, servers: object, *more: object) -> worlds.Done:
    words = ["--target", TARGET, "--tasks", TASKS, "--servers", json.dumps(servers), "--out", out]
    return worlds.call("eval/load.py", *words, "--at_once", "[1, 4]", *more)


def stand_in(seconds: float) -> StandIn:
    server = StandIn()
    server.seconds = seconds
    return server


def test_a_faster_server_is_seen_as_faster(tmp_path: Path) -> None:
    """Bug: ratios upside down, requests one after the other, turns of one server only, or a level asked twice."""
    with serving(stand_in(0.15)) as slow, serving(stand_in(0.03)) as fast:
        servers = [{"name": "plain", "url": slow.url}, {"name": "draft", "url": fast.url}]
        done = run(tmp_path / "out", servers, "--turns", 2, "--max_new_tokens", 8).ok()
        rows = json.loads((tmp_path / "out" / "load.json").read_text())["levels"]
        assert [(row["at_once"], row["server"]) for row in rows] == [
            (n, name) for n in (1, 4) for name in ("plain", "draft")
        ]
        for plain, draft in zip(rows[::2], rows[1::2], strict=True):
            assert plain["speedup"] == 1
            assert 1.2 < draft["speedup_range"][0] <= draft["speedup"] <= draft["speedup_range"][1]
            assert draft["latency_median"] < plain["latency_median"] < plain["latency_95"] + 1e-9
            assert draft["equal_texts"] == draft["compared_texts"] > 0
        # Four at once give nearly four times as many tokens in the same time, on a busy machine less.
        assert rows[2]["tokens_per_second"] > 1.5 * rows[0]["tokens_per_second"]
        assert slow.most_open == fast.most_open == 4
        asked = len(slow.bodies)
        assert asked == len(fast.bodies) == 2 * (4 + 8 + 16)  # warm-up, then each level
        assert {body["max_tokens"] for body in slow.bodies} == {8}
        run(tmp_path / "out", servers, "--turns", 2, "--max_new_tokens", 8).ok()
        assert len(slow.bodies) == asked  # all of it was measured already
    assert "speed-up" in done.out


def test_other_answers_are_counted(tmp_path: Path) -> None:
    """Bug: a draft that changes the text passes for a gain."""
    same, other = Answer(0, 1.0, 4, "abc"), Answer(0, 0.5, 4, "abd")
    second = Answer(1, 1.0, 4, "x")
    found = compare([Level(2.0, [same, second], 0)], [Level(1.0, [other, second], 1)])
    assert (found["equal_texts"], found["compared_texts"], found["failed"]) == (1, 2, 1)
    assert found["speedup"] == 2


@pytest.mark.parametrize(
    ("timings", "accepted", "warned"),
    [
        ({"draft_n": 4, "draft_n_accepted": 3}, "24 of 32", False),
        ({"predicted_n": 4}, "0 of 0", True),
        (None, "–", False),
    ],
)
def test_a_server_without_its_draft_is_named(
    timings: dict[str, int] | None, accepted: str, warned: bool, tmp_path: Path
) -> None:
    """Bug: a llama-server that was given a draft's file and not told to use it is reported as a draft without gain."""
    draft = StandIn(timings=timings)
    with serving(StandIn()) as plain, serving(draft):
        servers = [{"name": "plain", "url": plain.url}, {"name": "draft", "url": draft.url}]
        done = run(tmp_path / "o", servers, "--turns", 1, "--max_new_tokens", 4, "--at_once", "[1]")
    assert done.code == 0, done.err
    rows = json.loads((tmp_path / "o" / "load.json").read_text())["levels"]
    assert rows[0]["drafted"] is None
    counts = "–" if rows[1]["drafted"] is None else f"{rows[1]['accepted']} of {rows[1]['drafted']}"
    assert counts == accepted
    assert ("draft drafted no token" in done.err) == warned


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("{0}drafts_total 5\n{0}draft_tokens_total 15\n{0}accepted_tokens_total 6\n", (15, 6)),
        ("vllm:num_requests_running 1\n", None),
        ("[]", None),
    ],
)
def test_what_vllm_counts_is_read(text: str, found: tuple[int, int] | None) -> None:
    """Bug: a server without counters of drafts ends the run, or its page is looked for below /v1."""

    async def read() -> tuple[int, int] | None:
        replies = {"http://h:1/metrics": text.format("vllm:spec_decode_num_")}
        transport = httpx2.MockTransport(lambda asked: httpx2.Response(200, text=replies[str(asked.url)]))  # fmt: skip
        async with httpx2.AsyncClient(transport=transport) as http:
            return await vllm_drafts(http, "http://h:1/v1")

    assert asyncio.run(read()) == found


def test_every_server_is_asked_the_same() -> None:
    s = LoadConfig(target="t", servers=[ServedModel("a", "u"), ServedModel("b", "v")])
    assert level_requests(s, 1, 3) == [0, 1, 2, 0, 1, 2, 0, 1]
    assert len(level_requests(s, 16, 3)) == 64


SERVER = """
import http.server, json, sys

class Handler(http.server.BaseHTTPRequestHandler):
    def log_message(self, *_): ...

    def do_GET(self):
        self.answer({"object": "list", "data": [{"id": "tiny"}]})

    def do_POST(self):
        self.rfile.read(int(self.headers["content-length"]))
        choice = {"index": 0, "text": "abc", "finish_reason": "length"}
        self.answer({"choices": [choice], "usage": {"completion_tokens": 4}})

    def answer(self, content):
        data = json.dumps(content).encode()
        self.send_response(200)
        self.send_header("content-length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

http.server.ThreadingHTTPServer(("127.0.0.1", int(sys.argv[1])), Handler).serve_forever()
"""


@pytest.mark.slow
def test_servers_are_started_for_their_turns(tmp_path: Path) -> None:
    """Bug: a server that is left running takes the cores of the next one's turn."""
    script = tmp_path / "server.py"
    script.write_text(SERVER)
    start = f"{sys.executable} {script} {{port}}"
    servers = [{"name": "plain", "start": start}, {"name": "draft", "start": start}]
    run(tmp_path / "out", servers, "--turns", 1, "--max_new_tokens", 4).ok()
    rows = json.loads((tmp_path / "out" / "load.json").read_text())["levels"]
    assert len(rows) == 4


@pytest.mark.parametrize(
    ("servers", "said"),
    [
        ([ServedModel("a", "u")], "two or more"),
        ([ServedModel("a", "u"), ServedModel("a", "v")], "two or more"),
    ],
)
def test_what_cannot_be_compared_is_refused(servers: list[ServedModel], said: str) -> None:
    with pytest.raises(UserError, match=said):
        main(LoadConfig(target="t", servers=servers))


@pytest.mark.parametrize(
    "given", [{}, {"url": "u", "start": "x {port}"}, {"start": "llama-server"}]
)
def test_a_server_needs_one_address(given: dict[str, str]) -> None:
    with pytest.raises(UserError, match="servers: "):
        ServedModel("a", **given)
