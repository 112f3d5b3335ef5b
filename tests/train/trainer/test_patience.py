"""Processes that work alone for longer than a process group waits by default: two under gloo, with a default of 3 s."""

from pathlib import Path

import pytest

from tests import worlds

WORK = """
import datetime, sys, time
import torch.distributed.distributed_c10d as c10d
short = datetime.timedelta(seconds=3)
c10d.default_pg_timeout = short
c10d._get_default_timeout = lambda backend: short
from accelerate import PartialState
from train.trainer import collective
state = collective.join_processes() if {ours} else PartialState(cpu=True)
with collective.raise_on_all_ranks(state):
    time.sleep(8 * state.process_index)  # its share of the prompts
# One write a line: two processes share the pipe, and unbuffered print writes its parts alone.
sys.stdout.write(f"rank {state.process_index} reached the end\\n")
sys.stdout.flush()
"""


@pytest.mark.slow
@pytest.mark.parametrize("ours", [True, False])
def test_a_process_waits_for_another_that_works_alone(ours: bool, tmp_path: Path) -> None:
    """Catches a gather at the end of a long sampling that dies since the other process has not ended yet. Planted: a
    group with torch's own time-out."""
    script = tmp_path / "work.py"
    script.write_text(WORK.replace("{ours}", str(ours)))
    env = {"ACCELERATE_USE_CPU": "true"}
    done = worlds.run(str(script), env=env, processes=2, timeout=200)
    ends = {f"rank {rank} reached the end" for rank in range(2)}
    assert (done.code == 0) == ours
    assert (ends <= set(done.out.splitlines())) == ours
