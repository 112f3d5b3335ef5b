"""configs/accelerate/two_nodes.yaml, rehearsed with two launchers on one machine: a node is killed, both go on."""

import contextlib
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import psutil
import pytest

from tests import worlds
from tests.train.test_distill_command import COMMAND, WEIGHTS, arguments, losses_of
from tests.worlds import PATIENCE, ROOT, Fork, World

pytestmark = pytest.mark.slow
CONFIG = "configs/accelerate/two_nodes.yaml"


@contextmanager
def node(rank: int, port: int, *words: object) -> Iterator[Fork]:
    """The launcher of one node, with one process of the training; all of it is gone when the block is left."""
    where = ["--num_processes", 2, "--machine_rank", rank, "--main_process_ip", "127.0.0.1"]
    command = ["--config_file", ROOT / CONFIG, *where, "--main_process_port", port]
    with worlds.forked(worlds.launcher(), *command, ROOT / COMMAND, *words) as [launcher]:
        try:
            yield launcher
        finally:
            kill(launcher)


def kill(node: Fork) -> None:
    """Ends the launcher and its workers, which have process groups of their own, by SIGKILL."""
    with contextlib.suppress(psutil.NoSuchProcess):
        launcher = psutil.Process(node.process.pid)
        for process in [launcher, *launcher.children(recursive=True)]:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()


def await_true(reached: Callable[[], bool], nodes: list[Fork]) -> None:
    end = time.monotonic() + PATIENCE
    while not reached():
        assert all(process.poll() is None for process in nodes), "a node has ended too early"
        assert time.monotonic() < end
        time.sleep(0.01)


def test_after_a_killed_node_both_go_on_from_the_last_checkpoint(
    world: World, data: Path, tmp_path: Path
) -> None:
    """Bug: nodes train apart, the other one waits for ever, or the second start trains other batches."""
    whole, out = tmp_path / "whole", tmp_path / "out"
    worlds.fork(COMMAND, *arguments(world, data, whole), processes=2).ok()

    words = arguments(world, data, out)
    with ExitStack() as stack:
        port = worlds._free_port()
        nodes = [stack.enter_context(node(rank, port, *words)) for rank in (0, 1)]
        await_true((out / "checkpoints" / "latest").is_file, nodes)
        kill(nodes[1])
        assert nodes[0].wait() != 0  # it does not wait for the lost one
    assert not (out / WEIGHTS).exists()

    with ExitStack() as stack:
        port = worlds._free_port()
        nodes = [stack.enter_context(node(rank, port, *words)) for rank in (0, 1)]
        ends = [launcher.end() for launcher in nodes]
        first, second = (end.out + end.err for end in ends)
        assert [end.code for end in ends] == [0, 0], first + second
    assert "2 process(es)" in first
    assert "from step 0" not in first
    assert losses_of(out) == losses_of(whole)
    assert (out / WEIGHTS).read_bytes() == (whole / WEIGHTS).read_bytes()
