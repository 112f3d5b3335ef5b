"""Logging of a run's metrics: always as JSON lines on disk, and in Weights & Biases unless it is disabled.

metrics.jsonl is the authoritative log. W&B may fail (no network, a killed service) without stopping the training.
Nothing is written outside the run's output folder.
"""

import json
import logging
import math
import netrc
import os
import re
import secrets
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal
from urllib.parse import urlsplit

from decode.common import damage
from decode.common.errors import UserError
from decode.common.files import write_atomically
from decode.common.secret_patterns import redact

LOG = logging.getLogger(__name__)

WandbMode = Literal["auto", "online", "offline", "disabled"]
SECRET_NAMES = ("token", "key", "password", "secret")


class Tracker:
    """Writes `<out>/metrics.jsonl` and a W&B run. For the main process only.

    With `resumed_step` the run is resumed: lines of later steps are cut from the file, since those steps will be
    trained again, and the same W&B run is continued. With None both start anew. `mode` auto follows WANDB_MODE if it is
    set, else it is online if there is an API key, else offline. Online becomes offline when W&B cannot be reached.
    """

    def __init__(
        self,
        out: Path,
        project: str,
        config: Mapping[str, Any],
        mode: WandbMode = "auto",
        resumed_step: int | None = None,
    ) -> None:
        resolved = resolve_mode(mode)
        path = out / "metrics.jsonl"
        write_atomically(path, _lines_up_to(path, resumed_step))
        self._file = path.open("a", encoding="utf-8")
        self._run: Any = None
        if resolved != "disabled":
            run_id = _run_id(out, resumed_step is not None)
            self._run = self._call_wandb(
                lambda: _start_wandb(out, project, config, resolved, run_id)
            )
            if self._run is None and resolved == "online":  # a node without network: sync it later
                self._run = self._call_wandb(
                    lambda: _start_wandb(out, project, config, "offline", run_id)
                )

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """Appends the line {"step": step, **values} and flushes it. NaN and inf become null."""
        line = {"step": step, **{name: _finite(value) for name, value in values.items()}}
        self._file.write(json.dumps(line) + "\n")
        self._file.flush()
        if self._run is not None:
            self._call_wandb(lambda: self._run.log({"step": step, **values}))

    def artifact(self, name: str, kind: str, paths: Sequence[Path]) -> None:
        """Logs files and folders to W&B as one artifact of type `kind`."""
        if self._run is not None:
            self._call_wandb(lambda: self._run.log_artifact(_artifact(name, kind, paths)))

    def finish(self) -> None:
        """Closes the file and the W&B run."""
        self._file.close()
        if self._run is not None:
            self._call_wandb(self._run.finish)
        self._run = None

    def _call_wandb(self, action: Callable[[], Any]) -> Any:
        """The result of `action`. If W&B fails: None, one warning, and W&B is off from then on."""
        try:
            return action()
        except Exception as error:  # no error of W&B may end a training
            self._run = None
            reason = redact(" ".join(str(error).split()))
            LOG.warning("W&B failed (metrics.jsonl is still written): %s", reason)
            return None


class NullTracker:
    """The tracker of every process but the main one: it logs nothing."""

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """Nothing."""

    def artifact(self, name: str, kind: str, paths: Sequence[Path]) -> None:
        """Nothing."""

    def finish(self) -> None:
        """Nothing."""


def resolve_mode(mode: WandbMode) -> str:
    """The W&B mode: online, offline or disabled. UserError for online without an API key.

    W&B itself would ask for the key on the terminal, which a training job does not have.
    """
    resolved = os.environ.get("WANDB_MODE", "auto") if mode == "auto" else mode
    if resolved == "auto":
        return "online" if _has_key() else "offline"
    if resolved not in ("online", "offline", "disabled"):
        raise UserError(f"WANDB_MODE={resolved!r}: use online, offline or disabled, or unset it")
    if resolved == "online" and not _has_key():
        raise UserError(
            "W&B is to be online but there is no API key: run `wandb login`, set WANDB_API_KEY, or "
            "track offline"
        )
    return resolved


def _start_wandb(out: Path, project: str, config: Mapping[str, Any], mode: str, run_id: str) -> Any:
    """A W&B run that writes only below `out` and prints nothing on the terminal."""
    folder = out.resolve() / "wandb"
    folder.mkdir(parents=True, exist_ok=True)
    # W&B reads these when it is imported, and its service process inherits them.
    os.environ["WANDB_DIR"] = str(out.resolve())
    for name in ("CACHE", "DATA", "ARTIFACT"):
        os.environ[f"WANDB_{name}_DIR"] = str(folder / name.lower())
    import wandb

    settings = wandb.Settings(
        silent=True,
        console="off",
        save_code=False,
        disable_git=True,
        x_disable_meta=True,  # its metadata include the command line, which may contain a key
        init_timeout=60,
    )
    try:
        run = wandb.init(
            dir=str(out.resolve()),
            project=project,
            id=run_id,
            resume="allow",
            mode=mode,  # type: ignore[arg-type]
            config=_mask_secrets(dict(config)),
            settings=settings,
        )
    except Exception:
        wandb.teardown()  # else its service keeps the id and the next attempt fails
        raise
    # A step metric of our own: W&B drops values whose built-in step goes back, as it does after resuming.
    run.define_metric("step")
    run.define_metric("*", step_metric="step")
    return run


def _artifact(name: str, kind: str, paths: Sequence[Path]) -> Any:
    import wandb

    artifact = wandb.Artifact(name, type=kind)
    for path in paths:
        if path.is_dir():
            artifact.add_dir(str(path), name=path.name)
        else:
            artifact.add_file(str(path))
    return artifact


def _lines_up_to(path: Path, step: int | None) -> str:
    """The metric lines up to and including `step`; none for None. Damaged lines are left out (`damage.read_log`)."""
    if step is None:
        return ""
    rows = damage.read_log(path, {"step": int}, "the log goes on without them")
    return "".join(json.dumps(row) + "\n" for row in rows if row["step"] <= step)


def _run_id(out: Path, resumed: bool) -> str:
    path = out / "wandb_run_id.txt"
    if resumed and path.is_file():
        known = path.read_bytes().strip()
        if re.fullmatch(rb"\w+", known):  # else the file is damaged, and a new W&B run begins
            return known.decode()
    run_id = secrets.token_hex(4)
    write_atomically(path, f"{run_id}\n".encode())
    return run_id


def _has_key() -> bool:
    """Whether there is a W&B API key, in WANDB_API_KEY or in the file that `wandb login` writes."""
    if os.environ.get("WANDB_API_KEY", "") != "":
        return True
    host = urlsplit(os.environ.get("WANDB_BASE_URL", "https://api.wandb.ai")).netloc
    path = Path(os.environ.get("NETRC", "~/.netrc")).expanduser()
    try:
        return netrc.netrc(path).authenticators(host) is not None
    except (OSError, netrc.NetrcParseError):
        return False


def _mask_secrets(value: Any) -> Any:
    """`value` with *** in place of each value whose key names a secret (api_key, hub_token, ...)."""
    if isinstance(value, dict):
        return {k: "***" if v and _is_secret(k) else _mask_secrets(v) for k, v in value.items()}
    return [_mask_secrets(item) for item in value] if isinstance(value, list | tuple) else value


def _is_secret(name: str) -> bool:
    return name.lower().rsplit("_", 1)[-1] in SECRET_NAMES


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None  # JSON has no NaN
