"""Memory and time of everything that train/sample.py does around the engine, for very many prompts.

    python scripts/benchmarks/prompts_bench.py --count 1000000
    python scripts/benchmarks/prompts_bench.py --count 50000 --target HuggingFaceTB/SmolLM2-135M-Instruct

Prompts of some 60 words, 1 % of them near duplicates of the one before, are read, tokenised and filtered; the answers
of 90 % are written as an earlier run would have left them; the rest is found and answered, without a model, by a fixed
reply; answers are counted, the manifest is written, and the finished set is looked through once more. Memory is the
peak of each stage, with what Python and its libraries take (the first line). It needs Linux. The last line is JSON.
"""

import json
import random
import re
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Annotated, Any, TypeVar, cast

if not __package__:
    sys.path[0] = str(Path(__file__).resolve().parents[2])

from accelerate import PartialState
from rich.console import Console

from decode.common.command import run_command
from decode.common.progress import progress_bars
from decode.common.ranges import Seed, at_least
from decode.engine.engine import SpeculativeEngine
from decode.engine.records import RoundRecord
from train import sample
from train.data import python_corpus
from train.data.filters import FilterConfig
from train.data.prompt_pipeline import TargetTokenizer, TokenizedPrompt, load_target_tokenizer
from train.data.sources import PromptSource
from train.sampling import local_engine
from train.sampling.config import SampleConfig

T = TypeVar("T")
WORDS, NEAR_DUPLICATES, DONE = 60, 0.01, 0.9
REPLY = list(range(100, 164))


@dataclass
class PromptsBenchConfig:
    target: str = "assets/target"
    """The model whose tokenizer and chat template are used: a folder, a GGUF file or a Hub name."""
    count: Annotated[int, at_least(1000)] = 50_000
    """Prompts in the file."""
    folder: str = ""
    """Where the prompts and the sampled set are kept for the time of the run; empty: the system's temporary folder."""
    seed: Seed = 0


@dataclass
class StageTable:
    """Runs stages, prints a line for each, and collects the numbers."""

    console: Console
    stages: dict[str, dict[str, float]] = field(default_factory=dict)

    def run(self, name: str, stage: Callable[[], T]) -> T:
        """What the stage returns. The kernel's record of the highest memory is set back before it."""
        Path("/proc/self/clear_refs").write_text("5")
        start = time.perf_counter()
        result = stage()
        seconds = time.perf_counter() - start
        peak, now = (_memory(key) for key in ("VmHWM", "VmRSS"))
        self.stages[name] = {"peak_mb": peak, "after_mb": now, "seconds": round(seconds, 2)}
        line = f"{name:24} {peak:7,.0f} MB at its peak, {now:7,.0f} MB after, {seconds:8.1f} s"
        self.console.print(line, highlight=False)
        return result


def _memory(key: str) -> float:
    """A line of the kernel's status of this process, in MB."""
    status = Path("/proc/self/status").read_text()
    return int(re.findall(rf"{key}:\s*(\d+) kB", status)[0]) * 1024 / 1e6


def write_prompts(path: Path, count: int, seed: int) -> None:
    """A jsonl of prompts: words of Python's help, in random order."""
    rng = random.Random(seed)
    text = " ".join(python_corpus.read_help_topics(False).values())
    vocabulary = sorted(set(re.findall(r"[a-z]+", text)))
    words: list[str] = []
    with path.open("w") as file:
        for _ in range(count):
            is_near = words and rng.random() < NEAR_DUPLICATES
            words = [*words[:-1], "again"] if is_near else rng.choices(vocabulary, k=WORDS)
            file.write(json.dumps({"prompt": " ".join(words)}) + "\n")


def answer_at_once(prompts: list[list[int]], **settings: Any) -> Iterator[RoundRecord]:
    """Stands for an engine's `speculate`: every prompt, in order, gets the same reply."""
    for number in range(len(prompts)):
        yield RoundRecord(number, True, 0, 0, [], REPLY, "eos", 0.0)


def write_answers(s: SampleConfig, reader: TargetTokenizer, prompts: list[TokenizedPrompt]) -> None:
    """Answers the prompts as the local engine does, but for the model."""
    target = SimpleNamespace(decoder=SimpleNamespace(context=reader.context))
    engine = SimpleNamespace(target=target, speculate=answer_at_once)
    with progress_bars(disable=True) as bars:
        local_engine.generate_answers(s, cast(SpeculativeEngine, engine), None, prompts, bars)


def measure(s: PromptsBenchConfig, folder: Path) -> dict[str, Any]:
    """{stage: its memory and time}, and the manifest's counts."""
    table = StageTable(Console(stderr=True))
    file, state = folder / "prompts.jsonl", PartialState(cpu=True)
    reader = table.run("libraries and tokenizer", lambda: load_target_tokenizer(s.target, None))
    table.run("writing the prompts", partial(write_prompts, file, s.count, s.seed))
    settings = SampleConfig(
        sources=[PromptSource("file", str(file))],
        filters=FilterConfig(near_duplicates=0.8),
        out=str(folder / "set"),
    )
    prompts, dropped = table.run(
        "loading the prompts", partial(sample.load_prompts, settings, reader)
    )
    done = prompts[: int(DONE * len(prompts))]
    table.run("writing 90 % of the rows", partial(write_answers, settings, reader, done))
    unanswered = partial(sample.unanswered_prompts, settings, state, reader, prompts)
    todo = table.run("finding what is missing", unanswered)
    table.run("writing the rest", partial(write_answers, settings, reader, todo))
    served = replace(settings, engine="openai")  # counts skipped replies as well
    counts = table.run("counting", partial(sample.count_answers, served, prompts, dropped))
    table.run("manifest", partial(sample.write_manifest, settings, reader, prompts, counts))
    left = table.run("looking through the set", unanswered)
    assert len(todo) == len(prompts) - len(done) > len(left) == 0
    tokens = sum(prompt.tokens() for prompt in prompts) / len(prompts)
    return {"prompts": len(prompts), "tokens": tokens, "counts": counts, "stages": table.stages}


def main(s: PromptsBenchConfig) -> None:
    with tempfile.TemporaryDirectory(dir=s.folder or None) as folder:
        print(json.dumps(measure(s, Path(folder))))


if __name__ == "__main__":
    run_command(main, PromptsBenchConfig, __doc__)
