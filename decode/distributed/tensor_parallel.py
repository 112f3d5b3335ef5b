"""Tensor parallelism: the processes of one launch hold a slice of each layer and compute every pass together.

The plan is transformers' own for the architecture, but for the embedding and the LM head: each process has them whole.
So drafts and losses read them as those of any target, and only the passes of the layers need all processes.
"""

import os
import pickle
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from transformers import AutoModelForCausalLM
from transformers.distributed import DistributedConfig

from decode.common import machine
from decode.common.errors import UserError

LONGEST_SILENCE = timedelta(days=30)
"""How long followers wait for the next message: the leader may do other things for hours."""


class LeaderGoneError(UserError):
    """The first process of the launch has ended without a word."""


@dataclass
class Launch:
    """The processes that hold the target together: `LAUNCH`, the only instance."""

    messages: dist.ProcessGroup | None = None
    """The group over which the leader tells the others what to do; None: this is a run of one process."""
    senders: list[Any] = field(default_factory=list)
    """Of the leader: what tells the others about passes, for each model in the order in which they were loaded."""


LAUNCH = Launch()


def join_launch() -> int:
    """Joins the processes that the launcher started; returns the number of this one, 0 for the leader. UserError unless
    there are several, all of which may be the target's."""
    size = machine.process_count()
    if size < 2:
        raise UserError(
            "placement.kind tensor_parallel needs a process for each part: start the command with "
            "torchrun --nproc-per-node N, or accelerate launch --num_processes N"
        )
    for kind in ("FSDP", "DeepSpeed"):
        if os.environ.get(f"ACCELERATE_USE_{kind.upper()}", "false").lower() in ("1", "true"):
            raise UserError(
                f"placement.kind tensor_parallel: all processes belong to the target, and {kind} would shard the draft "
                "over the same ones: launch without it"
            )
    if torch.cuda.is_available():
        torch.cuda.set_device(machine.read_number("LOCAL_RANK", 0))
    dist.init_process_group("cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo")
    LAUNCH.messages = dist.new_group(backend="gloo", timeout=LONGEST_SILENCE)
    return dist.get_rank()


@contextmanager
def alone() -> Iterator[None]:
    """In the block this process looks like the only one of its launch, to Accelerate as well."""
    names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")
    hidden = {name: os.environ.pop(name) for name in names if name in os.environ}
    try:
        yield
    finally:
        os.environ.update(hidden)


def send(message: tuple[Any, ...], patience: timedelta = LONGEST_SILENCE) -> None:
    """Gives the message of the leader to all followers; its tensors must be in CPU memory. RuntimeError if they are
    gone, or do not take it within `patience`."""
    data = torch.frombuffer(bytearray(pickle.dumps(message)), dtype=torch.uint8)
    for part in (torch.tensor([len(data)]), data):
        dist.broadcast(part, 0, group=LAUNCH.messages, async_op=True).wait(patience)


def receive() -> tuple[Any, ...]:
    """The next message of the leader. LeaderGoneError if it has ended."""
    try:
        size = torch.zeros(1, dtype=torch.long)
        dist.broadcast(size, 0, group=LAUNCH.messages)
        data = torch.empty(int(size), dtype=torch.uint8)
        dist.broadcast(data, 0, group=LAUNCH.messages)
    except RuntimeError as error:
        raise LeaderGoneError(
            "the first process of the launch has ended: start the command again"
        ) from error
    message: tuple[Any, ...] = pickle.loads(data.numpy().tobytes())
    return message


def load_sharded(
    config: Any, what: str, folder: str, **settings: Any
) -> tuple[Any, dict[str, Any]]:
    """(this process's part of a causal LM, transformers' loading information). All processes must call it. UserError
    for an architecture without a plan, and for heads that cannot be shared out evenly."""
    size = dist.get_world_size()
    plan = replicated_ends_plan(config, what, size)
    split = DistributedConfig(tp_size=size, tp_plan=plan)
    result: tuple[Any, dict[str, Any]] = AutoModelForCausalLM.from_pretrained(
        folder, config=config, distributed_config=split, output_loading_info=True, **settings
    )
    return result


def replicated_ends_plan(config: Any, what: str, size: int) -> dict[str, str]:
    """transformers' plan for the architecture, {module: style}, with embedding and LM head whole on each process.
    UserError for an architecture without a plan, and for heads that `size` does not divide."""
    with torch.device("meta"):
        model: Any = AutoModelForCausalLM.from_config(config)
    text = config.get_text_config(decoder=True)
    plan = dict(model.tp_plan or {})
    if not any("layers." in name for name in plan):
        raise UserError(
            f"{what}: transformers has no tensor-parallel plan for {config.model_type}: use placement.kind device_map"
        )
    heads = text.num_attention_heads
    key_heads = vars(text).get("num_key_value_heads") or heads
    if heads % size or key_heads % size:
        raise UserError(
            f"{what} has {heads} heads and {key_heads} key heads, which {size} processes cannot share out evenly: "
            "start a number that divides both"
        )
    ends = (model.get_input_embeddings(), model.get_output_embeddings())
    names = [name for name, module in model.named_modules() if any(module is end for end in ends)]
    return plan | dict.fromkeys(names, "replicated_with_grad_allreduce")
