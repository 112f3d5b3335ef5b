"""FSDP2 and DeepSpeed: what they cannot train, and the whole draft where every process holds a piece of it."""

from collections.abc import Callable

import torch
from accelerate import Accelerator
from accelerate.utils import DistributedType
from torch.distributed.fsdp import MixedPrecisionPolicy

from decode.common.errors import UserError
from train.families.base import TrainableDraft
from train.trainer.loop import LoopConfig


def check(accelerator: Accelerator, family: str, loop: LoopConfig) -> None:
    """UserError for what this kind of parallelism would train wrongly or not at all."""
    kind = accelerator.distributed_type
    if kind == DistributedType.FSDP and not accelerator.is_fsdp2:
        raise UserError("FSDP 1 is not supported: set fsdp_config.fsdp_version to 2")
    if kind not in (DistributedType.FSDP, DistributedType.DEEPSPEED):
        return
    if loop.muon_lr > 0:
        raise UserError(
            f"Muon needs whole matrices and an optimiser of its own, {kind.value} has neither: set loop.muon_lr to 0 "
            "or use plain data parallelism (configs/accelerate/ddp8.yaml)"
        )
    if kind == DistributedType.FSDP and family == "medusa2":
        raise UserError(
            "medusa2 trains adapters inside the target, which FSDP leaves alone: use plain data parallelism "
            "(configs/accelerate/ddp8.yaml)"
        )


def configure_accelerator(accelerator: Accelerator, loop: LoopConfig) -> None:
    """Sets what a file under configs/accelerate/ cannot say."""
    if accelerator.is_fsdp2 and accelerator.mixed_precision == "bf16":
        # What the loss returns are sums over thousands of tokens; accelerate would have them rounded.
        accelerator.state.fsdp_plugin.mixed_precision_policy = MixedPrecisionPolicy(
            param_dtype=torch.bfloat16, reduce_dtype=torch.float32, output_dtype=torch.float32
        )
    if accelerator.distributed_type == DistributedType.DEEPSPEED:
        fields = accelerator.state.deepspeed_plugin.deepspeed_config
        fields["gradient_clipping"] = loop.clip  # it clips by itself
        fields["train_micro_batch_size_per_gpu"] = loop.micro_batch


def gather_full_draft(
    accelerator: Accelerator,
    model: torch.nn.Module,
    trainee: TrainableDraft,
    make: Callable[[], TrainableDraft],
) -> Callable[[], TrainableDraft]:
    """What gives the draft as it is, with all its weights on the main process; every process must call it.

    Under FSDP2 one process cannot decode alone, it would wait for the others' pieces. There the gathered weights go
    into a second draft, which `make` makes.
    """
    if not accelerator.is_fsdp2:
        return lambda: trainee
    twin = make() if accelerator.is_main_process else trainee

    def gathered() -> TrainableDraft:
        weights = accelerator.get_state_dict(model)
        if accelerator.is_main_process:
            twin.model.load_state_dict(weights)
        return twin

    return gathered
