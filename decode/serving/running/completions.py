"""Requests to a server that speaks OpenAI's API: which model it serves, and completions with repeated attempts.

A request that fails for a passing reason is repeated after a wait that doubles each time, or as long as the server
asks for. The key comes from the environment, and is in no message.
"""

import asyncio
import json
import os
import random
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from email.utils import parsedate_to_datetime
from typing import Any, Protocol, TypeVar
from urllib.parse import urlsplit

import httpx2

from decode.common.errors import UserError, one_line
from decode.common.proxies import proxy_for, through
from decode.common.secret_patterns import redact

T = TypeVar("T")

KEY_VARIABLE = "OPENAI_API_KEY"
FIRST_WAIT, LONGEST_WAIT, LONGEST_RETRY_AFTER = 1.0, 60.0, 600.0
"""Seconds before the first repetition of a request, at most before a later one, and that a server may ask for."""
CONNECT_SECONDS = 30.0  # for the list of models, which a running server gives at once


class ServerSettings(Protocol):
    """The settings of a command or a part of it that say which server is asked, and how patiently."""

    url: str
    model: str
    timeout: float
    retries: int


class MalformedReplyError(Exception):
    """What the server said is no complete reply; `str` says why. The next attempt may give one."""


class ForeignReplyError(Exception):
    """A reply of another model or to another prompt, as it would be next time; `str` says how that shows."""


@dataclass(frozen=True)
class Server:
    """A server that was reached."""

    url: str
    model: str
    context: int | None  # tokens of its longest text, if it says so
    own: bool = False  # it was started for this run: once nobody listens at its address, it is gone


class PromptFailedError(Exception):
    """A request that got no answer; `reason` is counted, and `str` says more."""

    def __init__(self, reason: str, details: str = ""):
        super().__init__(f"{reason}: {details}" if details else reason)
        self.reason = reason


class _PassingError(PromptFailedError):
    """One after which the same request may succeed."""

    def __init__(self, reason: str, details: str, retry_after: float = 0.0, gone: bool = False):
        super().__init__(reason, details)
        self.retry_after, self.unreachable = retry_after, gone


def connect(s: ServerSettings) -> Server:
    """The server at `s.url`. UserError if it cannot be reached, refuses the key or does not serve the model."""
    url = checked_url(s.url)

    async def models() -> httpx2.Response:
        async with open_client(url) as http, asyncio.timeout(min(s.timeout, CONNECT_SECONDS)):
            return await http.get(f"{url}/models")

    try:
        response = asyncio.run(models())
    except (httpx2.RequestError, httpx2.InvalidURL, TimeoutError, UnicodeError) as error:
        raise UserError(
            f"no server answers at {url:.120} ({one_line(error, 100)}{through(url)}): start it, or correct --url"
        ) from error
    unlisted = response.status_code == 404 and s.model  # some servers have no list of models
    served = {} if unlisted else _served_models(response, url)
    names = ", ".join(served)[:120]
    if s.model and served and s.model not in served:
        raise UserError(f"--model {s.model:.80}: the server at {url:.120} serves {names}")
    if not s.model and len(served) != 1:
        raise UserError(
            f"the server at {url:.120} serves {names or 'no model'}: choose one with --model"
        )
    model = s.model or next(iter(served))
    return Server(url, model, served.get(model))


def checked_url(url: str) -> str:
    """The address without a slash at its end. UserError unless it is one of http or https, without a key in it."""
    bad = f"--url {url[:80]!r}: give an address such as http://localhost:8000/v1"
    try:
        parts = urlsplit(url)
        whole = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:  # of the port, or of a bracket
        raise UserError(bad) from None
    if parts.username is not None or parts.query or parts.fragment:
        raise UserError(
            f"--url holds more than an address: a key belongs into the environment variable {KEY_VARIABLE}"
        )
    if not whole or not url.isascii() or not url.isprintable() or " " in url:
        raise UserError(bad)
    return url.rstrip("/")


def open_client(url: str) -> httpx2.AsyncClient:
    """A client for `url` and below, which sends the key. Each request has a connection of its own, so that nothing
    which a server sends too much can be taken for the answer to the next request. UserError for a key or a proxy that
    cannot be used."""
    key = os.environ.get(KEY_VARIABLE, "").strip()
    if not (key.isascii() and key.isprintable()):
        raise UserError(f"{KEY_VARIABLE} holds characters that no key has: set it again")
    limits = httpx2.Limits(max_connections=None, max_keepalive_connections=0)
    headers = {"Authorization": f"Bearer {key}"} if key else {}
    proxy = proxy_for(url)
    try:
        route = httpx2.AsyncHTTPTransport(limits=limits, proxy=proxy.address if proxy else None)
    except (ImportError, ValueError, httpx2.InvalidURL) as error:
        needs = "is of SOCKS: pip install socksio"
        if not isinstance(error, ImportError):
            needs = "cannot be used: write it as http://host:port or socks5://host:port"
        raise UserError(f"{proxy} {needs}, or unset {proxy and proxy.variable}") from error
    return httpx2.AsyncClient(headers=headers, timeout=None, transport=route)


class Completions:
    """Requests to /completions over one client."""

    def __init__(self, http: httpx2.AsyncClient, server: Server, s: ServerSettings):
        self.http, self.server, self.s = http, server, s
        self.responses = 0  # of any status: so often the server was there

    async def request(self, body: Mapping[str, object], read: Callable[[Any], T]) -> T:
        """What `read` makes of the response to `body`, after as many attempts as are needed and allowed.

        PromptFailedError without one; UserError if the server is gone or refuses the key or the model.
        """
        responses_before, wait = self.responses, FIRST_WAIT
        for attempts_left in range(self.s.retries, -1, -1):
            try:
                return await self._attempt(body, read)
            except _PassingError as error:
                problem = error
            if self.server.own and problem.unreachable:
                break
            if attempts_left:
                jittered = wait * random.uniform(0.5, 1)
                await asyncio.sleep(max(jittered, problem.retry_after))
                wait = min(2 * wait, LONGEST_WAIT)
        if problem.unreachable and self.responses == responses_before:
            raise UserError(
                f"the server at {self.server.url:.120} cannot be reached any more ({problem}): what is finished is "
                "kept, and the same command goes on"
            )
        raise problem

    async def _attempt(self, body: Mapping[str, object], read: Callable[[Any], T]) -> T:
        try:
            async with asyncio.timeout(self.s.timeout):
                response = await self.http.post(f"{self.server.url}/completions", json=body)
            self.responses += 1
            return read(_content(response, self.server))
        except TimeoutError:
            raise _PassingError("timeout", f"no answer in {self.s.timeout:g} s") from None
        except httpx2.RequestError as error:
            gone = isinstance(error, httpx2.ConnectError)
            said = one_line(error, 100) + through(self.server.url)
            raise _PassingError("connection", said, gone=gone) from None
        except MalformedReplyError as error:
            raise _PassingError("malformed answer", str(error)) from None
        except ForeignReplyError as error:
            raise PromptFailedError("foreign answer", str(error)) from None


def _content(response: httpx2.Response, server: Server) -> Any:
    """The JSON of a response with status 200; otherwise the error that its status means."""
    status = response.status_code
    _check_key(response, server.url)
    if status == 404:
        raise UserError(
            f"{server.url:.120}/completions: {_said(response)}: the server does not serve "
            f"{server.model:.80} there: correct --url or --model"
        )
    if status in (408, 409, 425, 429) or status >= 500:
        raise _PassingError(f"HTTP {status}", _said(response), _retry_after(response))
    if status != 200:
        raise PromptFailedError(f"HTTP {status}", _said(response))
    try:
        return response.json()
    except (json.JSONDecodeError, UnicodeDecodeError, RecursionError):
        raise MalformedReplyError("no JSON") from None


def _served_models(response: httpx2.Response, url: str) -> dict[str, int | None]:
    """{name: longest text in tokens, if it is told} of the models that the server lists."""
    _check_key(response, url)
    try:
        content = response.json() if response.status_code == 200 else {}
        models = content["data"]
        lengths = {str(model["id"]): model.get("max_model_len") for model in models}
    except (AttributeError, KeyError, RecursionError, TypeError, ValueError):
        raise UserError(
            f"{url:.120}/models gives no list of models (HTTP {response.status_code}: {_said(response)}): check that "
            "the server is ready and that --url ends as its API does, often in /v1"
        ) from None
    return {name: n if type(n) is int and n > 0 else None for name, n in lengths.items()}


def _check_key(response: httpx2.Response, url: str) -> None:
    if response.status_code in (401, 403):
        raise UserError(
            f"the server at {url:.120} refuses the key (HTTP {response.status_code}{through(url)}): set the "
            f"environment variable {KEY_VARIABLE}"
        )


def _retry_after(response: httpx2.Response) -> float:
    """Seconds that the server asks to wait, given as a number or as a date; 0 without any."""
    value, seconds = response.headers.get("retry-after", ""), 0.0
    with suppress(TypeError, ValueError, OverflowError):
        seconds = parsedate_to_datetime(value).timestamp() - time.time()
    with suppress(ValueError):
        seconds = float(value)
    return min(seconds, LONGEST_RETRY_AFTER) if seconds > 0 else 0.0


def _said(response: httpx2.Response) -> str:
    """The beginning of what the server says about an error, in one line and without keys, and the proxy that it came
    through."""
    key = os.environ.get(KEY_VARIABLE, "").strip()
    text = " ".join(response.text[:2000].split())
    text = text.replace(key, "***") if key else text
    return redact(text)[:120] + through(str(response.url))
