"""Every test starts from the same seeds, on one thread; so do hypothesis's examples. The fast suite: durations.py."""

import gc
import os
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import settings

from tests import durations

# Modules are imported while tests are collected, and stay: the collector need not look at them, now or later.
gc.disable()
torch.set_num_threads(1)
examples = 100 if os.environ.get("CI") == "true" else 25
settings.register_profile("repeatable", deadline=None, derandomize=True, max_examples=examples)
settings.load_profile("repeatable")


@pytest.fixture(autouse=True)
def _seeded() -> None:
    random.seed(0)
    np.random.seed(0)
    torch.manual_seed(0)


@pytest.fixture(scope="session", autouse=True)
def _quiet_machine() -> Iterator[None]:
    """Tests run beside others, which are no part of what they measure; tests of that take the real functions."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("eval.benchmark.turns.busy_reason", lambda *_: "")
        patch.setattr("eval.benchmark.turns.all_busy", lambda _: False)
        yield


def pytest_collection_finish() -> None:
    gc.freeze()
    gc.enable()


# A tiny target and its samples, for whoever needs no other ones and changes nothing in them. Imports are late: most
# files need none of this.


@pytest.fixture(scope="session")
def world(tmp_path_factory: pytest.TempPathFactory) -> Any:
    from tests import worlds

    return worlds.build(tmp_path_factory.mktemp("world"))


@pytest.fixture(scope="session")
def data(world: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Samples whose answers have between 1 and 40 tokens, in several shards."""
    from tests import worlds

    own = ("--max_new_tokens", 40, "--shard_rows", 16)
    return worlds.sampled(world, tmp_path_factory.mktemp("data"), *own)


@pytest.fixture(scope="session")
def target(world: Any) -> Any:
    from decode.model.loading import load_target

    return load_target(str(world.target), "cpu")


@pytest.hookimpl(tryfirst=True)  # before -m chooses
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    names_a_file = any(".py" in word for word in config.args)
    if not (names_a_file or config.pluginmanager.has_plugin("tests.durations")):
        durations.leave_out_cases(items)
