"""A run of train/distill.py: its parts are loaded and checked against each other, then the draft is trained."""

import json
import os
import shlex
import subprocess
import sys
import warnings
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from accelerate import Accelerator, PartialState
from rich.console import Console

from decode.checkpoints.draft_folder import (
    METADATA_FILE,
    MODEL_FILES,
    check_saved_draft,
    draft_sha256,
)
from decode.common import provenance
from decode.common.command import stop
from decode.common.errors import UserError
from decode.common.files import parse_jsonl, read_text
from decode.common.progress import progress_bars
from decode.common.settings import to_dict
from decode.common.typed_json import to_json
from decode.distributed.placement import load_target, run_placed
from decode.drafts.base import check_request
from decode.model import attention
from decode.model.loading import Target, adopt_tokenizer
from decode.model.vocabularies import check_embedded
from decode.verification.sampling import SamplingParams
from eval.reporting.formatting import Table, format_number, table_html, table_text
from train.data import manifest, mixture, sample_store
from train.data.sample_store import SampleRow
from train.families.base import FamilyContext, TrainableDraft
from train.families.builders import build_trainable
from train.hub.upload import check_labels, resolve_repo
from train.planning.dry_run import print_measurements, shared_temp_folder, try_export, try_steps
from train.planning.estimates import FlopsCounter, estimate_resources
from train.settings.training import TrainingPublishConfig
from train.teacher.cached import CachedTeacher, FeatureFolder
from train.trainer import checkpoint, collective, draft_metadata, on_policy, sharding
from train.trainer.acceptance_eval import AcceptanceEval
from train.trainer.launch import attention_in_force, in_force, init_accelerator
from train.trainer.loop import Training, build_optimizers, train
from train.trainer.on_policy import OnPolicyBuffer
from train.trainer.settings import DistillConfig
from train.trainer.throughput import report_out_of_memory
from train.trainer.tracking import NullTracker, Tracker

COMMAND = "train/distill.py"
OWNED_FILES = (
    *MODEL_FILES,
    *(f"target/{name}" for name in MODEL_FILES),  # the trained target of Medusa-2
    METADATA_FILE,
    "adapter/*",
    "metrics.jsonl",
    "layer_choice.json",  # of earlier versions
    "wandb_run_id.txt",
    "wandb/**",
    "tensorboard/**",
    "trackio/**",
    "checkpoints/latest",
    "checkpoints/step-*/**",
    "on_policy/**",
)
"""Patterns of the files that this command writes into its output folder."""
OUT_OF_MEMORY_ADVICE = (
    "the models alone do not fit: set target_dtype to bfloat16, or take a smaller draft"
)


MOST_ROWS = 20


@dataclass(frozen=True, repr=False)
class Distilled:
    """A trained draft. It prints as the table of its log; a notebook draws its loss and acceptance as well."""

    folder: str
    """Where it lies: what `load_draft` and the methods of eval/run.py take."""
    steps: int
    measured: dict[str, float]
    """accept/tau, accept/alpha, … as they were measured last in training, or best with loop.keep_best."""

    @property
    def log(self) -> list[dict[str, float]]:
        """The lines of metrics.jsonl."""
        file = Path(self.folder, "metrics.jsonl")
        return [line for _, line in parse_jsonl(read_text(file), file)]

    @property
    def table(self) -> Table:
        """A row for each step at which something was logged; of many as many as a page holds, the last among them."""
        rows: dict[float, dict[str, float]] = {}
        for line in self.log:
            rows.setdefault(line["step"], {}).update(line)
        columns = {"step": 0, "train/loss": 3, "accept/alpha": 3, "accept/tau": 2}
        cells = [
            [format_number(row.get(x), n) for x, n in columns.items()] for row in rows.values()
        ]
        return Table(self.folder, [*columns], cells[:: -(len(cells) // MOST_ROWS + 1)][::-1])

    def __repr__(self) -> str:
        return f"{self.folder}, {self.steps} steps\n{table_text(self.table)}"

    def _repr_html_(self) -> str:
        # matplotlib, which no training needs
        from eval.reporting.plots import ChartSeries, Point, line_chart

        charts = ""
        for name in ("train/loss", "accept/tau"):
            points = [Point(x["step"], x[name]) for x in self.log if x.get(name) is not None]
            if points:
                charts += line_chart([ChartSeries(name, points)], [name], "", "step", name)
        return f"{charts}{table_html(self.table)}"


@dataclass(frozen=True)
class DryRun:
    """What `dry_run` found out: what the training needs by estimate, and by two steps."""

    estimated: dict[str, float]
    measured: dict[str, float]


def load_rows(s: DistillConfig, target: Target) -> tuple[mixture.Mixture, int]:
    """(samples that fit, how many were dropped). UserError for samples of another tokenizer."""
    return mixture.load(s.data, max_sample_length(s, target), target, s.supervise, s.seed)


def check_embedded_rows(rows: Sequence[SampleRow], target: Target) -> None:
    """UserError for a row with a token that was added to the tokenizer and that the target does not embed."""
    size = target.runner.embedding_rows
    if max(target.tokenizer.get_vocab().values()) < size:
        return
    for row in rows:
        if "images" in row:  # a placeholder of an image may be no token of the target
            continue
        try:
            check_embedded(target.tokenizer, row["input_ids"], size)
        except UserError as error:
            raise UserError(f"sample {row['id']}: {error}; sampling again leaves it out") from error


def check_encoder_decoder(s: DistillConfig, target: Target) -> None:
    """UserError for samples of the other kind of target, and for settings that do not apply to an encoder-decoder."""
    own = target.is_encoder_decoder
    for part in mixture.mixture_parts(s.data):
        if manifest.read_manifest(Path(part.path)).encoder_decoder != own:
            kinds = ("a causal target", "an encoder-decoder")
            raise UserError(
                f"samples in {part.path} are of {kinds[not own]}, and {target.name!r} is {kinds[own]}: sample this one"
            )
    if not own:
        return
    wrong = {
        "draft.family: train a causal draft, from a smaller encoder-decoder": s.draft.family != "causal",
        "supervise: set it to answers, the decoder predicts no prompt": s.supervise == "all",
        "loop.pack: set it to false, the encoder reads one prompt a row": s.loop.pack,
        "features: leave it empty, the live target is the teacher": bool(s.features),
    }  # fmt: skip
    for advice, found in wrong.items():
        if found:
            raise UserError(f"target {target.name!r} is an encoder-decoder. {advice}")


def check_images(s: DistillConfig, target: Target) -> None:
    """UserError for a training that would leave out the images of samples."""
    wrong = {
        f"target {target.name!r} reads text only": not target.runner.takes_images,
        "states.url: the server is sent tokens alone": bool(s.states.url),
        "on_policy.share: the draft writes on texts alone, set it to 0": s.on_policy.share > 0,
    }
    for why, found in wrong.items():
        if found:
            raise UserError(f"samples hold images. {why}")


def max_sample_length(s: DistillConfig, target: Target) -> int:
    """Tokens that a sample may have; longer ones are cut."""
    return min(s.loop.max_length, target.runner.context)


def build_draft(s: DistillConfig, target: Target, rows: mixture.Mixture) -> TrainableDraft:
    """The draft in training. UserError, before any step, if training could not measure it with these settings."""
    folder = None
    if s.features and not s.dry_run:
        folder = FeatureFolder(Path(s.features), s.features_top, s.loop.max_length, s.allow_changed)
    device = str(target.runner.device)
    context = FamilyContext(s, target, rows, device, folder, rows.whole, s.states)
    trainable = build_trainable(s.draft, context)
    if s.loop.eval_every > 0 and not s.dry_run:
        check_request(trainable.to_draft(), s.check.k, SamplingParams())
        trainable.model.train()
    # Others have the target's context, to which samples are cut.
    if s.draft.continues and not s.dry_run and PartialState().is_main_process:
        warn_of_long_samples(trainable.to_draft().reads.context, rows)
        trainable.model.train()
    return trainable


def warn_of_long_samples(context: int | None, rows: Sequence[SampleRow]) -> None:
    """One warning if samples have labels beyond the `context` of the draft (None: it has no end)."""
    if context is None:
        return
    beyond = sum(any(end > context for _, end in row["loss_spans"]) for row in rows)
    if beyond:
        warnings.warn(
            f"{beyond} of {len(rows)} samples have labels beyond the draft's context of {context} tokens, where it "
            f"drafts nothing: set loop.max_length to {context}, or start from a draft with a longer context",
            stacklevel=2,
        )


@dataclass(frozen=True)
class RunComponents:
    """The loaded parts of a run, which are known to fit together."""

    target: Target
    rows: mixture.Mixture
    dropped: int
    """Samples without supervised tokens."""
    trainable: TrainableDraft
    acceptance_eval: AcceptanceEval
    inputs: checkpoint.TrainingInputs


def load_components(
    s: DistillConfig, accelerator: Accelerator
) -> tuple[DistillConfig, RunComponents]:
    """(settings with steps computed from epochs, the loaded parts). UserError if they do not fit together."""
    if s.draft.continues and accelerator.is_main_process:
        check_saved_draft(s.draft.continues)
    device, dtype = str(accelerator.device), s.target_dtype
    adopt_tokenizer(s.target, s.tokenizer, s.revision)
    target = load_target(
        s.placement, s.target, device, dtype, s.revision, with_layers=not s.states.url
    )
    check_encoder_decoder(s, target)
    rows, dropped = load_rows(s, target)
    check_embedded_rows(rows, target)
    if rows.has_images:
        check_images(s, target)
    if accelerator.is_main_process:
        mixture.check_target(s.data, target, s.allow_changed)
    s = replace(s, loop=s.loop.resolve_epochs(len(rows)))
    init = draft_sha256(s.draft.continues) if s.draft.continues else None
    inputs = checkpoint.TrainingInputs(target.fingerprint, target.identity, rows.digests, init)
    if not s.overwrite and accelerator.is_main_process:
        checkpoint.check_inputs(Path(s.out), inputs, s.allow_changed)
    templates = mixture.templates_of(s.data)
    acceptance_eval = AcceptanceEval(s.check, target, s.seed, rows, templates)
    for prompt in acceptance_eval.prompts if s.loop.eval_every > 0 else []:
        if acceptance_eval.images is None:
            check_embedded(target.tokenizer, prompt, target.runner.embedding_rows)
    draft = build_draft(s, target, rows)
    if rows.has_images and draft.teacher is None:
        raise UserError(
            f"samples hold images. draft.family {s.draft.family} trains in the target, which is given texts alone"
        )
    return s, RunComponents(target, rows, dropped, draft, acceptance_eval, inputs)


def build_training(s: DistillConfig, accelerator: Accelerator, parts: RunComponents) -> Training:
    """Builds the optimisers, wraps the model for several processes, and sets where each step's rows come from."""
    trainable, rows, target = parts.trainable, parts.rows, parts.target
    model, *optimizers = accelerator.prepare(trainable.model, *build_optimizers(trainable, s.loop))
    buffer = None
    if s.on_policy.share > 0:
        max_length = max_sample_length(s, target)
        buffer = OnPolicyBuffer(s, rows, trainable, target, accelerator, max_length)
    from_data = partial(rows.global_batch, s.loop.batch_size, s.seed)
    return Training(
        accelerator=accelerator,
        model=model,
        optimizers=optimizers,
        trainable=trainable,
        select_batch=from_data if buffer is None else buffer.global_batch,
        step_flops=FlopsCounter(s, accelerator.mixed_precision != "no", buffer).count,
        teacher=f"target {s.target!r} in {s.target_dtype}",
    )


def run_dry_run(
    s: DistillConfig, accelerator: Accelerator, parts: RunComponents, console: Console
) -> dict[str, float]:
    """Tries two steps, one round of on-policy generation if there is any, and saving; returns what was measured."""
    console.print(in_force(s, accelerator))
    loop = replace(s.loop, steps=max(2, s.loop.steps))
    every = s.on_policy.every if s.on_policy.share > 0 else 0
    with shared_temp_folder(accelerator.wait_for_everyone) as folder:
        training = build_training(replace(s, out=folder, loop=loop), accelerator, parts)
        measured = try_steps(training, parts.rows, s.loop, every)
    full_copy = build_full_copy(s, accelerator, parts)
    draft = sharding.gather_full_draft(accelerator, training.model, parts.trainable, full_copy)
    with collective.raise_on_all_ranks(accelerator):
        if accelerator.is_main_process:
            measured |= try_export(s, draft, parts.target, parts.acceptance_eval)
            cuda = accelerator.device.type == "cuda"
            print_measurements(console, measured, s.loop.steps, cuda)
    return measured


def build_full_copy(
    s: DistillConfig, accelerator: Accelerator, parts: RunComponents
) -> TrainableDraft | None:
    """A second draft for gathered weights, on the main process under FSDP2; elsewhere None."""
    if not (accelerator.is_fsdp2 and accelerator.is_main_process):
        return None
    return build_draft(s, parts.target, parts.rows)


def input_paths(s: DistillConfig) -> list[str]:
    """What the run reads: folders and files, or names on the Hub."""
    parts = mixture.mixture_parts(s.data)
    return [s.target, s.draft.continues, s.features, *(part.path for part in parts)]


def fill_feature_store(accelerator: Accelerator, parts: RunComponents, console: Console) -> None:
    """Computes the features that are missing on disk, if the run reads the target's outputs from there."""
    if isinstance(parts.trainable.teacher, CachedTeacher):
        rank, wait = accelerator.process_index, accelerator.wait_for_everyone
        parts.trainable.teacher.fill_store(console, rank, accelerator.num_processes, wait)


def distill(
    s: DistillConfig,
    accelerator: Accelerator,
    parts: RunComponents,
    console: Console,
    resumed: bool,
) -> Distilled | None:
    """Trains from the last checkpoint, if there is one, and writes the draft's folder, which this run has open."""
    out, trainable, is_main = Path(s.out), parts.trainable, accelerator.is_main_process
    samples, processes = len(parts.rows), accelerator.num_processes
    with collective.raise_on_all_ranks(accelerator):
        if is_main:
            checkpoint.remove_partial(out)
            sample_store.remove_partial(out)
    fill_feature_store(accelerator, parts, console)
    training = build_training(s, accelerator, parts)
    full_copy = build_full_copy(s, accelerator, parts)
    with collective.raise_on_all_ranks(accelerator):
        damage = partial(on_policy.find_damage, s)
        state = checkpoint.load_latest(accelerator, out, parts.target.fingerprint, damage)
    state.note_inputs(parts.inputs)
    console.print(
        f"{in_force(s, accelerator)}; {samples} samples ({parts.dropped} dropped), from step {state.step}"
    )
    tracker: NullTracker = NullTracker()
    if is_main:
        config = {**to_dict(s), "hardware": to_json(provenance.hardware())}
        resumed_step = state.step if resumed else None
        tracker = Tracker(out, s.project, config, s.wandb, resumed_step, s.tracker)

    def measure() -> dict[str, float]:
        """τ and α, measured by the main process and broadcast to the others."""
        measured: dict[str, float] = {}
        draft = sharding.gather_full_draft(accelerator, training.model, trainable, full_copy)
        with collective.raise_on_all_ranks(accelerator):
            if is_main:
                measured = parts.acceptance_eval.measure(draft.to_draft())
                draft.model.train()
        return collective.broadcast(measured)

    try:
        bars = progress_bars(console, ("loss", "alpha", "speed"), disable=not is_main)
        with collective.raise_on_all_ranks(accelerator), bars as bar:
            signal_number = train(training, s.loop, state, out, tracker, measure, bar)
        if signal_number:
            accelerator.end_training()
            stop(signal_number, f"step {state.step} is saved")
        if state.step > s.loop.steps:
            console.print(
                f"loop.steps is {s.loop.steps}, and {state.step} steps are done already: the draft is theirs"
            )
        if s.loop.keep_best and state.measured_at != state.step:
            with collective.raise_on_all_ranks(accelerator):
                checkpoint.load_best(accelerator, out, state.measured_at)
            console.print(f"the draft is that of step {state.measured_at}, whose τ was best")
        draft = sharding.gather_full_draft(accelerator, training.model, trainable, full_copy)
        made: Distilled | None = None
        if is_main:
            metadata = draft_metadata.build_metadata(
                s, parts.target, trainable, state, samples, processes
            )
            draft_metadata.save_draft(s, draft, metadata, tracker)
            console.print(f"draft saved: {s.out}")
            made = Distilled(s.out, metadata.trained_steps or 0, state.measured)
        with collective.raise_on_all_ranks(accelerator):
            if is_main and s.publish.repo:
                console.print(f"published: {publish(s.publish, out)}")
        accelerator.wait_for_everyone()
        return made
    finally:
        tracker.finish()


def publish(s: TrainingPublishConfig, draft: Path) -> str:
    """Publishes the draft without a report, as scripts/publish.py does: "URL of the commit (tag)".

    UserError if that fails, which has then said why.
    """
    script = Path(__file__).resolve().parents[1] / "scripts" / "publish.py"
    words = [f"--draft={draft}", f"--out={draft}-published", f"--repo={s.repo}", "--push=true"]
    words += [f"--private={json.dumps(s.private)}"]
    words += [f"--labels.{name}={value}" for name, value in vars(s.labels).items()]
    launched = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "TORCHELASTIC", "ACCELERATE")
    env = {name: value for name, value in os.environ.items() if not name.startswith(launched)}
    # A process of its own: what makes cards and reports is not loaded to train.
    done = subprocess.run([sys.executable, str(script), *words], env=env, stdout=subprocess.PIPE)
    if done.returncode != 0:
        raise UserError(
            f"{draft} is saved and not published: python scripts/publish.py {shlex.join(words)} tries again"
        )
    sent = json.loads(done.stdout.splitlines()[-1])["pushed"]
    return f"{sent['url']} ({sent['tag']})"


def train_draft(s: DistillConfig) -> Distilled | DryRun | None:
    """Trains the draft, or goes on from its last checkpoint; with `dry_run` it only tries two steps. None in a process
    of several that is not the first."""
    return run_placed(s.placement, partial(train_here, s))


def train_here(s: DistillConfig) -> Distilled | DryRun | None:
    s, accelerator = init_accelerator(s)
    console = Console(stderr=True, quiet=not accelerator.is_main_process)
    if s.publish.repo:
        resolve_repo(s.publish.repo, push=True)
        check_labels(s.publish.labels)
    estimated: dict[str, float] = {}
    method = attention_in_force(s.draft.attention, accelerator.device.type)
    with attention.training_attention(method):
        with collective.raise_on_all_ranks(accelerator), report_out_of_memory(OUT_OF_MEMORY_ADVICE):
            if s.dry_run:
                mixed = accelerator.mixed_precision != "no"
                table, estimated = estimate_resources(s, accelerator.num_processes, mixed)
                console.print(table)
            s, parts = load_components(s, accelerator)
            for line in sharding.choose_wrapping(accelerator, parts.trainable):
                console.print(line)
        if s.dry_run:
            measured = run_dry_run(s, accelerator, parts, console)
            return DryRun(estimated, measured) if accelerator.is_main_process else None
        with collective.open_run(accelerator, s, COMMAND, OWNED_FILES, input_paths(s)) as resumed:
            return distill(s, accelerator, parts, console, resumed)
