"""Logging of a run's metrics: always as JSON lines on disk, and in Weights & Biases, TensorBoard or Trackio.

metrics.jsonl is the authoritative log. The other may fail (no network, a killed service) without stopping the training.
Nothing is written outside the run's output folder, unless TRACKIO_DIR or WANDB_DIR names another.

What a user set for W&B itself is asked of wandb: logins of every kind, its settings file and environment variables.
They stand above our defaults; a setting of ours that was given stands above them. W&B is called without Accelerate's
wrapper, which lacks its modes, its artifacts and its resuming.
"""

import contextlib
import json
import logging
import math
import os
import re
import secrets
import sys
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from accelerate import PartialState
from accelerate.tracking import LOGGER_TYPE_TO_CLASS, get_available_trackers

from decode.common import damage
from decode.common.errors import UserError, first_line, naming
from decode.common.files import write_atomically
from decode.common.secret_patterns import redact
from train.settings.training import TrackerName, WandbMode

LOG = logging.getLogger(__name__)

TRACKERS = {"wandb": "W&B", "tensorboard": "TensorBoard", "trackio": "Trackio"}
"""{setting: name in messages}; the last two are those of Accelerate."""
DEFAULT_PROJECT = "draftsmith"
TRUE = ("1", "true", "yes", "on", "y", "t")
"""What turns a variable on, in capitals or not."""
WEIGHTS = {"": [], "false": [], "end": ["draft"], "checkpoint": ["draft", "checkpoint"]}
"""{value of WANDB_LOG_MODEL: artifacts with weights that it asks for}, as transformers' Trainer reads it. Nothing else
makes weights leave the machine."""
OWN_FOLDERS: dict[str, str] = {}
"""{variable: folder} that a run of this process set for W&B; what the user set stays."""
SECRET_NAMES = ("token", "key", "password", "secret")


class NullTracker:
    """The tracker of every process but the main one: it logs nothing."""

    def log(self, step: int, values: Mapping[str, float]) -> None: ...

    def artifact(self, name: str, kind: str, paths: Sequence[Path]) -> None: ...

    def finish(self) -> None: ...


class Tracker(NullTracker):
    """Writes `<out>/metrics.jsonl` and a run of the tracker `name`. For the main process only.

    With `resumed_step` the run is resumed: lines of later steps are cut from the file, since those steps will be
    trained again, and the same run is continued. With None both start anew. `mode` is that of W&B (`explain_mode`).
    Online becomes offline when W&B cannot be reached. An empty `project` is that of WANDB_PROJECT, else draftsmith.
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
        path = out / "metrics.jsonl"
        write_atomically(path, _lines_up_to(path, resumed_step))
        self._file = path.open("a", encoding="utf-8")
        self._run: Any = None
        self._name = name
        if name in ("tensorboard", "trackio"):
            own = project or DEFAULT_PROJECT
            self._run = self._call(lambda: _start_other(name, out, own, config, resumed_step))
        elif name == "wandb" and (resolved := explain_mode(mode)[0]) != "disabled":
            run_id = _run_id(out, resumed_step is not None, os.environ.get("WANDB_RUN_ID", ""))
            start = partial(_start_wandb, out, project, config, run_id)
            self._run = self._call(partial(start, resolved))
            # A node without network: sync it later.
            if self._run is None and resolved in ("online", "shared"):
                self._run = self._call(partial(start, "offline"))

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """Appends the line {"step": step, **values} and flushes it. NaN and inf become null."""
        finite = {name: x if math.isfinite(x) else None for name, x in values.items()}
        line = {"step": step, **finite}
        with naming(self._file.name):
            self._file.write(json.dumps(line) + "\n")
            self._file.flush()
        if self._run is not None and self._name == "wandb":
            self._call(lambda: self._run.log({"step": step, **values}))
        elif self._run is not None:
            self._call(lambda: self._run.log(dict(values), step=step))

    def artifact(self, name: str, kind: str, paths: Sequence[Path]) -> None:
        """Logs files and folders to W&B as one artifact of type `kind`; those of type model only if asked (WEIGHTS)."""
        wanted = kind != "model" or name in WEIGHTS.get(_log_model(), [])
        if self._run is not None and self._name == "wandb" and wanted:
            self._call(lambda: self._run.log_artifact(_artifact(name, kind, paths)))

    def finish(self) -> None:
        """Closes the file and the tracker's run."""
        self._file.close()
        if self._run is not None:
            self._call(self._finish)
        self._run = None

    def _finish(self) -> None:
        if self._name != "trackio":
            self._run.finish()
            return
        import trackio  # Accelerate's own way finishes it at exit once more, and prints on stdout

        trackio.finish()

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


def check_tracker(name: TrackerName, mode: WandbMode = "auto", project: str = "") -> list[str]:
    """What to tell the user of where metrics will go. UserError if the tracker cannot start: its package is missing,
    a login, or W&B does not take its own variables."""
    if name in ("tensorboard", "trackio") and name not in map(str, get_available_trackers()):
        raise UserError(
            f"tracker {name} is not installed: run `pip install {name}`, or name another"
        )
    if name != "wandb":
        return []
    resolved, notes = explain_mode(mode)
    asked = os.environ.get("WANDB_PROJECT", "")
    if resolved != "disabled" and project and asked not in ("", project):
        notes.append(f"project {project} stands above WANDB_PROJECT={asked}")
    value = _log_model()
    if resolved != "disabled" and value not in WEIGHTS:
        known = ", ".join(filter(None, WEIGHTS))
        notes.append(f"WANDB_LOG_MODEL={value} is none of {known}: W&B gets no weights")
    elif resolved != "disabled" and WEIGHTS[value]:
        notes.append(f"W&B gets the weights too, as WANDB_LOG_MODEL={value} asks")
    return notes


def _log_model() -> str:
    value = os.environ.get("WANDB_LOG_MODEL", "").lower()
    return "end" if value in TRUE else value


def explain_mode(mode: WandbMode) -> tuple[str, list[str]]:
    """(W&B's mode: online, offline, shared or disabled, what to tell the user of it).

    auto follows WANDB_DISABLED, WANDB_MODE and W&B's settings file, else it is online if wandb finds a login, else
    offline. UserError for online without a login: W&B itself would ask for one on the terminal, which a training job
    does not have.
    """
    asked = os.environ.get("WANDB_MODE", "")
    if os.environ.get("WANDB_DISABLED", "").lower() in TRUE:
        asked = "disabled"
    if mode == "disabled" or (mode == "auto" and asked == "disabled"):
        return "disabled", []
    settings = wandb_settings()
    asked = asked or (str(settings.mode) if "mode" in settings.model_fields_set else "")
    asked = {"dryrun": "offline", "run": "online"}.get(asked, asked)
    notes = []
    if mode != "auto" and asked not in ("", mode):
        notes.append(
            f"wandb {mode} stands above what W&B was told by its variables or settings, {asked}"
        )
    resolved = asked if mode == "auto" else mode
    if resolved == "offline":
        return resolved, notes
    known = _find_login(settings)
    if not resolved and not known:
        return "offline", [
            f"W&B: no login for {settings.base_url} is found, so the run is kept offline (`wandb sync` uploads it "
            "later): run `wandb login`, set WANDB_API_KEY, or set wandb to offline to not read this"
        ]
    if not known:
        raise UserError(
            f"W&B is to be {resolved} but there is no login for {settings.base_url}: run `wandb login`, set "
            "WANDB_API_KEY or WANDB_IDENTITY_TOKEN_FILE, or set wandb to offline"
        )
    return resolved or "online", notes


def wandb_settings() -> Any:
    """W&B's settings of its own files and variables. UserError that names one that it does not take.

    Empty variables count as not set, as in a shell script that exports what may be empty; W&B refuses them.
    """
    for name in [x for x, value in os.environ.items() if x.startswith("WANDB_") and not value]:
        del os.environ[name]
    from pydantic import ValidationError
    from wandb.errors import Error
    from wandb.sdk import wandb_setup

    try:
        return wandb_setup.singleton().settings
    except ValidationError as error:  # its own text repeats the value, which may be a key
        what = error.errors()[0]
        name = str(what["loc"][0])
        raise UserError(
            f"W&B does not take WANDB_{name.upper()} ({what['msg']}): mend or unset it, or mend W&B's settings file"
        ) from error
    except Error as error:
        raise UserError(
            f"W&B does not take its settings ({redact(first_line(error))}): mend its WANDB_ variables"
        ) from error


def _find_login(settings: Any) -> bool:
    """Whether wandb finds a login for its server: a key, an identity token, or what `wandb login` left. Nothing is
    sent. UserError for one that cannot be right."""
    from wandb.errors import Error
    from wandb.sdk.lib import wbauth

    try:
        auth = wbauth.authenticate_session(
            host=settings.base_url, source="draftsmith", prompt=False, update_session=False
        )
    except (Error, ValueError) as error:
        reason = redact(first_line(error)).rstrip(".")
        raise UserError(
            f"W&B's login is not usable ({reason}): mend it, or set wandb to offline"
        ) from error
    if isinstance(auth, wbauth.AuthIdentityTokenFile) and not auth.path.is_file():
        raise UserError(
            f"WANDB_IDENTITY_TOKEN_FILE {auth.path} does not exist: name the file, or set wandb to offline"
        )
    return auth is not None


def _start_wandb(out: Path, project: str, config: Mapping[str, Any], run_id: str, mode: str) -> Any:
    """A W&B run that prints nothing on the terminal, and writes only below `out` or where its own variables say."""
    asked = wandb_settings()
    folder = out.resolve() / "wandb"
    folder.mkdir(parents=True, exist_ok=True)
    for name in ("WANDB_CACHE_DIR", "WANDB_DATA_DIR", "WANDB_ARTIFACT_DIR"):
        if os.environ.get(name) == OWN_FOLDERS.get(name):  # not set, or by an earlier run here
            OWN_FOLDERS[name] = os.environ[name] = str(folder / name.split("_")[1].lower())
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
            dir=os.environ.get("WANDB_DIR") or str(out.resolve()),
            project=project or asked.project or DEFAULT_PROJECT,
            id=run_id,
            resume=asked.resume or "allow",
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
    # A draft stays where it is, while a checkpoint may be deleted before it is sent: only that one is copied.
    kept: Any = {"policy": "immutable", "skip_cache": True} if name == "draft" else {}
    for path in paths:
        if path.is_dir():
            artifact.add_dir(str(path), name=path.name, **kept)
        else:
            artifact.add_file(str(path), **kept)
    return artifact


def _lines_up_to(path: Path, step: int | None) -> str:
    """The metric lines up to and including `step`; none for None. Damaged lines are left out (`damage.read_log`)."""
    if step is None:
        return ""
    rows = damage.read_log(path, {"step": int}, "the log goes on without them")
    return "".join(json.dumps(row) + "\n" for row in rows if row["step"] <= step)


def _run_id(out: Path, resumed: bool, given: str = "") -> str:
    """The id of the run: `given`, else that of the run which is resumed, else a new one."""
    path = out / "wandb_run_id.txt"
    if resumed and not given and path.is_file():
        known = path.read_bytes().strip()
        if re.fullmatch(rb"[\w.-]+", known):  # else the file is damaged, and a new W&B run begins
            return known.decode()
    run_id = given or secrets.token_hex(4)
    write_atomically(path, f"{run_id}\n".encode())
    return run_id


def _mask_secrets(value: Any) -> Any:
    """`value` with *** in place of each value whose key names a secret (api_key, hub_token, ...)."""
    if isinstance(value, dict):
        secret = {k for k in value if k.lower().rsplit("_", 1)[-1] in SECRET_NAMES}
        return {k: "***" if v and k in secret else _mask_secrets(v) for k, v in value.items()}
    return [_mask_secrets(item) for item in value] if isinstance(value, list | tuple) else value
