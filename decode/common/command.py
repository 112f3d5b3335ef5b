"""How a command starts and ends: its settings are parsed, and every foreseeable end is one line and an exit code.

0: done; 2: bad input, or an error of the world such as a full disk; 128 + the signal's number: 130 for Ctrl-C (SIGINT),
143 for SIGTERM, 129 for SIGHUP, 138 for SIGUSR1. A programming error keeps its traceback. Commands that check
something end with 1 by themselves where it is not right. docs/runs.md says what `accelerate launch` adds to this.
"""

import ctypes
import hashlib
import importlib
import importlib.metadata
import json
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from itertools import takewhile
from pathlib import Path
from typing import Any, NoReturn, TypeVar

from decode.common import machine
from decode.common.errors import UserError, world_error
from decode.common.provenance import CALLS
from decode.common.secret_patterns import redact
from decode.common.settings import make_settings, parse_settings

T = TypeVar("T")

REPORTED = "reported-"
"""What the names of empty files begin with, one for each error that was printed."""


PLUGINS, ENTRY_POINTS = "DRAFTSMITH_PLUGINS", "draftsmith"
"""Environment variable with the names of modules, separated by commas, and group of entry points of installed packages:
each is imported before settings are read, and registers draft families or verification rules."""


SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1)
"""What ends a command: a person, a scheduler, a terminal that closes, a scheduler's warning before the time is up."""


class Terminated(BaseException):
    """A signal other than SIGINT, raised in the main thread so that `finally` blocks run."""

    def __init__(self, number: int = signal.SIGTERM):
        super().__init__()
        self.number = number


def run_command(
    main: Callable[[T], None],
    settings: type[T],
    about: str | None,
    first: str = "",
    argv: Sequence[str] | None = None,
) -> None:
    """Parses the command line, calls `main`, and ends as the module says: with one line on stderr and SystemExit.

    `about` is the text of --help. The settings named in `first`, separated by spaces, may be the first arguments,
    without their flags. `argv` is the command line after the command's name, sys.argv by default. What a stopped run
    saved is added to the line: `main` leaves it with `add_note` on the exception.
    """
    words = list(sys.argv[1:] if argv is None else argv)
    names = first.split()
    given = list(takewhile(lambda word: not word.startswith("-"), words))[: len(names)]
    words[: len(given)] = [f"--{name}={word}" for name, word in zip(names, given, strict=False)]
    try:
        asked = prepared(lambda: parse_settings(settings, about or "", words))
        with stop_signals():
            main(asked)
        _leave_at_once_if_one_of_several(0)
    except SystemExit as error:
        _leave_at_once_if_one_of_several(int(error.code or 0))
        raise
    except UserError as error:
        _end(2, f"error: {error}", error)
    except KeyboardInterrupt as error:
        _end(128 + signal.SIGINT, "stopped by Ctrl-C", error)
    except Terminated as error:
        _end(128 + error.number, f"stopped by {signal.Signals(error.number).name}", error)
    except Exception as error:
        line = world_error(error)
        if line is None:
            raise
        _end(2, f"error: {line}", error)


@contextmanager
def called(settings: type[T], given: Mapping[str, Any]) -> Iterator[T]:
    """In the block a function does what a command does; gives its settings, those `given` to it. Signals are a
    command's, so that a training saves its step at Ctrl-C, and the caller's again afterwards. UserError for bad
    settings."""
    asked = prepared(lambda: make_settings(settings, given))
    CALLS.append(settings)
    try:
        with stop_signals():
            yield asked
    finally:
        CALLS.pop()


def prepared(read: Callable[[], T]) -> T:
    """The settings that `read` returns, once this process is prepared and plugins are known to them."""
    unusual = machine.prepare()
    import_plugins()
    asked = read()
    if unusual and os.environ.get("RANK", "0") == "0":
        print(f"warning: {unusual}", file=sys.stderr)
    return asked


def import_plugins() -> None:
    """Imports what PLUGINS and ENTRY_POINTS name. UserError for a module that is not there."""
    for point in importlib.metadata.entry_points(group=ENTRY_POINTS):
        point.load()
    for name in filter(None, map(str.strip, os.environ.get(PLUGINS, "").split(","))):
        try:
            importlib.import_module(name)
        except ImportError as error:
            raise UserError(
                f"{PLUGINS} names {name!r}, which cannot be imported: {error}"
            ) from error


@contextmanager
def stop_signals() -> Iterator[None]:
    """In the block SIGINT raises KeyboardInterrupt and the other SIGNALS raise Terminated, once, as in `stop`.

    Under a launcher its end counts as SIGTERM.
    """
    with _handlers(lambda number, _: stop(number)):
        if machine.is_launched():
            end_with_parent()
        yield


class DeferredStop:
    """Context manager in which SIGNALS only set `received`: a step is finished and saved before `stop`.

    A second SIGINT ends the process at once.
    """

    received = 0
    """Number of the first signal; 0: none came."""
    stopping = False

    def __enter__(self) -> "DeferredStop":
        self._block = _handlers(self._on_signal)
        self._block.__enter__()
        return self

    def _on_signal(self, number: int, _: Any) -> None:
        self.received = self.received or number
        signal.signal(signal.SIGINT, _end_at_once)

    def ranks_stop(self) -> None:
        """All ranks have agreed to stop: a signal that reaches this one later, before `stop`, does not end it while the
        others wait for it."""
        self.stopping = True
        _heed_sigint_alone()

    def __exit__(self, *error: Any) -> None:
        if not self.stopping:
            self._block.__exit__(*error)


def stop(number: int, saved: str = "") -> NoReturn:
    """Raises KeyboardInterrupt for SIGINT, else Terminated; `saved` is a note for the line that the command ends with.

    What follows may save: a second SIGINT ends the process at once, and other SIGNALS are ignored, because launchers
    send one after a Ctrl-C.
    """
    _heed_sigint_alone()
    error = KeyboardInterrupt() if number == signal.SIGINT else Terminated(number)
    if saved:
        error.add_note(saved)
    raise error


@contextmanager
def _handlers(handler: Callable[[int, Any], None]) -> Iterator[None]:
    """In the block `handler` gets SIGNALS. SIGHUP and SIGUSR1 stay ignored where they were, as under nohup. Python has
    handlers in its main thread alone: in another one, as of a server that calls us, signals stay what they are."""

    def handle(number: int, frame: Any) -> None:
        if number == signal.SIGHUP:
            _leave_closed_terminal()
        handler(number, frame)

    is_main = threading.current_thread() is threading.main_thread()
    before = {number: signal.getsignal(number) for number in SIGNALS if is_main}
    for number, earlier in before.items():
        if earlier != signal.SIG_IGN or number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, handle)
    try:
        yield
    finally:
        for number, earlier in before.items():
            signal.signal(number, earlier)


def _heed_sigint_alone() -> None:
    signal.signal(signal.SIGINT, _end_at_once)
    for number in SIGNALS[1:]:
        signal.signal(number, signal.SIG_IGN)


def _leave_closed_terminal() -> None:
    """What is written from now on goes nowhere if it went to a terminal that is gone: an error would end what saves."""
    for stream in (1, 2):
        try:
            os.write(stream, b"")
        except OSError:
            os.dup2(os.open(os.devnull, os.O_WRONLY), stream)


def _end_at_once(number: int, frame: Any) -> None:
    if CALLS:  # a notebook would be lost with all that it holds
        signal.default_int_handler(number, frame)
    os._exit(128 + signal.SIGINT)


def end_with_parent() -> None:
    """Asks Linux to send this process SIGTERM when its parent ends: not every launcher passes a signal on."""
    if sys.platform == "linux":
        set_parent_death_signal = 1
        ctypes.CDLL(None).prctl(set_parent_death_signal, signal.SIGTERM)


def _end(code: int, line: str, error: BaseException) -> NoReturn:
    """Prints the line with the notes of `error`: of several processes of one launch the first that has it.

    The end by a signal is the main process's to print, and nobody's if an error of another one is why the launcher sent
    it.
    """
    notes = "; ".join(getattr(error, "__notes__", []))
    line = redact(line + (("; " if code == 2 else ": ") + notes if notes else ""))
    file = _error_file()
    if code == 2:
        note_error(line)
        is_ours = file is None or _is_first_to_print(line, file)
    else:
        reported = file is not None and any(file.parent.parent.glob(f"{REPORTED}*"))
        is_ours = os.environ.get("RANK", "0") == "0" and not reported
    if is_ours:
        print(line, file=sys.stderr, flush=True)
    _leave_at_once_if_one_of_several(code)
    sys.exit(code)


def note_error(line: str) -> None:
    """Leaves the error for torchrun, whose report ends with the one of the process that it saw failing first."""
    file = _error_file()
    if file is not None:
        text = redact(line)
        stamp = {"py_callstack": text, "timestamp": str(int(time.time()))}
        # A full disk, or no folder of the launcher: its report then says less.
        with suppress(OSError):
            file.write_text(json.dumps({"message": {"message": text, "extraInfo": stamp}}))


def _error_file() -> Path | None:
    """The file that torchrun names for this process's error; those of one launch lie in folders side by side."""
    name = os.environ.get("TORCHELASTIC_ERROR_FILE")
    return Path(name) if name else None


def _is_first_to_print(line: str, file: Path) -> bool:
    """Whether no other process of this launch and machine has printed the error before."""
    said = f"{REPORTED}{hashlib.sha256(line.encode()).hexdigest()[:16]}"
    try:
        (file.parent.parent / said).touch(exist_ok=False)
    except FileExistsError:
        return False
    except OSError:
        pass  # better said by each process than by none
    return True


def _leave_at_once_if_one_of_several(code: int) -> None:
    """Ends a process that a launcher started beside others, without the interpreter's own shutdown.

    In the shutdown Python unwinds threads that wait for its lock; one of torch.distributed's that is met in C++ code
    aborts the process ("terminate called without an active exception", exit code -6) after all work is done.
    """
    if machine.process_count() > 1:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
