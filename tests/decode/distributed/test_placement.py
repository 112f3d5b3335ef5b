"""Targets that one device cannot hold: the same texts, numbers and trained weights as on one device."""

import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from decode.common.errors import UserError
from decode.common.settings import parse_settings
from decode.distributed.placement import (
    PlacementConfig,
    check_placeable,
    device_map,
    load_target,
    plan_layers,
    run_placed,
)
from decode.distributed.tensor_parallel import replicated_ends_plan
from decode.engine.engine import SpeculativeEngine, decode
from decode.model import loading
from decode.model.layer_stack import with_layers
from decode.model.loading import Target
from decode.verification.sampling import SamplingParams
from tests import worlds
from tests.tiny import tiny_model
from tests.train.test_sample_command import rows_of
from tests.worlds import Done, World
from train.trainer.settings import DistillConfig
from train.training import train_here

SLICED = ["--placement.kind", "tensor_parallel"]
ON_DISK = PlacementConfig("device_map", {"cpu": 0.0001})
"""Room for the embedding and the LM head of the tiny target, and for one of its layers."""
DISK_WORDS = ["--placement.kind", "device_map", "--placement.max_gib", "{cpu: 0.0001}"]
SAMPLE = ["--max_new_tokens", 24, "--batch_size", 8]
HEAD = [
    "--draft.family",
    "eagle3",
    "--draft.taps",
    "[0,1]",
    "--draft.steps",
    2,
    "--draft.vocab",
    100,
]


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> World:
    return worlds.build(tmp_path_factory.mktemp("world"))


@pytest.fixture(scope="module")
def data(world: World, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return worlds.sampled(world, tmp_path_factory.mktemp("data"), *SAMPLE)


def train_words(target: object, data: object, out: object) -> list[Any]:
    return [
        "train/distill.py", "--target", target, "--data", data, "--out", out, *HEAD,
        "--loop.steps", 3, "--loop.batch_size", 4, "--loop.eval_every", 3, "--check.k", 2,
        "--check.max_new_tokens", 8,
    ]  # fmt: skip


def trained(done: Done, out: Path) -> dict[str, Tensor]:
    assert done.code == 0, done.err
    return load_file(out / "model.safetensors")


def test_a_target_on_disk_decodes_the_same(world: World) -> None:
    """Bug: hidden states or slots on the wrong device, weights that are read as zeros, or another K/V cache."""
    one = loading.load_target(str(world.target), "cpu")
    spread = load_target(ON_DISK, str(world.target), "cpu")
    weights = dict(spread.runner.model.named_parameters())
    assert any(weight.is_meta for weight in weights.values())
    assert not weights["model.embed_tokens.weight"].is_meta
    prompts = [one.tokenizer(text)["input_ids"] for text in world.texts[:4]]
    settings = {"max_new_tokens": 16, "sampling": SamplingParams(1.0), "rows": 3}
    found, wanted = (decode(target, None, prompts, **settings) for target in (spread, one))
    assert [o.output_ids for o in found] == [o.output_ids for o in wanted]
    with torch.no_grad():
        tokens = torch.tensor(prompts[:1])
        same = [t.runner.model(tokens, use_cache=False).logits for t in (spread, one)]
    assert torch.equal(*same)


def test_a_target_on_disk_trains_the_same_head(world: World, data: Path, tmp_path: Path) -> None:
    """Bug: the teacher reads states of another device, or a head starts from a weight that is not there. Layers in
    memory share products (decode/model/linear), which rounds otherwise."""
    one, spread = tmp_path / "one", tmp_path / "spread"
    wanted = trained(worlds.call(*train_words(world.target, data, one)), one)
    found = trained(worlds.call(*train_words(world.target, data, spread), *DISK_WORDS), spread)
    assert found.keys() == wanted.keys()
    for name, weight in wanted.items():
        off = (found[name].double() - weight.double()).abs().max()
        assert off <= 1e-6 * weight.double().abs().max(), name


def test_what_needs_the_layers_here_is_refused(world: World) -> None:
    """Bug: a draft is copied from weights that are on disk, which are no numbers."""
    spread = load_target(ON_DISK, str(world.target), "cpu")
    with pytest.raises(UserError, match="leave placement.kind at single"):
        with_layers(spread.runner.model, [1])
    with pytest.raises(UserError, match="eager"):
        SpeculativeEngine(spread, mode="compiled")


def test_a_target_on_disk_samples_the_same_rows(world: World, data: Path, tmp_path: Path) -> None:
    """Bug: the command loads the target whole, whatever its placement says."""
    out, sources = tmp_path / "out", json.dumps([{"kind": "file", "path": str(world.prompts)}])
    words = ["--target", world.target, "--sources", sources, "--out", out, *SAMPLE]
    done = worlds.call("train/sample.py", *words, *DISK_WORDS)
    assert done.code == 0, done.err
    assert rows_of(out) == rows_of(data)
    done = worlds.call("train/sample.py", *words, *DISK_WORDS, "--origin", "text")
    assert "leave its kind at single" in done.error()


@pytest.mark.parametrize(
    ("kind", "variables", "said"),
    [
        ("tensor_parallel", {"WORLD_SIZE": "1"}, "torchrun --nproc-per-node"),
        ("device_map", {"WORLD_SIZE": "2"}, "start one process"),
        ("tensor_parallel", {"WORLD_SIZE": "2", "ACCELERATE_USE_FSDP": "true"}, "FSDP would shard the draft"),
    ],
)  # fmt: skip
def test_a_launch_that_does_not_suit_is_refused(
    kind: Any, variables: dict[str, str], said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Bug: one process waits for others, or several put the whole target on each device."""
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(UserError, match=said):
        run_placed(PlacementConfig(kind), lambda: pytest.fail("it ran"))


@pytest.mark.parametrize(
    ("placement", "dtype", "said"),
    [
        (PlacementConfig("device_map", {"cpu": 0.0}), "float32", "raise it"),
        (PlacementConfig("device_map", {"cuda:9": 1.0}), "float32", "device 'cuda:9' is not on this machine"),
        (ON_DISK, "int8", "another dtype than int8"),
        (ON_DISK, "w8a8", "placement.kind device_map: .* another dtype than w8a8"),
        (PlacementConfig("tensor_parallel"), "w8a8", "placement.kind tensor_parallel: .* another dtype than w8a8"),
        (PlacementConfig("tensor_parallel"), "float32", "in one process only"),
    ],
)  # fmt: skip
def test_bad_placements_are_refused(
    placement: PlacementConfig, dtype: str, said: str, world: World
) -> None:
    with pytest.raises(UserError, match=said):
        load_target(placement, str(world.target), "cpu", dtype)


@pytest.mark.parametrize("part", ["an encoder", "recurrent layers"])
def test_models_of_other_kinds_are_refused(part: str) -> None:
    """Bug: an encoder or a recurrent state runs in the first process alone, and the others wait for ever."""
    config = tiny_model("llama").config
    if part == "an encoder":
        config.is_encoder_decoder = True
    else:
        config.layer_types = ["linear_attention", "full_attention", "linear_attention"]
    with pytest.raises(UserError, match=f"target has {part}: placement.kind device_map"):
        check_placeable(config, "target", "device_map")
    check_placeable(tiny_model("llama").config, "target", "device_map")


def test_plans_keep_both_ends_whole() -> None:
    """Bug: a draft reads half an embedding, or heads are shared out unevenly, which transformers does not refuse."""
    config = tiny_model("llama").config
    plan = replicated_ends_plan(config, "target", 2)
    assert plan["model.layers.*.self_attn.q_proj"] == "colwise"
    assert plan["lm_head"] == plan["model.embed_tokens"] == "replicated_with_grad_allreduce"
    with pytest.raises(UserError, match="2 key heads, which 4 processes cannot share"):
        replicated_ends_plan(config, "target", 4)
    with pytest.raises(UserError, match="no tensor-parallel plan for opt"):
        replicated_ends_plan(tiny_model("opt").config, "target", 2)


def what_the_leader_does(target: str, data: str, out: str) -> None:
    """Runs in the first process of the test below: logits and texts, what drafts of the target's layers say, and a
    training."""
    sliced = load_target(PlacementConfig("tensor_parallel"), target, "cpu")
    with pytest.raises(UserError, match="leave placement.kind at single"):
        sliced.runner.first_layers(1)
    Path(out, "found").write_text(json.dumps(logits_and_texts(sliced)))
    _, *words = train_words(target, data, f"{out}/trained")
    train_here(parse_settings(DistillConfig, "", [str(word) for word in [*words, *SLICED]]))


def logits_and_texts(target: Target) -> dict[str, list[Any]]:
    """Logits of a text, and texts of ragged prompts in refilled rows, some of which are longer than one bucket."""
    tokens = [list(range(12, 12 + n)) for n in (28, 3, 150, 7, 40)]
    with torch.no_grad():
        logits = target.runner.model(torch.tensor(tokens[:1]), use_cache=False).logits
    sampling = SamplingParams(1.0, top_p=0.9)
    found = decode(target, None, tokens, max_new_tokens=16, sampling=sampling, rows=2)
    return {"logits": logits.tolist(), "texts": [output.output_ids for output in found]}


@pytest.mark.slow
def test_two_slices_compute_and_train_what_the_whole_does(
    world: World, data: Path, tmp_path: Path
) -> None:
    """Bug: heads or biases of a slice are counted twice or not at all, K/V of refilled rows differ, each process trains
    on its own rows or counts the loss twice, or a head reads a slice of the LM head."""
    words = "tests/decode/distributed/run_sliced.py", world.target, data, tmp_path
    done = worlds.fork(*words, processes=2)
    found = trained(done, tmp_path / "trained")
    computed = json.loads((tmp_path / "found").read_text())
    wanted = logits_and_texts(loading.load_target(str(world.target), "cpu"))
    assert computed["texts"] == wanted["texts"]
    logits = (torch.tensor(x["logits"]) for x in (computed, wanted))
    torch.testing.assert_close(*logits, atol=1e-5, rtol=0)
    facts = json.loads((tmp_path / "trained" / "draftsmith.json").read_text())
    assert facts["processes"] == 1  # that train
    one = tmp_path / "one"
    for name, value in trained(worlds.call(*train_words(world.target, data, one)), one).items():
        torch.testing.assert_close(found[name], value, atol=1e-6, rtol=0)


@pytest.mark.slow
def test_two_slices_are_measured_as_one_process_is(world: World, tmp_path: Path) -> None:
    """Bug: trees are moved in one process's cache alone, or references are computed by half a model."""
    methods = [
        {"name": "causal", "draft": str(world.draft)},
        {"name": "causal-tree", "draft": str(world.draft), "tree": {"width": 2, "nodes": 4}},
    ]
    words = [
        "eval/run.py", "--target", world.target, "--methods", json.dumps(methods), "--k", 2,
        "--tasks", json.dumps([{"name": "own", "path": str(world.prompts), "limit": 3}]),
        "--max_new_tokens", 12, "--phase_prompts", 0,
    ]  # fmt: skip
    two: Callable[..., Done] = partial(worlds.fork, processes=2)
    outputs = []
    for name, launch, more in (("one", worlds.call, []), ("two", two, SLICED)):
        out = tmp_path / name
        done = launch(*map(str, words), "--out", str(out), *more)
        assert done.code == 0, done.err
        lines = [json.loads(line) for line in (out / "outputs.jsonl").read_text().splitlines()]
        clocks = {"seconds": 0.0, "measured_seconds": 0.0, "untimed": ""}
        outputs.append([line | clocks for line in lines])
        report = json.loads((out / "report.json").read_text())
        greedy = [x["lossless"] for x in report["methods"] if not x["temperature"]]
        assert {x["greedy_identical"] for x in greedy} == {True}
    assert outputs[0] == outputs[1]


@pytest.mark.parametrize(
    ("room", "wanted"),
    [
        ({"cuda:0": 14, "cuda:1": 20, "cpu": 7}, "cuda:0 " + "cuda:1 " * 4 + "cpu disk disk"),
        ({"cpu": 10}, "disk " * 8),
        ({"cuda:0": 100, "cpu": 0}, "cuda:0 " * 8),
        ({"cuda:0": 16, "cpu": 100}, "cuda:0 " + "cpu " * 7),
    ],
)
def test_devices_are_filled_in_order(room: dict[str, int], wanted: str) -> None:
    """Bug: a device gets more than it may hold, or one after a full one is filled first. Layers take 5, the rest 9."""
    found = plan_layers(9 if len(room) > 1 else 10, [5, 5, 5, 5, 5, 4, 4, 4], room)
    assert found == wanted.split()


def test_no_room_for_embedding_and_head_is_an_error() -> None:
    with pytest.raises(UserError, match=r"cuda:0 holds the embedding .* raise it"):
        plan_layers(11, [1], {"cuda:0": 10, "cpu": 1000})


@pytest.mark.parametrize("kind", ["llama", "gpt2", "opt", "gemma3_text", "mixtral", "phi3"])
def test_each_weight_is_on_one_device(kind: str) -> None:
    """Bug: a norm or a position table of some architecture is in no place, or a module and a part of it in two."""
    model = tiny_model(kind)
    sizes = sum(p.nbytes for p in model.parameters())
    placed = device_map(model.config, torch.float32, {"cpu": int(sizes * 0.8)})
    names = [name for name, _ in [*model.named_parameters(), *model.named_buffers()]]
    assert all(sum(name.startswith(f"{part}.") for part in placed) == 1 for name in names)
    on_disk = [part for part, device in placed.items() if device == "disk"]
    assert on_disk
    assert all(part.rpartition(".")[2].isdigit() for part in on_disk)  # layers alone
