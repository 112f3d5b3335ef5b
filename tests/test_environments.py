"""Commands in the environments that people run them in: containers, proxies, terminals, launchers, schedulers."""

import json
import os
import pty
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import PartialState

from decode.common import machine, proxies
from decode.common.errors import UserError
from decode.model.quantized import vnni
from decode.serving.running import completions
from decode.serving.running.server_process import free_port, running_server
from tests import worlds
from tests.worlds import ROOT, World
from train.trainer import collective

PROXIES = [f"{scheme}_proxy" for scheme in ("http", "https", "all", "no")]
PROXIES += map(str.upper, PROXIES[:])
PROGRAM = """
import os, signal, sys, time
from dataclasses import dataclass
from decode.common.command import DeferredStop, run_command, stop

@dataclass
class Settings:
    deferred: bool = False

def main(s):
    if s.deferred:
        with DeferredStop() as signals:
            print("ready", flush=True)
            while not signals.received:
                time.sleep(0.01)
            print("saving", file=sys.stderr)
        stop(signals.received, "step 3 is saved")
    print("ready", flush=True)
    time.sleep(60)

run_command(main, Settings, None)
"""
"""A command that waits for a signal."""


def environment(**variables: str) -> dict[str, str]:
    """That of the tests without proxies, with these variables; an empty one is not set."""
    env = {k: v for k, v in {**os.environ, **worlds.ENV}.items() if k not in PROXIES} | variables
    return {name: value for name, value in env.items() if value}


# ---- CPUs ----


def fake_groups(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, told: str, files: Mapping[str, str]
) -> None:
    """16 CPUs, and control groups with these files; `told` is /proc/self/cgroup."""
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    real = machine._read
    monkeypatch.setattr(machine, "CGROUPS", tmp_path)
    monkeypatch.setattr(machine, "_affinity", lambda: 16)
    monkeypatch.setattr(
        machine, "_read", lambda path: told if path == "/proc/self/cgroup" else real(path)
    )


@pytest.mark.parametrize(
    ("told", "files", "cpus"),
    [
        ("0::/\n", {"cpu.max": "200000 100000\n"}, 2),
        ("0::/\n", {"cpu.max": "max 100000\n"}, 16),
        ("0::/\n", {"cpu.max": "50000 100000\n"}, 1),  # half a CPU
        ("0::/\n", {"cpu.max": "350000 100000\n"}, 3),
        ("0::/\n", {"cpu.max": "3200000 100000\n"}, 16),  # more than there are
        ("0::/a/b\n", {"a/b/cpu.max": "max 100000\n", "a/cpu.max": "400000 100000\n"}, 4),
        ("0::/kube/pod7\n", {"cpu.max": "200000 100000\n"}, 2),  # the path is the host's
        ("4:cpu,cpuacct:/d/7\n", {f"cpu/cpu.cfs_{n}_us": t for n, t in (("quota", "300000"), ("period", "100000"))}, 3),
        ("4:cpu:/\n", {"cpu/cpu.cfs_quota_us": "-1\n", "cpu/cpu.cfs_period_us": "100000\n"}, 16),
        ("4:cpu:/\n0::/\n", {"unified/cpu.max": "500000 100000\n"}, 5),
        ("4:memory:/\n", {"cpu/cpu.cfs_quota_us": "100000\n", "cpu/cpu.cfs_period_us": "100000\n"}, 16),
        ("", {}, 16),
        ("0::/\n", {"cpu.max": "what is this\n"}, 16),
    ],
)  # fmt: skip
def test_cpus_are_those_of_the_quota(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, told: str, files: dict[str, str], cpus: int
) -> None:
    """Catches a thread for each of the host's CPUs in a container that may use two of them."""
    fake_groups(monkeypatch, tmp_path, told, files)
    assert machine.cpu_count() == cpus


@pytest.mark.parametrize(
    ("quota", "given", "launched", "threads"),
    [
        ("400000", {}, False, "4"),
        ("400000", {"OMP_NUM_THREADS": "9"}, False, "9"),
        ("400000", {"OMP_NUM_THREADS": "9"}, True, "4"),  # the launcher's, of the host's cores
        ("400000", {"OMP_NUM_THREADS": "1"}, True, "1"),
        ("400000", {"LOCAL_WORLD_SIZE": "2"}, True, "2"),
        ("400000", {"LOCAL_WORLD_SIZE": "8"}, True, "1"),
        ("max", {}, False, None),
    ],
)
def test_threads_follow_the_quota_and_the_user(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, quota: str, given: dict[str, str],
    launched: bool, threads: str | None,
) -> None:  # fmt: skip
    """Catches threads that are throttled, and a number that overrides the user's."""
    fake_groups(monkeypatch, tmp_path, "0::/\n", {"cpu.max": f"{quota} 100000\n"})
    for name in (*machine.THREADS, "LOCAL_WORLD_SIZE"):
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)
    for name, value in given.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(machine, "is_launched", lambda: launched)
    machine._limit_threads()
    assert os.environ.get("OMP_NUM_THREADS") == threads


# ---- the cache ----


@pytest.mark.parametrize(
    ("variables", "why"),
    [
        ({}, ""),
        ({"HOME": "/proc"}, "/proc/.cache cannot be written (No such file or directory)"),
        ({"HOME": "/dev/null"}, "/dev/null/.cache cannot be written (Not a directory)"),
        ({"XDG_CACHE_HOME": "/proc/x"}, "/proc/x cannot be written (No such file or directory)"),
        ({"HOME": "no home"}, "HOME is not set, and user {uid} has no home folder"),
    ],
)
def test_a_cache_that_cannot_be_written_is_elsewhere(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, variables: dict[str, str], why: str
) -> None:
    """Catches a traceback without a home, an error of a home that cannot be written, and a wrong reason."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.delenv("HF_HOME", raising=False)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    if variables.get("HOME") == "no home":
        monkeypatch.delenv("HOME")
        monkeypatch.setattr(os.path, "expanduser", lambda path: path)  # no entry of the user
    instead, why = tmp_path / f"draftsmith-{os.getuid()}", why.format(uid=os.getuid())
    assert machine.cache_folder() == (instead if why else tmp_path / "home/.cache", why)
    line = machine._provide_cache()
    end = f": what is cached is in {instead}, XDG_CACHE_HOME names another folder"
    assert line == (why + end if why else "")
    assert os.environ.get("XDG_CACHE_HOME") == (str(instead) if why else None)
    assert os.environ["HOME"] != "~"


def test_models_in_a_home_that_is_only_read_stay_in_use(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Catches models that are fetched again because the cache is elsewhere now."""
    (tmp_path / "home/.cache/huggingface").mkdir(parents=True)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setattr(machine, "_why_not_written", lambda folder: "read-only")
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    for name in ("XDG_CACHE_HOME", "HF_HOME"):
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)
    machine._provide_cache()
    assert os.environ["HF_HOME"] == str(tmp_path / "home/.cache/huggingface")


def test_what_another_user_may_write_is_not_loaded(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Catches a library that is loaded from a folder which anybody made before."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setenv("XDG_CACHE_HOME", "/proc/x")
    instead = tmp_path / f"draftsmith-{os.getuid()}"
    for make in (
        lambda: (instead.mkdir(), instead.chmod(0o777)),
        lambda: instead.symlink_to(tmp_path),
    ):
        make()
        with pytest.raises(PermissionError, match="others may write it, and /proc/x cannot be"):
            machine.cache_folder()
        instead.unlink() if instead.is_symlink() else instead.rmdir()


@pytest.mark.parametrize(
    ("has_vnni", "variables", "cause"),
    [
        (False, {}, "this CPU has no AVX512-VNNI"),
        (True, {"CXX": "no-such-compiler"}, "there is no C++ compiler no-such-compiler (CXX names another one)"),
        (True, {"CXX": "false"}, "the C++ compiler false fails: no message"),
        (True, {"TORCH_EXTENSIONS_DIR": "/proc/x"},
         "they could not be built or loaded: [Errno 2] No such file or directory: '/proc/x'"),
    ],
)  # fmt: skip
def test_the_slow_path_names_what_is_missing(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, has_vnni: bool, variables: dict[str, str],
    cause: str,
) -> None:  # fmt: skip
    """Catches "needs AVX512-VNNI and a C++ compiler" where both are there and a folder cannot be written."""
    monkeypatch.setattr(torch.cpu, "_is_vnni_supported", lambda: has_vnni)
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path))
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert vnni.what_is_missing.__wrapped__() == cause


@pytest.mark.skipif(
    not torch.cpu._is_vnni_supported() or shutil.which("c++") is None, reason="something is missing"
)
def test_nothing_is_missing_where_all_is_there() -> None:
    """Catches the slow path on a machine that has the fast one."""
    assert vnni.what_is_missing() == ""


# ---- the terminal ----


@pytest.mark.parametrize(
    ("variables", "written"),
    [
        ({"PYTHONIOENCODING": "latin-1"}, b"\\u2026 \xe9 \\ud83d"),
        ({"PYTHONIOENCODING": "ascii"}, b"\\u2026 \\xe9 \\ud83d"),
        ({"PYTHONIOENCODING": "ascii:replace"}, b"? ? ?"),  # as the user chose
        ({"PYTHONIOENCODING": "utf-8"}, "… é \\ud83d".encode()),
        ({"PYTHONIOENCODING": "cp1252"}, b"\x85 \xe9 \\ud83d"),
        ({"LC_ALL": "POSIX", "PYTHONCOERCECLOCALE": "0", "PYTHONUTF8": "0"}, b"\\u2026 \\xe9 \\ud83d"),
    ],
)  # fmt: skip
def test_what_a_terminal_cannot_show_is_escaped(variables: dict[str, str], written: bytes) -> None:
    """Catches a UnicodeEncodeError after the work was done."""
    program = "from decode.common import machine; machine.prepare(); print(chr(0x2026), chr(0xe9), chr(0xd83d))"
    words = [sys.executable, "-c", program]
    done = subprocess.run(words, cwd=ROOT, env=environment(**variables), capture_output=True)
    assert (done.stdout.rstrip(b"\n"), done.returncode) == (written, 0), done.stderr


# ---- signals ----


def stopped(
    sent: signal.Signals, *words: str, ignored: Sequence[signal.Signals] = ()
) -> tuple[int, str]:
    """(exit code, stderr) of PROGRAM after the signal; -9 if it ran on."""

    def ignore() -> None:
        signal.signal(signal.SIGHUP, signal.SIG_DFL)  # the suite itself may run under nohup
        for number in ignored:
            signal.signal(number, signal.SIG_IGN)

    with subprocess.Popen(
        [sys.executable, "-c", PROGRAM, *words], cwd=ROOT, env=environment(), text=True,
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, preexec_fn=ignore,
    ) as process:  # fmt: skip
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        process.send_signal(sent)
        try:
            process.wait(2 if sent in ignored else 60)
        except subprocess.TimeoutExpired:
            process.kill()
        return process.wait(), process.communicate()[1]


@pytest.mark.parametrize("sent", [signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGINT])
def test_each_signal_ends_with_its_line(sent: signal.Signals) -> None:
    """Catches a scheduler's SIGUSR1 and a closed terminal's SIGHUP, which end a process without a word."""
    name = "Ctrl-C" if sent == signal.SIGINT else sent.name
    assert stopped(sent) == (128 + sent, f"stopped by {name}\n")
    line = f"saving\nstopped by {name}: step 3 is saved\n"
    assert stopped(sent, "--deferred=true") == (128 + sent, line)


@pytest.mark.parametrize(
    ("sent", "ignored", "code"),
    [
        (signal.SIGHUP, [signal.SIGHUP], -9),  # nohup
        (signal.SIGUSR1, [signal.SIGUSR1], -9),  # trap '' USR1
        (signal.SIGTERM, [signal.SIGHUP], 143),
        (signal.SIGUSR1, [signal.SIGHUP], 138),
    ],
)
def test_what_was_ignored_stays_ignored(
    sent: signal.Signals, ignored: list[signal.Signals], code: int
) -> None:
    """Catches a run under nohup that ends with its terminal."""
    assert stopped(sent, ignored=ignored)[0] == code


def test_a_closed_terminal_does_not_end_what_saves(tmp_path: Path) -> None:
    """Catches an I/O error of the terminal that is gone in the middle of saving."""
    child, terminal = pty.fork()
    if child == 0:
        signal.signal(signal.SIGHUP, signal.SIG_DFL)  # the suite itself may run under nohup
        os.chdir(ROOT)
        end = f"open({str(tmp_path / 'saved')!r}, 'w').close()\n        stop(signals"
        program = PROGRAM.replace("stop(signals", end).replace(
            '"saving", ', '"saving", flush=True, '
        )
        os.execve(sys.executable, [sys.executable, "-c", program, "--deferred=true"], environment())
    assert b"ready" in os.read(terminal, 5)
    os.close(terminal)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 128 + signal.SIGHUP
    assert (tmp_path / "saved").exists()


# ---- launchers ----

ARGUMENTS = ["--out", "x"]


@pytest.mark.parametrize(
    ("line", "variables", "launched"),
    [
        ("python /bin/accelerate launch train/distill.py", {"ACCELERATE_MIXED_PRECISION": "no"}, True),
        ("python -m accelerate.commands.launch train/distill.py", {"ACCELERATE_MIXED_PRECISION": "no"}, True),
        ("python /v/bin/torchrun --nproc-per-node 2 train/distill.py", {"TORCHELASTIC_RUN_ID": "1"}, True),
        ("python -m torch.distributed.run train/distill.py", {"LOCAL_RANK": "0"}, True),
        ("python /v/bin/torchrun train/distill.py", {}, False),  # passes nothing on: not our launcher
        ("-bash", {"ACCELERATE_MIXED_PRECISION": "bf16"}, False),
        ("python own.py", {"ACCELERATE_MIXED_PRECISION": "bf16"}, False),
        ("/sbin/init", {"LOCAL_RANK": "0"}, False),
        ("", {"ACCELERATE_MIXED_PRECISION": "bf16"}, False),
    ],
)  # fmt: skip
def test_a_launcher_is_known_by_its_variables_and_its_command_line(
    monkeypatch: pytest.MonkeyPatch, line: str, variables: dict[str, str], launched: bool
) -> None:
    """Catches a training under nohup that ends with its shell because a variable was exported."""
    for name in machine.LAUNCHED:
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(machine, "parent_words", lambda: [*line.split(), *ARGUMENTS])
    monkeypatch.setattr(sys, "argv", ["train/distill.py", *ARGUMENTS])
    assert machine.is_launched() == launched


@pytest.mark.parametrize(
    ("variables", "line"),
    [
        ({"WORLD_SIZE": "2"}, "WORLD_SIZE is 2, and no variable says which of the processes this one is"),
        ({"WORLD_SIZE": "two"}, "the environment variable WORLD_SIZE is 'two', and a launcher sets a number"),
        ({"WORLD_SIZE": "2", "RANK": "0"}, "Accelerate cannot set up what the launcher asks for"),  # no address
        ({"OMPI_COMM_WORLD_SIZE": "2"}, "WORLD_SIZE is 2, and no variable says which"),
    ],
)  # fmt: skip
def test_processes_that_form_no_group_are_refused(
    monkeypatch: pytest.MonkeyPatch, variables: dict[str, str], line: str
) -> None:
    """Catches processes that each believe that they are alone, and one that waits for ever for others."""
    told = ("WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
    for name in (*collective.RANKS, *told):
        monkeypatch.setenv(name, "")  # is put back when Accelerate has set it
        monkeypatch.delenv(name)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    PartialState._reset_state()
    with pytest.raises(UserError, match=f"^{line}"):
        collective.join_processes()
    PartialState._reset_state()


# ---- proxies ----


@pytest.fixture
def no_proxies(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in (*PROXIES, "REQUEST_METHOD"):
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)


@pytest.mark.parametrize(
    ("host", "own"),
    [
        *[(host, True) for host in ("localhost", "LOCALHOST", "127.0.0.1", "127.8.9.1", "[::1]")],
        *[(host, True) for host in ("0.0.0.0", "[::ffff:127.0.0.1]", "a.localhost", "localhost.")],
        *[(host, False) for host in ("localhost.org", "10.0.0.1", "128.0.0.1", "[::2]", "my-localhost")],
    ],
)  # fmt: skip
def test_this_machine_is_asked_by_no_proxy(
    monkeypatch: pytest.MonkeyPatch, no_proxies: None, host: str, own: bool
) -> None:
    """Catches a server of this machine that is asked by way of the internet's proxy."""
    monkeypatch.setenv("all_proxy", "http://p:1")
    assert (proxies.proxy_for(f"http://{host}:8000/v1") is None) == own


@pytest.mark.parametrize(
    ("variables", "url", "variable"),
    [
        ({"http_proxy": "p:1"}, "http://h/v1", "http_proxy"),
        ({"http_proxy": "p:1"}, "https://h/v1", None),
        ({"HTTPS_PROXY": "p:1", "ALL_PROXY": "q:1"}, "https://h/v1", "HTTPS_PROXY"),
        ({"ALL_PROXY": "q:1"}, "https://h/v1", "ALL_PROXY"),
        ({"HTTP_PROXY": "p:1", "REQUEST_METHOD": "GET"}, "http://h/v1", None),
        ({"http_proxy": "p:1", "no_proxy": "*"}, "http://h/v1", None),
        ({"http_proxy": "p:1", "NO_PROXY": ".lan, b.org"}, "http://h.lan/v1", None),
        ({"http_proxy": "p:1", "NO_PROXY": ".lan, b.org"}, "http://a.b.org/v1", None),
        ({"http_proxy": "p:1", "NO_PROXY": "b.org"}, "http://ab.org/v1", "http_proxy"),
        ({"http_proxy": "p:1", "no_proxy": "10.0.0.0/8"}, "http://10.2.3.4/v1", None),
        ({"http_proxy": "p:1", "no_proxy": "10.0.0.0/8"}, "http://11.2.3.4/v1", "http_proxy"),
        ({"http_proxy": "p:1", "no_proxy": "h:80"}, "http://h:81/v1", "http_proxy"),
        ({"http_proxy": "p:1", "no_proxy": "[fe80::1]"}, "http://[fe80::1]:8/v1", None),
    ],
)  # fmt: skip
def test_elsewhere_the_variables_are_followed(
    monkeypatch: pytest.MonkeyPatch, no_proxies: None, variables: dict[str, str], url: str,
    variable: str | None,
) -> None:  # fmt: skip
    """Catches a proxy that is not asked, one that is asked for what no_proxy excepts, and a wrong name in the line."""
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    found = proxies.proxy_for(url)
    assert (found and found.variable) == variable
    assert ("asked through the proxy that" in proxies.through(url)) == (variable is not None)


@pytest.mark.parametrize(
    ("name", "value", "line"),
    [
        ("ALL_PROXY", "socks5://u:geheim9@127.0.0.1:1",
         "the proxy that ALL_PROXY names is of SOCKS: pip install socksio, or unset ALL_PROXY"),
        ("all_proxy", "socks://127.0.0.1:1",
         "the proxy that all_proxy names cannot be used: write it as http://host:port or socks5://host:port, or unset "
         "all_proxy"),
        ("http_proxy", "http://[::1:8",
         "the proxy that http_proxy names cannot be used: write it as http://host:port or socks5://host:port, or unset "
         "http_proxy"),
        ("HTTP_PROXY", "http://127.0.0.1:1",
         "no server answers at http://far.example/v1 (All connection attempts failed, asked through the proxy that "
         "HTTP_PROXY names (no_proxy=far.example goes straight there)): start it, or correct --url"),
    ],
)  # fmt: skip
def test_a_proxy_that_fails_is_one_line(
    monkeypatch: pytest.MonkeyPatch, no_proxies: None, name: str, value: str, line: str
) -> None:
    """Catches tracebacks of SOCKS and of a misspelt proxy, and "start it" where the proxy is not reached."""
    monkeypatch.setenv(name, value)
    with pytest.raises(UserError) as error:
        completions.connect(Address("http://far.example/v1"))
    assert str(error.value) == line


class Address:
    """What `connect` reads of a command's settings."""

    def __init__(self, url: str):
        self.url, self.model, self.timeout, self.retries = url, "", 5.0, 0


def proxy_that_says(status: int) -> tuple[ThreadingHTTPServer, str]:
    """(a running proxy that refuses everything, its address)"""

    class Refuses(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_error(status)

        do_CONNECT = do_POST = do_GET

        def log_message(self, *_: Any) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Refuses)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    return server, f"http://127.0.0.1:{server.server_port}"


@pytest.mark.parametrize("scheme", ["http", "https"])
@pytest.mark.parametrize("status", [403, 407, 502])
def test_what_the_proxy_refuses_is_not_the_server_s_fault(
    monkeypatch: pytest.MonkeyPatch, no_proxies: None, scheme: str, status: int
) -> None:
    """Catches "set OPENAI_API_KEY" alone for what a proxy refuses."""
    server, address = proxy_that_says(status)
    monkeypatch.setenv(f"{scheme}_proxy", address)
    with pytest.raises(UserError, match=f"asked through the proxy that {scheme}_proxy names"):
        completions.connect(Address(f"{scheme}://far.example/v1"))
    server.shutdown()


READY = """
import sys
from http.server import BaseHTTPRequestHandler, HTTPServer
class Handler(BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200)
        self.end_headers()
HTTPServer(("127.0.0.1", int(sys.argv[1])), Handler).serve_forever()
"""


def test_a_server_of_our_own_is_ready_behind_any_proxy(
    monkeypatch: pytest.MonkeyPatch, no_proxies: None
) -> None:
    """Catches "not ready within 30 s" of a server that listens."""
    server, address = proxy_that_says(403)
    for name in ("http_proxy", "ALL_PROXY"):
        monkeypatch.setenv(name, address)
    port = free_port()
    words = [sys.executable, "-c", READY, str(port)]
    with running_server(words, f"http://127.0.0.1:{port}/", 30, "it"):
        pass
    server.shutdown()


# ---- commands in environments ----


def words_of(command: str, world: World, data: Path, out: Path) -> list[object]:
    sources = json.dumps([{"kind": "file", "path": str(world.prompts)}])
    tasks = json.dumps([{"name": "own", "path": str(world.prompts), "limit": 2}])
    return {
        "decode/generate.py": ["--target", world.target, "--prompt", "zq1", "--max_new_tokens", 2],
        "train/sample.py": ["--target", world.target, "--sources", sources, "--max_new_tokens", 2, "--out", out],
        "train/distill.py": ["--target", world.target, "--data", data, "--draft.init", world.draft,
                             "--loop.steps", 1, "--loop.batch_size", 2, "--loop.eval_every", 0, "--out", out],
        "eval/run.py": ["--target", world.target, "--methods", "[{name: ngram}]", "--tasks", tasks,
                        "--temperatures", "[0.0]", "--max_new_tokens", 2, "--out", out],
    }[command]  # fmt: skip


def closed_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


POSIX = {"LC_ALL": "POSIX", "PYTHONCOERCECLOCALE": "0", "PYTHONUTF8": "0"}
NO_USER = ["unshare", "--user", "--map-user=54321", "--map-group=54321"]
NOWHERE = {"HOME": "", "USER": "", "LOGNAME": "", "HF_HOME": "", "XDG_CACHE_HOME": ""}
ENVIRONMENTS: dict[str, tuple[list[str], Callable[[], dict[str, str]], str]] = {
    "no home": (NO_USER, lambda: NOWHERE, "warning: HOME is not set, and user 54321 has no home folder: what is"),
    "a home that cannot be written": (NO_USER, lambda: {**NOWHERE, "HOME": "/proc"}, "warning: /proc/.cache cannot be"),
    "latin-1": ([], lambda: {"PYTHONIOENCODING": "latin-1"}, ""),
    "POSIX": ([], lambda: POSIX, ""),
    "proxies": ([], lambda: {"http_proxy": f"127.0.0.1:{closed_port()}", "ALL_PROXY": "socks://h:1"}, ""),
    "an exported precision": ([], lambda: {"ACCELERATE_MIXED_PRECISION": "no"}, ""),
}  # fmt: skip
"""{name: (what the command is started by, its variables, the line that it begins with)}"""


def has_users() -> bool:
    return subprocess.run([*NO_USER, "true"], capture_output=True).returncode == 0


COMMANDS = ["decode/generate.py", "train/sample.py", "train/distill.py", "eval/run.py"]
WHERE = [
    *((command, "no home") for command in COMMANDS),  # each imports other libraries before it begins
    ("eval/run.py", "a home that cannot be written"), ("train/sample.py", "latin-1"), ("decode/generate.py", "POSIX"),
    ("eval/run.py", "POSIX"), ("train/distill.py", "proxies"), ("train/distill.py", "an exported precision"),
]  # fmt: skip


def test_each_environment_is_tried() -> None:
    """Catches a new environment that no command is run in."""
    assert {name for _, name in WHERE} == set(ENVIRONMENTS)


@pytest.mark.slow
@pytest.mark.parametrize(("command", "name"), WHERE)
def test_commands_work_in_each_environment(
    world: World, data: Path, tmp_path: Path, command: str, name: str
) -> None:
    """Catches a command that ends with a traceback, or says nothing about a cache that lies elsewhere."""
    prefix, variables, line = ENVIRONMENTS[name]
    if prefix and not has_users():
        pytest.skip("needs unshare --user")
    words = [*prefix, sys.executable, str(ROOT / command)]
    words += map(str, words_of(command, world, data, tmp_path / "out"))
    env = environment(**variables(), TMPDIR=str(tmp_path), TORCH_EXTENSIONS_DIR="")
    done = subprocess.run(
        words, cwd=ROOT, env=env, capture_output=True, text=True, errors="replace"
    )
    assert done.returncode == 0, done.stderr
    assert "Traceback" not in done.stderr
    assert done.stderr.startswith(line)
    assert done.stderr.count("warning: ") == (line != "")
    assert not (ROOT / "~").exists()


@pytest.mark.slow
@pytest.mark.parametrize("sent", [signal.SIGHUP, signal.SIGUSR1])
def test_a_training_saves_its_step_at_a_scheduler_s_signal(
    world: World, data: Path, tmp_path: Path, sent: signal.Signals
) -> None:
    """Catches the loss of all steps since the last checkpoint."""
    out = tmp_path / "out"
    words = [*words_of("train/distill.py", world, data, out), "--loop.steps", 500]
    with worlds.forked("train/distill.py", *words) as [process]:
        while not (out / "metrics.jsonl").is_file() or not (out / "metrics.jsonl").stat().st_size:
            assert process.poll() is None
            time.sleep(0.01)
        process.send(sent)
        done = process.end()
    assert done.code == 128 + sent
    assert f"stopped by {sent.name}: step " in done.err
    assert (out / "checkpoints" / "latest").is_file()


@pytest.mark.slow
def test_torchrun_trains_together_on_cpus(world: World, data: Path, tmp_path: Path) -> None:
    """Catches two processes that each believe that they are alone."""
    words = words_of("train/distill.py", world, data, tmp_path / "out")
    env = {"ACCELERATE_USE_CPU": "false", "CUDA_VISIBLE_DEVICES": ""}
    done = worlds.run("train/distill.py", *words, env=env, processes=2).ok()
    assert json.loads((tmp_path / "out/draftsmith.json").read_text())["processes"] == 2
    assert "error" not in done.err
