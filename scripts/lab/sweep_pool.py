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
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from datetime import datetime
from pathlib import Path
from typing import IO, Any

from rich.console import Console

from decode.common import files, lock
from decode.common.errors import UserError
from decode.common.machine import cpu_count
from decode.common.progress import duration, progress_bars
from decode.common.secret_patterns import redact
from scripts.lab.sweep_plan import ROOT, SweepConfig, Trial

RECORD, STDOUT, STDERR = "record.json", "stdout.txt", "stderr.txt"
"""Files in a trial's folder: how it ended, and what its last process printed."""
POLL_SECONDS, LOOK_SECONDS = 0.2, 2.0
"""Time between two updates of the bar, and between two looks at trials that others hold."""
LONGEST_ERROR = 300
TELLING = re.compile(r"error: |stopped by |[\w.]+(Error|Exception)\b")
OF_LAUNCHER = re.compile(r"\S*(CalledProcessError|ChildFailedError)")


class TrialPool:
    """The trials of a sweep and the workers of this process, a thread each, which run them."""

    def __init__(self, s: SweepConfig, trials: list[Trial], console: Console):
        self.s, self.trials, self.console = s, trials, console
        records = {trial.name: read_record(trial) for trial in trials}
        self.failed_before = {name: x for name, x in records.items() if x and x["error"]}
        self.waiting = [trial for trial in trials if not self.is_settled(trial)]
        self.running: dict[int, subprocess.Popen[bytes]] = {}
        """{number of the worker: its process}."""
        self.stopped = threading.Event()
        self.mutex = threading.Lock()

    def run(self) -> None:
        """Returns when every trial is finished or has failed, here or on another machine.

        Trials that failed before this start are tried again. When it is stopped, so are the trials.
        """
        total, count = len(self.trials), worker_count(self.s)
        with (
            progress_bars(self.console, ("state",)) as progress,
            ThreadPoolExecutor(count) as threads,
        ):
            done = total - len(self.waiting)
            task = progress.add_task("trials", total=total, completed=done, state="")
            workers = [threads.submit(self.work, worker) for worker in range(count)]
            try:
                while not all(worker.done() for worker in workers):
                    here, waiting = len(self.running), len(self.waiting)
                    state = f"{here} running here"
                    if waiting and here < count:
                        state += f", {waiting} elsewhere"
                    progress.update(task, completed=total - waiting - here, state=state)
                    time.sleep(POLL_SECONDS)
                    for worker in workers:
                        if worker.done():
                            worker.result()  # its exception ends the others
            finally:
                with self.mutex:
                    self.stopped.set()
                    for process in self.running.values():
                        process.terminate()

    def is_settled(self, trial: Trial) -> bool:
        """Whether the trial is finished, or has failed since this start."""
        record = read_record(trial)
        return record is not None and (
            record["error"] is None or record != self.failed_before.get(trial.name)
        )

    def work(self, worker: int) -> None:
        """Runs trials that nobody holds, one after the other, until none is left."""
        while self.waiting and not self.stopped.is_set():
            with ExitStack() as held:
                claimed = self.claim(held)
                if claimed is None:
                    self.stopped.wait(LOOK_SECONDS)
                else:
                    self.try_trial(worker, *claimed)

    def claim(self, held: ExitStack) -> tuple[Trial, IO[str]] | None:
        """The first waiting trial that nobody holds, and its lock, now held by `held`; None if there is none.

        Trials that another machine has settled meanwhile are dropped on the way.
        """
        with self.mutex:
            for trial in list(self.waiting):
                trial.folder.mkdir(parents=True, exist_ok=True)
                try:
                    file = held.enter_context(
                        lock.hold(trial.folder / lock.LOCK_FILE, trial.folder)
                    )
                except UserError:
                    continue
                self.waiting.remove(trial)
                if not self.is_settled(trial):
                    return trial, file
                held.close()
        return None

    def try_trial(self, worker: int, trial: Trial, claim: IO[str]) -> None:
        """Runs the trial's command, again if it fails, and records how it ended unless the sweep is stopped."""
        for attempt in range(1, self.s.retries + 2):
            started = time.monotonic()
            with self.mutex:
                if self.stopped.is_set():
                    return
                process = self.running[worker] = start_trial(self.s, worker, trial, claim)
            code = process.wait()
            with self.mutex:
                del self.running[worker]
            if self.stopped.is_set():
                return
            stderr = (trial.folder / STDERR).read_text(encoding="utf-8", errors="replace")
            error = None if code == 0 else last_error(stderr, code)
            if error is None or attempt > self.s.retries:
                break
            self.say(f"{trial.name} failed, and is tried again: {error}")
        seconds = time.monotonic() - started
        record = {
            "settings": trial.settings,
            "error": error,
            "attempts": attempt,
            "seconds": round(seconds, 1),
            "host": socket.gethostname(),
            "ended": datetime.now().astimezone().isoformat(),
        }
        files.write_atomically(trial.folder / RECORD, json.dumps(record, indent=1) + "\n")
        self.say(f"{trial.name} {f'failed: {error}' if error else f'done, {duration(seconds)}'}")

    def say(self, line: str) -> None:
        self.console.print(line, highlight=False, markup=False, soft_wrap=True)


def read_record(trial: Trial) -> dict[str, Any] | None:
    """How the trial ended; None if it has not ended, or if the record is damaged."""
    try:
        return files.read_json_object(trial.folder / RECORD, "a record of a trial", ("error",))
    except UserError:
        return None


def start_trial(
    s: SweepConfig, worker: int, trial: Trial, claim: IO[str]
) -> subprocess.Popen[bytes]:
    variables, prefix = split_launch(s.launch[worker % len(s.launch)] if s.launch else "")
    env = launch_environment(s) | {"WANDB_NAME": trial.name} | variables
    command = [*(prefix or [sys.executable]), str(ROOT / s.command), *trial.words]
    with (trial.folder / STDOUT).open("wb") as out, (trial.folder / STDERR).open("wb") as err:
        return subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=out, stderr=err, env=env,
            pass_fds=[claim.fileno()],
        )  # fmt: skip


def worker_count(s: SweepConfig) -> int:
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
        env.setdefault("OMP_NUM_THREADS", str(max(1, cpu_count() // worker_count(s))))
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
