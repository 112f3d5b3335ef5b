"""Logging of a run's metrics: always as JSON lines on disk, and in Weights & Biases, TensorBoard or Trackio.

metrics.jsonl is the authoritative log. The other may fail (no network, a killed service) without stopping the training.
Nothing is written outside the run's output folder, unless TRACKIO_DIR names another for Trackio.
"""

import contextlib
import json
import logging
import math
import netrc
import os
import re
import secrets
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal
from urllib.parse import urlsplit

from accelerate import PartialState
from accelerate.tracking import LOGGER_TYPE_TO_CLASS, get_available_trackers

from decode.common import damage
from decode.common.errors import UserError
from decode.common.files import write_atomically
from decode.common.secret_patterns import redact

LOG = logging.getLogger(__name__)

TrackerName = Literal["wandb", "tensorboard", "trackio", "none"]
TRACKERS = {"wandb": "W&B", "tensorboard": "TensorBoard", "trackio": "Trackio"}
"""{setting: name in messages}; the last two are those of Accelerate."""
WandbMode = Literal["auto", "online", "offline", "disabled"]
SECRET_NAMES = ("token", "key", "password", "secret")


class Tracker:
    """Writes `<out>/metrics.jsonl` and a run of the tracker `name`. For the main process only.

    With `resumed_step` the run is resumed: lines of later steps are cut from the file, since those steps will be
    trained again, and the same run is continued. With None both start anew. `mode` is that of W&B: auto follows
    WANDB_MODE if it is set, else it is online if there is an API key, else offline. Online becomes offline when W&B
    cannot be reached.
    """

    def __init__(
        self,
        out: Path,
        project: str,
        config: Mapping[str, Any],
        mode: WandbMode = "auto",
        resumed_step: int | None = None,
        name: TrackerName = "wandb",
    ) -> None:
        resolved = resolve_mode(mode) if name == "wandb" else "disabled"
        path = out / "metrics.jsonl"
        write_atomically(path, _lines_up_to(path, resumed_step))
        self._file = path.open("a", encoding="utf-8")
        self._run: Any = None
        self._name = name
        if name in ("tensorboard", "trackio"):
            self._run = self._call(lambda: _start_other(name, out, project, config, resumed_step))
        if resolved != "disabled":
            run_id = _run_id(out, resumed_step is not None)
            self._run = self._call(lambda: _start_wandb(out, project, config, resolved, run_id))
            if self._run is None and resolved == "online":  # a node without network: sync it later
                self._run = self._call(
                    lambda: _start_wandb(out, project, config, "offline", run_id)
                )

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """Appends the line {"step": step, **values} and flushes it. NaN and inf become null."""
        line = {"step": step, **{name: _finite(value) for name, value in values.items()}}
        self._file.write(json.dumps(line) + "\n")
        self._file.flush()
        if self._run is not None and self._name == "wandb":
            self._call(lambda: self._run.log({"step": step, **values}))
        elif self._run is not None:
            self._call(lambda: self._run.log(dict(values), step=step))

    def artifact(self, name: str, kind: str, paths: Sequence[Path]) -> None:
        """Logs files and folders to W&B as one artifact of type `kind`."""
        if self._run is not None and self._name == "wandb":
            self._call(lambda: self._run.log_artifact(_artifact(name, kind, paths)))

    def finish(self) -> None:
        """Closes the file and the tracker's run."""
        self._file.close()
        if self._run is not None:
            self._call(_finish_trackio if self._name == "trackio" else self._run.finish)
        self._run = None

    def _call(self, action: Callable[[], Any]) -> Any:
        """The result of `action`. If the tracker fails: None, one warning, and it is off from then on.

        What it prints goes to stderr: the last line on stdout is the command's JSON.
        """
        try:
            with contextlib.redirect_stdout(sys.stderr):
                return action()
        except Exception as error:  # no error of a tracker may end a training
            self._run = None
            reason = redact(" ".join(str(error).split()))
            shown = TRACKERS[self._name]
            LOG.warning("%s failed (metrics.jsonl is still written): %s", shown, reason)
            return None


class NullTracker:
    """The tracker of every process but the main one: it logs nothing."""

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """Nothing."""

    def artifact(self, name: str, kind: str, paths: Sequence[Path]) -> None:
        """Nothing."""

    def finish(self) -> None:
        """Nothing."""


def check_tracker(name: TrackerName) -> None:
    """UserError if the package of the tracker is not installed."""
    if name in ("tensorboard", "trackio") and name not in map(str, get_available_trackers()):
        raise UserError(
            f"tracker {name} is not installed: run `pip install {name}`, or name another"
        )


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


def _start_other(
    name: str, out: Path, project: str, config: Mapping[str, Any], resumed_step: int | None
) -> Any:
    """A run of one of Accelerate's trackers. The settings are logged when it begins, under dotted names."""
    PartialState()  # their logging needs it; a training has it already
    resumed = resumed_step is not None
    if name == "trackio":
        os.environ.setdefault("TRACKIO_DIR", str(out.resolve() / "trackio"))
        title = f"{out.resolve().name}-{_run_id(out, resumed)}"
        tracker = LOGGER_TYPE_TO_CLASS[name](project, name=title, resume="allow", embed=False)
    else:  # TensorBoard leaves out what was logged from step `purge_step` on
        purge = None if resumed_step is None else resumed_step + 1
        tracker = LOGGER_TYPE_TO_CLASS[name](name, str(out), purge_step=purge)
    tracker.start()
    if not resumed:
        tracker.store_init_configuration(_flat(_mask_secrets(dict(config))))
    return tracker


def _finish_trackio() -> None:
    """Finishes the run once: after Accelerate's way Trackio does it again at exit, and prints on stdout."""
    import trackio

    trackio.finish()


def _flat(values: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Nested settings under dotted names; what is neither a number nor text becomes text."""
    out: dict[str, Any] = {}
    for name, value in values.items():
        if isinstance(value, dict):
            out |= _flat(value, f"{prefix}{name}.")
        else:
            scalar = isinstance(value, int | float | str)
            out[prefix + name] = value if scalar else json.dumps(value, default=str)
    return out


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
