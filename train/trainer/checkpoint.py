"""Checkpoints that are there whole or not at all, and that say when they are damaged.

`<out>/checkpoints/step-000100/` is renamed into place once complete; `<out>/checkpoints/latest`, written last,
names the one to go on from. The trained state is what `Accelerator.save_state` keeps; `contents.json` beside it holds
`State` and a checksum of every file.
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

# Tied embeddings are stored once; being told so at every checkpoint breaks the progress bar.
logging.getLogger("accelerate.utils.other").setLevel(logging.ERROR)


@dataclass
class TrainingState:
    """Where a training stands, besides its weights."""

    tokenizer: str
    """Fingerprint of the target's, which says what the weights' rows mean."""
    step: int = 0
    """Steps done."""
    sums: dict[str, float] = field(default_factory=dict)
    """Of the steps since the last line of the log."""
    measured: dict[str, float] = field(default_factory=dict)
    """The last measurement of τ and α; with loop.keep_best the best."""
    measured_at: int = 0
    """The step of that measurement; 0: there is none."""
    learned: int = 0
    """Supervised tokens so far."""
    seconds: float = 0.0
    """Of the steps so far, on the wall: what lies between them (measuring, saving) does not count."""


def checkpoint_name(step: int) -> str:
    """Of the checkpoint after `step` steps."""
    return f"step-{step:06d}"


def checkpoint_dir(out: Path, step: int) -> Path:
    """Its folder."""
    return out / "checkpoints" / checkpoint_name(step)


def save(
    accelerator: Accelerator, out: Path, state: TrainingState, keep: int, best: int = 0
) -> None:
    """Writes the state after `state.step` steps; forgets all but the last `keep` checkpoints and that of `best`."""
    home = out / "checkpoints"
    final = checkpoint_dir(out, state.step)
    scratch = home / f"{final.name}.tmp"
    if accelerator.is_main_process:
        shutil.rmtree(scratch, ignore_errors=True)
        scratch.mkdir(parents=True)
    accelerator.wait_for_everyone()
    accelerator.save_state(str(scratch), safe_serialization=True)
    accelerator.wait_for_everyone()
    if accelerator.is_main_process:
        contents = {**asdict(state), "files": _digests(scratch)}
        (scratch / CONTENTS).write_text(json.dumps(contents))
        shutil.rmtree(final, ignore_errors=True)  # a step trained again after a kill
        scratch.replace(final)
        files.write_atomically(home / LATEST, final.name + "\n")
        for old in sorted(home.glob("step-??????"))[:-keep]:
            if old.name != checkpoint_name(best):
                shutil.rmtree(old)
    accelerator.wait_for_everyone()


def discard_checkpoint(out: Path, step: int) -> None:
    """Forgets the checkpoint of `step`, whose weights turned out to be ruined, and goes back to the one before."""
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
    """Deletes what a kill left half written. For one process, before any other writes."""
    for scratch in (out / "checkpoints").glob("step-*.tmp"):
        shutil.rmtree(scratch)


def check_tokenizer(out: Path, tokenizer: str) -> None:
    """UserError if the newest checkpoint is of another tokenizer: its weights may fit and mean other tokens."""
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
    """Restores the newest checkpoint and returns its state; that of step 0 when there is none.

    UserError names the checkpoint and the file if anything in it is missing or altered.
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
    """Restores the weights, optimisers and random states of one checkpoint. UserError if they are of another draft."""
    try:
        accelerator.load_state(str(path))
    except (
        RuntimeError,
        ValueError,
    ) as error:  # names or shapes of the weights, or of the optimiser
        reason = " ".join(str(error).split())
        raise UserError(
            f"checkpoint {path} is of another draft ({reason:.120}): go on with its settings, or start over with "
            "--overwrite true"
        ) from error


def latest_checkpoint(out: Path) -> Path | None:
    """The checkpoint to go on from."""
    pointer = out / "checkpoints" / LATEST
    return pointer.parent / pointer.read_text().strip() if pointer.is_file() else None


def _digests(folder: Path) -> dict[str, Any]:
    paths = sorted(p for p in folder.rglob("*") if p.is_file() and p.name != CONTENTS)
    return {str(p.relative_to(folder)): _digest(p) for p in paths}


def _digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
