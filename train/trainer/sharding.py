"""FSDP2 and DeepSpeed: what they cannot train, and gathering the whole draft where each rank holds a part of it."""

import os

import torch
from accelerate import Accelerator
from accelerate.utils import DistributedType
from torch.distributed.fsdp import MixedPrecisionPolicy, StateDictType
from torch.distributed.fsdp.wrap import transformer_auto_wrap_policy

from decode.common.errors import UserError
from train.families.base import TrainableDraft
from train.families.causal import TrainableCausal
from train.families.registry import family_settings
from train.settings.training import LoopConfig

NOT_THIS_STAGE = {
    0: "shards nothing: set zero_stage to 2, or use plain data parallelism (configs/accelerate/ddp8.yaml)",
    3: "would shard the frozen target too, which each process needs whole: set zero_stage to 2, or shard the draft "
    "with FSDP 2 (configs/accelerate/fsdp2_8.yaml)",
}
"""{stage of ZeRO: why not, and what instead}"""


def check(accelerator: Accelerator, family: str, loop: LoopConfig) -> None:
    """UserError if this kind of parallelism cannot train draft family `family` with these settings."""
    kind = accelerator.distributed_type
    scaled = accelerator.mixed_precision == "fp16"
    if kind == DistributedType.FSDP and not accelerator.is_fsdp2:
        raise UserError("FSDP 1 is not supported: set fsdp_config.fsdp_version to 2")
    if scaled and loop.muon_lr > 0:
        raise UserError(
            "mixed_precision fp16 scales for one optimiser: set loop.muon_lr to 0, or train in bf16"
        )
    if kind not in (DistributedType.FSDP, DistributedType.DEEPSPEED):
        return
    if scaled:
        raise UserError(
            f"mixed_precision fp16 is not supported under {kind.value}: train in bf16, or with plain data parallelism "
            "(configs/accelerate/ddp8.yaml)"
        )
    if kind == DistributedType.DEEPSPEED:
        zero = accelerator.state.deepspeed_plugin.deepspeed_config["zero_optimization"]
        if zero["stage"] not in (1, 2):
            raise UserError(f"DeepSpeed ZeRO stage {zero['stage']} {NOT_THIS_STAGE[zero['stage']]}")
    if loop.muon_lr > 0:
        raise UserError(
            f"Muon needs whole matrices and an optimiser of its own, {kind.value} has neither: set loop.muon_lr to 0 "
            "or use plain data parallelism (configs/accelerate/ddp8.yaml)"
        )
    if kind == DistributedType.FSDP and family_settings(family).trains_target:
        raise UserError(
            f"{family} trains adapters inside the target, which FSDP does not shard: use plain data parallelism "
            "(configs/accelerate/ddp8.yaml)"
        )


def configure_accelerator(accelerator: Accelerator, loop: LoopConfig) -> list[str]:
    """Sets the options that are not the launcher's choice; returns a line for each that it had set otherwise."""
    changed: list[str] = []
    if accelerator.is_fsdp2:
        plugin = accelerator.state.fsdp_plugin
        if accelerator.mixed_precision == "bf16":
            # The loss returns sums over thousands of tokens; accelerate would round them to bf16.
            plugin.mixed_precision_policy = MixedPrecisionPolicy(
                param_dtype=torch.bfloat16, reduce_dtype=torch.float32, output_dtype=torch.float32
            )
        if plugin.cpu_ram_efficient_loading:
            # transformers would load the target on the first process of a machine only
            plugin.cpu_ram_efficient_loading = False
            changed.append(
                "fsdp_cpu_ram_efficient_loading is off: each process needs the whole target"
            )
        os.environ["FSDP_CPU_RAM_EFFICIENT_LOADING"] = "false"  # what transformers reads
        if plugin.activation_checkpointing:
            plugin.activation_checkpointing = False
            changed.append(
                "fsdp_activation_checkpointing is off: --draft.activation_checkpointing true is this command's own"
            )
        if plugin.state_dict_type != StateDictType.SHARDED_STATE_DICT:
            plugin.state_dict_config = plugin.optim_state_dict_config = None
            plugin.set_state_dict_type("SHARDED_STATE_DICT")
            changed.append(
                "fsdp_state_dict_type is SHARDED_STATE_DICT: checkpoints are in pieces that any number of processes "
                "reads, and the draft is saved whole"
            )
    if accelerator.distributed_type == DistributedType.DEEPSPEED:
        fields = accelerator.state.deepspeed_plugin.deepspeed_config
        fields["gradient_clipping"] = loop.clip  # DeepSpeed clips by itself
        fields["train_micro_batch_size_per_gpu"] = loop.micro_batch
        fields["train_batch_size"] = "auto"
        fields["gradient_accumulation_steps"] = 1  # or it divides the loss, which is a step's mean
        if accelerator.mixed_precision == "bf16":
            changed.append(
                "DeepSpeed keeps the draft in bf16, and its fp32 weights in the optimiser: it is saved in bf16"
            )
    return changed


def choose_wrapping(accelerator: Accelerator, trainable: TrainableDraft) -> list[str]:
    """Sets which modules FSDP2 gathers one by one; returns a line if the launcher's policy is another.

    Those can be the layers of a draft that is a language model; heads reach into their layers.
    """
    plugin = accelerator.state.fsdp_plugin if accelerator.is_fsdp2 else None
    if plugin is None or plugin.auto_wrap_policy is None:
        return []
    layers: set[str] = set()
    if isinstance(trainable, TrainableCausal):
        names = {type(module).__name__ for module in trainable.lm.modules()}
        layers = names & set(trainable.lm._no_split_modules or ())
    if plugin.auto_wrap_policy is not transformer_auto_wrap_policy or not layers:
        plugin.auto_wrap_policy = None
        return ["fsdp_auto_wrap_policy is NO_WRAP: this draft is gathered as one"]
    asked = plugin.transformer_cls_names_to_wrap
    plugin.transformer_cls_names_to_wrap = sorted(layers)
    if asked is None or set(asked) == layers:
        return []
    return [f"fsdp_transformer_layer_cls_to_wrap is {','.join(sorted(layers))}, the draft's layers"]


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
