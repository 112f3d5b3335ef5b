"""Every test starts from the same seeds, on one thread; so do hypothesis's examples."""

import os
import random

import numpy as np
import pytest
import torch
from hypothesis import settings

torch.set_num_threads(1)
examples = 100 if os.environ.get("CI") == "true" else 25
settings.register_profile("repeatable", deadline=None, derandomize=True, max_examples=examples)
settings.load_profile("repeatable")


@pytest.fixture(autouse=True)
def _seeded() -> None:
    random.seed(0)
    np.random.seed(0)
    torch.manual_seed(0)
