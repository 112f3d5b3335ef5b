"""Ceilings against worked examples; sizes against the models themselves."""

import json
import struct
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from decode.common.typed_json import Estimate
from decode.model.compatibility import cache_name
from eval.metrics import roofline
from eval.metrics.roofline import GPU_SPECS, ModelSize
from eval.reporting.figures import roofline_tokens_per_second
from eval.results.report import ModelSizes, read_report
from tests.tiny import tiny_model

ROOT = Path(__file__).resolve().parents[3]


def test_worked_examples() -> None:
    """Catches bits for bytes, and K drafts read once: 70 B in fp16 on 2 TB/s gives 14.3 tokens/s."""
    saved = read_report(ROOT / "docs/results/smollm2.json").methods[0]
    sizes = ModelSizes(ModelSize(70_000_000_000, 0), {"m": ModelSize(1_000_000_000, 0)})
    plain = replace(saved, name="plain", k=0, tau=Estimate(1.0), dtype="float16")
    drafted = replace(plain, name="m", k=5, tau=Estimate(3.69))
    assert roofline_tokens_per_second(plain, sizes, 2e12) == pytest.approx(14.3, abs=0.05)
    assert roofline_tokens_per_second(drafted, sizes, 2e12) == pytest.approx(3.69 * 2000 / 150)
    h100 = GPU_SPECS["NVIDIA H100 80GB HBM3"]
    assert roofline.ridge_point(h100, 2) == pytest.approx(295, abs=1)  # 989 TFLOP/s ÷ 3.35 TB/s
    assert roofline.ridge_point(h100, 1) == pytest.approx(148, abs=1)


def test_gpus_are_plausible() -> None:
    """Catches a figure off by a thousand, or one "with sparsity": none has a ridge above 450 tokens in bf16. And fp32
    with tensor cores (TF32 has half of bf16) for fp32 without."""
    for name, gpu in GPU_SPECS.items():
        assert gpu.flops("float32") == gpu.fp32
        assert gpu.flops("bfloat16") == gpu.flops("float16") == gpu.bf16
        assert 1.9 < gpu.bf16 / gpu.fp32 < 31, name
        assert 0.2e12 < gpu.bandwidth < 10e12, name
        assert 20e9 < gpu.memory < 200e9, name
        assert 50 < roofline.ridge_point(gpu, 2) < 450, name


@pytest.mark.parametrize("arch", ["llama", "gpt2", "qwen3_moe"])
def test_sizes_are_the_model_s(arch: str, tmp_path: Path) -> None:
    """Catches tied weights counted twice, K/V by query heads, and a mixture of experts taken for a dense model."""
    model = tiny_model(arch)
    model.save_pretrained(tmp_path, max_shard_size="20KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 1
    found = roofline.read_model_size(tmp_path)
    assert found is not None
    unique = {p.data_ptr(): p.numel() for p in model.parameters()}
    assert found.parameters == sum(unique.values())
    assert found.experts == (arch == "qwen3_moe")
    cache = model(torch.tensor([[1, 2, 3]]), use_cache=True)[cache_name(model)]
    kept = sum(layer.keys.numel() + layer.values.numel() for layer in cache.layers)
    assert 3 * found.kv_values == kept


def test_sizes_of_what_is_not_there(tmp_path: Path) -> None:
    """Catches a crash on a hub name, a draft without weights, or one whose files were damaged after the report."""
    assert roofline.read_model_size("someone/some-model") is None
    (tmp_path / "config.json").write_text("{}")
    assert roofline.read_model_size(tmp_path) is None
    for content in (b"", b"\xff" * 50, struct.pack("<Q", 2**60) + b"{}"):
        (tmp_path / "model.safetensors").write_bytes(content)
        assert roofline.read_model_size(tmp_path) is None


def test_integers_and_metadata_are_no_weights(tmp_path: Path) -> None:
    """Catches a vocabulary map (ids, booleans) counted as parameters of a draft."""
    entries = {
        "__metadata__": {"format": "pt"},
        "w": {"dtype": "BF16", "shape": [3, 4], "data_offsets": [0, 24]},
        "d2t": {"dtype": "I64", "shape": [5], "data_offsets": [24, 64]},
        "t2d": {"dtype": "BOOL", "shape": [7], "data_offsets": [64, 71]},
    }
    header = json.dumps(entries).encode()
    (tmp_path / "model.safetensors").write_bytes(
        struct.pack("<Q", len(header)) + header + bytes(71)
    )
    (tmp_path / "config.json").write_text("{}")
    assert roofline.read_model_size(tmp_path) == ModelSize(12, 0)


def test_memory_of_a_load() -> None:
    """Catches a cache that does not grow with rows or length, and a draft without its own."""
    target, draft = ModelSize(1000, 10), ModelSize(100, 2)
    parts = roofline.memory_breakdown(target, draft, rows=4, length=50, bytes_a_value=2)
    assert parts == {
        "target": 2000, "target's K/V cache": 4000, "draft": 200, "draft's K/V cache": 800,
    }  # fmt: skip
    assert "draft" not in roofline.memory_breakdown(target, None, 1, 1, 2)


def test_bundled_models_are_sized() -> None:
    """Catches a report that cannot tell its own target's size: the roofline would be missing."""
    saved = read_report(ROOT / "docs/results/smollm2.json")
    one = saved.methods[0]
    report = replace(
        saved,
        target=replace(saved.target, name=str(ROOT / "assets/target")),
        methods=[
            replace(one, name="base", draft=str(ROOT / "assets/draft")),
            replace(one, name="x", draft=""),
        ],
        models=None,
    )
    models = report.with_models().models
    loaded = AutoModelForCausalLM.from_pretrained(ROOT / "assets/target")
    assert models is not None
    assert models.target is not None
    assert models.target.parameters == loaded.num_parameters()
    assert models.drafts.keys() == {"base"}
    known = replace(report, models=ModelSizes(None, {}))
    assert known.with_models().models == ModelSizes(None, {})
    assert report.models is None


def test_bandwidth_is_measured() -> None:
    """Catches milliseconds for seconds: memory of a machine reads between 0.1 and 10 000 GB/s."""
    found = roofline.measure_bandwidth(torch.device("cpu"), size=2**24, repeats=2)
    assert 1e8 < found < 1e13
