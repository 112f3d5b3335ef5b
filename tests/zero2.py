"""tests/zero2.py COMMAND …: it under DeepSpeed ZeRO-2 on CPUs, which accelerate starts on GPUs only."""

import os
import runpy
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
from accelerate.state import PartialState
from accelerate.utils import DistributedType

# What accelerate's launcher makes of configs/accelerate/deepspeed_zero2.yaml, where it said nothing else.
os.environ |= {
    "ACCELERATE_USE_DEEPSPEED": "true",
    "ACCELERATE_DEEPSPEED_ZERO_STAGE": "2",
    "ACCELERATE_GRADIENT_ACCUMULATION_STEPS": "1",
    "ACCELERATE_DEEPSPEED_OFFLOAD_OPTIMIZER_DEVICE": "none",
    "ACCELERATE_DEEPSPEED_OFFLOAD_PARAM_DEVICE": "none",
    "ACCELERATE_DEEPSPEED_ZERO3_INIT": "false",
    **os.environ,
}


def on_cpus(state: PartialState) -> None:
    state.device = torch.device("cpu")


PartialState._prepare_backend = lambda *_, **__: ("gloo", DistributedType.MULTI_GPU)
PartialState.set_device = on_cpus
PartialState.default_device = property(lambda _: torch.device("cpu"))
del sys.argv[0]
runpy.run_path(sys.argv[0], run_name="__main__")
