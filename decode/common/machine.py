"""What this process may use of the machine that it runs on: CPUs, memory, a folder for what is cached, the terminal;
and who started it.

`prepare` is called once by every command, before torch and the Hub's libraries are loaded, which read these variables.
"""

import ctypes
import functools
import io
import math
import os
import platform
import sys
import tempfile
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path

import psutil

from decode.common.errors import UserError
from decode.common.proxies import keep_loopback_direct

CGROUPS = Path("/sys/fs/cgroup")
"""Where Linux shows what a container may use."""
SCARCE = 0.3
"""Share of the machine's memory below which freed memory is returned to it."""
THREADS = ("OMP_NUM_THREADS", "TORCHINDUCTOR_COMPILE_THREADS", "MAX_JOBS")
"""Variables by which torch, and what is built for it, learn their number of threads or processes."""
LAUNCHED = ("TORCHELASTIC_RUN_ID", "ACCELERATE_MIXED_PRECISION", "LOCAL_RANK")
"""Variables of which every launcher sets one. People export them as well."""
LAUNCHERS = {
    ("accelerate", "launch"),
    ("-m", "accelerate.commands.launch"),
    ("-m", "torch.distributed.run"),
    ("-m", "torch.distributed.launch"),
    ("-m", "deepspeed.launcher.launch"),
}
"""Two words in a row of a launcher's command line, where its program alone does not say it."""
LAUNCHER_FILES = ("accelerate-launch", "accelerate/commands/launch.py", "torchrun", "deepspeed")
"""How the path of a launcher's program ends."""


def prepare() -> str:
    """Sets what this process and those that it starts may use, by variables that nobody has set; what the terminal
    cannot show is written as its escape. Returns a line about what is not as usual, "" where all is."""
    for stream in (sys.stdout, sys.stderr):
        # What the user chose, such as replace, stays.
        if isinstance(stream, io.TextIOWrapper) and stream.errors in ("strict", "surrogateescape"):
            stream.reconfigure(errors="backslashreplace")
    use_huge_pages()
    keep_loopback_direct()
    _limit_threads()
    return _provide_cache()


# ---- CPUs ----


def cpu_count() -> int:
    """How many CPUs this process may keep busy: those of its affinity, or of its container's quota if that is less."""
    return max(1, int(min(_affinity(), cpu_quota())))


def cpu_quota() -> float:
    """CPUs by the quota of this process's control groups (version 1 or 2) and of those above; infinite without one."""
    return min(map(_quota, _control_groups()), default=math.inf)


def _affinity() -> int:
    if sys.platform == "linux":
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def _control_groups() -> list[Path]:
    """The folders of this process's control groups for CPUs, and those above. A container may see its own as the
    uppermost one, whatever the path is that Linux tells."""
    found = []
    for line in _read("/proc/self/cgroup").splitlines():
        number, kinds, path = (line.split(":", 2) + ["", ""])[:3]
        mounts = ("", "unified") if number == "0" else ("cpu", "cpu,cpuacct", "cpuacct,cpu")
        if number == "0" or "cpu" in kinds.split(","):
            group = Path(path.lstrip("/"))
            found += [CGROUPS / at / part for at in mounts for part in (group, *group.parents)]
    return found


def _quota(group: Path) -> float:
    """CPUs that the control group's own quota allows."""
    new = _read(group / "cpu.max").split()
    old = [_read(group / f"cpu.cfs_{name}_us").strip() for name in ("quota", "period")]
    try:
        quota, period = map(float, new or old)
    except ValueError:  # "max", or there is no such file
        return math.inf
    return quota / period if quota > 0 and period > 0 else math.inf


def _limit_threads() -> None:
    """Tells the libraries of a quota, which they do not see. What the user says stays; a launcher's number is of the
    whole machine."""
    if cpu_quota() >= _affinity():
        return
    share = max(1, cpu_count() // max(1, read_number("LOCAL_WORLD_SIZE", 1)))
    for name in THREADS:
        given = os.environ.get(name, "")
        if not given or (given.isdecimal() and int(given) > share and is_launched()):
            os.environ[name] = str(share)


# ---- memory ----


@functools.cache
def keep_freed_memory() -> None:
    """Makes this process keep freed memory for its next tensors. Without glibc nothing is changed.

    By default glibc returns large blocks to the system, which maps and zeroes other pages for the next tensor: on a CPU
    that takes longer than many an operation on them (docs/log, 2026-11-24). The price is that the process holds as
    much memory as it ever needed, and more where tensors have ever other sizes: they leave holes that the next ones do
    not fit in, so `return_freed_memory_if_scarce` is called between steps and requests.
    """
    if platform.libc_ver()[0] != "glibc":
        return
    libc = ctypes.CDLL(None)
    libc.mallopt(-4, 0)  # M_MMAP_MAX: no block has a mapping of its own
    libc.mallopt(-1, -1)  # M_TRIM_THRESHOLD: free memory at the end of the heap stays
    libc.mallopt(-2, 1 << 26)  # M_TOP_PAD: the heap grows by 64 MiB at least


def return_freed_memory() -> None:
    """Gives the system what was freed until now, also after `keep_freed_memory`. Without glibc nothing is done.

    A model whose float weights were replaced by others would hold their memory as well.
    """
    if platform.libc_ver()[0] == "glibc":
        ctypes.CDLL(None).malloc_trim(0)


def return_freed_memory_if_scarce() -> None:
    """`return_freed_memory` where less than SCARCE of the machine's memory is available.

    Without it a training with batches of ever other lengths grew by 0.55 GB a step (of 14 GB 9 were free memory), until
    the system ended it.
    """
    memory = psutil.virtual_memory()
    if memory.available < SCARCE * memory.total:
        return_freed_memory()


def use_huge_pages() -> None:
    """Makes torch ask Linux for pages of 2 MiB for large tensors, unless the environment says otherwise.

    Products of few rows read all weights: in eight bits at 55 to 59 GB/s instead of 39 (docs/log, 2026-11-26). torch
    reads the variable at its first tensor, so this is called before torch is loaded.
    """
    os.environ.setdefault("THP_MEM_ALLOC_ENABLE", "1")


# ---- a folder for what is cached ----


def cache_folder() -> tuple[Path, str]:
    """(the folder for what is built or fetched once, why it is not the usual one: "" where it is).

    The usual one is $XDG_CACHE_HOME or ~/.cache; where there is no home, or it cannot be written, one of this user's
    below the folder for temporary files. OSError if that is not there either, or is another user's.
    """
    usual = Path(os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache"))  # noqa: PTH111 (Path's raises)
    if usual.is_absolute():
        why = _why_not_written(usual)
        if not why:
            return usual, ""
    else:
        why = f"HOME is not set, and user {os.getuid()} has no home folder"
    instead = Path(tempfile.gettempdir()) / f"draftsmith-{os.getuid()}"
    instead.mkdir(mode=0o700, exist_ok=True)
    found = instead.lstat()
    # Libraries are loaded from it.
    if found.st_uid != os.getuid() or found.st_mode & 0o022 or instead.is_symlink():
        raise PermissionError(13, f"others may write it, and {why}", str(instead))
    return instead, why


def _why_not_written(folder: Path) -> str:
    """What forbids to write into `folder`, or to make it where it is not there; "" if nothing does."""
    there = next(parent for parent in (folder, *folder.parents) if parent.exists())
    try:
        with tempfile.TemporaryFile(dir=there):
            return ""
    except OSError as error:
        return f"{folder} cannot be written ({error.strerror})"


def _provide_cache() -> str:
    """Lets other libraries find the folder that stands for the usual one; a line that says so, "" if it is that one.
    Models that are in the usual one stay where they are."""
    try:
        folder, why = cache_folder()
    except OSError:  # said by what needs it
        return ""
    if not why:
        return ""
    home = os.path.expanduser("~")  # noqa: PTH111 (Path's raises)
    if home == "~":
        os.environ["HOME"] = home = str(folder)
    usual = Path(os.environ.get("XDG_CACHE_HOME") or f"{home}/.cache")
    if (usual / "huggingface").is_dir():
        os.environ.setdefault("HF_HOME", str(usual / "huggingface"))
    os.environ["XDG_CACHE_HOME"] = str(folder)
    return f"{why}: what is cached is in {folder}, XDG_CACHE_HOME names another folder"


# ---- who started this process ----


def parent_words() -> list[str]:
    """The command line of the process that started this one; [] where the system does not show it."""
    return _read(f"/proc/{os.getppid()}/cmdline").split("\0")[:-1]


def launcher_words(words: Sequence[str], arguments: Sequence[str]) -> list[str]:
    """A launcher's own part of its command line `words`, which ends with `arguments`, those of the command that it
    started; [] for any other program."""
    own = list(words[: len(words) - len(arguments)])
    named = any(f"/{word}".endswith(f"/{file}") for word in own for file in LAUNCHER_FILES)
    names = pairwise(Path(word).name for word in own)
    return own if named or not LAUNCHERS.isdisjoint(names) else []


def is_launched() -> bool:
    """Whether a launcher (accelerate, torchrun, deepspeed) started this process: it has a launcher's variables, and its
    parent is one."""
    told = any(name in os.environ for name in LAUNCHED)
    return told and bool(launcher_words(parent_words(), sys.argv[1:]))


def process_count() -> int:
    """The processes that were started together, as torchrun or MPI say it; 1 where nothing does."""
    names = ("WORLD_SIZE", "PMI_SIZE", "OMPI_COMM_WORLD_SIZE", "MV2_COMM_WORLD_SIZE")
    return next((read_number(name, 1) for name in names if os.environ.get(name)), 1)


def read_number(name: str, default: int) -> int:
    """The whole number in an environment variable, `default` where it is not set. UserError for anything else."""
    text = os.environ.get(name) or str(default)
    if not text.strip().isdecimal():
        raise UserError(
            f"the environment variable {name} is {text!r}, and a launcher sets a number: unset it"
        )
    return int(text)


def _read(path: str | Path) -> str:
    try:
        return Path(path).read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""
