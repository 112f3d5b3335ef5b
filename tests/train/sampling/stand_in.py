"""A server with OpenAI's API in a thread of the test: it answers as it is told, well or badly, and notes what came."""

import json
import random
import socket
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from tests import worlds

Ids = tuple[int, ...]
LETTERS = b"abcdefghij klm"


@dataclass
class StandIn:
    """What the server does. `said` holds the answer to each prompt, as a sampled set should have it."""

    lists: str = "token_ids"
    """token_ids (vLLM), content (llama.cpp), tokens (texts of tokens), count (their number), or nothing."""
    fault: Callable[[Ids, int], str] = lambda prompt, attempt: ""
    """(prompt, number of the attempt) -> what goes wrong, see `Handler`."""
    answer: Callable[[Ids, int, int], tuple[list[int], str]] | None = None
    """(prompt, limit, seed) -> ids with EOS, finish_reason; by default random letters."""
    model: dict[str, Any] = field(default_factory=lambda: {"id": "tiny"})
    key: str = ""
    """Requests with another key are refused."""
    seconds: float = 0.0
    """Each answer takes so long."""
    after: Callable[[int], None] = lambda count: None
    """Called after each answer with their number."""

    def __post_init__(self) -> None:
        self.tokenizer = worlds.byte_tokenizer()
        self.lock = threading.Lock()
        self.bodies: list[dict[str, Any]] = []
        self.times: dict[Ids, list[float]] = {}
        self.attempts, self.answered = Counter[Ids](), Counter[Ids]()
        self.said: dict[Ids, tuple[list[int], str]] = {}
        self.open = self.most_open = 0
        self.url = ""
        self.headers: list[dict[str, str]] = []

    def reply_to(self, body: dict[str, Any]) -> tuple[list[int], str]:
        prompt: Ids = tuple(body["prompt"])
        if self.answer is not None:
            return self.answer(prompt, body["max_tokens"], body["seed"])
        rng = random.Random(f"{prompt} {body['seed']}")
        limit = body["max_tokens"]
        length = rng.randint(0, limit + 5)
        text = bytes(rng.choices(LETTERS, k=min(length, limit))).decode()
        ids = self.tokenizer(text)["input_ids"] if text else []
        if length >= limit:
            return ids, "length"
        return [*ids, self.tokenizer.eos_token_id], "stop"

    def response(self, body: dict[str, Any], ids: list[int], finish: str) -> dict[str, Any]:
        shown = ids[:-1] if finish == "stop" else ids
        choice = {"index": 0, "text": self.tokenizer.decode(shown), "finish_reason": finish}
        if self.lists == "token_ids" and body.get("return_token_ids"):
            choice |= {"token_ids": ids, "prompt_token_ids": body["prompt"]}
        elif self.lists == "content" and "logprobs" in body:
            choice |= {"logprobs": {"content": [{"id": i, "token": ""} for i in ids]}}
        elif self.lists == "tokens" and "logprobs" in body:
            choice |= {"logprobs": {"tokens": [self.tokenizer.decode([i]) for i in ids]}}
        usage = {} if self.lists == "nothing" else {"usage": {"completion_tokens": len(ids)}}
        return {"object": "text_completion", "choices": [choice], **usage}


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    stand_in: StandIn

    def log_message(self, *_: Any) -> None: ...

    def do_GET(self) -> None:
        if self._allowed():
            self._send({"object": "list", "data": [self.stand_in.model]})

    def do_POST(self) -> None:
        s = self.stand_in
        body = json.loads(self.rfile.read(int(self.headers["content-length"])))
        prompt = tuple(body["prompt"])
        if not self._allowed():
            return
        with s.lock:
            s.bodies.append(body)
            s.headers.append(dict(self.headers))
            s.times.setdefault(prompt, []).append(time.monotonic())
            s.attempts[prompt] += 1
            s.open += 1
            s.most_open = max(s.open, s.most_open)
            fault = s.fault(prompt, s.attempts[prompt])
        try:
            time.sleep(s.seconds)
            self._answer(body, prompt, fault)
        finally:
            with s.lock:
                s.open -= 1

    def _answer(self, body: dict[str, Any], prompt: Ids, fault: str) -> None:
        s = self.stand_in
        if fault == "drop":
            self.close_connection = True
            self.connection.shutdown(socket.SHUT_RDWR)
            return
        if fault == "hang":
            time.sleep(3.0)
            fault = ""
        if fault.isdigit():
            wait = {"retry-after": "0.4"} if fault == "429" else {}
            said = {"error": f"as told: {self.headers.get('authorization')}"}
            self._send(said, int(fault), wait)
            return
        ids, finish = s.reply_to(body)
        response = s.response(body, ids, finish)
        (choice,) = response["choices"]
        if fault == "wrong prompt":
            choice["prompt_token_ids"] = [*body["prompt"], 1]
        elif fault == "wrong tokens":
            choice["token_ids"] = [i ^ 1 if i > 11 else i for i in ids]
        elif fault == "undecodable":
            choice["text"] += "\ufffd"
        elif fault == "too many":
            response["usage"] = {"completion_tokens": len(ids) + 3}
        elif fault == "two choices":
            response["choices"] *= 2
        elif fault == "aborted":
            choice["finish_reason"] = "abort"
        elif fault == "other end":
            choice |= {"finish_reason": "stop", "stop_reason": 99, "token_ids": None}
            choice["text"] = "abc"
            response.pop("usage", None)
        elif fault in ("cut", "garbled", "list"):
            text = {"cut": json.dumps(response), "garbled": "{'", "list": "[1]"}[fault]
            self._send_text(text, cut=fault == "cut")
            return
        with s.lock:
            s.answered[prompt] += fault == ""
            s.said.setdefault(prompt, (ids, "eos" if finish == "stop" else "length"))
            count = s.answered.total()
        self._send(response)
        if fault == "twice":
            self._send(response)
        s.after(count)

    def _allowed(self) -> bool:
        sent = self.headers.get("authorization")
        if self.stand_in.key and sent != f"Bearer {self.stand_in.key}":
            self._send({"error": f"no key: {sent}"}, 401)
            return False
        return True

    def _send(self, content: Any, status: int = 200, headers: dict[str, str] | None = None) -> None:
        self._send_text(json.dumps(content), status, headers or {})

    def _send_text(
        self, text: str, status: int = 200, headers: dict[str, str] | None = None, cut: bool = False
    ) -> None:
        data = text.encode()
        with suppress(OSError):  # the client is gone
            self.send_response(status)
            for name, value in {"content-length": str(len(data)), **(headers or {})}.items():
                self.send_header(name, value)
            self.end_headers()
            self.wfile.write(data[: len(data) // 2] if cut else data)
            self.wfile.flush()
            self.close_connection = self.close_connection or cut


@contextmanager
def serving(stand_in: StandIn) -> Iterator[StandIn]:
    """The server runs while the block does; its address is `stand_in.url`."""
    handler = type("BoundHandler", (Handler,), {"stand_in": stand_in})
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    server.daemon_threads = True
    stand_in.url = f"http://127.0.0.1:{server.server_address[1]}/v1"
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
    thread.start()
    try:
        yield stand_in
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
