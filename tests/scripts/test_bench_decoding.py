"""scripts/lab/bench_decoding.py: all engines sample the same law on the same prompts, and only text is counted."""

import json
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console
from transformers import GenerationConfig

from decode.engine.engine import SpeculativeEngine
from decode.model.loading import Target, load_model, load_target
from scripts.lab import bench_decoding
from scripts.lab.bench_decoding import (
    BenchDecodingConfig,
    SamplingEngine,
    answer_length,
    continuous_engine,
    count_run,
    padded_engine,
    refilling_engine,
    summarize_runs,
    take_turns,
)
from tests import worlds

ROOT = Path(__file__).resolve().parents[2]
EOS = list(range(0, 4096, 12))
"""A twelfth of the bundled target's tokens, so that answers of all lengths end with one."""
LIMIT = 12
CHATS = "{% for m in messages %}{{ m['content'] }}{% endfor %}"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The bundled target with more EOS, a chat template, and a generation config that is all but greedy."""
    folder = tmp_path_factory.mktemp("bench") / "target"
    shutil.copytree(ROOT / "assets" / "target", folder)
    config = folder / "generation_config.json"
    more = {"eos_token_id": EOS, "top_k": 1, "min_p": 0.99, "do_sample": True}
    config.write_text(json.dumps(json.loads(config.read_text()) | more))
    (folder / "chat_template.jinja").write_text(CHATS)
    return folder


@pytest.fixture(scope="module")
def target(folder: Path) -> Target:
    return load_target(str(folder), "cpu")


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


PROMPTS = [
    [851], [533, 1897, 8], [457, 26, 1411, 2030, 432, 221, 19], [503, 1072, 1688], [1420, 273, 305, 1914, 8], [595],
    [259, 355, 309], [88, 274, 603, 17, 12, 221, 18, 12], [492, 394, 898, 8, 477, 12], [459, 26],
]  # fmt: skip
"""Beginnings of code and prose, after which the target expects different tokens."""


def test_only_text_up_to_the_first_eos_counts() -> None:
    """Catches padding, or what follows an EOS, counted as generated; and an EOS that is not counted."""
    answers = [[7, 8, 9, 10], [7, 8, 0, 0], [0, 7, 0, 0], [7, 7, 7, 7, 7, 7], [7, 7, 7, 3], [7, 2]]
    assert [answer_length(ids, {0, 3}, 4) for ids in answers] == [4, 3, 1, 4, 4, 2]
    run = count_run(answers, 2.0, {0, 3}, 4)
    assert run == {
        "tokens": 18, "seconds": 2.0, "tokens_per_second": 9.0, "answers": 6, "ended": 3,
    }  # fmt: skip


def test_prompts_are_padded_on_the_left() -> None:
    """Catches a model that continues from padding, or attends to it."""
    ids, mask = bench_decoding.pad_left([[5, 6, 7], [8]], 0)
    assert ids.tolist() == [[5, 6, 7], [0, 0, 8]]
    assert mask.tolist() == [[1, 1, 1], [0, 0, 1]]


def passes_with_refill(lengths: list[int], rows: int) -> int:
    """Passes of a token for each row, where a row that is done takes the next answer; its first token is prefill's."""
    queue, running, passes = list(lengths), [0] * rows, 0
    while queue or any(running):
        while queue and 0 in running:  # an answer of one token leaves its row free
            running[running.index(0)] = queue.pop(0) - 1
        if any(running):
            passes += 1
            running = [max(0, left - 1) for left in running]
    return passes


def test_rows_are_refilled(target: Target, monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches a batch that waits for its longest answer before the next prompts begin."""
    passes: list[None] = []
    launch = SpeculativeEngine._launch_round

    def counted(*args: Any) -> Any:
        passes.append(None)
        return launch(*args)

    monkeypatch.setattr(SpeculativeEngine, "_launch_round", counted)
    engine = refilling_engine(target, 3, LIMIT)
    lengths = [len(ids) for ids in engine.sample(PROMPTS, LIMIT, 5)]
    assert len(passes) == passes_with_refill(lengths, 3)
    static = sum(max(lengths[at : at + 3]) - 1 for at in range(0, len(lengths), 3))
    assert len(passes) < static


@pytest.fixture(scope="module")
def likeliest(folder: Path) -> list[tuple[int, float]]:
    """(the token that the target expects after each prompt, its probability)."""
    model, found = load_model(str(folder), "target", "cpu", "float32"), []
    for prompt in PROMPTS:
        with torch.no_grad():
            probs = model(torch.tensor([prompt])).logits[0, -1].softmax(-1)
        found.append((int(probs.argmax()), float(probs.max())))
    return found


def check_samples(engine: SamplingEngine, times: int, likeliest: list[tuple[int, float]]) -> None:
    """Asserts that answers to PROMPTS, `times` over, end as they must, and that the likeliest tokens are as frequent in
    their first place as the target says."""
    answers = engine.sample(PROMPTS * times, LIMIT, 0)
    for ids in answers:
        assert answer_length(ids, EOS, LIMIT) == len(ids)
        assert len(ids) == LIMIT or ids[-1] in EOS
    assert 2 < sum(map(len, answers)) / len(answers) < LIMIT - 1
    hits = [ids[0] == token for ids, (token, _) in zip(answers, likeliest * times, strict=True)]
    expected = sum(p for _, p in likeliest) / len(likeliest)
    assert 0.2 < expected < 0.4
    assert abs(sum(hits) / len(hits) - expected) < 0.12


@pytest.mark.parametrize("name", ["ours", "generate", "generate_batch"])
def test_all_engines_sample_alike(
    name: str, target: Target, folder: Path, likeliest: list[tuple[int, float]]
) -> None:
    """Catches an engine that takes settings of generation_config.json, stops elsewhere, or mixes up answers."""
    eos, model = sorted(target.eos), load_model(str(folder), "target", "cpu", "float32")
    model.generation_config = GenerationConfig()
    starts: dict[str, Callable[[], SamplingEngine]] = {
        "ours": lambda: refilling_engine(target, 40, LIMIT),
        "generate": lambda: padded_engine(model, eos, 40),
        "generate_batch": lambda: continuous_engine(model, eos, 40, 20, 0),
    }
    check_samples(starts[name](), 12, likeliest)
    model.destroy_cached_continuous_batching_manager()


def test_engines_take_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches an engine that always runs first, or is timed while it warms up; and a median over other turns."""
    turns: list[tuple[str, int, int]] = []
    clock = [0.0]
    monkeypatch.setattr(bench_decoding.time, "perf_counter", lambda: clock[0])

    def engine(name: str) -> SamplingEngine:
        """Notes its turns, and answers with as many tokens as it is asked for, each turn a second slower."""

        def sample(prompts: Any, limit: int, seed: int) -> list[list[int]]:
            turns.append((name, len(prompts), seed))
            clock[0] += len(turns)
            return [[9] * limit for _ in prompts]

        return SamplingEngine(sample, lambda prompts: turns.append((name, -len(prompts), 0)))

    s = BenchDecodingConfig(max_new_tokens=3, repeats=3, seed=10)
    engines = {name: engine(name) for name in ("ours", "generate")}
    runs = take_turns(s, engines, PROMPTS, 4, {0}, Console(quiet=True))
    for name, at in (("ours", 0), ("generate", 3)):
        assert turns[at : at + 3] == [(name, 4, 10)] * 2 + [(name, -4, 0)]
    assert turns[6:] == [
        ("ours", 10, 11), ("generate", 10, 11), ("generate", 10, 12), ("ours", 10, 12),
        ("ours", 10, 13), ("generate", 10, 13),
    ]  # fmt: skip
    ours, generate = summarize_runs(4, runs)
    assert [run["seconds"] for run in runs["ours"]] == [7, 10, 11]
    assert (ours.tokens_per_second, ours.least, ours.most) == (30 / 10, 30 / 11, 30 / 7)
    assert ours.over_generate == 12 / 11
    assert (generate.over_generate, ours.tokens_per_answer, ours.ended) == (1.0, 3.0, 0.0)


def test_the_command(folder: Path, tmp_path: Path) -> None:
    """Catches a command that does not run as a user starts it."""
    chats = [[{"role": "user", "content": f"import os{i}"}] for i in range(3)]
    lines = "".join(json.dumps({"messages": chat}) + "\n" for chat in chats)
    (tmp_path / "chats.jsonl").write_text(lines)
    done = worlds.call(
        "scripts/lab/bench_decoding.py", "--target", folder, "--prompts", tmp_path / "chats.jsonl",
        "--count", 5, "--max_new_tokens", 4, "--batches", "[2, 3]", "--repeats", 2, "--threads", 1,
        "--dtype", "bfloat16", "--out", tmp_path / "out.json",
    )  # fmt: skip
    assert done.code == 0, done.err
    result = json.loads((tmp_path / "out.json").read_text())
    assert result == json.loads(done.out.splitlines()[-1])
    names = ["ours", "generate", "generate_batch"]
    assert [(c["batch"], c["engine"]) for c in result["cells"]] == [
        (rows, name) for rows in (2, 3) for name in names
    ]
    for cell in result["cells"]:
        assert len(cell["runs"]) == 2
        assert all(5 <= run["tokens"] <= 20 and run["answers"] == 5 for run in cell["runs"])
        assert cell["least"] <= cell["tokens_per_second"] <= cell["most"]
    assert result["hardware"]["threads"] == 1
    assert result["settings"]["dtype"] == "bfloat16"
    assert "git" in result
