"""The split-KV kernel, run by Triton's interpreter in a process of its own, against SDPA with a dense mask."""

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import Tensor

from decode.engine.compiled import filter_guards
from decode.model import attention
from decode.model.kv_cache import bit_words

CHECK = """
import sys

import torch

from decode.drafts.causal import CausalDraft
from decode.drafts.early_exit import EarlyExitDraft
from decode.engine.engine import decode
from decode.model import attention
from decode.model.gpu import split_kv_attention, step_blocks
from decode.model.runner import ModelRunner
from decode.verification.tree import DynamicTree
from tests.decode.engine.test_engine import PROMPTS
from tests.decode.drafts.test_token_trees import BUSHY
from tests.tiny import noisy, tiny_model, tiny_target

# three parts, of several blocks, in short texts; trees in two tiles of queries
step_blocks.CHOICES, split_kv_attention.TARGET_PROGRAMS, step_blocks.TILE = ((16, 2),), 18, 16
calls = 0
attend = split_kv_attention.split_kv_attention

def counted(*args):
    global calls
    calls += 1
    return attend(*args)

split_kv_attention.split_kv_attention = counted
for arch in sys.argv[1:]:
    model = tiny_model(arch)
    target, moved = tiny_target(model), noisy(model, 0.01)
    for draft in (
        CausalDraft(ModelRunner(moved)),
        CausalDraft(ModelRunner(moved), shape=DynamicTree(width=2, nodes=5)),
        EarlyExitDraft(target, 2, BUSHY),
    ):
        texts = {}
        for on in (False, True):
            attention.use_split_kv(on)
            before = calls
            texts[on] = [(o.output_ids, o.rounds) for o in decode(target, draft, PROMPTS, k=3, max_new_tokens=6)]
            assert (calls > before) == on
        assert texts[True] == texts[False], (arch, draft.name)
        torch.manual_seed(0)
        tokens = torch.randint(0, 97, (3, 4))
        logits = {}
        for on in (False, True):
            attention.use_split_kv(on)
            with torch.inference_mode():
                logits[on] = target.runner.step(tokens, torch.tensor([9, 3, 7]))
        assert torch.allclose(logits[True], logits[False], atol=1e-4), (arch, "logits")
print("equal")
"""


AT_LOAD = """
import torch

from decode.model.gpu import layer_kernels, split_kv_attention
from decode.model.gpu.kernel_choice import StepShape, compare_attention, compare_layer_kernels

split_kv_attention.TARGET_PROGRAMS, cpu = 18, torch.device("cpu")
shape = StepShape(2, 2, 16, 24, torch.float32, 0.25, 33, None, True)
with torch.inference_mode():
    for dtype in (torch.float32, torch.bfloat16):
        compare_layer_kernels(dtype, cpu)
    compare_attention(shape, cpu)
    right = layer_kernels.rms_norm
    layer_kernels.rms_norm = lambda x, weight, eps, rounding: right(x, weight, eps, 0)
    try:
        compare_layer_kernels(torch.float32, cpu)
    except AssertionError as error:
        assert "a norm" in str(error)
        print("equal")
"""


def interpret(*command: str) -> None:
    """AssertionError unless the Python `command` prints "equal" in a process where Triton's kernels are interpreted."""
    root = Path(__file__).resolve().parents[4]
    env = {
        **os.environ,
        "TRITON_INTERPRET": "1",
        "PYTHONPATH": f"{root}:{os.environ.get('PYTHONPATH', '')}",
    }
    done = subprocess.run(
        [sys.executable, "-c", *command], env=env, cwd=root, capture_output=True, text=True
    )
    assert done.stdout == "equal\n", done.stderr[-2000:]


@pytest.mark.slow
@pytest.mark.skipif(
    importlib.util.find_spec("triton") is None, reason="needs Triton (comes with CUDA's torch)"
)
def test_the_checks_at_load_pass_and_find_a_wrong_norm() -> None:
    """Catches norms, RoPE and writes of the Triton kernels that differ from torch's, and checks that see nothing:
    a norm without Gemma's one is planted."""
    interpret(AT_LOAD)


@pytest.mark.slow
@pytest.mark.skipif(
    importlib.util.find_spec("triton") is None, reason="needs Triton (comes with CUDA's torch)"
)
@pytest.mark.parametrize("arch", ["llama", "gemma2", "gpt_oss", "deepseek_v3", "qwen2+window"])
def test_split_kv_equals_the_dense_mask(arch: str) -> None:
    """Catches parts merged wrongly, an ancestor mask or window read off by one, softcap, sinks and heads of unequal
    size lost, dead slots read: chains and trees of ragged rows, text and logits."""
    interpret(CHECK, arch)


@pytest.mark.parametrize("count", [1, 63, 64, 65, 130])
def test_bits_of_words_are_the_nodes(count: int) -> None:
    """Catches the sign bit of a word, a word that is missing and nodes in the wrong one."""
    torch.manual_seed(0)
    bits = torch.rand(2, 3, count) < 0.5
    bits[0, 0] = True
    words = bit_words(bits)
    assert words.shape == (2, 3, -(-count // 64))
    found = [(words[..., n // 64] >> (n % 64)) & 1 for n in range(count)]
    assert torch.equal(torch.stack(found, -1).bool(), bits)


def test_compiled_code_notices_the_switch(monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches the guard of `split_kv` dropped by the guard filter, which knows it by its name: compiled code
    would go on with the kernel that was chosen when it was compiled."""

    def forward(x: Tensor) -> Tensor:
        return x + 1 if attention.SETTINGS.split_kv else x - 1

    options = {"guard_filter_fn": filter_guards}
    compiled = torch.compile(forward, fullgraph=True, backend="eager", options=options)
    x = torch.zeros(2)
    for on in (False, True, False):
        monkeypatch.setattr(attention.SETTINGS, "split_kv", on)
        assert torch.equal(compiled(x), forward(x))
