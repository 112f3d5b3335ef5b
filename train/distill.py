"""Distills a draft: a small LM is trained on the target's samples against the target's own distributions.

    accelerate launch train/distill.py --config configs/quickstart/causal.yaml
    accelerate launch train/distill.py --target T --data outputs/samples --draft.init small-lm --out DIR

Killed at any moment, the same command goes on from its last checkpoint and ends with the very weights that an
undisturbed run gives. The draft directory in --out decodes with eval/run.py and decode/generate.py.
"""

import json
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Literal

if not __package__:
    sys.path[0] = str(Path(__file__).resolve().parents[1])

import torch
from accelerate import Accelerator, PartialState
from accelerate.utils import parse_flag_from_env, set_seed
from rich.console import Console

from decode import runs
from decode.drafts.base import Draft, Request
from decode.sampling import Sampling
from decode.settings import run_command, to_dict
from decode.target import Target, load_target
from train import (
    batches,
    checkpoint,
    drafts,
    mixture,
    onpolicy,
    outcome,
    rehearsal,
    sharding,
    shards,
    together,
)
from train.criterion import Comparison
from train.families import FAMILIES, Job, Trainee
from train.features import Folder, Stored
from train.heads import Weights
from train.loop import LoopSettings, Training, bar_of, optimizers_of, train
from train.meter import enough_memory
from train.mixture import Data
from train.onpolicy import OnPolicy, OwnTexts
from train.tracking import NullTracker, Tracker
from train.trial import CheckSettings, trial
from train.upload import PublishSettings, ready

STOPPED = 128 + 15  # the exit code of a process that SIGTERM ended
TOO_LARGE = "the models alone do not fit: set target_dtype to bfloat16, or take a smaller draft"


@dataclass
class Settings:
    target: str = "assets/target"
    """The model to imitate: folder or hub name."""
    revision: str | None = None
    """Commit, tag or branch of a hub target."""
    data: Data = "outputs/samples"
    """A sampled set from train/sample.py, or several mixed: [{path: one, weight: 3}, {path: other, weight: 1}]."""
    on_policy: OnPolicy = field(default_factory=OnPolicy)
    draft: drafts.DraftSettings = field(default_factory=drafts.DraftSettings)
    loss: Literal[
        "forward_kl", "reverse_kl", "jsd", "tv", "lk_alpha", "lk_lambda", "hard_ce", "soft_ce", "top_k"
    ] = "forward_kl"  # fmt: skip
    """Divergence from the target's distribution; forward_kl is the robust default."""
    compare: Comparison = field(default_factory=Comparison)
    weights: Weights = field(default_factory=Weights)
    """Of the parts of the loss of heads."""
    features: str = ""
    """Folder of the target's states and laws, made in one pass where they are missing; empty: it runs in every step."""
    features_top: int = 0
    """features: 0: final states, which give the whole law; else tokens of each that are kept, which is biased where
    the target is flat (compare.top of as many leaves out what is not known)."""
    loop: LoopSettings = field(default_factory=LoopSettings)
    check: CheckSettings = field(default_factory=CheckSettings)
    mixed_precision: Literal["auto", "no", "bf16"] = "auto"
    """auto: bf16 on a GPU that has it, else fp32."""
    target_dtype: str = "float32"
    """Precision of the frozen target."""
    wandb: Literal["auto", "online", "offline", "disabled"] = "auto"
    """auto: online if there is an API key, else offline; metrics.jsonl is written always."""
    project: str = "draftsmith"
    """Weights & Biases project."""
    publish: PublishSettings = field(default_factory=PublishSettings)
    seed: int = 0
    out: str = "outputs/drafts/causal"
    """Folder of the draft and its checkpoints."""
    resume: bool = False
    """Go on in `out` although the settings differ (an equal run goes on by itself)."""
    overwrite: bool = False
    """Delete what another run left in `out`."""
    dry_run: bool = False
    """Only tell what the run needs and try two steps of it, with the live target; writes nothing into `out`."""


def load_rows(s: Settings, target: Target) -> tuple[mixture.Mixture, int]:
    """(samples that fit, how many were dropped); refuses samples of another tokenizer."""
    return mixture.load(s.data, length_of(s, target), target.fingerprint, target.name)


def length_of(s: Settings, target: Target) -> int:
    """Tokens that a sample may have."""
    return min(s.loop.max_length, target.decoder.context)


def precision(s: Settings, device_type: str) -> str:
    """Accelerate's name for the precision of the forward pass."""
    if s.mixed_precision != "auto":
        return s.mixed_precision
    return "bf16" if device_type == "cuda" and torch.cuda.is_bf16_supported() else "no"


def started(s: Settings) -> Accelerator:
    """The accelerator of this process; refuses what its kind of parallelism cannot train."""
    state = PartialState(cpu=parse_flag_from_env("ACCELERATE_USE_CPU"))
    accelerator = Accelerator(mixed_precision=precision(s, state.device.type))
    set_seed(s.seed)
    with together.agreed(accelerator):
        sharding.check(accelerator, s.draft.family, s.loop)
        batches.split_for(0, accelerator.num_processes, range(s.loop.batch_size))
        onpolicy.refuse(s.on_policy, s.draft.family, s.features, accelerator.is_fsdp2)
        if s.publish.repo:
            ready(s.publish.repo)
    sharding.adapt(accelerator, s.loop)
    return accelerator


def made(s: Settings, target: Target, rows: Sequence[shards.Row]) -> Trainee:
    """The draft in training. Refuses early what cannot be measured later."""
    where = Folder(Path(s.features), s.features_top, s.loop.max_length) if s.features else None
    where = None if s.dry_run else where
    trainee = FAMILIES[s.draft.family](Job(s, target, rows, str(target.decoder.device), where))
    if s.loop.eval_every > 0 and not s.dry_run:
        trainee.draft().begin(Request(1, 1, s.check.k, Sampling(), lambda p: p.argmax(-1)))
        trainee.model.train()
    return trainee


@dataclass(frozen=True)
class Parts:
    """What a run is made of, once it is known to fit together."""

    target: Target
    rows: mixture.Mixture
    dropped: int
    """Samples with nothing to learn."""
    trainee: Trainee
    worth: Callable[[Draft], dict[str, float]]
    """τ and α of a draft as it is, on the same few prompts each time."""


def fitted(s: Settings, accelerator: Accelerator) -> tuple[Settings, Parts]:
    """Everything loaded, and the settings with steps counted. Refuses early what would only show later."""
    target = load_target(s.target, str(accelerator.device), s.target_dtype, s.revision)
    rows, dropped = load_rows(s, target)
    s = replace(s, loop=s.loop.over(len(rows)))
    if not s.overwrite:
        checkpoint.check_tokenizer(Path(s.out), target.fingerprint)
    worth = trial(s.check, target, s.seed)
    return s, Parts(target, rows, dropped, made(s, target, rows), worth)


def prepared(s: Settings, accelerator: Accelerator, parts: Parts) -> Training:
    """Optimisers made, all of it wrapped for several processes, and the rows of each step chosen."""
    trainee, rows = parts.trainee, parts.rows
    optimizers = optimizers_of(trainee.model, trainee.matrices, trainee.slow, s.loop)
    model, *optimizers = accelerator.prepare(trainee.model, *optimizers)
    longest, plain = length_of(s, parts.target), s.on_policy.share == 0
    own = None if plain else OwnTexts(s, rows, trainee, parts.target, accelerator, longest)
    in_bf16 = accelerator.mixed_precision == "bf16"
    return Training(
        accelerator=accelerator,
        model=model,
        optimizers=optimizers,
        objective=trainee.objective(model),
        choose=own.step if own else partial(rows.step, s.loop.batch_size, s.seed),
        work=rehearsal.work_of(s, in_bf16, own.fresh if own else list),
    )


def rehearse(
    s: Settings, accelerator: Accelerator, parts: Parts, console: Console
) -> dict[str, float]:
    """Two steps, a round of the draft's own texts if it writes any, and what they took; the draft saved elsewhere."""
    loop = replace(s.loop, steps=max(2, s.loop.steps))
    every = s.on_policy.every if s.on_policy.share > 0 else 0
    with rehearsal.shared_folder(accelerator.wait_for_everyone) as folder:
        training = prepared(replace(s, out=folder, loop=loop), accelerator, parts)
        found = rehearsal.try_steps(training, parts.rows, s.loop, every)
    draft = whole_draft(s, training, parts)()
    with together.agreed(accelerator):
        if accelerator.is_main_process:
            found |= rehearsal.try_export(s, draft, parts.target, parts.worth)
            rehearsal.report(console, found, s.loop.steps, accelerator.device.type == "cuda")
    return found


def whole_draft(s: Settings, training: Training, parts: Parts) -> Callable[[], Trainee]:
    """What gives the draft with all its weights to the main process; every process must call it."""
    again = partial(made, s, parts.target, parts.rows)
    return sharding.whole(training.accelerator, training.model, parts.trainee, again)


def claimed(s: Settings, accelerator: Accelerator) -> bool:
    """Makes `out` this run's; True in the main process if it goes on with an earlier one."""
    goes_on = False
    with together.agreed(accelerator):
        if accelerator.is_main_process:
            goes_on = runs.claim(s.out, s)
            checkpoint.tidy(Path(s.out))
            shards.sweep(Path(s.out))
    return goes_on


def fill(accelerator: Accelerator, parts: Parts, console: Console) -> None:
    """What the target says is on disk behind it, if the run reads it from there."""
    if isinstance(parts.trainee.teacher, Stored):
        rank, wait = accelerator.process_index, accelerator.wait_for_everyone
        parts.trainee.teacher.fill(console, rank, accelerator.num_processes, wait)


def distill(s: Settings, accelerator: Accelerator, parts: Parts, console: Console) -> None:
    """The run itself: from the last checkpoint, if there is one, to the draft directory."""
    out, trainee, is_main = Path(s.out), parts.trainee, accelerator.is_main_process
    samples, processes = len(parts.rows), accelerator.num_processes
    goes_on = claimed(s, accelerator)
    fill(accelerator, parts, console)
    training = prepared(s, accelerator, parts)
    whole = whole_draft(s, training, parts)
    with together.agreed(accelerator):
        state = checkpoint.load_latest(accelerator, out, parts.target.fingerprint)
    console.print(
        f"{samples} samples ({parts.dropped} dropped), {processes} process(es), {accelerator.device}, "
        f"precision {accelerator.mixed_precision}, from step {state.step}"
    )
    tracker: Tracker | NullTracker = NullTracker()
    if is_main:
        config = {**to_dict(s), "hardware": runs.hardware()}
        tracker = Tracker(out, s.project, config, s.wandb, state.step if goes_on else None)

    def measure() -> dict[str, float]:
        """By the main process; the others wait and are told."""
        found: dict[str, float] = {}
        draft = whole()
        with together.agreed(accelerator):
            if is_main:
                found = parts.worth(draft.draft())
                draft.model.train()
        return together.told(found)

    try:
        with together.agreed(accelerator), bar_of(console, is_main) as bar:
            done = train(training, s.loop, state, out, tracker, measure, bar)
        if not done:
            stopped = f"stopped by SIGTERM: step {state.step} is saved, the same command goes on"
            console.print(stopped)
            accelerator.end_training()
            sys.exit(STOPPED)
        if s.loop.keep_best and state.measured_at != state.step:
            checkpoint.load(accelerator, checkpoint.home_of(out, state.measured_at))
            console.print(f"the draft is that of step {state.measured_at}, whose τ was best")
        draft = whole()
        if is_main:
            facts = outcome.facts_of(s, parts.target, trainee, state, samples, processes)
            outcome.save(s, draft, facts, tracker)
            console.print(f"draft saved: {s.out}")
            print(json.dumps({"draft": s.out, "steps": s.loop.steps, **state.measured}))
        with together.agreed(accelerator):
            if is_main and s.publish.repo:
                from train.publish import (
                    publish_trained,  # draws: slow to import, and writes a cache
                )

                console.print(f"published: {publish_trained(s.publish, out)}")
        accelerator.wait_for_everyone()
    finally:
        tracker.finish()


def main(s: Settings) -> None:
    accelerator = started(s)
    console = Console(stderr=True, quiet=not accelerator.is_main_process)
    needs: dict[str, float] = {}
    with together.agreed(accelerator), enough_memory(TOO_LARGE):
        if s.dry_run:
            mixed = accelerator.mixed_precision == "bf16"
            table, needs = rehearsal.forecast(s, accelerator.num_processes, mixed)
            console.print(table)
        s, parts = fitted(s, accelerator)
    if s.dry_run:
        found = rehearse(s, accelerator, parts, console)
        if accelerator.is_main_process:
            print(json.dumps({"dry_run": True, "estimated": needs, "measured": found}))
    else:
        distill(s, accelerator, parts, console)
    accelerator.end_training()  # threads of the group that outlive it may abort a process that has finished


if __name__ == "__main__":
    run_command(main, Settings, __doc__)
