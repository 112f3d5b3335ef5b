"""Training checkpoints: written atomically, and verified by checksums when they are loaded.

`<out>/checkpoints/step-000100/` is renamed into place once it is complete; `<out>/checkpoints/latest`, written after
it, names the checkpoint to resume from. Weights, optimisers and random states are saved by `Accelerator.save_state`;
`contents.json` beside them holds the `TrainingState` and a checksum of every file.
"""

import hashlib
import json
import logging
import shutil
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from accelerate import Accelerator

from decode.common import files
from decode.common.errors import UserError

LATEST = "latest"
CONTENTS = "contents.json"

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


def checkpoint_name(step: int) -> str:
    """The folder name of the checkpoint after `step` steps."""
    return f"step-{step:06d}"


def checkpoint_dir(out: Path, step: int) -> Path:
    """The folder of the checkpoint after `step` steps."""
    return out / "checkpoints" / checkpoint_name(step)


def save(
    accelerator: Accelerator, out: Path, state: TrainingState, keep: int, best: int = 0
) -> None:
    """Writes the checkpoint after `state.step` steps; deletes all but the last `keep` ones and that of step `best`.

    Every rank must call it.
    """
    folder = out / "checkpoints"
    final = checkpoint_dir(out, state.step)
    scratch = folder / f"{final.name}.tmp"
    if accelerator.is_main_process:
        shutil.rmtree(scratch, ignore_errors=True)
        scratch.mkdir(parents=True)
    accelerator.wait_for_everyone()
    accelerator.save_state(str(scratch), safe_serialization=True)
    accelerator.wait_for_everyone()
    if accelerator.is_main_process:
        contents = {**asdict(state), "files": _digests(scratch)}
        (scratch / CONTENTS).write_text(json.dumps(contents))
        shutil.rmtree(final, ignore_errors=True)  # the step was trained again after a kill
        scratch.replace(final)
        files.write_atomically(folder / LATEST, final.name + "\n")
        for old in sorted(folder.glob("step-??????"))[:-keep]:
            if old.name != checkpoint_name(best):
                shutil.rmtree(old)
    accelerator.wait_for_everyone()


def discard_checkpoint(out: Path, step: int) -> None:
    """Deletes the checkpoint of `step`, whose weights are ruined; `latest` then names the one before it."""
    bad = checkpoint_dir(out, step)
    if not bad.is_dir():
        return
    earlier = [path.name for path in sorted(bad.parent.glob("step-??????")) if path < bad]
    if earlier:
        files.write_atomically(bad.parent / LATEST, earlier[-1] + "\n")
    else:
        (bad.parent / LATEST).unlink()
    shutil.rmtree(bad)


def remove_partial(out: Path) -> None:
    """Deletes checkpoints that a kill left half written. To be called by one process before any other writes."""
    for scratch in (out / "checkpoints").glob("step-*.tmp"):
        shutil.rmtree(scratch)


def check_tokenizer(out: Path, tokenizer: str) -> None:
    """UserError if the newest checkpoint belongs to another tokenizer.

    Its weights could have the right shapes and still stand for other tokens.
    """
    path = latest_checkpoint(out)
    found = (
        tokenizer if path is None else files.read_json(path / CONTENTS).get("tokenizer", tokenizer)
    )
    if found != tokenizer:
        raise UserError(
            f"checkpoint {path} was trained for tokenizer {found}, but this target has {tokenizer}: "
            "--overwrite true starts over, --out names another folder"
        )


def load_latest(accelerator: Accelerator, out: Path, tokenizer: str) -> TrainingState:
    """Restores the newest checkpoint and returns its state, or the state of step 0 when there is no checkpoint.

    UserError names the checkpoint and the file if one of its files is missing or damaged.
    """
    path = latest_checkpoint(out)
    if path is None:
        return TrainingState(tokenizer)
    contents = files.read_json(path / CONTENTS)
    found = _digests(path)
    for name, digest in contents.pop("files").items():
        if found.get(name) != digest:
            what = "is missing" if name not in found else "is damaged"
            raise UserError(
                f"checkpoint {path}: {name} {what}; name an earlier step in {path.parent / LATEST} or start over "
                "with --overwrite true"
            )
    load(accelerator, path)
    return TrainingState(**{"tokenizer": tokenizer, **contents})


def load(accelerator: Accelerator, path: Path) -> None:
    """Restores weights, optimisers and random states from the checkpoint in `path`.

    UserError if the checkpoint belongs to a draft with other parameters.
    """
    try:
        accelerator.load_state(str(path))
    except (
        RuntimeError,
        ValueError,
    ) as error:  # other names or shapes of weights or optimiser states
        reason = " ".join(str(error).split())
        raise UserError(
            f"checkpoint {path} is of another draft ({reason:.120}): resume with its settings, or start over with "
            "--overwrite true"
        ) from error


def latest_checkpoint(out: Path) -> Path | None:
    """The checkpoint that `latest` names; None when there is none."""
    pointer = out / "checkpoints" / LATEST
    return pointer.parent / pointer.read_text().strip() if pointer.is_file() else None


def _digests(folder: Path) -> dict[str, Any]:
    paths = sorted(p for p in folder.rglob("*") if p.is_file() and p.name != CONTENTS)
    return {str(p.relative_to(folder)): _digest(p) for p in paths}


def _digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
