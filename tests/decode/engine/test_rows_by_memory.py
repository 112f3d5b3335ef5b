"""Rows by the memory of a GPU: free memory is put in place, and passes without data are counted beside the plan."""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from transformers import AutoConfig

from decode.common import damage
from decode.common.settings import parse_settings
from decode.engine import memory
from decode.engine.batch import kv_caches
from decode.engine.engine import SpeculativeEngine, decode
from decode.engine.memory import prompts_together
from decode.engine.records import collect_outputs
from decode.model.kv_cache import StaticKVCache
from decode.model.loading import Target, auto_class, build_runner
from decode.verification.sampling import SamplingParams, warp
from tests.heads import random_draft
from tests.hybrids import HYBRIDS, hybrid_target, tiny_hybrid
from tests.params import slow_except
from tests.tiny import tiny_model, tiny_prompts, tiny_target
from tests.worlds import ROOT
from train.planning.shape_run import FloatsWithoutData, Kernels, LiveBytes
from train.sampling.config import SampleConfig

GB = 10**9
CONTEXT = GB // 2
"""Bytes of a GPU that CUDA itself takes."""
SIZES: dict[str, dict[str, Any]] = {
    "qwen3-8b": {
        "model_type": "qwen3", "hidden_size": 4096, "intermediate_size": 12288, "num_hidden_layers": 36,
        "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128, "vocab_size": 151936,
        "max_position_embeddings": 40960,
    },
    "smollm2-135m": {
        "model_type": "llama", "hidden_size": 576, "intermediate_size": 1536, "num_hidden_layers": 30,
        "num_attention_heads": 9, "num_key_value_heads": 3, "head_dim": 64, "vocab_size": 49152,
        "max_position_embeddings": 8192, "tie_word_embeddings": True,
    },
    "gemma-3-1b": {
        "model_type": "gemma3_text", "hidden_size": 1152, "intermediate_size": 6912, "num_hidden_layers": 26,
        "num_attention_heads": 4, "num_key_value_heads": 1, "head_dim": 256, "vocab_size": 262144,
        "max_position_embeddings": 32768, "sliding_window": 512,
    },
    "gpt-oss-20b": {
        "model_type": "gpt_oss", "hidden_size": 2880, "intermediate_size": 2880, "num_hidden_layers": 24,
        "num_attention_heads": 64, "num_key_value_heads": 8, "head_dim": 64, "vocab_size": 201088,
        "num_local_experts": 32, "num_experts_per_tok": 4, "max_position_embeddings": 131072,
        "sliding_window": 128,
    },
}  # fmt: skip
A_TOKEN = {
    "qwen3-8b": 36 * 2 * 8 * 128 * 2, "smollm2-135m": 30 * 2 * 3 * 64 * 2,
    "gemma-3-1b": 26 * 2 * 1 * 256 * 2, "gpt-oss-20b": 24 * 2 * 8 * 64 * 2,
}  # fmt: skip
"""Bytes of K and V in bfloat16; layers with windows hold every slot here."""


def on_the_host(x: Any) -> Any:
    return torch.device("cpu") if x == torch.device("cuda") else x


class OnTheHost(TorchFunctionMode):
    """What is made on "cuda", or moved there, is on the CPU: torch without CUDA would look for a driver first."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = {key: on_the_host(x) for key, x in (kwargs or {}).items()}
        return func(*(x if isinstance(x, Tensor) else on_the_host(x) for x in args), **kwargs)


class Gpu:
    """A model without data, and what it holds; `total` bytes are the GPU's."""

    def __init__(self, name: str, total: int, monkeypatch: pytest.MonkeyPatch):
        self.live = LiveBytes()
        self.modes = FloatsWithoutData(), self.live, Kernels(self.live.phase), OnTheHost()
        config = AutoConfig.for_model(**SIZES[name])
        with self.without_data():
            model = auto_class(config).from_config(config, dtype=torch.bfloat16)
            self.target = Target(build_runner(model), None, name, None, "", frozenset())
        self.weights = self.live.now.total()
        self.together = 0  # prompts that `peak` prefills together; 0: as the engine does it
        monkeypatch.setattr(
            torch.cuda,
            "mem_get_info",
            lambda device: (total - CONTEXT - self.live.now.total(), total),
        )

    @contextmanager
    def without_data(self) -> Iterator[None]:
        with ExitStack() as stack:
            for mode in self.modes:
                stack.enter_context(mode)
            yield

    def rows(self, asked: int, prompt: int, new: int, mode: str = "graph") -> int:
        """Rows of a plain engine for sampling."""
        with self.without_data():
            self.engine = SpeculativeEngine(self.target, sampling=SamplingParams(1.0))
            self.engine.mode, self.engine.device = mode, torch.device("cuda")
            self.a_token = self.target.runner.cache_of_a_token().row_bytes(1)
            return self.engine.rows_that_fit([[0] * prompt], new, asked)

    def peak(self, rows: int, prompt: int, new: int) -> int:
        """The most bytes alive while so many rows are prefilled as the engine does it, and while a step follows."""
        runner, sampling = self.target.runner, SamplingParams(1.0)
        with self.without_data(), torch.inference_mode():
            slots = self.engine.num_slots([[0] * prompt], new, rows)
            runner.allocate(rows, slots)
            self.live.peak = self.live.now.copy()
            every = torch.arange(rows)
            for row in every.split(self.together or prompts_together(prompt)):
                length = torch.full((len(row),), prompt)
                tokens = torch.zeros(len(row), prompt, dtype=torch.long)
                warp(runner._prefill_together(tokens, length, row), sampling)
            warp(runner.step(every[:, None] * 0, every * 0 + prompt), sampling)
        return self.live.peak.total()


@pytest.fixture(autouse=True)
def said_anew() -> None:
    damage.warn_once.cache_clear()


def chat() -> SampleConfig:
    """Sampling with the recipe for chats."""
    return parse_settings(SampleConfig, "", ["--config", str(ROOT / "configs/sample/chat.yaml")])


PLANS = [
    ("qwen3-8b", 24, 700, 16), ("qwen3-8b", 24, 3000, 9), ("qwen3-8b", 24, 12_000, 2),
    ("qwen3-8b", 80, 700, 64), ("qwen3-8b", 80, 12_000, 23), ("smollm2-135m", 16, 700, 64),
    ("smollm2-135m", 4, 3000, 29), ("gemma-3-1b", 16, 6000, 54), ("gpt-oss-20b", 80, 3000, 64),
]  # fmt: skip


@pytest.mark.parametrize(
    ("name", "gigabytes", "prompt", "rows"), slow_except(PLANS, [PLANS[1], PLANS[6]])
)
def test_rows_of_the_chat_recipe(
    name: str, gigabytes: int, prompt: int, rows: int, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    """Catches K/V counted by query heads or windows, weights or slots left out, a plan that changes, and silence."""
    settings, gpu = chat(), Gpu(name, gigabytes * GB, monkeypatch)
    found = gpu.rows(settings.batch_size, prompt, settings.max_new_tokens)
    assert abs(found - rows) <= 1
    assert gpu.a_token == A_TOKEN[name]
    said = capsys.readouterr().err
    fewer = f"free: {found} are decoded together (batch_size, max_new_tokens)\n"
    assert said.endswith(fewer) if found < settings.batch_size else said == ""
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (GB, GB))
    with gpu.without_data():
        prompts = [[0] * prompt]
        again = gpu.engine.rows_that_fit(prompts, settings.max_new_tokens, settings.batch_size)
    assert again == found


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "gigabytes", "prompt"),
    [("qwen3-8b", 24, 700), ("smollm2-135m", 1.5, 3000)],
)
def test_what_is_planned_fits(
    name: str, gigabytes: float, prompt: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Catches more rows than the memory holds (a prefill of all at once, logits of all positions), and memory that is
    left unused."""
    settings, gpu = chat(), Gpu(name, int(gigabytes * GB), monkeypatch)
    rows = gpu.rows(settings.batch_size, prompt, settings.max_new_tokens)
    room = gigabytes * GB - CONTEXT
    assert 0.8 * room < gpu.peak(rows, prompt, settings.max_new_tokens) < room


@pytest.mark.slow
@pytest.mark.parametrize("fault", ["half of the cache", "all rows prefilled at once"])
def test_a_plan_that_does_not_fit_is_seen(fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Planted: what the test above is for."""
    if fault == "half of the cache":
        row_bytes = StaticKVCache.row_bytes
        monkeypatch.setattr(StaticKVCache, "row_bytes", lambda *args: row_bytes(*args) // 2)
    gpu = Gpu("smollm2-135m", 2 * GB, monkeypatch)
    rows = gpu.rows(64, 3000, 1024)
    if fault != "half of the cache":
        gpu.together = rows
    assert gpu.peak(rows, 3000, 1024) > 2 * GB - CONTEXT


def test_a_card_with_no_room_decodes_one_row(monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches no row at all: what does not fit ends as a full GPU does, in one line."""
    gpu = Gpu("qwen3-8b", 16 * GB, monkeypatch)
    assert gpu.rows(64, 700, 1024) == 1
    assert gpu.rows(1, 700, 1024) == 1


@pytest.mark.parametrize("arch", slow_except(HYBRIDS, ["qwen3_next", "falcon_h1"]))
def test_states_do_not_grow(arch: str) -> None:
    """Catches states of recurrent layers left out of a row's bytes, or counted for each slot."""
    runner: Any = hybrid_target(tiny_hybrid(arch)).runner
    runner.allocate(2, 16)
    runner.prefill(torch.ones(2, 3, dtype=torch.long), torch.tensor([3, 3]))
    cache = runner.cache
    kept = [x for y in cache.kv_layers if y.is_initialized for x in (y.keys, y.values)]
    states = sum(x.nbytes for x in cache.states().values())
    assert 2 * cache.row_bytes(16) == sum(x.nbytes for x in kept) + states
    assert 2 * cache.row_bytes(0) == states


@pytest.mark.parametrize("kind", [None, "eagle3"])
def test_a_request_on_a_small_card(
    kind: str | None, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Catches rows, or tokens of a prefill, beyond the plan in the engine itself, a draft's cache that is left out,
    and texts that are others with fewer rows."""
    model = tiny_model("qwen3", max_position_embeddings=512)
    prompts = tiny_prompts(30, 40, 25, 60, 33, 12, 20, 31)
    settings: dict[str, Any] = {"max_new_tokens": 20, "seed": 3}
    wanted = [x.output_ids for x in decode(tiny_target(model, (5,)), None, prompts, **settings)]
    target = tiny_target(model, (5,))
    draft = None if kind is None else random_draft(kind, target)
    seen: list[int] = []
    held: list[int] = []
    forward = type(target.runner)._forward

    def noted(self: Any, tokens: Tensor, last: int = 0) -> Tensor:
        if self.cache.slots.is_prefill:
            seen.append(tokens.numel())
        held.append(self.shape[0])
        return forward(self, tokens, last)

    a_row = 128 * (2 * 2 * 8 * 4) * (3 + (kind is not None))  # two heads of 8 numbers in float32
    prefill = 4 * 60 * (4 * 48 + 12 * 32)
    free = (3.5 * a_row + prefill) / memory.SHARE
    engine = SpeculativeEngine(target, draft, k=2)
    engine.device = torch.device("cuda")

    def left(device: torch.device) -> tuple[float, float]:
        caches = memory.unique(kv_caches(engine.target, engine.draft))
        return free - sum(x.slots.rows * x.row_bytes(x.slots.size) for x in caches), free

    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: None)
    monkeypatch.setattr(torch.cuda, "mem_get_info", left)
    monkeypatch.setattr(memory, "PREFILL_TOKENS", 100)
    monkeypatch.setattr(type(target.runner), "_forward", noted)
    with OnTheHost():
        found = collect_outputs(prompts, engine.speculate(prompts, rows=8, **settings))
    assert [x.output_ids for x in found] == wanted
    assert max(seen) <= 100
    assert max(held) == 3
    assert "3 are decoded together" in capsys.readouterr().err
