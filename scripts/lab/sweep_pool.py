"""Runs the trials of a sweep, each in a process of its own, on one machine or on several that share the folder.

A trial belongs to the process that holds the lock in its folder; the others take the next one and look again later. The
trial's own process inherits the lock: one that was left running when its sweep was killed is waited for.
"""

import json
import os
import re
import shlex
import shutil
import socket
import subprocess
import sys
import time
from contextlib import ExitStack
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import IO, Any

from rich.console import Console

from decode.common import files, lock
from decode.common.errors import UserError
from decode.common.progress import duration, progress_bars
from decode.common.secret_patterns import redact
from scripts.lab.sweep_plan import ROOT, SweepConfig, Trial

RECORD, STDOUT, STDERR = "record.json", "stdout.txt", "stderr.txt"
"""Files in a trial's folder: how it ended, and what its last process printed."""
POLL_SECONDS = 0.2
LOOK_SECONDS = 2.0
"""Time between two looks at trials that others hold."""
LONGEST_ERROR = 300
TELLING = re.compile(r"error: |stopped by |[\w.]+(Error|Exception)\b")
OF_LAUNCHER = re.compile(r"\S*(CalledProcessError|ChildFailedError)")


@dataclass(frozen=True)
class TrialClaim:
    """The lock of a trial's folder, held until `stack` is closed and the processes that inherited `file` have ended."""

    stack: ExitStack
    file: IO[str]


@dataclass(frozen=True)
class RunningTrial:
    """A trial's process, and the lock that is held for it."""

    trial: Trial
    claim: TrialClaim
    attempt: int
    process: subprocess.Popen[bytes]
    started: float


@dataclass
class TrialPool:
    """The trials of a sweep and the workers of this process, which run them."""

    s: SweepConfig
    trials: list[Trial]
    console: Console
    running: dict[int, RunningTrial] = field(default_factory=dict)
    """{number of the worker: its trial}."""

    def run(self) -> None:
        """Returns when every trial is finished or has failed, here or on another machine.

        Trials that failed before this start are tried again. When it is stopped, so are the trials.
        """
        records = {trial.name: read_record(trial) for trial in self.trials}
        self.failed_before = {name: x for name, x in records.items() if x and x["error"]}
        self.waiting = [trial for trial in self.trials if not self.is_settled(trial)]
        self.look_at = 0.0
        with progress_bars(self.console, ("state",)) as progress:
            done = len(self.trials) - len(self.waiting)
            total = len(self.trials)
            task = progress.add_task("trials", total=total, completed=done, state="")
            try:
                while self.waiting or self.running:
                    if time.monotonic() >= self.look_at:
                        self.start_waiting()
                    for worker, running in list(self.running.items()):
                        code = running.process.poll()
                        if code is not None:
                            self.end(worker, running, code)
                    done = total - len(self.waiting) - len(self.running)
                    progress.update(task, completed=done, state=self.state())
                    time.sleep(POLL_SECONDS)
            finally:
                self.stop()

    def state(self) -> str:
        """How many trials run here, and how many on other machines if there is nothing else to wait for."""
        here = len(self.running)
        elsewhere = len(self.waiting) if here < worker_count(self.s) else 0
        return f"{here} running here" + (f", {elsewhere} elsewhere" if elsewhere else "")

    def is_settled(self, trial: Trial) -> bool:
        """Whether the trial is finished, or has failed since this start."""
        record = read_record(trial)
        return record is not None and (
            record["error"] is None or record != self.failed_before.get(trial.name)
        )

    def start_waiting(self) -> None:
        """Starts trials that nobody holds, until no worker is idle."""
        idle = [worker for worker in range(worker_count(self.s)) if worker not in self.running]
        for trial in list(self.waiting) if idle else []:
            if len(idle) == 0:
                break
            claim = claim_trial(trial)
            if claim is None:
                continue
            self.waiting.remove(trial)
            if self.is_settled(trial):  # by another machine
                claim.stack.close()
            else:
                worker = idle.pop(0)
                self.running[worker] = start_trial(self.s, worker, trial, claim, 1)
        self.look_at = time.monotonic() + LOOK_SECONDS

    def end(self, worker: int, running: RunningTrial, code: int) -> None:
        """Records how the process of a trial ended, or starts it again if it failed."""
        trial, attempt = running.trial, running.attempt
        stderr = (trial.folder / STDERR).read_text(encoding="utf-8", errors="replace")
        error = None if code == 0 else last_error(stderr, code)
        if error is not None and attempt <= self.s.retries:
            self.say(f"{trial.name} failed, and is tried again: {error}")
            again = start_trial(self.s, worker, trial, running.claim, attempt + 1)
            self.running[worker] = again
            return
        seconds = time.monotonic() - running.started
        record = {
            "settings": trial.settings,
            "error": error,
            "attempts": attempt,
            "seconds": round(seconds, 1),
            "host": socket.gethostname(),
            "ended": datetime.now().astimezone().isoformat(),
        }
        files.write_atomically(trial.folder / RECORD, json.dumps(record, indent=1) + "\n")
        running.claim.stack.close()
        del self.running[worker]
        self.look_at = 0.0
        self.say(f"{trial.name} {f'failed: {error}' if error else f'done, {duration(seconds)}'}")

    def stop(self) -> None:
        """Ends the trials that still run, and waits until they have saved."""
        for running in self.running.values():
            running.process.terminate()
        for running in self.running.values():
            running.process.wait()
            running.claim.stack.close()

    def say(self, line: str) -> None:
        """Prints one line on stderr, beside the bars."""
        self.console.print(line, highlight=False, markup=False, soft_wrap=True)


def read_record(trial: Trial) -> dict[str, Any] | None:
    """How the trial ended; None if it has not ended, or if the record is damaged."""
    try:
        return files.read_json_object(trial.folder / RECORD, "a record of a trial", ("error",))
    except UserError:
        return None


def claim_trial(trial: Trial) -> TrialClaim | None:
    """Takes the lock of the trial's folder; None if another process has it."""
    trial.folder.mkdir(parents=True, exist_ok=True)
    stack = ExitStack()
    try:
        file = stack.enter_context(lock.hold(trial.folder / lock.LOCK_FILE, trial.folder))
    except UserError:
        return None
    return TrialClaim(stack, file)


def start_trial(
    s: SweepConfig, worker: int, trial: Trial, claim: TrialClaim, attempt: int
) -> RunningTrial:
    """Starts the trial's command in a process."""
    variables, prefix = split_launch(s.launch[worker % len(s.launch)] if s.launch else "")
    env = launch_environment(s) | {"WANDB_NAME": trial.name} | variables
    command = [*(prefix or [sys.executable]), str(ROOT / s.command), *trial.words]
    with (trial.folder / STDOUT).open("wb") as out, (trial.folder / STDERR).open("wb") as err:
        process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=out, stderr=err, env=env,
            pass_fds=[claim.file.fileno()],
        )  # fmt: skip
    return RunningTrial(trial, claim, attempt, process, time.monotonic())


def worker_count(s: SweepConfig) -> int:
    """Trials at a time."""
    return s.workers or max(1, len(s.launch))


def split_launch(text: str) -> tuple[dict[str, str], list[str]]:
    """(environment variables, words before the command) of an entry of `launch`. UserError for an open quote."""
    try:
        words = shlex.split(text)
    except ValueError as error:
        raise UserError(f"launch: {text} cannot be read ({error}): close the quote") from error
    variables = {}
    while words and re.match(r"\w+=", words[0]):
        name, _, value = words.pop(0).partition("=")
        variables[name] = value
    return variables, words


def launch_environment(s: SweepConfig) -> dict[str, str]:
    """The environment of trials: the programs beside this Python come first, and workers share the cores."""
    env = {"WANDB_RUN_GROUP": Path(s.out).resolve().name, **os.environ}
    env.pop("WANDB_RUN_ID", None)  # else all trials would be one run of W&B
    env["PATH"] = os.pathsep.join([str(Path(sys.executable).parent), env.get("PATH", os.defpath)])
    if worker_count(s) > 1:
        env.setdefault("OMP_NUM_THREADS", str(max(1, (os.cpu_count() or 1) // worker_count(s))))
    return env


def check_launch(s: SweepConfig) -> None:
    """UserError for an entry of `launch` whose program is not there."""
    path = launch_environment(s)["PATH"]
    for entry in s.launch:
        _, prefix = split_launch(entry)
        if prefix and shutil.which(prefix[0], path=path) is None:
            raise UserError(f"launch: there is no program {prefix[0]}: install it or correct it")


def last_error(stderr: str, code: int) -> str:
    """The last line that names an error, of the command rather than of its launcher, and the exit code."""
    lines = [line.strip() for line in stderr.splitlines() if line.strip() != ""]
    telling = [line for line in lines if TELLING.match(line) and not OF_LAUNCHER.match(line)]
    line = (telling or lines or ["no message"])[-1].removeprefix("error: ")
    return f"{redact(line)[:LONGEST_ERROR]} (exit code {code})"
