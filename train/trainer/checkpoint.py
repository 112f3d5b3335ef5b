"""Training checkpoints: written atomically, and verified by checksums when they are loaded.

`<out>/checkpoints/step-000100/` is renamed into place once it is complete; `<out>/checkpoints/latest`, written after
it, names the checkpoint to resume from. Weights, optimisers and random states are saved by `Accelerator.save_state`;
`contents.json` beside them holds the `TrainingState`, the `LaunchKind`, a checksum of every file, and one of itself. A
run resumes from the newest checkpoint whose checksums are right, so the last MIN_KEPT ones are always there.
"""

import hashlib
import json
import logging
import re
import shutil
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from accelerate import Accelerator
from accelerate.utils import DistributedType

from decode.checkpoints.draft_folder import CHECKPOINTS
from decode.common import damage, files, run_dir
from decode.common.errors import UserError, naming
from decode.common.target_record import ModelFingerprint, difference
from decode.common.typed_json import from_json, to_json

LATEST = "latest"
CONTENTS = "contents.json"
MIN_KEPT = 2
"""Checkpoints that are kept at least, so that there is one to go back to where the last is damaged."""

# Accelerate warns at every checkpoint that tied embeddings are stored once, which breaks the progress bar.
logging.getLogger("accelerate.utils.other").setLevel(logging.ERROR)


@dataclass
class TrainingState:
    """The state of a training run besides its weights, optimisers and random states."""

    tokenizer: str
    """Fingerprint of the target's tokenizer, which gives the rows of the draft's embeddings their meaning."""
    step: int = 0
    """Steps done."""
    sums: dict[str, float] = field(default_factory=dict)
    """Sums of the metrics over the steps since the last line of the log."""
    measured: dict[str, float] = field(default_factory=dict)
    """The last measurement of τ and α, or with loop.keep_best the best one."""
    measured_at: int = 0
    """The step after which `measured` was measured; 0: nothing was measured yet."""
    learned: int = 0
    """Supervised tokens trained on so far."""
    seconds: float = 0.0
    """Wall-clock time of the steps so far, without measuring and saving between them."""
    inputs: list[dict[str, Any]] = field(default_factory=list)
    """`TrainingInputs` as JSON, those of now at the end; more than one if a change was allowed."""

    def note_inputs(self, now: "TrainingInputs") -> None:
        """Adds those of now, unless they are the last ones."""
        if self.inputs[-1:] != [now.to_json()]:
            self.inputs.append(now.to_json())


@dataclass(frozen=True)
class TrainingInputs:
    """What a training learns from, by content: the same after a copy, another one after a replacement."""

    tokenizer: str
    """Fingerprint of the target's tokenizer."""
    target: ModelFingerprint
    data: list[str]
    """`sample_store.rows_digest` of each sampled set."""
    init: str | None
    """Checksum of the draft that training began with; None: of no local folder."""

    def to_json(self) -> dict[str, Any]:
        """Without the tokenizer, which a checkpoint names by itself."""
        return {"target": to_json(self.target), "data": self.data, "init": self.init}

    def changes(self, then: dict[str, Any]) -> list[str]:
        """How they differ from those of a checkpoint, which may lack some."""
        target = difference(from_json(ModelFingerprint, then.get("target", {})), self.target)
        found = [f"target: {target}"] if target else []
        pairs = {
            "samples": (then.get("data"), self.data),
            "draft.init": (then.get("init"), self.init),
        }
        for name, (a, b) in pairs.items():
            if a and b and a != b:
                before, now = (" + ".join(x) if isinstance(x, list) else x[:16] for x in (a, b))
                found.append(f"{name}: {before} then, {now} now")
        return found


@dataclass(frozen=True)
class LaunchKind:
    """How a training runs, as its checkpoints remember it."""

    parallelism: str
    """plain (one process, or data parallelism over several), FSDP2, or ZeRO-2 with the stage's number."""
    processes: int
    precision: str
    """no, bf16 or fp16."""

    @classmethod
    def of(cls, accelerator: Accelerator) -> "LaunchKind":
        parallelism = "FSDP2" if accelerator.is_fsdp2 else "plain"
        if accelerator.distributed_type == DistributedType.DEEPSPEED:
            zero = accelerator.state.deepspeed_plugin.deepspeed_config["zero_optimization"]
            parallelism = f"ZeRO-{zero['stage']}"
        return cls(parallelism, accelerator.num_processes, accelerator.mixed_precision)

    def __str__(self) -> str:
        name = "data parallelism" if self.parallelism == "plain" else self.parallelism
        return f"{name}, {self.processes} process(es), precision {self.precision}"

    def continues(self, earlier: "LaunchKind") -> bool:
        """Whether this launch can load a checkpoint of the `earlier` one.

        ZeRO stores each process's part in the precision of training; only the scaler of fp16 is stored elsewhere.
        """
        if self.parallelism.startswith("ZeRO"):
            return self == earlier
        scaled = (self.precision == "fp16", earlier.precision == "fp16")
        return self.parallelism == earlier.parallelism and scaled[0] == scaled[1]

    def continued_by(self) -> str:
        """Which launches can load a checkpoint of this one, in words."""
        scaled = " in fp16" if self.precision == "fp16" else ""
        if self.parallelism == "plain":
            return f"one process, or data parallelism over any number{scaled}"
        if self.parallelism == "FSDP2":
            return f"FSDP2 over any number of processes{scaled}"
        return f"{self.parallelism} over {self.processes} process(es) with mixed_precision {self.precision}"


def checkpoint_dir(out: Path, step: int) -> Path:
    """The folder of the checkpoint after `step` steps."""
    return out / CHECKPOINTS / f"step-{step:06d}"


def save(
    accelerator: Accelerator, out: Path, state: TrainingState, keep: int, best: int = 0
) -> None:
    """Writes the checkpoint after `state.step` steps; deletes all but the last `keep` ones and that of step `best`.

    The last MIN_KEPT stay in any case, and so do those of later steps, which are trained again. Every rank must call
    it.
    """
    folder = out / CHECKPOINTS
    final = checkpoint_dir(out, state.step)
    scratch = folder / f"{final.name}.tmp"
    if accelerator.is_main_process:
        shutil.rmtree(scratch, ignore_errors=True)
        scratch.mkdir(parents=True)
    accelerator.wait_for_everyone()
    try:
        with naming(final):
            accelerator.save_state(str(scratch), safe_serialization=True)
    except Exception:  # such as a full disk
        shutil.rmtree(scratch, ignore_errors=True)
        raise
    accelerator.wait_for_everyone()
    if accelerator.is_main_process:
        launch = asdict(LaunchKind.of(accelerator))
        contents = {**asdict(state), "launch": launch, "files": _digests(scratch)}
        text = json.dumps({**contents, "sha256": _contents_digest(contents)})
        with naming(final):
            (scratch / CONTENTS).write_text(text)
        if final.is_symlink():
            final.unlink()
        shutil.rmtree(final, ignore_errors=True)  # the step was trained again after a kill
        scratch.replace(final)
        files.write_atomically(folder / LATEST, final.name + "\n")
        earlier = [path for step, path in _checkpoints(out) if step <= state.step]
        for old in earlier[max(keep, MIN_KEPT) :]:
            if old != checkpoint_dir(out, best):
                shutil.rmtree(old)
    accelerator.wait_for_everyone()


def discard_checkpoint(out: Path, step: int) -> None:
    """Deletes the checkpoint of `step`, whose weights are ruined; `latest` then names the one before it."""
    bad = checkpoint_dir(out, step)
    earlier = [path for number, path in _checkpoints(out) if number < step]
    if earlier:
        files.write_atomically(bad.parent / LATEST, earlier[0].name + "\n")
    if bad.is_dir() and not bad.is_symlink():
        shutil.rmtree(bad)
    if not earlier:
        (bad.parent / LATEST).unlink(missing_ok=True)


def remove_partial(out: Path) -> None:
    """Deletes checkpoints that a kill left half written. To be called by one process before any other writes."""
    for scratch in (out / CHECKPOINTS).glob("step-*.tmp"):
        shutil.rmtree(scratch)


def check_launch(out: Path, launch: LaunchKind) -> None:
    """UserError if the newest checkpoint that can be read was written by a launch that `launch` cannot continue."""
    path, contents = _newest(out)
    if "launch" not in contents:  # there is no checkpoint, or it is of an earlier version
        return
    earlier = LaunchKind(**contents["launch"])
    if not launch.continues(earlier):
        raise UserError(
            f"checkpoint {path} was written by another launch ({earlier}) than this one ({launch}): continue it with "
            f"{earlier.continued_by()}, or start over with --overwrite true"
        )


def check_inputs(out: Path, now: TrainingInputs, allowed: bool) -> None:
    """UserError if the newest checkpoint that can be read belongs to another tokenizer, or was trained on other inputs
    and that is not `allowed`.

    With another tokenizer its weights could have the right shapes and still stand for other tokens.
    """
    path, contents = _newest(out)
    found = contents.get("tokenizer", now.tokenizer)
    if found != now.tokenizer:
        raise UserError(
            f"checkpoint {path} was trained for tokenizer {found}, but this target has {now.tokenizer}: "
            "--overwrite true starts over, --out names another folder"
        )
    changes = [change for then in contents.get("inputs", [])[-1:] for change in now.changes(then)]
    if changes:
        what = f"checkpoint {path} was trained on something else ({'; '.join(changes)})"
        run_dir.refuse_change(what, allowed)


def load_latest(
    accelerator: Accelerator,
    out: Path,
    tokenizer: str,
    other_damage: Callable[[int], str] = lambda step: "",
) -> TrainingState:
    """Restores the newest intact checkpoint and returns its state, or the state of step 0 if there is no checkpoint.

    `other_damage` says what else is missing or damaged that resuming after that step would need, "" for nothing. A
    warning in the main process names the checkpoints that were passed over and why. UserError if none is intact.
    """
    paths, problem = _candidates(out)
    passed_over = [problem] if problem else []
    for path in paths:
        found = find_damage(path) or other_damage(_step_of(path))
        if found:
            passed_over.append(f"checkpoint {path}: {found}")
            continue
        if passed_over and accelerator.is_main_process:
            damage.warn(f"{'; '.join(passed_over)}: the run goes on from the intact {path.name}")
        load(accelerator, path)
        contents = _read_contents(path)
        state = {name: contents[name] for name in asdict(TrainingState("")) if name in contents}
        return TrainingState(**{"tokenizer": tokenizer, **state})
    if paths:
        raise UserError(
            f"{'; '.join(passed_over)}; no intact checkpoint is left: restore one from a copy, or start over with "
            "--overwrite true"
        )
    return TrainingState(tokenizer)


def load(accelerator: Accelerator, path: Path) -> None:
    """Restores weights, optimisers and random states from the checkpoint in `path`.

    UserError if the checkpoint belongs to a draft with other parameters.
    """
    try:
        accelerator.load_state(str(path))
    # Other names or shapes of weights or optimiser states.
    except (RuntimeError, ValueError) as error:
        reason = " ".join(str(error).split())
        raise UserError(
            f"checkpoint {path} is of another draft ({reason:.120}): resume with its settings, or start over with "
            "--overwrite true"
        ) from error


def load_best(accelerator: Accelerator, out: Path, step: int) -> None:
    """Restores the checkpoint of the best step at the end of a training. UserError if it is damaged."""
    path = checkpoint_dir(out, step)
    found = find_damage(path)
    if found:
        raise UserError(
            f"checkpoint {path}, whose τ was best: {found}; restore it from a copy, or save the last step's draft with "
            "--resume true --loop.keep_best false"
        )
    load(accelerator, path)


def find_damage(path: Path) -> str:
    """What is wrong with the files of a checkpoint: "optimizer.bin is damaged"; "" if each has its checksum."""
    if not path.is_dir():
        return "it does not exist"
    contents = _read_contents(path)
    if not contents:
        return f"{CONTENTS} is damaged or missing"
    digests = _digests(path)
    for name, digest in contents["files"].items():
        if digests.get(name) != digest:
            return f"{name} is damaged" if name in digests else f"{name} is missing"
    return ""


def latest_checkpoint(out: Path) -> Path | None:
    """The checkpoint that a run would resume from if it is intact; None when there is none."""
    paths, _ = _candidates(out)
    return paths[0] if paths else None


def _candidates(out: Path) -> tuple[list[Path], str]:
    """(the checkpoints to resume from, the first that is intact is taken; what is wrong with `latest`, "" if nothing).

    They are the one that `latest` names and those before it; all of them if it names none of this folder.
    """
    found = _checkpoints(out)
    pointer = out / CHECKPOINTS / LATEST
    if not found and not pointer.exists():
        return [], ""
    name = pointer.read_bytes().decode(errors="replace").strip() if pointer.is_file() else ""
    paths = [path for _, path in found]
    named = [i for i, path in enumerate(paths) if path.name == name]
    if named:
        return paths[named[0] :], ""
    what = "does not exist" if not pointer.exists() else "names no checkpoint of its folder"
    if not found:
        raise UserError(
            f"{pointer} {what}, and there is no other: restore one from a copy, or start over with --overwrite true"
        )
    return paths, f"{pointer} {what}"


def _newest(out: Path) -> tuple[Path | None, dict[str, Any]]:
    """(the newest checkpoint whose contents.json can be read, its contents); (None, {}) if there is none."""
    read = ((path, _read_contents(path)) for path in _candidates(out)[0])
    return next(((path, found) for path, found in read if found), (None, {}))


def _checkpoints(out: Path) -> list[tuple[int, Path]]:
    """(step, folder) of every checkpoint, the newest first. Links are none: what they lead to is not this run's."""
    folders = (out / CHECKPOINTS).glob("step-*")
    found = [path for path in folders if re.fullmatch(r"step-\d{6,}", path.name)]
    return sorted(
        ((_step_of(path), path) for path in found if path.is_dir() and not path.is_symlink()),
        reverse=True,
    )


def _step_of(path: Path) -> int:
    return int(path.name.removeprefix("step-"))


def _read_contents(path: Path) -> dict[str, Any]:
    """contents.json of a checkpoint; {} if it is missing or damaged. Those of earlier versions have no own checksum."""
    try:
        contents = files.read_json(path / CONTENTS)
    except UserError:
        return {}
    if not isinstance(contents, dict) or not isinstance(contents.get("files"), dict):
        return {}
    digest = contents.pop("sha256", None)
    return contents if digest in (None, _contents_digest(contents)) else {}


def _contents_digest(contents: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(contents).encode()).hexdigest()


def _digests(folder: Path) -> dict[str, str]:
    paths = sorted(p for p in folder.rglob("*") if p.is_file() and p.name != CONTENTS)
    return {str(p.relative_to(folder)): damage.sha256(p) for p in paths}
