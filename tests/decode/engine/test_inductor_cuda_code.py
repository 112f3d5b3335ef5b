"""Inductor's CUDA code of a round's compiled halves, for models as wide as Llama-3.1-8B, without a GPU.

Skipped where Triton is not installed; any torch will do. `tests/lowest/run.sh` has it.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import count
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor
from torch._inductor import config as inductor_config
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.torch_version import TorchVersion
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.models.llama.modeling_llama import LlamaMLP

from decode.checkpoints import eagle_layouts
from decode.drafts.base import Draft
from decode.drafts.causal import CausalDraft
from decode.drafts.eagle import EagleDraft
from decode.drafts.eagle_model import Eagle3Model, llama_config
from decode.engine import round as rounds
from decode.engine.batch import ActiveRequest, DecodeRequests
from decode.engine.compiled import compile_function
from decode.engine.engine import SpeculativeEngine
from decode.engine.round import propose, round_bytes, verify_and_commit
from decode.model import compatibility, inductor_linear
from decode.model.gpu import cuda_layers
from decode.model.hidden_states import HiddenStateSpec
from decode.model.kv_cache import StaticKVLayer
from decode.model.loading import Target
from decode.model.runner import ModelRunner
from decode.verification import sampling as samplings
from decode.verification.sampling import SamplingParams
from decode.verification.tree import DynamicTree
from tests.fake_gpu import GPU, NOT_HERE, device_guard
from tests.gpu_counts import gpu_layers
from tests.params import rotated, slow_except
from tests.tiny import tiny_model

pytest.importorskip("triton", reason="needs Triton, which has wheels for Linux")
from tests.decode.model.gpu.test_kernels_compile import Compiled, check, spilled_bytes
from tests.inductor_cuda import ON_HOST, GeneratedCode, compile_kernels, generate

pytestmark = pytest.mark.skipif(NOT_HERE is not None, reason=str(NOT_HERE))
VOCAB, DRAFT_VOCAB, SLOTS, K = 128_256, 32_000, 2048, 3
LAYERS, DRAFT_LAYERS = 3, 2
KV_HEADS, HEAD_DIM = 8, 128
MOST = 9 if TorchVersion(torch.__version__) >= (2, 13) else 10
"""Kernels of a Llama's layer: four products, attention, two norms with the sums before them, RoPE with the writes to
the buffers, and the MLP's product of two; inductor of older torch joins one kernel fewer."""
SAMPLED = SamplingParams(0.8, top_p=0.9)


def llama(hidden: int, layers: int, heads: int, inner: int) -> ModelRunner:
    """A Llama in bf16 on the fake GPU, of weights without numbers. What a trial pass would find is left out: it reads
    numbers."""
    config = LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=hidden,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=KV_HEADS,
        head_dim=HEAD_DIM,
        intermediate_size=inner,
        max_position_embeddings=8192,
    )
    with GPU, mock.patch.object(compatibility, "check_trial_pass"):
        return ModelRunner(LlamaForCausalLM._from_config(config, dtype=torch.bfloat16))


def make_draft(name: str, target: Target) -> Draft | None:
    """The draft of a case: a model of 1B width, or an EAGLE-3 head with a vocabulary of 32 thousand."""
    if name == "plain":
        return None
    if name == "causal":
        return CausalDraft(llama(2048, DRAFT_LAYERS, 16, 8192))
    config = eagle_layouts.eagle3_config(target.runner.config, VOCAB, DRAFT_VOCAB, (0, 1, 2))
    with GPU, numbers_in(torch.bfloat16):
        ids = torch.arange(DRAFT_VOCAB)
        net = Eagle3Model(llama_config(config), HiddenStateSpec((0, 1, 2)), ids)
    draft = EagleDraft(net, target, "eagle3")
    draft.shape = DynamicTree(4, 12) if name == "eagle3-tree" else None
    return draft


@contextmanager
def numbers_in(dtype: torch.dtype) -> Iterator[None]:
    """While the block runs, new floating-point tensors have this dtype."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


@dataclass(frozen=True)
class Round:
    """The code of a round's two halves; `draft` is None in plain decoding."""

    draft: GeneratedCode | None
    target: GeneratedCode
    tokens: int
    """Those that the target verifies in a row."""
    q_bytes: int

    @property
    def halves(self) -> list[GeneratedCode]:
        return [self.target] if self.draft is None else [self.draft, self.target]


def generate_round(name: str, sampling: SamplingParams, rows: int = 1) -> Round:
    """The code of a round of `rows` rows of the draft `name`."""
    cuda_layers.use_own_kernels(tiny_model("llama", dtype=torch.bfloat16))  # trials on numbers
    with device_guard(), FakeTensorMode(), gpu_layers(True):
        runner = llama(4096, LAYERS, 32, 14336)
        target = Target(runner, None, "llama", None, "fingerprint", frozenset({5}))
        draft = make_draft(name, target)
        engine = SpeculativeEngine(target, draft, k=K, sampling=sampling, mode="captured")
        state, config = engine._prepare_batch(rows, SLOTS, SLOTS, None, 0)
        requests = {row: ActiveRequest(row, 100, 1000) for row in range(rows)}
        seeds = list(range(rows))
        engine._prefill(state, DecodeRequests([[1] * 100] * rows, seeds, 64), requests)
        args = draft, state, K, runner.context
        with torch.inference_mode():
            proposal = propose(*args)
        first, reader = None, None if draft is None or draft.reads.aux_layers is None else draft
        if draft is not None:
            first = generate(compile_function(propose, "cuda"), args, VOCAB)
        second = generate(
            compile_function(verify_and_commit, "cuda"),
            (target, state, proposal, config, reader),
            VOCAB,
        )
        q_bytes = 0 if proposal.q is None else proposal.q.nbytes
        return Round(first, second, proposal.tokens.shape[1] + 1, q_bytes)


def check_on_gpu(code: GeneratedCode) -> None:
    """AssertionError for a tensor on the host, and for code that reads a number there."""
    assert code.devices == {"cuda"}
    assert [word for word in ON_HOST if word in code.text] == []


def check_kv_buffers(code: GeneratedCode, rows: int = 1) -> None:
    """AssertionError for a buffer as large as the keys or the values of one layer: a copy of them."""
    kv = rows * KV_HEADS * SLOTS * HEAD_DIM
    blocks = [code.main, *code.regions.values()]
    assert [
        b for block in blocks for b in block.buffers if b.count >= kv and SLOTS in b.shape
    ] == []


def check_regions(code: GeneratedCode, layers: int, passes: int = 1) -> None:
    """AssertionError unless each pass calls one region for each layer, and passes of one width share its code."""
    assert sum(code.main.regions.values()) == layers * passes
    assert len(code.regions) == min(passes, 2)  # the first pass of a draft reads two tokens


def check_launches(code: GeneratedCode) -> None:
    """AssertionError for more than MOST kernels in a layer, and for products that are not joined."""
    for block in code.regions.values():
        assert block.launches["extern_kernels.mm"] == 4, block.launches
        assert block.launches.total() <= MOST, block.launches


def check_memory(code: GeneratedCode, q_bytes: int, limit: int) -> None:
    """AssertionError if buffers as wide as the vocabulary, with q of the draft, take more than `limit` bytes."""
    wide = [f"{b.dtype} {b.shape}" for b in code.main.buffers if b.count % VOCAB == 0]
    assert 0 < code.main.peak + q_bytes <= limit, " ".join(wide)
    assert all(block.peak == 0 for block in code.regions.values())


KEPT = [
    ("plain", "greedy", 1),
    ("causal", "sampled", 1),
    ("eagle3", "greedy", 1),
    ("eagle3-tree", "sampled", 1),
]
NAMES = [name for name, *_ in KEPT]
CASES = dict.fromkeys([*KEPT, *rotated(NAMES, ["greedy", "sampled"], [1, 4])])


@pytest.mark.parametrize(("name", "how", "rows"), slow_except(CASES, KEPT))
def test_code_of_a_round(name: str, how: str, rows: int) -> None:
    """Catches what a GPU waits for, copies of the K/V buffers, a layer that is compiled anew, tensors as wide as the
    vocabulary that no model of memory knows, and kernels that were fused and are not any more."""
    sampling = SAMPLED if how == "sampled" else SamplingParams()
    code = generate_round(name, sampling, rows)
    for half in code.halves:
        check_on_gpu(half)
        check_kv_buffers(half, rows)
        check_launches(half)
    tree = name == "eagle3-tree"
    limit = round_bytes(rows, code.tokens, VOCAB, sampling, tree=tree, itemsize=2)
    check_regions(code.target, LAYERS)
    check_memory(code.target, code.q_bytes, limit)
    if name == "causal":
        assert code.draft is not None
        check_regions(code.draft, DRAFT_LAYERS, K)
        check_memory(code.draft, 0, limit)


@pytest.mark.parametrize(
    "case", slow_except(["plain sampled", "eagle3-tree sampled"], ["plain sampled"])
)
def test_generated_kernels_compile(case: str) -> None:
    """Catches a kernel that does not compile for sm_90, needs more shared memory than there is, or spills."""
    code = generate_round(case.split()[0], SAMPLED)
    for half in code.halves:
        kernels = compile_kernels(half)
        assert len(kernels) > 8
        for settings in kernels.values():
            for one in settings:
                spilled = spilled_bytes(one.asm["ptx"], 90)
                check(Compiled(len(one.asm["cubin"]), one.metadata.shared, spilled), 90)


# ---- planted ----


def target_code(sampling: SamplingParams = SamplingParams()) -> GeneratedCode:  # noqa: B008 (frozen)
    return generate_round("plain", sampling).target


def test_a_copy_of_the_keys_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """Planted: the keys are scaled in place of the queries, which takes a second buffer."""
    update = StaticKVLayer.update

    def scaled(self: StaticKVLayer, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        keys, values = update(self, *args, **kwargs)
        return 2 * keys, values

    monkeypatch.setattr(StaticKVLayer, "update", scaled)
    with pytest.raises(AssertionError, match=str(SLOTS)):
        check_kv_buffers(target_code())


def test_a_tensor_on_the_host_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """Planted: whether logits are numbers passes through the host."""
    finite = rounds.has_finite_logits
    monkeypatch.setattr(
        rounds, "has_finite_logits", lambda logits: finite(logits).cpu().to(logits.device)
    )
    with pytest.raises(AssertionError, match="cpu"):
        check_on_gpu(target_code())


def test_a_wide_copy_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """Planted: one running sum in fp64 over the whole vocabulary, in place of one over blocks and one inside."""

    def draw(weights: Tensor, uniform: Tensor) -> Tensor:
        running = weights.double().cumsum(-1)
        return samplings._first_beyond(running, uniform * running[..., -1])

    monkeypatch.setattr(samplings, "sample_inverse_cdf", draw)
    limit = round_bytes(1, 1, VOCAB, SamplingParams(0.8), itemsize=2)
    with pytest.raises(AssertionError, match="float64"):
        check_memory(target_code(SamplingParams(0.8)), 0, limit)


def test_a_layer_of_its_own_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """Planted: each layer computes with its own number, which becomes a constant of its code."""
    forward = LlamaMLP.forward
    numbers = count()

    def numbered(self: LlamaMLP, x: Tensor) -> Tensor:
        return forward(self, x) * self.number

    monkeypatch.setattr(LlamaMLP, "forward", numbered)
    init = LlamaMLP.__init__

    def numbering(self: LlamaMLP, config: Any) -> None:
        init(self, config)
        self.number = 1 + next(numbers) / 8

    monkeypatch.setattr(LlamaMLP, "__init__", numbering)
    with pytest.raises(AssertionError, match="3 == 1|regions"):
        check_regions(target_code(), LAYERS)


def test_layers_that_end_in_a_sum_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """Planted: the last sum of a layer stays a kernel of its own."""
    monkeypatch.setattr(inductor_linear, "hand_on_terms", lambda graph: None)
    with pytest.raises(AssertionError, match="Counter"):
        check_launches(target_code())


def test_unfused_kernels_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """Planted: inductor makes a kernel of each operation."""
    monkeypatch.setattr(inductor_config, "max_fusion_size", 1)
    with pytest.raises(AssertionError, match="triton_"):
        check_launches(target_code())
