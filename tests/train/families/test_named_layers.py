"""Drafts of some layers of a small LM (draft.layers): which ones, by which start, and what cannot be kept."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from decode.model.loading import load_model, load_target
from tests import worlds
from tests.train.test_distill_command import WEIGHTS, distill, facts_of
from tests.worlds import Done, World
from train.families.settings.causal import CausalSettings
from train.planning.shape_run import ShapeRun
from train.trainer.settings import DistillConfig

UP = "model.layers.{}.mlp.up_proj.weight"


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> World:
    return worlds.build(tmp_path_factory.mktemp("world"), layers=4)


@pytest.fixture(scope="module")
def data(world: World, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return worlds.sampled(world, tmp_path_factory.mktemp("data"), "--max_new_tokens", 40)


@pytest.fixture
def train(world: World, data: Path, tmp_path: Path) -> Callable[..., Done]:
    return lambda *more: distill(world, data, tmp_path / "out", *more)


def test_layers_named_are_those_of_the_init(
    world: World, train: Callable[..., Done], tmp_path: Path
) -> None:
    train("--draft.layers", "[1, 2]", "--loop.lr", 1e-30).ok()
    own, init = load_file(tmp_path / "out" / WEIGHTS), load_file(world.draft / WEIGHTS)
    for new, old in ((0, 1), (1, 2)):
        assert torch.equal(own[UP.format(new)], init[UP.format(old)])
    assert torch.equal(own["lm_head.weight"], init["lm_head.weight"])


def test_adapters_are_those_of_the_cut_model(
    world: World, train: Callable[..., Done], tmp_path: Path
) -> None:
    """Catches adapters on layers that go, and an adapter folder that names the whole model as its base."""
    train("--draft.layers", "[0, 2]", "--draft.lora_rank", 2).ok()
    assert not (tmp_path / "out" / "adapter").exists()
    own, init = load_file(tmp_path / "out" / WEIGHTS), load_file(world.draft / WEIGHTS)
    assert not any("lora" in name for name in own)
    names = [n for n in init if ".layers." not in n]
    assert all(torch.equal(own[n], init[n]) for n in names)
    assert not torch.equal(own[UP.format(1)], init[UP.format(2)])
    close = (own[UP.format(1)] - init[UP.format(2)]).norm()
    assert float(close) < float((own[UP.format(1)] - init[UP.format(1)]).norm())


def test_pard_drafts_are_cut_too(train: Callable[..., Done], tmp_path: Path) -> None:
    train("--draft.layers", "[0, 2]", "--draft.family", "pard", "--draft.block", 3).ok()
    assert facts_of(tmp_path / "out")["family"] == "pard"
    assert UP.format(2) not in load_file(tmp_path / "out" / WEIGHTS)


@pytest.mark.parametrize(
    ("wrong", "named"),
    [
        (["--draft.init", "", "--draft.layers", "[0]", "--draft.init_config", "{n: 3}"], "give one of"),
        (["--draft.layers", "[4]"], "[4]: name layers of 0 … 3"),
        (["--draft.layers", "[2, 1]"], "[2, 1]: name layers"),
    ],
)  # fmt: skip
def test_what_cannot_be_kept_is_one_line(
    train: Callable[..., Done], tmp_path: Path, wrong: list[Any], named: str
) -> None:
    """Catches a traceback, or a folder that is claimed first."""
    assert named in train(*wrong).error()
    assert not (tmp_path / "out").exists()


def test_the_estimate_counts_the_layers_that_stay(world: World) -> None:
    """Catches a dry run that counts the whole init."""
    target = load_target(str(world.target), "cpu").runner.config
    whole, named = (
        ShapeRun(DistillConfig(draft=CausalSettings(init=str(world.draft), layers=x)), target)
        for x in ([], [0, 2])
    )
    body = load_model(str(world.draft), "draft", "cpu", "float32").get_decoder().layers
    half = sum(p.numel() for layer in (body[1], body[3]) for p in layer.parameters())
    assert named.trained == whole.trained - half
