"""Our training beside the usual trainers: tokens a second and peak memory, on the very same batches.

    python scripts/compare_trainers.py --out docs/results/trainers.json
    python scripts/compare_trainers.py --arms '[ours-on-policy, gkd-on-policy]'

ours: train/loop.py with a causal draft. trainer: transformers' Trainer, whose loss is the KL at the supervised
positions. gkd: TRL's GKDTrainer at lmbda 0 and beta 0, the same KL; left out, with a word, unless `pip install trl` was
run. All three train every weight of the same draft on the same samples in the same order, against the live target. In
the on-policy arms the draft writes what it reads: GKD before every step (lmbda 1), ours for on_policy_every steps at
once.

Each run is a process of its own; arms take turns. Memory is what training adds to what lies there before its first
step. The last line is JSON.
"""

import contextlib
import importlib.util
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

if not __package__:
    sys.path[0] = str(Path(__file__).resolve().parents[1])

import torch
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from decode import runs
from decode.settings import UserError, run_command
from decode.target import load_model, load_target, load_tokenizer
from train import distill, meter, mixture, onpolicy
from train.batches import learned
from train.checkpoint import State
from train.drafts import DraftSettings
from train.loop import LoopSettings, train
from train.shards import Row
from train.tracking import NullTracker

Arm = Literal["ours", "trainer", "gkd", "ours-on-policy", "gkd-on-policy"]


@dataclass
class Settings:
    target: str = "assets/target"
    draft: str = "assets/draft"
    """The small LM that is trained."""
    data: str = "outputs/reproduce/samples"
    """A sampled set from train/sample.py."""
    arms: list[Arm] = field(default_factory=lambda: ["ours", "trainer", "gkd"])  # type: ignore[arg-type]
    rounds: int = 3
    """Times that each arm runs."""
    warm: int = 3
    """Steps before the clock starts."""
    steps: int = 20
    """Steps that are timed."""
    batch_size: int = 8
    max_length: int = 256
    """Longer samples are cut."""
    max_new_tokens: int = 64
    """On policy: longest continuation."""
    on_policy_every: int = 10
    """On policy, ours: steps whose texts are written together."""
    dtype: str = "float32"
    """Of the target; drafts train in fp32, on a GPU in mixed bf16."""
    out: str = ""
    """File for the JSON of the last line; empty writes none."""
    one: bool = False
    """Run the first arm here and print its JSON."""


@dataclass
class Clock:
    """Stamps behind the steps of one run."""

    device: torch.device
    warm: int
    steps: int
    stamps: list[float] = field(default_factory=list)
    before: int = 0
    """Bytes in use when training began."""

    def start(self) -> None:
        self.before = _in_use(self.device)

    def step(self) -> None:
        """Behind each step, the device's work included."""
        if self.device.type == "cuda":
            torch.cuda.synchronize()
        self.stamps.append(time.perf_counter())

    def found(self, tokens: Callable[[int], int]) -> dict[str, float]:
        """`tokens` says how many a step (from 0) read."""
        timed = range(self.warm, self.warm + self.steps)
        seconds = self.stamps[timed[-1]] - self.stamps[self.warm - 1]
        return {
            "tokens_per_second": sum(map(tokens, timed)) / seconds,
            "seconds_per_step": seconds / self.steps,
            "peak_bytes": meter.peak_memory(self.device) - self.before,
            "peak_bytes_in_all": meter.peak_memory(self.device),
        }


def _in_use(device: torch.device) -> int:
    return (
        torch.cuda.memory_allocated(device) if device.type == "cuda" else meter.peak_memory(device)
    )


def ours(s: Settings, on_policy: bool) -> dict[str, float]:
    """Our loop, as train/distill.py runs it."""
    steps = s.warm + s.steps
    loop = LoopSettings(
        steps=steps, batch_size=s.batch_size, micro_batch=s.batch_size, max_length=s.max_length,
        lr=1e-5, warmup=0, log_every=1, eval_every=0, save_every=steps,
    )  # fmt: skip
    own = onpolicy.OnPolicy(
        share=1.0 if on_policy else 0.0,
        every=s.on_policy_every,
        max_new_tokens=s.max_new_tokens,
        batch_size=s.on_policy_every * s.batch_size,
    )
    with tempfile.TemporaryDirectory(prefix="draftsmith-") as folder:
        settings = distill.Settings(
            target=s.target, data=s.data, draft=DraftSettings(init=s.draft), loop=loop,
            on_policy=own, target_dtype=s.dtype, out=folder,
        )  # fmt: skip
        accelerator = distill.started(settings)
        settings, parts = distill.fitted(settings, accelerator)
        training = distill.prepared(settings, accelerator, parts)
        read: list[int] = []

        def choose(step: int) -> Sequence[Row]:
            rows = training.choose(step)
            read.append(sum(len(row["input_ids"]) for row in rows))
            return rows

        clock = Clock(accelerator.device, s.warm, s.steps)

        class Watch(NullTracker):
            def log(self, step: int, values: Mapping[str, float]) -> None:
                clock.step()

        clock.start()
        state = State(parts.target.fingerprint)
        train(
            replace(training, choose=choose), loop, state, Path(folder), Watch(), dict,
            Progress(disable=True),
        )  # fmt: skip
        return clock.found(lambda step: read[step])


def theirs(s: Settings, kind: str) -> dict[str, float]:
    """Trainer or GKDTrainer on the batches of our order."""
    from datasets import Dataset
    from torch.utils.data import SequentialSampler
    from transformers import Trainer, TrainerCallback, TrainingArguments

    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    rows, _ = mixture.load(s.data, s.max_length)
    order = [row for step in range(s.warm + s.steps) for row in rows.step(s.batch_size, 0, step)]
    teacher = load_model(s.target, "target", str(device), s.dtype)
    student = load_model(s.draft, "draft", str(device), "float32")
    clock = Clock(device, s.warm, s.steps)
    read: list[int] = []

    class Stamps(TrainerCallback):
        def on_step_end(self, *args: Any, **kwargs: Any) -> None:
            clock.step()

    def collate(some: list[dict[str, int]]) -> dict[str, torch.Tensor]:
        return _padded([order[item["number"]] for item in some])

    with tempfile.TemporaryDirectory(prefix="draftsmith-") as folder:
        common: dict[str, Any] = {
            "output_dir": folder, "per_device_train_batch_size": s.batch_size,
            "max_steps": s.warm + s.steps, "learning_rate": 1e-5, "optim": "adamw_torch",
            "max_grad_norm": 1.0, "bf16": device.type == "cuda", "use_cpu": device.type == "cpu",
            "save_strategy": "no", "logging_strategy": "no", "report_to": "none",
            "remove_unused_columns": False, "disable_tqdm": True, "seed": 0,
        }  # fmt: skip
        if kind == "trainer":
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

        class Arm(base):
            def _get_train_sampler(self, *args: Any, **kwargs: Any) -> Any:
                return SequentialSampler(self.train_dataset)

            def compute_loss(
                self, model: Any, inputs: dict[str, Any], *args: Any, **kwargs: Any
            ) -> Any:
                read.append(int(inputs["attention_mask"].sum()))
                if kind != "trainer":
                    return super().compute_loss(model, inputs, *args, **kwargs)
                return _kl(model, teacher, inputs)

        trainer = Arm(
            model=student, args=arguments, data_collator=collate,
            train_dataset=Dataset.from_dict({"number": list(range(len(order)))}), callbacks=[Stamps()], **more,
        )  # fmt: skip
        clock.start()
        trainer.train()
    return clock.found(lambda step: read[step])


def _kl(model: Any, teacher: Any, inputs: dict[str, Any]) -> torch.Tensor:
    """The mean KL(p || q) of the supervised positions, which are taken before any softmax."""
    inside = inputs["labels"][:, 1:] != -100
    asked = {name: inputs[name] for name in ("input_ids", "attention_mask")}
    q = model(**asked, use_cache=False).logits[:, :-1][inside].float()
    with torch.no_grad():
        p = teacher(**asked, use_cache=False).logits[:, :-1][inside].float()
    return torch.nn.functional.kl_div(
        q.log_softmax(-1), p.log_softmax(-1), reduction="batchmean", log_target=True
    )


def _padded(rows: Sequence[Row]) -> dict[str, torch.Tensor]:
    """Samples padded on the right with labels where they are learned; and their prompts padded on the left, for GKD."""
    length = max(len(row["input_ids"]) for row in rows)
    ids = torch.zeros(len(rows), length, dtype=torch.long)
    mask, labels = torch.zeros_like(ids), torch.full_like(ids, -100)
    ends = [max(1, row["loss_spans"][0][0]) for row in rows]
    prompts = torch.zeros(len(rows), max(ends), dtype=torch.long)
    seen = torch.zeros_like(prompts)
    for i, (row, end) in enumerate(zip(rows, ends, strict=True)):
        text = torch.tensor(row["input_ids"], dtype=torch.long)
        ids[i, : len(text)], mask[i, : len(text)] = text, 1
        at = learned(row) + 1
        labels[i, at] = text[at]
        prompts[i, -end:], seen[i, -end:] = text[:end], 1
    return {
        "input_ids": ids, "attention_mask": mask, "labels": labels,
        "prompts": prompts, "prompt_attention_mask": seen,
    }  # fmt: skip


def run(arm: str, s: Settings) -> dict[str, float]:
    """One run of an arm in a process of its own."""
    flags = {name: value for name, value in vars(s).items() if name not in ("arms", "one", "out")}
    command = [sys.executable, __file__, "--one", "true", "--arms", json.dumps([arm])]
    for name, value in flags.items():
        command += [f"--{name}", str(value)]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode != 0:
        raise UserError(f"{arm} failed: {(done.stderr.strip().splitlines() or ['?'])[-1]}")
    return json.loads(done.stdout.strip().splitlines()[-1])


def main(s: Settings) -> None:
    if min(s.rounds, s.steps, s.warm) < 1:
        raise UserError("need rounds, steps and warm >= 1")
    if s.one:
        torch.manual_seed(0)
        arm = s.arms[0]
        with contextlib.redirect_stdout(sys.stderr):
            own = arm.startswith("ours")
            found = ours(s, arm == "ours-on-policy") if own else theirs(s, arm)
        print(json.dumps(found))
        return
    load_target(s.target, "cpu")  # refuses early what no arm could use
    console = Console(stderr=True)
    arms: list[str] = list(s.arms)
    if importlib.util.find_spec("trl") is None and any(arm.startswith("gkd") for arm in arms):
        console.print("gkd is left out: `pip install trl` brings it")
        arms = [arm for arm in arms if not arm.startswith("gkd")]
    runs_of: dict[str, list[dict[str, float]]] = {name: [] for name in arms}
    for turn in range(s.rounds):
        for name in arms if turn % 2 == 0 else reversed(arms):
            runs_of[name].append(run(name, s))
    table = Table("trainer", "tokens/s", "least to most", "s a step", "memory added, GB", "in all")
    cells = {}
    for name, each in runs_of.items():
        columns = {key: sorted(one[key] for one in each) for key in each[0]}
        middle = {key: statistics.median(values) for key, values in columns.items()}
        speeds = columns["tokens_per_second"]
        cells[name] = {"median": middle, "runs": each}
        table.add_row(
            name, f"{middle['tokens_per_second']:,.0f}", f"{speeds[0]:,.0f} to {speeds[-1]:,.0f}",
            f"{middle['seconds_per_step']:.3f}", f"{middle['peak_bytes'] / 1e9:.2f}",
            f"{middle['peak_bytes_in_all'] / 1e9:.2f}",
        )  # fmt: skip
    console.print(table)
    settings = {key: value for key, value in vars(s).items() if key not in ("one", "out")}
    made = runs.provenance()
    made["versions"]["trl"] = _version("trl")
    line = json.dumps({"arms": cells, "settings": settings, **made})
    if s.out:
        runs.write_atomically(Path(s.out), line + "\n")
    print(line)


def _version(package: str) -> str | None:
    from importlib.metadata import PackageNotFoundError, version

    try:
        return version(package)
    except PackageNotFoundError:
        return None


if __name__ == "__main__":
    run_command(main, Settings, __doc__)
