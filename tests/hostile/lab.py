"""A folder with a tiny target and small, real results of every command, and the arguments that made them.

Every case of the tables is one of these command lines with something wrong in it.
"""

import contextlib
import importlib
import inspect
import io
import json
import logging
import os
import resource
import shlex
import shutil
import signal
import socket
import traceback
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from string import Template
from typing import Any
from unittest import mock

import huggingface_hub.constants
from accelerate.state import AcceleratorState, PartialState

from decode.common.command import run_command
from tests import worlds
from tests.worlds import Done

FIRST_ARGUMENT = {
    "train/doctor.py": "data", "eval/report.py": "folder", "eval/advise.py": "report",
    "eval/fidelity.py": "target", "eval/rescore.py": "log other",
    "scripts/export.py": "draft",
    "scripts/check_draft.py": "draft", "scripts/referee.py": "draft",
    "scripts/llamacpp_parity.py": "draft", "scripts/audit.py": "draft",
}  # fmt: skip
"""The settings that may come first without their flags."""
BASE = {
    "train/sample.py": "--target $lab/target --sources '[{kind: file, path: $lab/prompts.jsonl, limit: 12}]' "
    "--max_new_tokens 6 --filters.min_answer 2 --shard_rows 4 --device cpu --out $out",
    "train/write_prompts.py": '--target $lab/chat --systems \'["", "Be odd."]\' --count 12 --max_new_tokens 24 '
    "--batch_size 4 --device cpu --out $out",
    "train/distill.py": "--target $lab/target --data $lab/samples --draft.init $lab/draft --loop.steps 4 "
    "--loop.batch_size 2 --loop.micro_batch 2 --loop.save_every 2 --loop.eval_every 0 --loop.max_length 64 "
    "--check.prompts 1 --check.max_new_tokens 4 --wandb disabled --out $out",
    "train/doctor.py": "--data $lab/samples --target $lab/target --html $tmp/page.html --out $tmp/found.json",
    "eval/run.py": "--target $lab/target --methods '[{name: causal, draft: $lab/causal, k: 2}]' "
    "--tasks '[{name: own, path: $lab/prompts.txt, limit: 4}]' --temperatures '[0.0]' --max_new_tokens 4 --k 2 "
    "--phase_prompts 0 --device cpu --out $out",
    "eval/tune.py": "--target $lab/target --methods '[{name: causal, draft: $lab/causal}]' "
    "--tasks '[{name: own, path: $lab/prompts.txt, limit: 4}]' --temperatures '[0.0]' --ks '[1, 2, 3]' "
    "--calibrate '[1, 3]' --tree_nodes '[]' --batch_sizes '[2]' --batch_ks '[1]' --max_new_tokens 4 --device cpu "
    "--out $out",
    "eval/report.py": "$tmp/report",
    "eval/advise.py": "$lab/report/report.json --out $tmp/advice.md",
    "eval/fidelity.py": "$lab/target --max_new_tokens 4 --tasks '[{name: own, path: $lab/prompts.txt, limit: 2}]' "
    "--device cpu --out $tmp/out.json",
    "eval/rescore.py": "$root/tests/golden/engine_logs/vllm_after.txt --json $tmp/out.json",
    "decode/generate.py": "--target $lab/target --draft ngram --prompt abc --max_new_tokens 4 --device cpu",
    "scripts/export.py": "$lab/eagle3 --format flat --target $lab/target --out $out",
    "scripts/publish.py": "--draft $lab/eagle3 --repo me/draft --out $out",
    "scripts/check_draft.py": "$lab/eagle3 --engine vllm --target $lab/target",
    "scripts/lab/build_target.py": "--gsm8k $lab/gsm8k.jsonl --work $tmp/work --assets $tmp/assets --tokens 20000 "
    "--compile false",
    "scripts/readme_table.py": "--report $lab/report/report.json --readme $tmp/page.md",
    "scripts/track_report.py": "--run $tmp/causal --report $lab/report",
    "scripts/referee.py": "$lab/causal --target $lab/target --python $lab/python",
    "scripts/audit.py": "$lab/causal --target $lab/target --served none --k 2 --max_new_tokens 4 "
    "--tasks '[{name: own, path: $lab/prompts.txt, limit: 2}]' --device cpu --out $out",
    "scripts/lab/task_prompts.py": "--math $lab/gsm8k.jsonl --math_count 2 --code_count 2 "
    "--article_count 2 --out $out",
    "scripts/lab/floor.py": "--target $lab/target --rows '[1, 2]' --max_new_tokens 2 --repeats 1 "
    "--tasks '[{name: own, path: $lab/prompts.txt, limit: 2}]' --out $tmp/out.json",
    "scripts/lab/gpu_smoke.py": "--target $lab/target --draft $lab/causal --rows 1 --k 2 --max_new_tokens 8 "
    "--device cpu --out $tmp/out.json",
    "scripts/llamacpp_parity.py": "$lab/causal --target $lab/target --server $lab/python",
}
"""Arguments of each command that work, or would with vLLM, a GPU or more time."""
EARLIER_RUNS = {
    "train/sample.py": "samples", "train/write_prompts.py": "written", "train/distill.py": "causal",
    "eval/run.py": "report", "eval/tune.py": "tuned",
}  # fmt: skip
"""Folders of the lab that hold a finished run of the command with its BASE arguments."""
CHAT_TEMPLATE = (
    "{% for m in messages %}<1>{{ m['role'] }}:{{ m['content'] }}<2>{% endfor %}"
    "{% if add_generation_prompt %}<1>assistant:{% endif %}"
)
"""Of $lab/chat, which is $lab/target as a chat model."""
HEADS = {
    "eagle3": "--draft.family eagle3 --draft.vocab 64 --draft.steps 2 --draft.taps '[0, 1]'",
    "medusa": "--draft.family medusa --draft.heads 3",
}
SECONDS = 60
MEMORY = 6 * 2**30


class TooSlowError(BaseException):
    """A command did not end: BaseException, so that no `except Exception` takes it for a failed step."""


class NetworkAskedError(BaseException):
    """A command asked for an address on the network."""


@dataclass(frozen=True)
class Lab:
    folder: Path

    def words(self, text: str, tmp: Path) -> list[str]:
        """The arguments in `text`, with $lab, $tmp (the case's own folder), $out and $root (the checkout) filled in."""
        names = {"lab": self.folder, "tmp": tmp, "out": tmp / "out", "root": worlds.ROOT}
        return [Template(word).substitute(names) for word in shlex.split(text)]


def build(folder: Path) -> Lab:
    """Runs the commands whose results the cases need. Fails if one of their BASE command lines does not work."""
    world = worlds.build(folder)
    shutil.copytree(world.target, folder / "chat")
    (folder / "chat" / "chat_template.jinja").write_text(CHAT_TEMPLATE)
    texts = [text for text in world.texts if len(text) > 4]
    (folder / "prompts.txt").write_text("\n\n".join(texts[:8]) + "\n")
    qa = [{"question": f"What is {i}?", "answer": f"It is {i}. #### {i}"} for i in range(500)]
    (folder / "gsm8k.jsonl").write_text("".join(json.dumps(row) + "\n" for row in qa))
    (folder / "python").write_text("#!/bin/sh\nexit 1\n")
    (folder / "python").chmod(0o755)
    lab = Lab(folder)
    for command, name in EARLIER_RUNS.items():
        finish(lab, command, f"--out $lab/{name}")
    for name, options in HEADS.items():
        finish(
            lab, "train/distill.py", f"--draft.init '' {options} --loop.steps 2 --out $lab/{name}"
        )
    return lab


def finish(lab: Lab, command: str, more: str) -> None:
    call(command, lab.words(f"{BASE[command]} {more}", lab.folder), lab.folder).ok()


def call(command: str, argv: Sequence[str], cwd: Path) -> Done:
    """The command in this process, with limits on time and memory, without a network. An exception that leaves it is
    exit code 1 with its traceback."""
    module = importlib.import_module(".".join(Path(command).with_suffix("").parts))
    (settings,) = inspect.signature(module.main).parameters.values()
    first = FIRST_ARGUMENT.get(command, "")
    AcceleratorState._reset_state(reset_partial_state=True)
    out, err, code = io.StringIO(), io.StringIO(), 0
    with (
        mock.patch.dict(os.environ, worlds.ENV),
        mock.patch.object(huggingface_hub.constants, "HF_HUB_OFFLINE", True),
        mock.patch.object(socket, "getaddrinfo", _refuse_network),
        contextlib.chdir(cwd),
        contextlib.redirect_stdout(out),
        contextlib.redirect_stderr(err),
        _logging_to(err),
        _limits(),
    ):
        try:
            run_command(module.main, settings.annotation, module.__doc__, first, argv)
        except SystemExit as end:
            code = int(end.code or 0)
        except BaseException:
            code = 1
            err.write(traceback.format_exc())
        finally:
            PartialState._reset_state()
    return Done(code, out.getvalue(), err.getvalue())


def _refuse_network(*address: Any) -> None:
    raise NetworkAskedError(f"the command asked for {address[:2]}")


@contextlib.contextmanager
def _logging_to(stream: io.StringIO) -> Iterator[None]:
    """Loggers that write to stderr write to `stream`, as they would in a process of the command's own."""
    loggers = [logging.getLogger(), *map(logging.getLogger, list(logging.root.manager.loggerDict))]
    handlers = {
        handler: handler.stream
        for logger in loggers
        for handler in logger.handlers
        if type(handler) is logging.StreamHandler
    }
    for handler in handlers:
        handler.stream = stream
    try:
        yield
    finally:
        for handler, before in handlers.items():
            handler.stream = before


@contextlib.contextmanager
def _limits() -> Iterator[None]:
    """At most SECONDS, and MEMORY bytes of addresses more than this process has now."""

    def stop(*_: Any) -> None:
        raise TooSlowError(f"not finished after {SECONDS} seconds")

    pages = int(Path("/proc/self/statm").read_text().split()[0])
    before = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (pages * resource.getpagesize() + MEMORY, before[1]))
    handler = signal.signal(signal.SIGALRM, stop)
    signal.alarm(SECONDS)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, handler)
        resource.setrlimit(resource.RLIMIT_AS, before)
