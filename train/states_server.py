"""Starts a vLLM server that writes a target's hidden states, from which train/distill.py trains without the target.

    python train/states_server.py --target T --layers '[2, 15, 27, 30]' --folder /dev/shm/states --vllm_python P
    accelerate launch train/distill.py --target T --states.url http://localhost:8000/v1 \\
      --states.folder /dev/shm/states --draft.family eagle3 --loop.eval_every 0 --out DIR

layers: the layers whose inputs the draft reads, and the number of layers, for the final state; train/distill.py names
them if they differ. Each text's states are in the folder until they are read. Ctrl-C ends the server.
"""

import json
import os
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated

if not __package__:
    sys.path[0] = str(Path(__file__).resolve().parents[1])

from decode.common.command import run_command
from decode.common.errors import UserError
from decode.common.files import write_atomically
from decode.common.ranges import CountOrZero, at_least


@dataclass
class StatesServer:
    target: str = "assets/target"
    """The target: a folder or a Hub name."""
    layers: list[CountOrZero] = field(default_factory=lambda: [2, 6, 9, 12])
    """The inputs of these layers are written; the number of layers stands for the state behind the last one."""
    folder: str = "/dev/shm/states"
    """Where the states are written: a folder that the training sees too, in memory (/dev/shm) or on a fast disk."""
    revision: str | None = None
    """Commit, tag or branch of a Hub target."""
    dtype: str = "auto"
    """vLLM's --dtype."""
    vllm_python: str = ""
    """The interpreter of the environment with vLLM; empty: $VLLM_PYTHON, else .venv-vllm/bin/python."""
    host: str = "127.0.0.1"
    """Whoever reaches the server can make it fill the folder."""
    port: Annotated[int, at_least(1, 65_535)] = 8000
    vllm_args: list[str] = field(default_factory=list)
    """Further arguments of the server, such as '[--tensor-parallel-size, "4"]'."""


def main(s: StatesServer) -> None:
    from decode.serving.running import vllm_client  # these load torch: --help does without
    from train.teacher.served import LAYERS_FILE

    if not s.layers or s.layers != sorted(set(s.layers)) or s.layers[0] < 0:
        raise UserError(f"layers {s.layers}: give each once, in rising order")
    folder = Path(s.folder)
    folder.mkdir(parents=True, exist_ok=True)
    if any(file.name != LAYERS_FILE for file in folder.iterdir()):
        raise UserError(f"folder {s.folder} holds other files: name an empty one")
    write_atomically(folder / LAYERS_FILE, json.dumps({"layers": s.layers}))
    command = vllm_client.server_command(
        s.vllm_python, s.target, s.revision, s.dtype, s.host, s.port
    )
    has_cuda = Path("/dev/nvidia0").exists()
    command += [*vllm_client.states_arguments(s.layers, folder, has_cuda), *s.vllm_args]
    os.execve(command[0], command, vllm_client.server_environment())


if __name__ == "__main__":
    run_command(main, StatesServer, __doc__)
