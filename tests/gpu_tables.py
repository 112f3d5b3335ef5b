"""Writes docs/results/gpu_counts.json: what a round on a GPU launches, by stand-ins, and a model of its time.

    python -m tests.gpu_tables docs/results/gpu_counts.json      # needs Triton; no GPU

Operations are counted on fake tensors (tests/gpu_counts.py), kernels of graph mode in inductor's code for an H100
(tests/inductor_cuda.py), and shared memory by compiling the kernel of attention for each card. Nothing is timed.
"""

import json
import sys
from collections.abc import Callable
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import transformers
import triton
from torch._subclasses.fake_tensor import FakeTensorMode
from transformers import AutoModelForCausalLM

from decode.engine.batch import ActiveRequest, DecodeRequests
from decode.engine.compiled import compile_function
from decode.engine.engine import SpeculativeEngine
from decode.engine.round import propose, verify_and_commit
from decode.model import compatibility
from decode.model.gpu import cuda_layers
from decode.model.gpu.step_blocks import SHARED_KIB
from decode.model.loading import Target
from decode.model.runner import ModelRunner
from decode.verification.sampling import SamplingParams
from tests.decode.engine import test_inductor_cuda_code as codes
from tests.decode.model.gpu.test_kernels_compile import SHAPES, compile_launch, launches_of
from tests.fake_gpu import GPU, device_guard
from tests.gpu_counts import depth, gpu_layers, per_layer
from tests.gpu_model import predictions
from tests.inductor_cuda import GeneratedCode, generate
from tests.tiny import tiny_config, tiny_model

ARCHITECTURES = ("llama", "qwen3", "gemma3_text", "gpt_oss")
CARDS = (80, 86, 89, 90, 120)
WIDTHS = ("llama-8b chain", "gemma3 tree of 16", "deepseek tree of 16")
K = 4


def operations(arch: str) -> dict[str, Any]:
    """Operations of eager and captured rounds, which are the same: with torch's kernels alone, and with ours."""
    found: dict[str, Any] = {}
    for kind, k in ((None, 0), ("eagle3", K)):
        for own in (False, True):
            layer, rest = per_layer(arch, kind, k, own)
            name = f"{kind or 'plain'}, {'ours' if own else 'torch'}"
            found[name] = {"layer": layer.total(), "beside": rest.total(), "of_layer": dict(layer)}
    return found


def graph_kernels(arch: str, kind: str) -> dict[str, Any]:
    """Kernels of a compiled round, of its layers and beside them."""
    cuda_layers.use_own_kernels(tiny_model(arch, dtype=torch.bfloat16))  # trials on real numbers
    hopper = mock.patch.object(torch.cuda, "get_device_capability", lambda *args: (9, 0))  # noqa: PT008 (dynamo traces it)
    with device_guard(), hopper, FakeTensorMode(), gpu_layers(True):
        with GPU, mock.patch.object(compatibility, "check_trial_pass"):
            config = tiny_config(arch, **depth(arch, 4))
            runner = ModelRunner(AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16))
        target = Target(runner, None, arch, None, "fingerprint", frozenset({5}))
        draft = None if kind == "plain" else draft_of(target)
        engine = SpeculativeEngine(target, draft, k=K, sampling=SamplingParams(), mode="captured")
        state, config = engine._prepare_batch(1, 512, 512, None, 0)
        engine._prefill(state, DecodeRequests([[1] * 9], [0], 64), {0: ActiveRequest(0, 9, 300)})
        with torch.inference_mode():
            proposal = propose(draft, state, K, runner.context)
        vocab = runner.vocab_size
        halves = {}
        if draft is not None:
            args = draft, state, K, runner.context
            halves["draft"] = generate(compile_function(propose, "cuda"), args, vocab)
        args = target, state, proposal, config, draft
        halves["target"] = generate(compile_function(verify_and_commit, "cuda"), args, vocab)
    return {name: summary(half) for name, half in halves.items()}


def draft_of(target: Target) -> Any:
    with mock.patch.multiple(codes, VOCAB=target.runner.vocab_size, DRAFT_VOCAB=64):
        return codes.make_draft("eagle3", target)


def summary(code: GeneratedCode) -> dict[str, Any]:
    regions = {name: block.launches.total() for name, block in code.regions.items()}
    return {
        "beside": code.main.launches.total(),
        "regions": regions,
        "calls": dict(code.main.regions),
    }


def shared_memory(card: int, name: str) -> dict[str, int]:
    """What the assembler says of the kernel of attention for a card, in the blocks that are chosen for it."""
    [launch] = launches_of(SHAPES[name], card)
    made, given = compile_launch(launch, card), launch.arguments
    return {
        "shared": made.shared, "limit": 1024 * SHARED_KIB[card], "spilled": made.spilled,
        "keys": given["BLOCK"], "queries": given["BM"], "stages": given["num_stages"],
        "tokens": given["M"], "width": given["D"], "out_width": given["DV"],
    }  # fmt: skip


def attempt(function: Callable[[], Any]) -> Any:
    """What the function gives, or in one line why it cannot."""
    try:
        return function()
    except Exception as error:
        return {"failed": f"{type(error).__name__}: {str(error).strip().splitlines()[0][:200]}"}


def main(out: str) -> None:
    """Goes on with what `out` has."""
    path = Path(out)
    found = json.loads(path.read_text()) if path.exists() else {}
    versions = {"torch": torch.__version__, "triton": triton.__version__}
    found["versions"] = versions | {"transformers": transformers.__version__}
    parts: list[tuple[str, str, Any]] = []
    for arch in ARCHITECTURES:
        parts.append(("operations", arch, partial(operations, arch)))
        for kind in ("plain", "eagle3"):
            parts.append(("graph", f"{arch}, {kind}", partial(graph_kernels, arch, kind)))
    for card, name in [(75, WIDTHS[0]), *product(CARDS, WIDTHS), *product((86, 90), SHAPES)]:
        parts.append(("attention", f"sm_{card}, {name}", partial(shared_memory, card, name)))
    for section, name, measure in parts:
        if name not in found.setdefault(section, {}):
            found[section][name] = attempt(measure)
            torch._dynamo.reset()
            path.write_text(json.dumps(found, indent=1) + "\n")
    kernels = found["graph"]["llama, eagle3"]
    found["model"] = predictions(
        max(kernels["target"]["regions"].values()),
        kernels["target"]["beside"],
        kernels["draft"]["beside"],
    )
    path.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main(*sys.argv[1:])
