"""python tests/fsdp2.py COMMAND …: the command under FSDP2 on CPUs, which accelerate by itself turns into DDP.

Under `accelerate launch` with a file for FSDP it is as that file says.
"""

import os
import runpy
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from accelerate.state import AcceleratorState, PartialState
from accelerate.utils import DistributedType, FullyShardedDataParallelPlugin

made = AcceleratorState.__init__


def sharded(self: AcceleratorState, *args: Any, **kwargs: Any) -> None:
    """As accelerate sets itself up on GPUs with configs/accelerate/fsdp2_8.yaml."""
    made(self, *args, **kwargs)
    if self.distributed_type == DistributedType.MULTI_CPU:
        self.distributed_type = DistributedType.FSDP
        self.fsdp_plugin = FullyShardedDataParallelPlugin(
            fsdp_version=2, auto_wrap_policy="no_wrap", reshard_after_forward=False,
            state_dict_type="SHARDED_STATE_DICT",
        )  # fmt: skip
        if "FSDP_VERSION" in os.environ:
            self.fsdp_plugin = FullyShardedDataParallelPlugin()
        if self._mixed_precision != "no":
            self.fsdp_plugin.set_mixed_precision(self._mixed_precision)
        # accelerate reads it at each use of its state: the plugin is made once
        PartialState._shared_state["distributed_type"] = self.distributed_type


AcceleratorState.__init__ = sharded
del sys.argv[0]
runpy.run_path(sys.argv[0], run_name="__main__")
