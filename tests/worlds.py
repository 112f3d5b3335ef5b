"""A folder with a tiny target, its drafts and prompts, and ways to run the real commands on them."""

import contextlib
import faulthandler
import hashlib
import io
import json
import multiprocessing
import os
import random
import runpy
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from tests.tiny import noisy, tiny_model

ROOT = Path(__file__).resolve().parents[1]
ENV = {
    "OMP_NUM_THREADS": "1",
    "TOKENIZERS_PARALLELISM": "false",
    "ACCELERATE_USE_CPU": "1",
    "HF_HUB_OFFLINE": "1",
    "WANDB_MODE": "disabled",
    "GIT_OPTIONAL_LOCKS": "0",  # the commands ask git for the commit while others may work in the checkout
    "COLUMNS": "300",  # rich wraps no line
}
CONTEXT = 512  # longer than any bundled prompt in bytes
EOS = list(range(12))  # many, so that answers of a random model end at all lengths
PATIENCE = 600  # seconds: for a hang, not for a slow machine; a fork then says where it is and ends


@dataclass(frozen=True)
class World:
    target: Path
    draft: Path  # close to the target: accepted now and then
    stranger: Path  # as many tokens as the target, in another order
    prompts: Path  # jsonl
    texts: list[str]


@dataclass(frozen=True)
class Done:
    """How a command ended."""

    code: int
    out: str
    err: str

    def ok(self) -> "Done":
        """Itself; asserts that the command succeeded."""
        assert self.code == 0, self.err
        return self

    def error(self) -> str:
        """The one line that bad input gets; asserts that it is one, and exit code 2."""
        lines = [line for line in self.err.splitlines() if line.strip()]
        assert self.code == 2, self.err
        assert len(lines) == 1, self.err
        assert lines[0].startswith("error: ")
        return lines[0]


def byte_tokenizer(reverse: bool = False) -> PreTrainedTokenizerFast:
    """A token for each byte behind 12 special ones; `reverse` gives the bytes other ids."""
    special = ["<eos>", *(f"<{i}>" for i in EOS[1:])]
    letters = sorted(pre_tokenizers.ByteLevel.alphabet(), reverse=reverse)
    vocab = {token: i for i, token in enumerate([*special, *letters])}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token=special[0], additional_special_tokens=special[1:]
    )


def save(folder: Path, model: Any, tokenizer: PreTrainedTokenizerFast) -> Path:
    model.generation_config.eos_token_id = EOS
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def build(folder: Path, prompts: int = 48, layers: int = 2) -> World:
    """The world in `folder`; its prompts have 3 to 42 bytes and occur in no evaluation prompt."""
    tokenizer = byte_tokenizer()
    size: dict[str, Any] = {
        "vocab_size": len(tokenizer),
        "num_hidden_layers": layers,
        "max_position_embeddings": CONTEXT,
    }
    target = tiny_model("llama", seed=1, **size)
    draft = noisy(target, 0.05)
    rng = random.Random(0)
    texts = [
        f"zq{i}" + "".join(rng.choices("abcdef ghij", k=rng.randint(0, 38))) for i in range(prompts)
    ]
    return World(
        target=save(folder / "target", target, tokenizer),
        draft=save(folder / "draft", draft, tokenizer),
        stranger=save(folder / "stranger", draft, byte_tokenizer(reverse=True)),
        prompts=write_prompts(folder / "prompts.jsonl", texts),
        texts=texts,
    )


def overflowing(folder: Path) -> Path:
    """A target that is fine but for one token, "~", whose states overflow in float16."""
    tokenizer = byte_tokenizer()
    model: Any = tiny_model("llama", vocab_size=len(tokenizer), max_position_embeddings=2048)
    with torch.no_grad():
        model.model.embed_tokens.weight[tokenizer("~")["input_ids"][0]] = 65504.0
        model.model.layers[0].mlp.down_proj.weight *= 200.0
    return save(folder, model, tokenizer)


def copied(world: World, folder: Path) -> World:
    """The same world in a folder of its own, to be altered."""
    shutil.copytree(world.target.parent, folder)
    target, draft, stranger = (folder / name for name in ("target", "draft", "stranger"))
    return World(target, draft, stranger, folder / "prompts.jsonl", world.texts)


def write_prompts(path: Path, texts: Sequence[str]) -> Path:
    path.write_text("".join(json.dumps({"prompt": text}) + "\n" for text in texts))
    return path


def call(command_file: str, *args: object) -> Done:
    """`python command_file args…`, run as __main__ within this process: no seconds of imports."""
    from accelerate.state import AcceleratorState, PartialState

    AcceleratorState._reset_state(reset_partial_state=True)
    out, err, code = io.StringIO(), io.StringIO(), 0
    argv = [command_file, *map(str, args)]
    with (
        mock.patch.dict(os.environ, ENV),
        mock.patch.object(sys, "argv", argv),
        mock.patch.object(sys, "path", list(sys.path)),
        contextlib.redirect_stdout(out),
        contextlib.redirect_stderr(err),
    ):
        try:
            runpy.run_path(str(ROOT / command_file), run_name="__main__")
        except SystemExit as end:
            code = int(end.code or 0)
        finally:
            PartialState._reset_state()
    return Done(code, out.getvalue(), err.getvalue())


def run(
    command_file: str, *args: object, env: dict[str, str] | None = None, cwd: Path = ROOT,
    processes: int = 0, timeout: float = PATIENCE,
) -> Done:  # fmt: skip
    """The command in a process of its own, or in several under torchrun."""
    with started(command_file, *args, env=env, cwd=cwd, processes=processes) as process:
        out, err = process.communicate(timeout=timeout)
    return Done(process.returncode, out, err)


@contextmanager
def started(
    command_file: str, *args: object, env: dict[str, str] | None = None, cwd: Path = ROOT,
    processes: int = 0,
) -> Iterator[subprocess.Popen[str]]:  # fmt: skip
    """The running command; it and its children are gone when the block is left."""
    launcher = [sys.executable]
    if processes > 0:
        address = ["--master-addr", "127.0.0.1", "--master-port", str(_free_port())]
        launcher += ["-m", "torch.distributed.run", "--nproc-per-node", str(processes), *address]
    process = subprocess.Popen(
        [*launcher, str(ROOT / command_file), *map(str, args)],
        cwd=cwd,
        env={**os.environ, **ENV, **(env or {})},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    try:
        yield process
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.communicate()


FORKS = multiprocessing.get_context("forkserver")
# Imported once, by the process that is forked: it runs nothing and so has neither threads nor locks.
FORKS.set_forkserver_preload(["tests.worlds", "train.training", "train.answering", "peft"])


class Fork:
    """A command in a fork of a process that has imported what commands import, and has done nothing else.

    A fork of the tests' own process would now and then wait for ever, for a lock of a thread that it does not have.
    """

    def __init__(self, env: dict[str, str], *words: str):
        self.streams = [tempfile.NamedTemporaryFile("r+") for _ in range(2)]  # noqa: SIM115
        names = [stream.name for stream in self.streams]
        env = {**os.environ, **ENV, **env}
        self.process = FORKS.Process(target=_run_forked, args=(env, words, names))
        with mock.patch.dict(os.environ, {**ENV, "PYTHONPATH": str(ROOT)}):
            self.process.start()

    def poll(self) -> int | None:
        return self.process.exitcode

    def kill(self) -> None:
        """Ends it and what it has started."""
        self.process.kill()
        with contextlib.suppress(ProcessLookupError):
            self.send_group(signal.SIGKILL)

    def send_group(self, number: int) -> None:
        """Sends the signal to it and to those that it has started, as a terminal does."""
        assert self.process.pid is not None
        os.killpg(self.process.pid, number)

    def send(self, number: int) -> None:
        """Sends the signal, unless it has ended: one of two ranks does so when the other is killed."""
        assert self.process.pid is not None  # 0 would be everybody
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.process.pid, number)

    def wait(self) -> int:
        """Its exit code."""
        self.process.join()
        return int(self.process.exitcode or 0)

    def end(self) -> Done:
        code = self.wait()
        for stream in self.streams:
            stream.seek(0)
        out, err = (stream.read() for stream in self.streams)
        return Done(code, out, err)


def _run_forked(env: dict[str, str], words: Sequence[str], streams: Sequence[str]) -> None:
    os.setsid()
    os.environ.clear()
    os.environ.update(env)
    for number, name in enumerate(streams, 1):
        os.dup2(os.open(name, os.O_WRONLY | os.O_APPEND), number)
    faulthandler.enable(sys.stderr)
    faulthandler.dump_traceback_later(PATIENCE, exit=True)
    if words[0] == launcher():
        os.execv(sys.executable, [sys.executable, *words])  # the command line is what tells it
    sys.argv = [*words]
    runpy.run_path(str(ROOT / words[0]), run_name="__main__")


@contextmanager
def forked(
    command_file: str, *args: object, processes: int = 1, env: dict[str, str] | None = None
) -> Iterator[list[Fork]]:
    """The running command in forks, as many as torchrun would start, without torchrun; gone when the block is left."""
    ranks: list[dict[str, str]] = [{}]
    if processes > 1:
        shared = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(_free_port())}
        shared |= dict.fromkeys(("WORLD_SIZE", "LOCAL_WORLD_SIZE"), str(processes))
        ranks = [{**shared, "RANK": str(i), "LOCAL_RANK": str(i)} for i in range(processes)]
    forks = [Fork({**rank, **(env or {})}, command_file, *map(str, args)) for rank in ranks]
    try:
        yield forks
    finally:
        for fork in forks:
            fork.kill()
            fork.process.join()


def launcher() -> str:
    """The file of `accelerate launch`, a command for a fork. Its own processes start as ever."""
    import accelerate

    return str(Path(accelerate.__file__).parent / "commands" / "launch.py")


def fork(
    command_file: str, *args: object, processes: int = 1, env: dict[str, str] | None = None
) -> Done:
    """How the command ends in forks: the first code that is not 0, and what all of them wrote."""
    with forked(command_file, *args, processes=processes, env=env) as forks:
        ends = [fork.end() for fork in forks]
    code = next((end.code for end in ends if end.code), 0)
    return Done(code, "".join(end.out for end in ends), "".join(end.err for end in ends))


def kill_when(
    ready: Callable[[], bool], command_file: str, *args: object, env: dict[str, str] | None = None,
    own_start: bool = False,
) -> int:  # fmt: skip
    """Runs the command in a fork, or in a process with its own start, until `ready()`, then kills it with SIGKILL.

    Returns its exit code: -9 if it was killed."""
    with contextlib.ExitStack() as stack:
        process: Any
        if own_start:
            process = stack.enter_context(started(command_file, *args, env=env))
        else:
            [process] = stack.enter_context(forked(command_file, *args, env=env))
        end = time.monotonic() + PATIENCE
        while not ready() and process.poll() is None:
            assert time.monotonic() < end, "nothing to kill for"
            time.sleep(0.002)
        process.kill()
        return int(process.wait())


def contents(folder: Path) -> dict[str, str]:
    """{path: digest} of every file below `folder`."""
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    return {
        str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in files
    }


def flip_byte(path: Path, at: int) -> None:
    """Damages one byte; negative counts from the end."""
    data = bytearray(path.read_bytes())
    data[at] ^= 0xFF
    path.write_bytes(data)


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def sampled(world: World, folder: Path, *more: object) -> Path:
    """A sampled set in `folder`, made by the real command: the target's answers to the world's prompts."""
    out = folder / "samples"
    sources = json.dumps([{"kind": "file", "path": str(world.prompts)}])
    done = call(
        "train/sample.py", "--target", world.target, "--sources", sources, "--out", out, *more
    )  # fmt: skip
    assert done.code == 0, done.err
    return out
