"""python run_sliced.py TARGET DATA OUT, in several processes: the first calls test_placement.what_the_leader_does."""

import os
import sys
from functools import partial
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[3]))

from decode.common.target_settings import PlacementConfig
from decode.distributed.placement import run_placed
from tests.decode.distributed.test_placement import what_the_leader_does

run_placed(PlacementConfig("tensor_parallel"), partial(what_the_leader_does, *sys.argv[1:]))
os._exit(0)  # as the commands do: torch's threads may abort Python's own end
