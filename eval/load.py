"""Is the draft worth serving? Tokens per second and latency under load, of a server with the draft and one without it.

    python eval/load.py --target Qwen/Qwen3-8B --tasks '[{name: mt-bench}]' --out outputs/load \
      --servers '[{name: plain, url: http://localhost:8000/v1}, {name: eagle3, url: http://localhost:8001/v1}]'

    # Servers that are started here, one at a time: {port} is a free port.
    python eval/load.py --target T.gguf --tasks '[{name: humaneval, limit: 16}]' --at_once '[1, 2, 4, 8]' \
      --out outputs/load --servers '[{name: plain, start: "llama-server -m T.gguf -np 8 --port {port}"},
      {name: draft, start: "llama-server -m T.gguf -md D.gguf --spec-type draft-simple -np 8 --port {port}"}]'

The same prompts go to each server, a fixed number of requests at a time, through the completions API of vLLM, SGLang
and llama.cpp. Servers take turns, every other turn in the opposite order, so that what the machine does over time hits
both. The first server is what the others are compared with: without a draft. At temperature 0 their answers should be
equal. Accepted and drafted tokens are what llama-server answers and what vLLM counts in /metrics. A run that was
stopped goes on when its command is given again.
"""

import asyncio
import json
import shlex
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Annotated, Any, ClassVar

if not __package__:
    sys.path[0] = str(Path(__file__).resolve().parents[1])

import httpx2
import numpy as np
from rich.console import Console
from rich.table import Table

from decode.common.command import run_command
from decode.common.errors import UserError
from decode.common.files import write_atomically
from decode.common.ranges import Count, CountOrZero, above, at_least
from decode.common.run_dir import RunSettings, open_run
from decode.common.typed_json import from_json, to_json
from decode.serving import prometheus
from decode.serving.running.completions import (
    Completions,
    MalformedReplyError,
    PromptFailedError,
    Server,
    connect,
    open_client,
)
from decode.serving.running.server_process import free_port, running_server
from eval.settings.evaluation import Task

COMMAND = "eval/load.py"


@dataclass
class ServedModel:
    """A server to measure: its address, or the command that starts it."""

    name: str
    url: str = ""
    """Address of one that runs, such as http://localhost:8000/v1."""
    start: str = ""
    """Its command line, in which {port} stands for a free port. It runs during its turns alone."""
    model: str = ""
    """The model's name there, where the server has several."""

    def __post_init__(self) -> None:
        if bool(self.url) == bool(self.start):
            raise UserError(
                f"servers: {self.name!r} needs a url or a command to start it, one of them"
            )
        if self.start and "{port}" not in self.start:
            raise UserError(
                f"servers: write {{port}} into the command of {self.name!r}, where its port stands"
            )


@dataclass
class LoadConfig(RunSettings):
    COMMON: ClassVar[str] = (
        "target servers tasks at_once requests turns max_new_tokens temperature out"
    )

    target: str = ""
    """The target that is served: its tokenizer and chat template make the prompts."""
    servers: list[ServedModel] = field(default_factory=list)
    """Two or more; the first is the one without a draft, see above."""
    tasks: list[Task] = field(default_factory=lambda: [Task("mt-bench", turns=1)])
    """What is asked, as in eval/run.py."""
    at_once: list[Count] = field(default_factory=lambda: [1, 2, 4, 8, 16, 32, 64])
    """Requests that are open at the same time, one measurement for each number."""
    requests: CountOrZero = 0
    """Requests of a measurement; 0: four times as many as are open at once, at least 8. Prompts repeat where they are
    fewer."""
    turns: Count = 3
    """How often each measurement is made."""
    max_new_tokens: Count = 256
    temperature: Annotated[float, at_least(0, 100)] = 0.0
    timeout: Annotated[float, above(0)] = 600.0
    """Seconds that a request may take."""
    ready: Annotated[float, above(0)] = 900.0
    """Seconds that a server which is started here may take until it answers."""
    out: str = "outputs/load"


@dataclass
class Address:
    """What the client is told: which server, and how patiently it is asked."""

    url: str
    model: str
    timeout: float
    retries: int = 0  # a repeated request would be timed with the wait before it


@dataclass(frozen=True)
class Answer:
    prompt: int  # its number among the prompts
    seconds: float
    tokens: int
    text: str
    drafts: tuple[int, int] | None = None  # drafted and accepted tokens, where the reply says so


@dataclass(frozen=True)
class Level:
    """One measurement: so many requests, a number of them open at the same time."""

    seconds: float
    answers: list[Answer]
    failed: int
    drafts: tuple[int, int] | None = None
    """Drafted and accepted tokens of all requests; None: the server does not say."""

    @property
    def tokens_per_second(self) -> float:
        return sum(answer.tokens for answer in self.answers) / self.seconds

    def latency(self, quantile: float) -> float:
        """Seconds of a request."""
        return float(np.quantile([answer.seconds for answer in self.answers], quantile))


def read_answer(reply: Any) -> tuple[int, str, tuple[int, int] | None]:
    """(tokens, text, drafts) of a reply. MalformedReplyError where it does not say how many tokens it has."""
    try:
        tokens, text = int(reply["usage"]["completion_tokens"]), str(reply["choices"][0]["text"])
        timings = reply.get("timings")  # llama-server's; without draft_n it drafted nothing
        counts = timings and (timings.get("draft_n", 0), timings.get("draft_n_accepted", 0))
    except (AttributeError, KeyError, IndexError, TypeError, ValueError):
        raise MalformedReplyError("no usage.completion_tokens") from None
    return tokens, text, counts or None


async def vllm_drafts(http: httpx2.AsyncClient, url: str) -> tuple[int, int] | None:
    """Drafted and accepted tokens since a vLLM was started, by its /metrics; None: this server does not say."""
    try:
        reply = await http.get(f"{url.removesuffix('/v1')}/metrics")
        counts = prometheus.sum_samples(
            "vllm", prometheus.parse(reply.text, "/metrics"), "/metrics"
        )
    except (httpx2.RequestError, UserError):
        return None
    return counts.drafted, counts.accepted


def add_drafts(of: Sequence[Answer] | Sequence[Level]) -> tuple[int, int] | None:
    counts = [one.drafts for one in of if one.drafts]
    return (sum(n for n, _ in counts), sum(n for _, n in counts)) if counts else None


async def ask_all(
    s: LoadConfig,
    server: Server,
    prompts: Sequence[list[int]],
    numbers: Sequence[int],
    at_once: int,
) -> Level:
    """Asks the prompts, as ids, with these numbers, `at_once` of them at a time."""
    waiting, answers, failed = iter(numbers), list[Answer](), 0

    async def work(asked: Completions) -> None:
        nonlocal failed
        for number in waiting:
            body = {
                "model": server.model,
                "prompt": prompts[number],
                "max_tokens": s.max_new_tokens,
                "temperature": s.temperature,
                "seed": s.seed,
            }
            begin = time.perf_counter()
            try:
                tokens, text, drafts = await asked.request(body, read_answer)
            except PromptFailedError:
                failed += 1
            else:
                seconds = time.perf_counter() - begin
                answers.append(Answer(number, seconds, tokens, text, drafts))

    async with open_client(server.url) as http:
        asked = Completions(http, server, Address(server.url, server.model, s.timeout))
        before = await vllm_drafts(http, server.url)
        begin = time.perf_counter()
        await asyncio.gather(*(work(asked) for _ in range(at_once)))
        seconds = time.perf_counter() - begin
        after = await vllm_drafts(http, server.url) if before else None
    if not answers:
        raise UserError(
            f"{server.url}: none of {failed} requests was answered in {s.timeout:g} s each"
        )
    drafts = add_drafts(answers)
    if before and after:
        drafts = after[0] - before[0], after[1] - before[1]
    return Level(seconds, answers, failed, drafts)


@contextmanager
def running(s: LoadConfig, served: ServedModel) -> Iterator[Server]:
    """The server, started here if it is to be."""
    if served.url:
        yield connect(Address(served.url, served.model, s.timeout))
        return
    port = free_port()
    address = f"http://127.0.0.1:{port}"
    command = shlex.split(served.start.replace("{port}", str(port)))
    with running_server(command, f"{address}/health", s.ready, served.name):
        yield connect(Address(f"{address}/v1", served.model, s.timeout))


def level_requests(s: LoadConfig, at_once: int, prompts: int) -> list[int]:
    """The numbers of the prompts of a measurement, the same ones for every server."""
    return [i % prompts for i in range(s.requests or max(8, 4 * at_once))]


def compare(plain: Sequence[Level], own: Sequence[Level]) -> dict[str, Any]:
    """A server's figures of one level beside those of the first one, turn by turn."""
    ratios = [b.tokens_per_second / a.tokens_per_second for a, b in zip(plain, own, strict=True)]
    texts = {answer.prompt: answer.text for answer in plain[0].answers}
    pairs = [(texts[a.prompt], a.text) for a in own[0].answers if a.prompt in texts]
    drafted, accepted = add_drafts(own) or (None, None)
    return {
        "tokens_per_second": median(level.tokens_per_second for level in own),
        "latency_median": median(level.latency(0.5) for level in own),
        "latency_95": median(level.latency(0.95) for level in own),
        "speedup": median(ratios),
        "speedup_range": [min(ratios), max(ratios)],
        "equal_texts": sum(a == b for a, b in pairs),
        "compared_texts": len(pairs),
        "drafted": drafted,
        "accepted": accepted,
        "failed": sum(level.failed for level in own),
    }


def results_table(rows: Sequence[dict[str, Any]], turns: int) -> Table:
    spread = "speed-up" if turns == 1 else f"speed-up [least, most of {turns} turns]"
    names = ("at once", "server", "tokens/s", "latency s, median", "95 %", spread)
    table = Table(*names, "accepted", "equal texts", "failed", title="Load", title_justify="left")
    for row in rows:
        low, high = row["speedup_range"]
        counted = row["drafted"] is not None
        table.add_row(
            str(row["at_once"]), row["server"], f"{row['tokens_per_second']:.1f}", f"{row['latency_median']:.2f}",
            f"{row['latency_95']:.2f}", f"{row['speedup']:.2f}× [{low:.2f}, {high:.2f}]",
            f"{row['accepted']:,} of {row['drafted']:,}" if counted else "–",
            f"{row['equal_texts']} of {row['compared_texts']}", str(row["failed"]),
        )  # fmt: skip
    return table


def main(s: LoadConfig) -> None:
    """Measures every level of every server in turns, and writes load.json."""
    from decode.model.loading import load_target  # these load torch: --help does without
    from eval.tasks.loading import load_fitting_prompts

    if not s.target:
        raise UserError(
            "--target: name the model that is served, whose tokenizer makes the prompts"
        )
    if len({server.name for server in s.servers}) < max(2, len(s.servers)):
        raise UserError(
            "--servers: give two or more, each under its own name, the first without a draft"
        )
    target = load_target(s.target, "cpu", with_layers=False)
    prompts = [item.prompt_ids for item in load_fitting_prompts(s.tasks, target)]
    console = Console(stderr=True, highlight=False)
    with open_run(s, COMMAND, writes=("journal.jsonl", "load.json"), reads=[s.target]) as run:
        journal = run.journal()
        for turn in range(s.turns):
            for served in s.servers if turn % 2 == 0 else reversed(s.servers):
                waiting = [n for n in s.at_once if journal.get([turn, served.name, n]) is None]
                if not waiting:
                    continue
                console.print(f"turn {turn + 1} of {s.turns}: {served.name}", markup=False)
                with running(s, served) as server:
                    # Not timed: the first requests of a server compile and allocate.
                    most = max(s.at_once)
                    asyncio.run(ask_all(s, server, prompts, [0] * min(4, most), most))
                    for at_once in waiting:
                        numbers = level_requests(s, at_once, len(prompts))
                        level = asyncio.run(ask_all(s, server, prompts, numbers, at_once))
                        journal.put([turn, served.name, at_once], to_json(level))
        rows = []
        for at_once in s.at_once:
            levels = {
                served.name: [
                    from_json(Level, journal.get([t, served.name, at_once])) for t in range(s.turns)
                ]
                for served in s.servers
            }
            plain = levels[s.servers[0].name]
            rows += [
                {"at_once": at_once, "server": name, **compare(plain, own)}
                for name, own in levels.items()
            ]
        result = {"target": s.target, "temperature": s.temperature, "levels": rows}
        write_atomically(run.path / "load.json", json.dumps(result, indent=1) + "\n")
    Console(highlight=False, soft_wrap=True).print(results_table(rows, s.turns))
    idle = {row["server"] for row in rows if row["drafted"] == 0} - {s.servers[0].name}
    for name in sorted(idle):
        console.print(
            f"{name} drafted no token, so nothing of a draft was measured: see what it logs at its start "
            "(llama-server needs --spec-type beside -md)", markup=False, soft_wrap=True,
        )  # fmt: skip


if __name__ == "__main__":
    run_command(main, LoadConfig, __doc__)
