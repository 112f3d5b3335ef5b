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

from decode.common import run_dir
from decode.common.cli import run_command, to_dict
from decode.drafts.base import Draft, DraftContext
from decode.model.loading import Target, load_target
from decode.verification.sampling import SamplingParams
from train.data import batching, mixture, sample_store
from train.data.mixture import DataSpec
from train.families import config as families_config
from train.families.base import FamilyContext, TrainableDraft
from train.families.head_loss import LossWeights
from train.families.registry import FAMILIES
from train.hub.upload import TrainingPublishConfig, check_upload_possible
from train.losses.objective import DivergenceConfig
from train.planning import dry_run as planning_dry_run
from train.teacher.cached import CachedTeacher, FeatureFolder
from train.trainer import checkpoint, collective, draft_metadata, sharding
from train.trainer import on_policy as trainer_on_policy
from train.trainer.acceptance_eval import AcceptanceEvalConfig, make_acceptance_eval
from train.trainer.loop import LoopConfig, Training, build_optimizers, make_progress_bar, train
from train.trainer.on_policy import OnPolicyBuffer, OnPolicyConfig
from train.trainer.throughput import report_out_of_memory
from train.trainer.tracking import NullTracker, Tracker

SIGTERM_EXIT_CODE = 128 + 15  # the exit code of a process that SIGTERM ended
OUT_OF_MEMORY_ADVICE = (
    "the models alone do not fit: set target_dtype to bfloat16, or take a smaller draft"
)


@dataclass
class DistillConfig:
    target: str = "assets/target"
    """The model to imitate: folder or hub name."""
    revision: str | None = None
    """Commit, tag or branch of a hub target."""
    data: DataSpec = "outputs/samples"
    """A sampled set from train/sample.py, or several mixed: [{path: one, weight: 3}, {path: other, weight: 1}]."""
    on_policy: OnPolicyConfig = field(default_factory=OnPolicyConfig)
    draft: families_config.DraftConfig = field(default_factory=families_config.DraftConfig)
    loss: Literal[
        "forward_kl", "reverse_kl", "jsd", "tv", "lk_alpha", "lk_lambda", "hard_ce", "soft_ce", "top_k"
    ] = "forward_kl"  # fmt: skip
    """Divergence from the target's distribution; forward_kl is the robust default."""
    compare: DivergenceConfig = field(default_factory=DivergenceConfig)
    weights: LossWeights = field(default_factory=LossWeights)
    """Of the parts of the loss of heads."""
    features: str = ""
    """Folder of the target's states and laws, made in one pass where they are missing; empty: it runs in every step."""
    features_top: int = 0
    """features: 0: final states, which give the whole law; else tokens of each that are kept, which is biased where
    the target is flat (compare.top of as many leaves out what is not known)."""
    loop: LoopConfig = field(default_factory=LoopConfig)
    check: AcceptanceEvalConfig = field(default_factory=AcceptanceEvalConfig)
    mixed_precision: Literal["auto", "no", "bf16"] = "auto"
    """auto: bf16 on a GPU that has it, else fp32."""
    target_dtype: str = "float32"
    """Precision of the frozen target."""
    wandb: Literal["auto", "online", "offline", "disabled"] = "auto"
    """auto: online if there is an API key, else offline; metrics.jsonl is written always."""
    project: str = "draftsmith"
    """Weights & Biases project."""
    publish: TrainingPublishConfig = field(default_factory=TrainingPublishConfig)
    seed: int = 0
    out: str = "outputs/drafts/causal"
    """Folder of the draft and its checkpoints."""
    resume: bool = False
    """Go on in `out` although the settings differ (an equal run goes on by itself)."""
    overwrite: bool = False
    """Delete what another run left in `out`."""
    dry_run: bool = False
    """Only tell what the run needs and try two steps of it, with the live target; writes nothing into `out`."""


def load_rows(s: DistillConfig, target: Target) -> tuple[mixture.Mixture, int]:
    """(samples that fit, how many were dropped); refuses samples of another tokenizer."""
    return mixture.load(s.data, max_sample_length(s, target), target.fingerprint, target.name)


def max_sample_length(s: DistillConfig, target: Target) -> int:
    """Tokens that a sample may have."""
    return min(s.loop.max_length, target.decoder.context)


def resolve_precision(s: DistillConfig, device_type: str) -> str:
    """Accelerate's name for the precision of the forward pass."""
    if s.mixed_precision != "auto":
        return s.mixed_precision
    return "bf16" if device_type == "cuda" and torch.cuda.is_bf16_supported() else "no"


def init_accelerator(s: DistillConfig) -> Accelerator:
    """The accelerator of this process; refuses what its kind of parallelism cannot train."""
    state = PartialState(cpu=parse_flag_from_env("ACCELERATE_USE_CPU"))
    accelerator = Accelerator(mixed_precision=resolve_precision(s, state.device.type))
    set_seed(s.seed)
    with collective.raise_on_all_ranks(accelerator):
        sharding.check(accelerator, s.draft.family, s.loop)
        batching.rank_slice(0, accelerator.num_processes, range(s.loop.batch_size))
        trainer_on_policy.check_supported(
            s.on_policy, s.draft.family, s.features, accelerator.is_fsdp2
        )
        if s.publish.repo:
            check_upload_possible(s.publish.repo)
    sharding.configure_accelerator(accelerator, s.loop)
    return accelerator


def build_draft(
    s: DistillConfig, target: Target, rows: Sequence[sample_store.SampleRow]
) -> TrainableDraft:
    """The draft in training. Refuses early what cannot be measured later."""
    where = (
        FeatureFolder(Path(s.features), s.features_top, s.loop.max_length) if s.features else None
    )
    where = None if s.dry_run else where
    trainee = FAMILIES[s.draft.family](
        FamilyContext(s, target, rows, str(target.decoder.device), where)
    )
    if s.loop.eval_every > 0 and not s.dry_run:
        trainee.draft().begin_batch(
            DraftContext(1, 1, s.check.k, SamplingParams(), lambda p: p.argmax(-1))
        )
        trainee.model.train()
    return trainee


@dataclass(frozen=True)
class RunComponents:
    """What a run is made of, once it is known to fit together."""

    target: Target
    rows: mixture.Mixture
    dropped: int
    """Samples with nothing to learn."""
    trainee: TrainableDraft
    measure_acceptance: Callable[[Draft], dict[str, float]]
    """τ and α of a draft as it is, on the same few prompts each time."""


def load_components(
    s: DistillConfig, accelerator: Accelerator
) -> tuple[DistillConfig, RunComponents]:
    """Everything loaded, and the settings with steps counted. Refuses early what would only show later."""
    target = load_target(s.target, str(accelerator.device), s.target_dtype, s.revision)
    rows, dropped = load_rows(s, target)
    s = replace(s, loop=s.loop.resolve_epochs(len(rows)))
    if not s.overwrite:
        checkpoint.check_tokenizer(Path(s.out), target.fingerprint)
    worth = make_acceptance_eval(s.check, target, s.seed)
    return s, RunComponents(target, rows, dropped, build_draft(s, target, rows), worth)


def build_training(s: DistillConfig, accelerator: Accelerator, parts: RunComponents) -> Training:
    """Optimisers made, all of it wrapped for several processes, and the rows of each step chosen."""
    trainee, rows = parts.trainee, parts.rows
    optimizers = build_optimizers(trainee.model, trainee.muon_parameters, trainee.slow, s.loop)
    model, *optimizers = accelerator.prepare(trainee.model, *optimizers)
    longest, plain = max_sample_length(s, parts.target), s.on_policy.share == 0
    own = None if plain else OnPolicyBuffer(s, rows, trainee, parts.target, accelerator, longest)
    in_bf16 = accelerator.mixed_precision == "bf16"
    return Training(
        accelerator=accelerator,
        model=model,
        optimizers=optimizers,
        objective=trainee.objective(model),
        select_batch=own.global_batch
        if own
        else partial(rows.global_batch, s.loop.batch_size, s.seed),
        step_flops=planning_dry_run.make_flops_counter(s, in_bf16, own.fresh if own else list),
    )


def run_dry_run(
    s: DistillConfig, accelerator: Accelerator, parts: RunComponents, console: Console
) -> dict[str, float]:
    """Two steps, a round of the draft's own texts if it writes any, and what they took; the draft saved elsewhere."""
    loop = replace(s.loop, steps=max(2, s.loop.steps))
    every = s.on_policy.every if s.on_policy.share > 0 else 0
    with planning_dry_run.shared_temp_folder(accelerator.wait_for_everyone) as folder:
        training = build_training(replace(s, out=folder, loop=loop), accelerator, parts)
        found = planning_dry_run.try_steps(training, parts.rows, s.loop, every)
    draft = make_draft_gatherer(s, training, parts)()
    with collective.raise_on_all_ranks(accelerator):
        if accelerator.is_main_process:
            found |= planning_dry_run.try_export(s, draft, parts.target, parts.measure_acceptance)
            planning_dry_run.print_measurements(
                console, found, s.loop.steps, accelerator.device.type == "cuda"
            )
    return found


def make_draft_gatherer(
    s: DistillConfig, training: Training, parts: RunComponents
) -> Callable[[], TrainableDraft]:
    """What gives the draft with all its weights to the main process; every process must call it."""
    again = partial(build_draft, s, parts.target, parts.rows)
    return sharding.gather_full_draft(training.accelerator, training.model, parts.trainee, again)


def claim_output_dir(s: DistillConfig, accelerator: Accelerator) -> bool:
    """Makes `out` this run's; True in the main process if it goes on with an earlier one."""
    goes_on = False
    with collective.raise_on_all_ranks(accelerator):
        if accelerator.is_main_process:
            goes_on = run_dir.claim_run_dir(s.out, s)
            checkpoint.remove_partial(Path(s.out))
            sample_store.remove_partial(Path(s.out))
    return goes_on


def fill_feature_store(accelerator: Accelerator, parts: RunComponents, console: Console) -> None:
    """What the target says is on disk behind it, if the run reads it from there."""
    if isinstance(parts.trainee.teacher, CachedTeacher):
        rank, wait = accelerator.process_index, accelerator.wait_for_everyone
        parts.trainee.teacher.fill_store(console, rank, accelerator.num_processes, wait)


def distill(
    s: DistillConfig, accelerator: Accelerator, parts: RunComponents, console: Console
) -> None:
    """The run itself: from the last checkpoint, if there is one, to the draft directory."""
    out, trainee, is_main = Path(s.out), parts.trainee, accelerator.is_main_process
    samples, processes = len(parts.rows), accelerator.num_processes
    goes_on = claim_output_dir(s, accelerator)
    fill_feature_store(accelerator, parts, console)
    training = build_training(s, accelerator, parts)
    whole = make_draft_gatherer(s, training, parts)
    with collective.raise_on_all_ranks(accelerator):
        state = checkpoint.load_latest(accelerator, out, parts.target.fingerprint)
    console.print(
        f"{samples} samples ({parts.dropped} dropped), {processes} process(es), {accelerator.device}, "
        f"precision {accelerator.mixed_precision}, from step {state.step}"
    )
    tracker: Tracker | NullTracker = NullTracker()
    if is_main:
        config = {**to_dict(s), "hardware": run_dir.hardware()}
        tracker = Tracker(out, s.project, config, s.wandb, state.step if goes_on else None)

    def measure() -> dict[str, float]:
        """By the main process; the others wait and are told."""
        found: dict[str, float] = {}
        draft = whole()
        with collective.raise_on_all_ranks(accelerator):
            if is_main:
                found = parts.measure_acceptance(draft.draft())
                draft.model.train()
        return collective.broadcast(found)

    try:
        with collective.raise_on_all_ranks(accelerator), make_progress_bar(console, is_main) as bar:
            done = train(training, s.loop, state, out, tracker, measure, bar)
        if not done:
            stopped = f"stopped by SIGTERM: step {state.step} is saved, the same command goes on"
            console.print(stopped)
            accelerator.end_training()
            sys.exit(SIGTERM_EXIT_CODE)
        if s.loop.keep_best and state.measured_at != state.step:
            checkpoint.load(accelerator, checkpoint.checkpoint_dir(out, state.measured_at))
            console.print(f"the draft is that of step {state.measured_at}, whose τ was best")
        draft = whole()
        if is_main:
            facts = draft_metadata.build_metadata(
                s, parts.target, trainee, state, samples, processes
            )
            draft_metadata.save_draft(s, draft, facts, tracker)
            console.print(f"draft saved: {s.out}")
            print(json.dumps({"draft": s.out, "steps": s.loop.steps, **state.measured}))
        with collective.raise_on_all_ranks(accelerator):
            if is_main and s.publish.repo:
                from train.hub.publish import publish_trained

                console.print(f"published: {publish_trained(s.publish, out)}")
        accelerator.wait_for_everyone()
    finally:
        tracker.finish()


def main(s: DistillConfig) -> None:
    accelerator = init_accelerator(s)
    console = Console(stderr=True, quiet=not accelerator.is_main_process)
    needs: dict[str, float] = {}
    with collective.raise_on_all_ranks(accelerator), report_out_of_memory(OUT_OF_MEMORY_ADVICE):
        if s.dry_run:
            mixed = accelerator.mixed_precision == "bf16"
            table, needs = planning_dry_run.estimate_resources(s, accelerator.num_processes, mixed)
            console.print(table)
        s, parts = load_components(s, accelerator)
    if s.dry_run:
        found = run_dry_run(s, accelerator, parts, console)
        if accelerator.is_main_process:
            print(json.dumps({"dry_run": True, "estimated": needs, "measured": found}))
    else:
        distill(s, accelerator, parts, console)
    accelerator.end_training()  # threads of the group that outlive it may abort a process that has finished


if __name__ == "__main__":
    run_command(main, DistillConfig, __doc__)
