"""Distills a draft: a small LM is trained on the target's samples against the target's own distributions.

    accelerate launch train/distill.py --config configs/quickstart/causal.yaml
    accelerate launch train/distill.py --target T --data outputs/samples --draft.init small-lm --out DIR

Killed at any moment, the same command goes on from its last checkpoint and ends with the very weights that an
undisturbed run gives. The draft directory in --out decodes with eval/run.py and decode/generate.py.
"""

import json
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

if not __package__:
    sys.path[0] = str(Path(__file__).resolve().parents[1])

import torch
from accelerate import Accelerator, PartialState
from accelerate.utils import parse_flag_from_env, set_seed
from rich.console import Console

from decode import runs
from decode.drafts.base import FACTS, Draft, Request, draft_sha256
from decode.sampling import Sampling
from decode.settings import UserError, run_command, to_dict
from decode.target import Target, load_target
from train import batches, checkpoint, drafts, rehearsal, shards
from train.families import FAMILIES, Trainee
from train.features import Folder, Stored
from train.heads import Weights
from train.loop import LoopSettings, bar_of, optimizers_of, train
from train.objectives import measure_acceptance
from train.prompts import DOMAINS, Source, encode, load_prompts
from train.tracking import NullTracker, Tracker


@dataclass
class CheckSettings:
    """The fixed prompts on which τ and α are measured during training, with the real decoder."""

    prompts: int = 6
    """How many; taken from the bundled training prompts, never from those of evaluation."""
    k: int = 4
    """Tokens drafted a round."""
    max_new_tokens: int = 32
    """Longest answer."""


@dataclass
class Settings:
    target: str = "assets/target"
    """The model to imitate: folder or hub name."""
    revision: str | None = None
    """Commit, tag or branch of a hub target."""
    data: str = "outputs/samples"
    """A sampled set from train/sample.py."""
    draft: drafts.DraftSettings = field(default_factory=drafts.DraftSettings)
    loss: Literal[
        "forward_kl",
        "reverse_kl",
        "jsd",
        "tv",
        "lk_alpha",
        "lk_lambda",
        "hard_ce",
        "soft_ce",
        "top_k",
    ] = "forward_kl"
    """Divergence from the target's distribution; forward_kl is the robust default."""
    weights: Weights = field(default_factory=Weights)
    """Of the parts of the loss of heads."""
    features: str = ""
    """Folder of the target's states and laws, made in one pass where they are missing; empty: it runs in every step."""
    features_top: int = 64
    """features: tokens of each law that are kept, the others share what is left; 0: final states, which give it all."""
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
    seed: int = 0
    out: str = "outputs/drafts/causal"
    """Folder of the draft and its checkpoints."""
    resume: bool = False
    """Go on in `out` although the settings differ (an equal run goes on by itself)."""
    overwrite: bool = False
    """Delete what another run left in `out`."""
    dry_run: bool = False
    """Only tell what the run needs and try two steps of it, with the live target; writes nothing into `out`."""


def load_rows(s: Settings, target: Target) -> tuple[list[shards.Row], int]:
    """(samples that fit, how many were dropped); refuses samples of another tokenizer."""
    manifest = shards.read_manifest(Path(s.data))
    if manifest.tokenizer_hash != target.fingerprint:
        raise UserError(
            f"samples in {s.data} were made with tokenizer {manifest.tokenizer_hash} (target "
            f"{manifest.target}), but {target.name} has {target.fingerprint}: sample this target"
        )
    length = min(s.loop.max_length, target.decoder.context)
    return batches.fit(shards.read_shards(Path(s.data)), length)


def check_prompts(s: Settings, target: Target) -> list[list[int]]:
    """The same few prompts at every measurement, from each bundled domain alike."""
    share = max(1, s.check.prompts // len(DOMAINS))
    sources = [Source("bundled", domain, limit=share) for domain in DOMAINS]
    return [encode(target.tokenizer, prompt) for prompt in load_prompts(sources, s.seed)]


def save_draft(s: Settings, trainee: Trainee, facts: dict[str, Any]) -> None:
    """The draft directory, with draftsmith.json written last."""
    out = Path(s.out)
    trainee.save(out)
    facts["draft_sha256"] = draft_sha256(s.out)
    runs.write_atomically(out / FACTS, json.dumps(facts, indent=1) + "\n")


def precision(s: Settings, device_type: str) -> str:
    """Accelerate's name for the precision of the forward pass."""
    if s.mixed_precision != "auto":
        return s.mixed_precision
    return "bf16" if device_type == "cuda" and torch.cuda.is_bf16_supported() else "no"


def rehearse(
    s: Settings,
    accelerator: Accelerator,
    target: Target,
    trainee: Trainee,
    rows: list[shards.Row],
    console: Console,
    needs: dict[str, float],
) -> None:
    """Two steps and what they took, then the draft saved and loaded elsewhere."""
    optimizers = optimizers_of(trainee.model, trainee.matrices, trainee.slow, s.loop)
    model, *optimizers = accelerator.prepare(trainee.model, *optimizers)
    objective = trainee.objective(model)
    found = rehearsal.try_steps(accelerator, model, optimizers, objective, rows, s.loop, s.seed)
    if accelerator.is_main_process:
        prompts, check = check_prompts(s, target), s.check

        def measure(draft: Draft) -> dict[str, float]:
            return measure_acceptance(target, draft, prompts, check.k, check.max_new_tokens, s.seed)

        found |= rehearsal.try_export(s, trainee, target, measure)
        rehearsal.report(console, found, s.loop.steps, accelerator.device.type == "cuda")
        print(json.dumps({"dry_run": True, "estimated": needs, "measured": found}))
    accelerator.wait_for_everyone()


def main(s: Settings) -> None:
    state = PartialState(cpu=parse_flag_from_env("ACCELERATE_USE_CPU"))
    accelerator = Accelerator(mixed_precision=precision(s, state.device.type))
    set_seed(s.seed)
    if min(s.check.prompts, s.check.k, s.check.max_new_tokens) < 1:
        raise UserError("check: need prompts >= 1, k >= 1 and max_new_tokens >= 1")
    console = Console(stderr=True, quiet=not accelerator.is_main_process)
    if s.dry_run:
        mixed = accelerator.mixed_precision == "bf16"
        table, needs = rehearsal.forecast(s, accelerator.num_processes, mixed)
        console.print(table)
    target = load_target(s.target, str(accelerator.device), s.target_dtype, s.revision)
    rows, dropped = load_rows(s, target)
    where = Folder(Path(s.features), s.features_top, s.loop.max_length) if s.features else None
    where = None if s.dry_run else where
    trainee = FAMILIES[s.draft.family](s, target, rows, str(accelerator.device), where)
    batches.split_for(0, accelerator.num_processes, range(s.loop.batch_size))  # refuses early
    if s.dry_run:
        rehearse(s, accelerator, target, trainee, rows, console, needs)
        return
    if s.loop.eval_every > 0:  # a draft that cannot be measured is refused early, too
        trainee.draft().begin(Request(1, 1, s.check.k, Sampling(), lambda p: p.argmax(-1)))
        trainee.model.train()
    goes_on = runs.claim(s.out, s) if accelerator.is_main_process else False
    accelerator.wait_for_everyone()
    if isinstance(trainee.teacher, Stored):
        rank, world = accelerator.process_index, accelerator.num_processes
        trainee.teacher.fill(console, rank, world, accelerator.wait_for_everyone)
    optimizers = optimizers_of(trainee.model, trainee.matrices, trainee.slow, s.loop)
    model, *optimizers = accelerator.prepare(trainee.model, *optimizers)
    start = checkpoint.load_latest(accelerator, Path(s.out))
    tracker: Tracker | NullTracker = NullTracker()
    if accelerator.is_main_process:
        config = {**to_dict(s), "hardware": runs.hardware()}
        tracker = Tracker(Path(s.out), s.project, config, s.wandb, start if goes_on else None)
    console.print(
        f"{len(rows)} samples ({dropped} dropped), {accelerator.num_processes} process(es), "
        f"{accelerator.device}, precision {accelerator.mixed_precision}, from step {start}"
    )
    prompts = check_prompts(s, target)
    measured: dict[str, float] = {}

    def measure() -> dict[str, float]:
        if accelerator.is_main_process:
            draft, check = trainee.draft(), s.check
            measured.update(
                measure_acceptance(target, draft, prompts, check.k, check.max_new_tokens, s.seed)
            )
            trainee.model.train()
        accelerator.wait_for_everyone()
        return dict(measured)

    try:
        with bar_of(console, accelerator.is_main_process) as progress:
            train(
                accelerator,
                model,
                optimizers,
                trainee.objective(model),
                rows,
                s.loop,
                Path(s.out),
                s.seed,
                start,
                tracker,
                measure,
                progress,
            )
        if accelerator.is_main_process:
            facts = {
                "family": s.draft.family,
                "target": {"name": target.name, "revision": target.revision},
                "tokenizer_hash": target.fingerprint,
                "training": to_dict(s),
                "samples": len(rows),
                "processes": accelerator.num_processes,
                "data_manifest": runs.read_json(Path(s.data) / "manifest.json"),
                "measured_in_training": measured,
                **trainee.facts,
                **runs.provenance(),
            }
            save_draft(s, trainee, facts)
            out = Path(s.out)
            tracker.artifact("settings", "settings", [out / runs.SETTINGS])
            tracker.artifact("manifest", "dataset", [Path(s.data) / "manifest.json"])
            names = ("config.json", "model.safetensors", "tokenizer.json", FACTS)
            files = [out / name for name in names if (out / name).is_file()]
            tracker.artifact("draft", "model", files)
            console.print(f"draft saved: {s.out}")
            print(json.dumps({"draft": s.out, "steps": s.loop.steps, **measured}))
    finally:
        tracker.finish()


if __name__ == "__main__":
    run_command(main, Settings, __doc__)
