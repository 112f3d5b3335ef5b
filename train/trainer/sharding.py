"""FSDP2 and DeepSpeed: what they cannot train, and gathering the whole draft where each rank holds a part of it."""

import torch
from accelerate import Accelerator
from accelerate.utils import DistributedType
from torch.distributed.fsdp import MixedPrecisionPolicy

from decode.common.errors import UserError
from train.families.base import TrainableDraft
from train.families.registry import family_trainer
from train.trainer.loop import LoopConfig


def check(accelerator: Accelerator, family: str, loop: LoopConfig) -> None:
    """UserError if this kind of parallelism cannot train draft family `family` with these settings."""
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
    if kind == DistributedType.FSDP and family_trainer(family).trains_target:
        raise UserError(
            f"{family} trains adapters inside the target, which FSDP does not shard: use plain data parallelism "
            "(configs/accelerate/ddp8.yaml)"
        )


def configure_accelerator(accelerator: Accelerator, loop: LoopConfig) -> None:
    """Sets options that a file under configs/accelerate/ cannot hold."""
    if accelerator.is_fsdp2 and accelerator.mixed_precision == "bf16":
        # The loss returns sums over thousands of tokens; accelerate would round them to bf16.
        accelerator.state.fsdp_plugin.mixed_precision_policy = MixedPrecisionPolicy(
            param_dtype=torch.bfloat16, reduce_dtype=torch.float32, output_dtype=torch.float32
        )
    if accelerator.distributed_type == DistributedType.DEEPSPEED:
        fields = accelerator.state.deepspeed_plugin.deepspeed_config
        fields["gradient_clipping"] = loop.clip  # DeepSpeed clips by itself
        fields["train_micro_batch_size_per_gpu"] = loop.micro_batch


def gather_full_draft(
    accelerator: Accelerator,
    model: torch.nn.Module,
    trainable: TrainableDraft,
    full_copy: TrainableDraft | None,
) -> TrainableDraft:
    """The draft with all its current weights on the main process; every rank must call this.

    Under FSDP2 one rank cannot decode alone, because it would wait for the parts of the others. There the weights of
    the wrapped `model` are gathered into `full_copy`, a second draft that only the main process has.
    """
    if not accelerator.is_fsdp2:
        return trainable
    weights = accelerator.get_state_dict(model)
    if full_copy is None:
        return trainable
    full_copy.model.load_state_dict(weights)
    return full_copy
