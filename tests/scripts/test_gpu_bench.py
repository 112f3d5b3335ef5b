"""The GPU benchmark's arithmetic by hand, its stages on tiny models, and the mistakes that it must not pass."""

import json
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from decode.common.cli import parse_settings
from decode.common.errors import UserError
from decode.engine import round as rounds
from scripts.benchmarks import gpu_bench, gpu_harness, gpu_stages, gpu_timers
from scripts.benchmarks.gpu_harness import BenchSizes, GpuHarness, hf_copy
from scripts.benchmarks.gpu_timers import Measurement
from scripts.benchmarks.widen_llama import SHAPES, LlamaShape
from tests.tiny import tiny_model, tiny_prompts, tiny_target

BIG, SMALL = SHAPES["llama-3.1-8b"], SHAPES["llama-3.2-1b"]


# ---- bytes and clocks ----


def test_bytes_of_llama_by_hand() -> None:
    """Catches an embedding that is counted though one row of it is read, K without V, and one head size for another."""
    layer = 2 * 4096 * 4096 + 2 * 4096 * 1024 + 3 * 4096 * 14336 + 2 * 4096
    assert gpu_timers.weight_bytes(BIG) == 2 * (32 * layer + 4096 + 128256 * 4096) == 15009849344
    assert gpu_timers.kv_bytes(BIG) == 131072
    assert gpu_timers.weight_bytes(SMALL) == 2471628800
    assert gpu_timers.kv_bytes(SMALL) == 32768


@pytest.mark.parametrize("tied", [True, False])
def test_bytes_are_those_of_a_real_model(tied: bool) -> None:
    """Catches a matrix that the formula forgets: transformers' own model is counted, without memory."""
    shape = LlamaShape(64, 3, 8, 2, 16, 112, 131, tied)
    config = LlamaConfig(
        hidden_size=64, num_hidden_layers=3, num_attention_heads=8, num_key_value_heads=2, head_dim=16,
        intermediate_size=112, vocab_size=131, tie_word_embeddings=tied,
    )  # fmt: skip
    with torch.device("meta"):
        model = LlamaForCausalLM(config)
    count = sum(value.numel() for value in model.parameters()) - (0 if tied else 131 * 64)
    assert gpu_timers.weight_bytes(shape, each=4) == 4 * count


def test_the_roofline_by_hand() -> None:
    """Catches a share upside down, and the context of one row counted for many."""
    floor = gpu_timers.floor_ms(BIG, 1024, 4.8e12)
    assert floor == pytest.approx(3.155, abs=5e-4)
    assert gpu_timers.roofline_share(floor, 3.71) == pytest.approx(0.85, abs=1e-3)
    more = gpu_timers.floor_ms(BIG, 1024, 4.8e12, rows=64) - floor
    assert more == pytest.approx(1e3 * 63 * 1024 * 131072 / 4.8e12)


def test_summary_is_median_and_middle_half() -> None:
    """Catches a mean in place of the median: one slow run out of five must not count."""
    assert gpu_timers.summary([5.0, 1.0, 2.0, 900.0, 3.0]) == {
        "median": 3.0, "low": 2.0, "high": 5.0, "n": 5,
    }  # fmt: skip
    assert gpu_timers.summary([7.0]) == {"median": 7.0, "low": 7.0, "high": 7.0, "n": 1}


def test_the_clock_leaves_out_what_comes_first() -> None:
    """Catches the warm-up or the rewinding in the time, and a sum for a mean."""
    calls: list[str] = []

    def run() -> None:
        calls.append("run")
        time.sleep(0.2 if len(calls) < 5 else 0.002)

    def before() -> None:
        calls.append("before")
        time.sleep(0.05)

    got = gpu_timers.time_ms(run, torch.device("cpu"), 2, 3, before)
    assert calls == ["before", "run", "run", "run"] * 3
    assert 2 <= got["median"] < 40
    assert got["n"] == 2


# ---- what rows say ----


def test_agreement() -> None:
    """Catches texts compared only up to the shorter one."""
    got = gpu_timers.compare_texts(
        [[1, 2], [1, 2], [1, 9, 3, 4]], [[1, 2], [1, 2, 3, 4], [1, 2, 3, 4]]
    )
    assert got == {"equal": 1, "of": 3, "same_until": pytest.approx((1 + 0.5 + 0.25) / 3)}


def timed(method: str, rows: int, ms: float) -> Measurement:
    return {"method": method, "rows": rows, "mode": "captured", "round_ms": {"median": ms}}


def test_speedups_by_hand() -> None:
    """Catches τ on the wrong side, and a batch that is compared with plain decoding of another one."""
    texts = [{"method": "plain", "tau": 1.0}, {"method": "causal", "tau": 2.5}]
    rounds = [timed("plain", 1, 4.0), timed("causal", 1, 5.0), timed("unknown", 1, 1.0)]
    rounds += [timed("plain", 8, 4.4), timed("causal", 8, 6.0), timed("causal", 64, 9.0)]
    found = {(row["method"], row["rows"]): row for row in gpu_timers.speedups(texts, rounds)}
    assert set(found) == {("plain", 1), ("causal", 1), ("plain", 8), ("causal", 8)}
    assert found["causal", 1]["ms_per_token"] == 2.0
    assert found["causal", 1]["speedup"] == 2.0
    assert found["causal", 8]["tokens_per_s"] == pytest.approx(8 * 2.5 / 0.006, rel=1e-4)
    assert found["plain", 8]["speedup"] == 1.0


def stage(*rows: Measurement, error: str | None = None, cut: bool = False) -> dict[str, Any]:
    return {"rows": list(rows), "error": error, "cut": cut}


TEXT = {"method": "causal", "equal": 2, "of": 3, "same_until": 0.9}
BAD: dict[str, tuple[dict[str, Any], str]] = {
    "failed": ({"plain": stage(error="Traceback\nValueError: no")}, "plain failed: ValueError: no"),
    "text": ({"texts": stage(TEXT)}, "texts: 1 of causal differ"),
    "graph": ({"graph_texts": stage(TEXT)}, "graph_texts: 1 of causal differ"),
    "wait": ({"host": stage({"method": "x", "waits": 1, "where": ["a.py:3"]})}, "waits at a.py:3"),
    "blind": ({"host": stage({"method": "planted", "waits": 0, "where": []})}, "planted"),
}


@pytest.mark.parametrize("name", BAD)
def test_problems_are_reported(name: str) -> None:
    """Planted: each thing that must not be."""
    stages, words = BAD[name]
    (problem,) = gpu_timers.find_problems({"stages": stages, "dtype": "float32"})
    assert words in problem


def test_texts_that_part_at_once_are_reported_in_bf16() -> None:
    """Planted: a CUDA graph that reads stale buffers changes its output from the start, which no near-tie does."""
    stages = {"graph_texts": stage(TEXT | {"same_until": 0.1})}
    (problem,) = gpu_timers.find_problems({"stages": stages, "dtype": "bfloat16"})
    assert "after 10%" in problem


def test_what_is_no_problem() -> None:
    """Catches a run that fails for a near-tie in bf16, for a stage that was cut, or for the planted wait."""
    stages = {
        "texts": stage(TEXT),
        "plain": stage(error="Traceback\nStageTimeout", cut=True),
        "host": stage({"method": "planted", "waits": 3, "where": []}),
    }
    assert gpu_timers.find_problems({"stages": stages, "dtype": "bfloat16"}) == []


# ---- the driver ----


def slow(_: Any) -> Iterator[Measurement]:
    for number in range(100):
        yield {"number": number}
        time.sleep(0.05)


def stuck(_: Any) -> Iterator[Measurement]:
    yield {"number": 0}
    time.sleep(60)


def wrong(_: Any) -> Iterator[Measurement]:
    yield {"number": 0}
    raise ValueError("no such kernel")


@pytest.mark.parametrize(
    ("rows", "cut", "error"),
    [(slow, True, None), (stuck, True, "StageTimeout"), (wrong, False, "no such kernel")],
)
def test_a_stage_that_goes_wrong_keeps_its_rows(
    rows: Any, cut: bool, error: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Catches a slow, stuck or failing stage that costs what was measured before it."""
    monkeypatch.setitem(gpu_bench.STAGES, "plain", (rows, 1.0))
    monkeypatch.setattr(gpu_bench, "GRACE_SECONDS", 0.2)
    seen: list[int] = []
    harness: Any = None
    entry = gpu_bench.run_stage(
        "plain", harness, 0.2, lambda entry: seen.append(len(entry["rows"]))
    )
    assert entry["cut"] == cut
    assert (entry["error"] is None) if error is None else (error in entry["error"])
    assert seen == list(range(1, len(entry["rows"]) + 1))
    assert 1 <= len(entry["rows"]) < 20
    assert entry["seconds"] < 5


# ---- models and stages ----


def tiny_harness(compiled: bool = False) -> GpuHarness:
    target, assistant = tiny_target(tiny_model("llama")), tiny_target(tiny_model("llama", seed=2))
    sizes = BenchSizes(16, [16], [1, 2], [1], [2], 2, 4, 1, 4, 1, 1, 2**20, 1e9)
    shape = LlamaShape(32, 3, 4, 2, 8, 48, 97, tied=False)
    return GpuHarness(sizes, target, assistant.decoder, shape, tiny_prompts(5, 7), [], compiled)


def test_weights_change_in_place() -> None:
    """Catches weights that captured graphs would not see, and a restoring that does not restore."""
    harness = tiny_harness()
    other, model = hf_copy(harness.target.decoder.model), harness.target.decoder.model
    ids = torch.tensor(harness.prompts[:1])
    first = other(ids).logits
    held = [value.data_ptr() for value in model.parameters()]
    harness.set_weights("random")
    assert not torch.allclose(other(ids).logits, first, atol=0.1)
    harness.set_weights("widened")
    assert torch.equal(other(ids).logits, first)
    assert held == [value.data_ptr() for value in model.parameters()]
    assert torch.allclose(
        model(ids).logits, first, atol=1e-5
    )  # our attention, without slots causal too


def test_a_batch_repeats_the_same_round() -> None:
    """Catches a rewinding that leaves something behind: then every timed row would cost another length."""
    harness = tiny_harness()
    for name in harness.methods():
        batch = harness.make_batch(name, 2)
        assert batch.state.length.tolist() == [16, 16]
        one = batch.round(False).clone()
        assert batch.state.length.min() > 16
        batch.rewind()
        assert torch.equal(batch.round(False), one), name


class Replayed:
    """Stands for a CUDA graph: the same calls, no capture."""

    def __init__(self, run: Any, changed: list[torch.Tensor]):
        kept = [tensor.clone() for tensor in changed]
        run()
        with torch.inference_mode():
            for tensor, value in zip(changed, kept, strict=True):
                tensor.copy_(value)
        self.run = run

    def __call__(self) -> torch.Tensor:
        return self.run()  # type: ignore[no-any-return]


def test_the_stages_of_a_gpu_run_but_for_the_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches plain mistakes in lines that only a GPU would reach; graphs, clocks of it and waits are stood in for."""

    @contextmanager
    def forbidden() -> Iterator[None]:
        yield

    @contextmanager
    def found(places: list[str]) -> Iterator[None]:
        yield
        places.append("x.py:1")

    monkeypatch.setattr(GpuHarness, "cuda", True)
    monkeypatch.setattr(gpu_harness, "CudaGraphRunner", Replayed)
    monkeypatch.setattr(gpu_timers, "record_syncs", found)
    monkeypatch.setattr(gpu_timers, "forbid_syncs", forbidden)
    harness = tiny_harness()
    rows = {
        name: list(gpu_stages.STAGES[name][0](harness))
        for name in ("plain", "verify", "overhead", "rounds", "host")
    }
    assert [row["mode"] for row in rows["plain"]] == ["eager", "captured"]
    assert len(rows["verify"]) == 2
    assert {row["mode"] for row in rows["rounds"]} == {"captured"}
    assert [row["waits"] for row in rows["host"]] == [1] * (len(rows["host"]) - 1) + [0]
    assert len(rows["host"]) == 2 + 2 * len(harness.methods())


def test_the_compiled_stages_run_but_for_the_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    """The same for what takes minutes of compilation; texts of compiled rounds must be those of eager ones."""
    for module in (gpu_harness, rounds):
        monkeypatch.setattr(module, "compile_function", lambda function, device_type: function)
    harness = tiny_harness(compiled=True)
    rows = list(gpu_stages.compiled(harness))
    assert [row["method"] for row in rows] == ["plain"] * 3 + ["causal k=2"] * 3
    assert "share" in rows[0]
    assert rows[-2].keys() >= {"target_ms", "draft_ms", "overhead_ms"}
    assert rows[-1]["round_ms"]["n"] >= 1
    assert all(row["equal"] == row["of"] == 2 for row in gpu_stages.graph_texts(harness))


SMALLEST = [
    "--tasks=[{name: code, limit: 1}]", "--max_new_tokens=6", "--repeats=2", "--inner=1", "--contexts=[64]",
    "--widths=[1, 2]", "--batches=[1]", "--ks=[2]", "--k=2", "--draft=assets/draft", "--device=cpu",
]  # fmt: skip


def smallest(tmp_path: Path, *more: str) -> list[str]:
    return [*SMALLEST, f"--out={tmp_path}/gpu.json", *more]


def run(argv: list[str]) -> None:
    gpu_bench.main(parse_settings(gpu_bench.GpuBenchConfig, "", argv))


@pytest.mark.slow
def test_the_self_test(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Every stage that a CPU can run, through the command's own settings; catches figures that are missing."""
    run(smallest(tmp_path))
    printed = capsys.readouterr()
    result = json.loads(printed.out.splitlines()[-1])
    assert result == json.loads((tmp_path / "gpu.json").read_text())
    assert "SELF-TEST" in printed.err
    assert result["self_test"] is True
    assert result["problems"] == []
    assert list(result["stages"]) == list(gpu_stages.STAGES)
    rows = {name: entry["rows"] for name, entry in result["stages"].items()}
    assert all(rows[name] for name in rows if name not in ("compiled", "host", "graph_texts"))
    assert {row["method"] for row in rows["texts"]} >= {"plain", "causal k=2", "ngram k=2"}
    assert all(row["tau"] >= 1 and row["equal"] == row["of"] for row in rows["texts"])
    assert 0 < rows["plain"][0]["share"] < 1
    assert [(row["T"], row["context"]) for row in rows["verify"]] == [(1, 64), (2, 64)]
    assert rows["verify"][0]["v"] == 1.0
    for row in rows["overhead"]:
        total = row["target_ms"] + row["draft_ms"] + row["overhead_ms"]
        assert total == pytest.approx(row["round_ms"]["median"], rel=1e-3)
    methods = {row["method"] for row in result["speedups"]}
    assert methods == {row["method"] for row in rows["texts"]}


@pytest.mark.slow
def test_a_widened_model_that_says_something_else_fails(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Planted: the wide target's last norm is off in one channel, so that its texts are not the small one's."""
    widen = gpu_bench.widen

    def off(*args: Any) -> Any:
        wide = widen(*args)
        with torch.no_grad():
            wide.model.norm.weight[:100] *= -1
        return wide

    monkeypatch.setattr(gpu_bench, "widen", off)
    with pytest.raises(SystemExit):
        run(smallest(tmp_path, "--stages=[texts]"))
    result = json.loads((tmp_path / "gpu.json").read_text())
    assert any("1 of plain differ" in problem for problem in result["problems"])
    assert "PROBLEM" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("more", "words"),
    [("--stages=[speed]", "no stage"), ("--draft=nowhere", "no draft"), ("--k=9", "one of ks")],
)
def test_bad_settings_are_refused(more: str, words: str, tmp_path: Path) -> None:
    """Catches minutes of loading before a misspelling is reported."""
    with pytest.raises(UserError, match=words):
        run(smallest(tmp_path, more))
