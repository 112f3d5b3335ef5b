"""What compare_trainers.py compares with: transformers' Trainer with a KL loss, TRL's GKDTrainer, and EAGLE-3's
training-time test as public trainers compute it (arXiv 2503.01840); and the clock of the steps of any trainer.

Batches are this project's, in its order. In the plain training-time test the target runs in transformers' code; each
step attends to the keys of the first step below the diagonal and to those of later steps on it; the target's logits of
all positions, over its whole vocabulary, stay in memory.
"""

import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import pad

from decode.drafts.eagle_model import Eagle3Model
from decode.model.loading import load_model, load_tokenizer
from eval.benchmark.timing import synchronize
from scripts.lab.settings import CompareTrainersConfig
from train.data import mixture
from train.data.batching import supervised_positions
from train.data.sample_store import SampleRow
from train.losses import divergences
from train.trainer import throughput

DECAY = 0.8
"""Weight of each step relative to the one before."""


class DiagonalAttention:
    """Attention of training-time test over the keys and values of all steps so far, which it keeps (an AttendFn)."""

    def __init__(self) -> None:
        self.keys: list[Tensor] = []
        self.values: list[Tensor] = []

    def __call__(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        groups, length, scale = q.shape[1] // k.shape[1], q.shape[2], q.shape[-1] ** -0.5
        self.keys.append(k.repeat_interleave(groups, 1))
        self.values.append(v.repeat_interleave(groups, 1))
        causal = torch.full((length, length), float("-inf"), device=q.device).triu(1)
        scores = [q @ self.keys[0].transpose(-1, -2) * scale + causal]
        scores += [(q * later).sum(-1, keepdim=True) * scale for later in self.keys[1:]]
        weights = torch.cat(scores, -1).float().softmax(-1).to(q.dtype)
        out = weights[..., :length] @ self.values[0]
        for step, later in enumerate(self.values[1:]):
            out = out + weights[..., length + step, None] * later
        return out.transpose(1, 2)


class PlainEagle3(nn.Module):
    """The loss of the head `net` on the frozen model `target`, over `steps` steps."""

    def __init__(self, net: Eagle3Model, target: Any, steps: int):
        super().__init__()
        self.net, self.steps = net, steps
        self.frozen = [target]  # in a list, so that it is not a part of this module

    def forward(self, input_ids: Tensor, attention_mask: Tensor, reply: Tensor) -> Tensor:
        """The sum of soft cross-entropies; `reply` [B, T] is True at tokens of a reply, which lie in one piece."""
        net, (target,) = self.net, self.frozen
        with torch.no_grad():
            out = target(
                input_ids=input_ids,
                attention_mask=attention_mask,
                output_hidden_states=True,
                use_cache=False,
            )
            states = torch.cat([out.hidden_states[layer] for layer in net.aux_layers.layers], -1)
            states = states.to(net.fc.weight.dtype)
            logits = shifted(out.logits, 1)
            counted = divergences.argmax_in_vocabulary(logits, net.ids)
            p = (logits if net.ids is None else logits[..., net.ids]).float().softmax(-1)
        embedding = target.get_input_embeddings().weight.detach().to(states.dtype)
        position = torch.arange(input_ids.shape[1], device=input_ids.device)[None]
        attend, total = DiagonalAttention(), torch.zeros((), device=input_ids.device)
        state = net.init_state(states)
        for step in range(self.steps):
            embeds = net.embed(shifted(input_ids, 1 + step), embedding)
            state = net.step(state, embeds, position + step, attend)
            log_q = net.logits(state).float().log_softmax(-1)
            valid = reply & shifted(reply, 2 + step) & shifted(counted, step)
            cross_entropy = -(shifted(p, step) * log_q).sum(-1)
            total = total + DECAY**step * (cross_entropy * valid).sum()
        return total


def shifted(values: Tensor, by: int) -> Tensor:
    """[B, T, ...]: at position t what `values` have at t + by, and zeros beyond the end."""
    rest = values[:, by:]
    return pad(rest, (0, 0) * (values.dim() - 2) + (0, values.shape[1] - rest.shape[1]))


def plain_loss(model: PlainEagle3, inputs: Mapping[str, Tensor]) -> Tensor:
    """The mean over all positions of a batch of `pad_rows`."""
    texts = {name: inputs[name] for name in ("input_ids", "attention_mask")}
    return model(**texts, reply=inputs["labels"] != -100) / inputs["input_ids"].numel()


@dataclass
class StepTimer:
    """Records the end of each step of one run; the first `warmup_steps` are not timed, the next `steps` are."""

    device: torch.device
    warmup_steps: int
    steps: int
    end_times: list[float] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)
    """What each step read."""

    def __post_init__(self) -> None:
        cuda = self.device.type == "cuda"
        in_use = torch.cuda.memory_allocated if cuda else throughput.peak_memory_bytes
        self.initial_bytes = in_use(self.device)

    def step(self) -> None:
        """Call after each step; waits for the device."""
        synchronize(self.device)
        self.end_times.append(time.perf_counter())

    def results(self) -> dict[str, float]:
        """Throughput and peak memory of the timed steps."""
        first, last = self.warmup_steps, self.warmup_steps + self.steps
        seconds = self.end_times[last - 1] - self.end_times[first - 1]
        peak = throughput.peak_memory_bytes(self.device)
        return {
            "tokens_per_second": sum(self.tokens[first:last]) / seconds,
            "seconds_per_step": seconds / self.steps,
            "peak_bytes": peak - self.initial_bytes,
            "peak_bytes_in_all": peak,
        }


def train_reference(
    s: CompareTrainersConfig, kind: str, net: Eagle3Model | None = None
) -> dict[str, float]:
    """Runs trainer, gkd, gkd-on-policy or eagle3-trainer, which trains `net`. Returns `StepTimer.results`."""
    from datasets import Dataset
    from torch.utils.data import SequentialSampler
    from transformers import Trainer, TrainerCallback, TrainingArguments

    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    rows, _ = mixture.load(s.data, s.max_length)
    order = [
        row for step in range(s.warm + s.steps) for row in rows.global_batch(s.batch_size, 0, step)
    ]
    teacher = load_model(s.target, "target", str(device), s.dtype)
    student: torch.nn.Module = (
        load_model(s.draft, "draft", str(device), "float32")
        if net is None
        else PlainEagle3(net, teacher, s.eagle_steps)
    )
    clock = StepTimer(device, s.warm, s.steps)

    class StepTimerCallback(TrainerCallback):
        def on_step_end(self, *args: Any, **kwargs: Any) -> None:
            clock.step()

    gkd = kind.startswith("gkd")
    base: Any = Trainer
    kind_of_arguments: Any = TrainingArguments
    settings: dict[str, Any] = {
        "per_device_train_batch_size": s.batch_size, "max_steps": s.warm + s.steps, "learning_rate": 1e-5,
        "optim": "adamw_torch", "max_grad_norm": 1.0, "bf16": device.type == "cuda",
        "use_cpu": device.type == "cpu", "save_strategy": "no", "logging_strategy": "no", "report_to": "none",
        "remove_unused_columns": False, "disable_tqdm": True, "seed": 0,
    }  # fmt: skip
    more: dict[str, Any] = {}
    if gkd:
        from trl.experimental.gkd import GKDConfig, GKDTrainer

        base, kind_of_arguments = GKDTrainer, GKDConfig
        settings |= {
            "lmbda": 1.0 if kind == "gkd-on-policy" else 0.0, "beta": 0.0, "temperature": 1.0,
            "max_new_tokens": s.max_new_tokens, "max_length": s.max_length,
            "gradient_checkpointing": False,  # on by default, to save memory for time
        }  # fmt: skip
        tokenizer = load_tokenizer(s.target)
        if tokenizer.pad_token is None:
            tokenizer.pad_token = tokenizer.eos_token
        more = {"teacher_model": teacher, "processing_class": tokenizer}

    class OrderedTrainer(base):
        def _get_train_sampler(self, *args: Any, **kwargs: Any) -> Any:
            return SequentialSampler(self.train_dataset)

        def compute_loss(self, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
            clock.tokens.append(int(inputs["attention_mask"].sum()))
            if gkd:
                return super().compute_loss(model, inputs, *args, **kwargs)
            return kl_loss(model, teacher, inputs) if net is None else plain_loss(model, inputs)

    with tempfile.TemporaryDirectory(prefix="draftsmith-") as folder:
        trainer = OrderedTrainer(
            model=student, args=kind_of_arguments(output_dir=folder, **settings),
            data_collator=lambda items: pad_rows([order[item["number"]] for item in items]),
            train_dataset=Dataset.from_dict({"number": list(range(len(order)))}),
            callbacks=[StepTimerCallback()], **more,
        )  # fmt: skip
        trainer.train()
    return clock.results()


def kl_loss(model: Any, teacher: Any, inputs: dict[str, Any]) -> torch.Tensor:
    """The mean KL(p || q) over supervised positions; other positions are dropped before the softmax."""
    supervised = inputs["labels"][:, 1:] != -100
    texts = {name: inputs[name] for name in ("input_ids", "attention_mask")}
    q = model(**texts, use_cache=False).logits[:, :-1][supervised].float()
    with torch.no_grad():
        p = teacher(**texts, use_cache=False).logits[:, :-1][supervised].float()
    return torch.nn.functional.kl_div(
        q.log_softmax(-1), p.log_softmax(-1), reduction="batchmean", log_target=True
    )


def pad_rows(rows: Sequence[SampleRow]) -> dict[str, torch.Tensor]:
    """Samples padded on the right, labels at supervised positions; and their prompts padded on the left, for GKD."""
    length = max(len(row["input_ids"]) for row in rows)
    ids = torch.zeros(len(rows), length, dtype=torch.long)
    mask, labels = torch.zeros_like(ids), torch.full_like(ids, -100)
    ends = [max(1, row["loss_spans"][0][0]) for row in rows]
    prompts = torch.zeros(len(rows), max(ends), dtype=torch.long)
    prompt_mask = torch.zeros_like(prompts)
    for i, (row, end) in enumerate(zip(rows, ends, strict=True)):
        text = torch.tensor(row["input_ids"], dtype=torch.long)
        ids[i, : len(text)], mask[i, : len(text)] = text, 1
        at = supervised_positions(row) + 1
        labels[i, at] = text[at]
        prompts[i, -end:], prompt_mask[i, -end:] = text[:end], 1
    return {
        "input_ids": ids, "attention_mask": mask, "labels": labels,
        "prompts": prompts, "prompt_attention_mask": prompt_mask,
    }  # fmt: skip
