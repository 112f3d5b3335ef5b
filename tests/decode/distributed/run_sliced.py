"""python run_sliced.py TARGET OUT, in several processes: the first calls what_the_leader_computes of test_placement."""

import os
import sys
from functools import partial
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[3]))

from decode.common.target_settings import PlacementConfig
from decode.distributed.placement import run_placed
from tests.decode.distributed.test_placement import what_the_leader_computes

run_placed(PlacementConfig("tensor_parallel"), partial(what_the_leader_computes, *sys.argv[1:]))
os._exit(0)  # as the commands do: torch's threads may abort Python's own end
