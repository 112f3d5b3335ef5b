"""Every test starts from the same seeds, on one thread; so do hypothesis's examples. The fast suite: durations.py."""

import os
import random

import numpy as np
import pytest
import torch
from hypothesis import settings

from tests import durations

torch.set_num_threads(1)
examples = 100 if os.environ.get("CI") == "true" else 25
settings.register_profile("repeatable", deadline=None, derandomize=True, max_examples=examples)
settings.load_profile("repeatable")


@pytest.fixture(autouse=True)
def _seeded() -> None:
    random.seed(0)
    np.random.seed(0)
    torch.manual_seed(0)


@pytest.hookimpl(tryfirst=True)  # before -m chooses
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    names_a_file = any(".py" in word for word in config.args)
    if not (names_a_file or config.pluginmanager.has_plugin("tests.durations")):
        durations.leave_out_cases(items)
