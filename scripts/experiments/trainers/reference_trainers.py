"""Widely used trainers on batches in this project's order: transformers' Trainer, and TRL's GKDTrainer."""

import tempfile
from collections.abc import Sequence
from typing import Any

import torch

from decode.drafts.eagle_model import Eagle3Model
from decode.model.loading import load_model, load_tokenizer
from scripts.experiments.trainers.plain_eagle3 import PlainEagle3, plain_loss
from scripts.experiments.trainers.step_timer import StepTimer
from train.data import mixture
from train.data.batching import supervised_positions
from train.data.sample_store import SampleRow


def train_reference(s: Any, kind: str, net: Eagle3Model | None = None) -> dict[str, float]:
    """Runs trainer, gkd, gkd-on-policy or eagle3-trainer, which trains `net`. Returns `StepTimer.results`.

    `s` is the CompareTrainersConfig.
    """
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
    tokens_read: list[int] = []

    class StepTimerCallback(TrainerCallback):
        def on_step_end(self, *args: Any, **kwargs: Any) -> None:
            clock.step()

    def collate(items: list[dict[str, int]]) -> dict[str, torch.Tensor]:
        return pad_rows([order[item["number"]] for item in items])

    with tempfile.TemporaryDirectory(prefix="draftsmith-") as folder:
        common: dict[str, Any] = {
            "output_dir": folder, "per_device_train_batch_size": s.batch_size,
            "max_steps": s.warm + s.steps, "learning_rate": 1e-5, "optim": "adamw_torch",
            "max_grad_norm": 1.0, "bf16": device.type == "cuda", "use_cpu": device.type == "cpu",
            "save_strategy": "no", "logging_strategy": "no", "report_to": "none",
            "remove_unused_columns": False, "disable_tqdm": True, "seed": 0,
        }  # fmt: skip
        if not kind.startswith("gkd"):
            base: Any = Trainer
            arguments: Any = TrainingArguments(**common)
            more: dict[str, Any] = {}
        else:
            from trl.experimental.gkd import GKDConfig, GKDTrainer

            base = GKDTrainer
            arguments = GKDConfig(
                **common, lmbda=1.0 if kind == "gkd-on-policy" else 0.0, beta=0.0, temperature=1.0,
                max_new_tokens=s.max_new_tokens, max_length=s.max_length,
                gradient_checkpointing=False,  # on by default, to save memory for time
            )  # fmt: skip
            tokenizer = load_tokenizer(s.target)
            if tokenizer.pad_token is None:
                tokenizer.pad_token = tokenizer.eos_token
            more = {"teacher_model": teacher, "processing_class": tokenizer}

        class OrderedTrainer(base):
            def _get_train_sampler(self, *args: Any, **kwargs: Any) -> Any:
                return SequentialSampler(self.train_dataset)

            def compute_loss(
                self, model: Any, inputs: dict[str, Any], *args: Any, **kwargs: Any
            ) -> Any:
                tokens_read.append(int(inputs["attention_mask"].sum()))
                if kind.startswith("gkd"):
                    return super().compute_loss(model, inputs, *args, **kwargs)
                return kl_loss(model, teacher, inputs) if net is None else plain_loss(model, inputs)

        trainer = OrderedTrainer(
            model=student, args=arguments, data_collator=collate,
            train_dataset=Dataset.from_dict({"number": list(range(len(order)))}),
            callbacks=[StepTimerCallback()], **more,
        )  # fmt: skip
        clock.start()
        trainer.train()
    return clock.results(tokens_read)


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
