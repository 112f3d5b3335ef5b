"""Who decodes with a model or a draft now: each serves one request at a time, since its KV cache is that request's.

A request begins with the first `next()` of its generator and ends when that has ended, failed, been closed or been
garbage-collected. Rounds of all requests of the process run one after the other, whichever threads read them: torch
compiles, captures CUDA graphs and packs weights for a whole process.
"""

import gc
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch

from decode.common.errors import UserError

USERS: dict[int, "Request"] = {}
"""The request that uses an object, by the object's id."""
ROUND = threading.RLock()
"""Held while a round runs."""


class Running(threading.local):
    """The request whose round runs in this thread."""

    request: "Request | None" = None


RUNNING = Running()


class Request:
    """One request with everything that it alone uses, until `release`."""

    def __init__(self) -> None:
        self.claimed: list[Any] = []

    def claim(self, thing: Any, name: str) -> None:
        """Makes `thing` this request's. UserError, which calls it `name`, if another request uses it."""
        # `setdefault` is atomic: of two threads one gets it.
        if USERS.setdefault(id(thing), self) is not self:
            gc.collect()  # an abandoned generator in a cycle of references still holds what it used
            if USERS.setdefault(id(thing), self) is not self:
                raise refusal(name)
        self.claimed.append(thing)

    def release(self) -> None:
        for thing in self.claimed:
            USERS.pop(id(thing), None)
        self.claimed.clear()

    @contextmanager
    def round(self) -> Iterator[None]:
        """The block runs while no round of another thread does, and in the dtypes of models and drafts: autocast, which
        a notebook may have on, would give products another dtype than their weights."""
        with ROUND, ExitStack() as stack:
            for kind in ("cpu", "cuda"):
                if torch.is_autocast_enabled(kind):
                    stack.enter_context(torch.autocast(kind, enabled=False))
            before, RUNNING.request = RUNNING.request, self
            try:
                yield
            finally:
                RUNNING.request = before


def claim(thing: Any, name: str) -> None:
    """Makes `thing` that of the request whose round runs here, if one does. UserError if another request uses it."""
    if RUNNING.request is not None:
        RUNNING.request.claim(thing, name)
    elif id(thing) in USERS:
        raise refusal(name)


def refusal(name: str) -> UserError:
    return UserError(
        f"{name} is decoding for another generator, which has neither ended nor been closed: read that one to its end "
        "or close() it first, or load this model a second time"
    )
