"""What the launcher was told about a training: read here, and agreed with the command's settings.

`accelerate launch` passes on what it was told as environment variables and as DeepSpeed's file. Its own command line is
read as well, because it passes some options on under DeepSpeed only. A setting of the command at its default gives way
to the launcher; two different values are refused. `no` and 1 are also what the launcher passes on when it was told
nothing, and files of `accelerate config` always hold them: they count as said only on its command line.
"""

import math
import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from pathlib import Path
from typing import Any, TypeVar, cast

import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState
from accelerate.utils import GradientAccumulationPlugin, set_seed, str_to_bool
from rich.console import Console
from torch.utils._triton import has_triton

from decode.common import files, machine
from decode.common.errors import UserError
from decode.devices.choice import has_bfloat16
from train.data import batching
from train.settings.training import LoopConfig, Precision
from train.trainer import checkpoint, collective, on_policy, sharding
from train.trainer.checkpoint import LaunchKind
from train.trainer.settings import DistillConfig
from train.trainer.tracking import check_tracker

T = TypeVar("T")

OPTIONS = ("mixed_precision", "gradient_accumulation_steps", "gradient_clipping")
"""Options of the launcher's command line that say how to train."""
UNSUPPORTED = {
    "ACCELERATE_USE_MEGATRON_LM": "Megatron-LM",
    "ACCELERATE_USE_PARALLELISM_CONFIG": "a parallelism_config",
}
"""{variable of the launcher: what it asks for} that no training follows."""
SHARDED = {"ACCELERATE_USE_FSDP": "FSDP", "ACCELERATE_USE_DEEPSPEED": "DEEPSPEED"}
"""{variable of the launcher: the parallelism that it asks for}"""


@dataclass
class Claims:
    """What the launcher asks for: {who says it: the value}, empty where it says nothing."""

    precision: dict[str, str] = field(default_factory=dict)
    switched_off: dict[str, str] = field(default_factory=dict)
    """{precision that DeepSpeed's file switches off: who says it}"""
    accumulation: dict[str, int] = field(default_factory=dict)
    """Micro-batches of a step."""
    micro_batch: dict[str, int] = field(default_factory=dict)
    """Samples of a micro-batch."""
    batch_size: dict[str, int] = field(default_factory=dict)
    """Samples of a step, over all processes."""
    clip: dict[str, float] = field(default_factory=dict)


def launcher_options(words: Sequence[str], arguments: Sequence[str]) -> dict[str, str]:
    """{name: text} of the OPTIONS that `words`, the command line of `accelerate launch`, has; {} for another program.

    The line ends with `arguments`, those of the launched command.
    """
    own = machine.launcher_words(words, arguments)
    if not any("accelerate" in word for word in own):
        return {}
    parts = [part for word in own for part in word.split("=", 1)]
    said = {name[2:].replace("-", "_"): text for name, text in pairwise(parts) if name[:2] == "--"}
    return {name: text for name, text in said.items() if name in OPTIONS}


def read_claims(variables: Mapping[str, str], options: Mapping[str, str]) -> Claims:
    """What the launcher asks for in its environment `variables` and the `options` of its command line.

    UserError for what no training follows, and for a file of DeepSpeed that cannot be read or leaves no choice.
    """
    for name, meaning in UNSUPPORTED.items():
        if str_to_bool(variables.get(name, "false")):
            raise UserError(
                f"the launcher asks for {meaning}, which no training follows: use data parallelism, FSDP 2 or ZeRO-2 "
                "(configs/accelerate/)"
            )
    claims, told = Claims(), {name: f"the launcher's {name}" for name in OPTIONS}
    precision = options.get("mixed_precision", variables.get("ACCELERATE_MIXED_PRECISION", "no"))
    if precision.lower() != "no" or "mixed_precision" in options:
        claims.precision[told["mixed_precision"]] = precision.lower()
    passed = {
        "gradient_accumulation_steps": variables.get("ACCELERATE_GRADIENT_ACCUMULATION_STEPS", "1"),
        "gradient_clipping": variables.get("ACCELERATE_GRADIENT_CLIPPING", "auto"),
    }
    steps, clip = [options.get(name, text) for name, text in passed.items()]
    if steps != "auto" and (steps != "1" or "gradient_accumulation_steps" in options):
        claims.accumulation[told["gradient_accumulation_steps"]] = int(steps)
    if clip != "auto":
        claims.clip[told["gradient_clipping"]] = float(clip)
    path = variables.get("ACCELERATE_DEEPSPEED_CONFIG_FILE", "none")
    if str_to_bool(variables.get("ACCELERATE_USE_DEEPSPEED", "false")) and path != "none":
        add_deepspeed_file(claims, path, files.read_json_object(path, "DeepSpeed's configuration"))
    return claims


def add_deepspeed_file(claims: Claims, path: str, content: Mapping[str, Any]) -> None:
    """Adds what DeepSpeed's file in `path` asks for; "auto" leaves the choice to the command."""
    for section in ("optimizer", "scheduler"):
        if section in content:
            raise UserError(
                f"{path} has a section {section!r}, which is this command's (loop.lr, loop.warmup, loop.weight_decay): "
                "remove it"
            )
    for name in ("fp16", "bf16"):
        switch = content.get(name)
        enabled = switch.get("enabled") if isinstance(switch, dict) else None
        if enabled is True:
            claims.precision[f"{name} in {path}"] = name
        elif enabled is False:
            claims.switched_off[name] = f"{name} in {path}"
    wanted: dict[str, dict[str, Any]] = {
        "gradient_accumulation_steps": claims.accumulation,
        "train_micro_batch_size_per_gpu": claims.micro_batch,
        "train_batch_size": claims.batch_size,
        "gradient_clipping": claims.clip,
    }
    for name, values in wanted.items():
        value = content.get(name, "auto")
        if value not in ("auto", None) and (name, value) != ("gradient_accumulation_steps", 1):
            values[f"{name} in {path}"] = value


def agree(claims: Mapping[str, T]) -> tuple[str, T] | None:
    """(who says it, the value that all say); None if nobody says anything. UserError if two say different things."""
    said = list(claims.items())
    for who, value in said[1:]:
        if value != said[0][1]:
            raise UserError(
                f"{said[0][0]} is {said[0][1]} and {who} is {value}: leave one of them out, or make them equal"
            )
    return said[0] if said else None


def settle(name: str, ours: T, default: T, claims: Mapping[str, T]) -> T:
    """The value in force of setting `name`; `ours` says nothing if it is the default. UserError as from `agree`."""
    said = agree({**({f"{name} of this command": ours} if ours != default else {}), **claims})
    return said[1] if said else ours


def settle_loop(s: LoopConfig, claims: Claims, processes: int, default: LoopConfig) -> LoopConfig:
    """The loop's settings in force; accumulation over N micro-batches gives `micro_batch`.

    UserError if two say different things, and for a batch that cannot be split evenly.
    """
    batch_size = settle("loop.batch_size", s.batch_size, default.batch_size, claims.batch_size)
    rows = len(batching.rank_slice(0, processes, range(batch_size)))
    micro = settle("loop.micro_batch", s.micro_batch, default.micro_batch, claims.micro_batch)
    accumulation = agree(claims.accumulation)
    if accumulation:
        who, steps = accumulation
        if s.micro_batch == default.micro_batch and not claims.micro_batch and rows % steps == 0:
            micro = rows // steps
        found = math.ceil(rows / micro)
        if found != steps:
            raise UserError(
                f"{who} is {steps}, and a process has {rows} samples a step in {found} micro-batches (loop.batch_size "
                f"{batch_size}, loop.micro_batch {micro}): leave out one of them, or make them fit"
            )
    clip = settle("loop.clip", s.clip, default.clip, claims.clip)
    return replace(s, batch_size=batch_size, micro_batch=micro, clip=clip)


def settle_precision(
    ours: Precision, claims: Claims, device_type: str, bf16_supported: bool
) -> Precision:
    """Accelerate's name for the precision in force of the forward pass: no, bf16 or fp16.

    UserError if two say different things, and for a precision that this device cannot train in.
    """
    said: str = settle("mixed_precision", str(ours), "auto", claims.precision)
    off = claims.switched_off
    if said == "auto":
        fastest: Precision = "bf16" if bf16_supported else "fp16"
        return fastest if device_type == "cuda" and fastest not in off else "no"
    if said in off:
        raise UserError(
            f"mixed_precision is {said}, and {off[said]} switches it off: make them agree"
        )
    if said not in ("no", "bf16", "fp16"):
        raise UserError(f"mixed_precision {said} is not supported: choose bf16, fp16 or no")
    if said == "fp16" and device_type == "cpu":
        raise UserError(
            "mixed_precision fp16 needs a gradient scaler, which Accelerate has on GPUs only: choose bf16 or no"
        )
    if said == "bf16" and device_type == "cuda" and not bf16_supported:
        raise UserError("mixed_precision bf16: this GPU does not have it, choose fp16 or no")
    return cast(Precision, said)


def check_parallelism(variables: Mapping[str, str], started: str) -> None:
    """UserError if the launcher asks for sharding and Accelerate `started` something else, as it does on CPUs."""
    for name, wanted in SHARDED.items():
        if str_to_bool(variables.get(name, "false")) and started != wanted:
            raise UserError(
                f"the launcher asks for {wanted}, which Accelerate has on GPUs only, and started {started}: launch "
                "without it (configs/accelerate/ddp8.yaml)"
            )


# ---- the settings in force ----


def follow_launcher(s: DistillConfig, processes: int, device_type: str) -> DistillConfig:
    """The settings in force, where the launcher also says how to train. UserError if it says something else."""
    options = launcher_options(machine.parent_words(), sys.argv[1:])
    claims = read_claims(os.environ, options)
    bf16 = device_type == "cuda" and has_bfloat16()
    return replace(
        s,
        mixed_precision=settle_precision(s.mixed_precision, claims, device_type, bf16),
        loop=settle_loop(s.loop, claims, processes, s.defaults(()).loop),
    )


def init_accelerator(s: DistillConfig) -> tuple[DistillConfig, Accelerator]:
    """(the settings in force, the accelerator of this process).

    UserError for settings that cannot be trained, also by this parallelism, and for those that contradict the launcher.
    """
    state = collective.join_processes()
    with collective.raise_on_all_ranks(state), collective.one_line_errors():
        s = follow_launcher(s, state.num_processes, state.device.type)
    AcceleratorState._reset_state()  # an earlier training of this process may have had another precision
    with collective.one_line_errors():
        # The loss is divided by the tokens of the whole step, so a micro-batch is not to be divided once more.
        whole = GradientAccumulationPlugin(num_steps=1)
        accelerator = Accelerator(
            mixed_precision=s.mixed_precision, gradient_accumulation_plugin=whole
        )
    set_seed(s.seed)
    with collective.raise_on_all_ranks(accelerator):
        check_parallelism(os.environ, accelerator.distributed_type.value)
        if accelerator.is_main_process:
            for note in check_tracker(s.tracker, s.wandb, s.project):
                sys.stderr.write(f"{note}\n")
        sharding.check(accelerator, s.draft.family, s.loop)
        on_policy.check_supported(s.on_policy, s.draft.family, s.features, accelerator.is_fsdp2)
        check_draft(s, state.device.type)
        if not s.overwrite:
            checkpoint.check_launch(Path(s.out), LaunchKind.of(accelerator))
    console = Console(stderr=True, quiet=not accelerator.is_main_process)
    for line in sharding.configure_accelerator(accelerator, s.loop):
        console.print(line)
    return s, accelerator


def attention_in_force(asked: str, device_type: str) -> str:
    """How training attends: for `auto` by flex_attention on a GPU that its kernels are made for (compute capability 8.0
    or newer, where torch has Triton), else as `asked`."""
    if asked != "auto" or device_type != "cuda" or not has_triton():
        return asked
    return "flex" if torch.cuda.get_device_capability() >= (8, 0) else asked


def in_force(s: DistillConfig, accelerator: Accelerator) -> str:
    """The line that says how the draft is trained, by settings and launcher."""
    rows = s.loop.batch_size // accelerator.num_processes
    parts, size = math.ceil(rows / s.loop.micro_batch), min(rows, s.loop.micro_batch)
    kernels = ""
    if accelerator.device.type == "cuda":
        attends = attention_in_force(s.draft.attention, "cuda")
        kernels = f", attention {attends}{', AdamW fused' if s.loop.fused_adamw else ''}"
    return (
        f"{LaunchKind.of(accelerator)}, {accelerator.device}, loop.clip {s.loop.clip:g}, {s.loop.batch_size} samples a "
        f"step ({parts} micro-batch(es) of {size} in a process){kernels}"
    )


def check_draft(s: DistillConfig, device_type: str) -> None:
    """UserError for settings that this family of drafts cannot be trained with, or not on this device."""
    needs = {
        "loop.eval_every measures acceptance with the target": s.loop.eval_every > 0,
        "on_policy.share lets the target read the draft's texts": s.on_policy.share > 0,
        "dry_run tries the target": s.dry_run,
        f"draft.family {s.draft.family} trains the target": s.draft.trains_target,
    }
    for reason, applies in needs.items():
        if applies and s.states.url:
            raise UserError(
                f"states.url: the target's layers are not loaded, and {reason}: set it to 0 or another, or drop "
                "states.url"
            )
    if s.placement.kind != "single" and s.draft.trains_target:
        raise UserError(
            f"placement.kind {s.placement.kind}: draft.family {s.draft.family} trains the target, which must be on "
            "one device: leave it at single, or choose another family"
        )
    if s.draft.attention == "flex" and device_type != "cuda":
        raise UserError(
            f"draft.attention flex needs CUDA, and this is {device_type}: choose blockwise, in as little memory"
        )
