"""Checkpoints that are there whole or not at all, and that say when they are damaged.

`<out>/checkpoints/step-000100/` is renamed into place once complete; `<out>/checkpoints/latest`, written last,
names the one to go on from. The trained state is what `Accelerator.save_state` keeps.
"""

import hashlib
import json
import logging
import shutil
from pathlib import Path
from typing import Any

from accelerate import Accelerator

from decode import runs
from decode.settings import UserError

LATEST = "latest"
CONTENTS = "contents.json"

# Tied embeddings are stored once; being told so at every checkpoint breaks the progress bar.
logging.getLogger("accelerate.utils.other").setLevel(logging.ERROR)


def save(accelerator: Accelerator, out: Path, step: int, keep: int) -> Path:
    """Writes the state after `step` steps and forgets all but the last `keep` checkpoints."""
    home = out / "checkpoints"
    final = home / f"step-{step:06d}"
    scratch = home / f"{final.name}.tmp"
    if accelerator.is_main_process:
        shutil.rmtree(scratch, ignore_errors=True)
        scratch.mkdir(parents=True)
    accelerator.wait_for_everyone()
    accelerator.save_state(str(scratch), safe_serialization=True)
    accelerator.wait_for_everyone()
    if accelerator.is_main_process:
        (scratch / CONTENTS).write_text(json.dumps({"step": step, "files": _digests(scratch)}))
        shutil.rmtree(final, ignore_errors=True)  # a step trained again after a kill
        scratch.replace(final)
        runs.write_atomically(home / LATEST, final.name + "\n")
        for old in sorted(home.glob("step-??????"))[:-keep]:
            shutil.rmtree(old)
    accelerator.wait_for_everyone()
    return final


def disown(out: Path, step: int) -> None:
    """Points to the checkpoint before that of `step`, whose weights turned out to have no finite loss."""
    home = out / "checkpoints"
    bad = home / f"step-{step:06d}"
    if not bad.is_dir():
        return
    earlier = [path.name for path in sorted(home.glob("step-??????")) if path.name < bad.name]
    if len(earlier) > 0:
        runs.write_atomically(home / LATEST, earlier[-1] + "\n")
    else:
        (home / LATEST).unlink()
    shutil.rmtree(bad)


def load_latest(accelerator: Accelerator, out: Path) -> int:
    """Restores the newest checkpoint and returns its step; 0 when there is none.

    UserError names the checkpoint and the file if anything in it is missing or altered.
    """
    pointer = out / "checkpoints" / LATEST
    if not pointer.is_file():
        return 0
    path = pointer.parent / pointer.read_text().strip()
    contents = runs.read_json(path / CONTENTS)
    found = _digests(path)
    for name, digest in contents["files"].items():
        if found.get(name) != digest:
            what = "is missing" if name not in found else "is damaged"
            raise UserError(
                f"checkpoint {path}: {name} {what}; name an earlier step in {pointer} or start over "
                "with --overwrite true"
            )
    accelerator.load_state(str(path))
    return int(contents["step"])


def _digests(folder: Path) -> dict[str, Any]:
    files = sorted(p for p in folder.rglob("*") if p.is_file() and p.name != CONTENTS)
    return {str(p.relative_to(folder)): hashlib.sha256(p.read_bytes()).hexdigest() for p in files}
