"""Golden files in tests/golden/made: what commands say and write on tiny models, kept as text so that a change shows.

    python -m pytest -m "" tests/test_goldens.py                    # compare
    WRITE_GOLDENS=1 python -m pytest -m "" tests/test_goldens.py    # write them again, then read `git diff`

Everything that may differ between two runs of the same code is dealt with in this file alone. A clock that counts the
work of the models replaces the real one, so speeds can be compared too. `masked` hides machine, versions, commits and
checksums. Fractions are kept to four digits and may differ a little, since another CPU adds in another order; all else
is equal to the byte, the order of fields included.
"""

import difflib
import json
import os
import re
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import nn

from decode.common import provenance
from eval.benchmark.machine_load import MachineWatch, TurnEvidence
from tests.worlds import ROOT

FOLDER = ROOT / "tests" / "golden" / "made"
WRITES = os.environ.get("WRITE_GOLDENS") == "1"
HIDDEN = {"argv", "git", "git_sha", "versions", "hardware", "transformers_version"}
"""Fields that tell of the machine, the checkout or the libraries."""
MASKS = [
    (re.compile(r"\b[0-9a-f]{12,64}\b(\+dirty)?"), "<hex>"),  # checksums of weights, commits
    (
        re.compile(r"\b((?:hardware|versions) \w+)( \| |</td><td[^>]*>)[^|<\n]*[^|<\s]"),
        r"\1\2<hidden>",
    ),
    (re.compile(r"\b20\d\d-\d\d-\d\d([T ]\d\d:\d\d(:\d\d)?)?"), "<date>"),
    (re.compile(r"<svg.*?</svg>", re.DOTALL), "<svg>"),  # matplotlib draws it
    (re.compile(r"data:[\w/+;-]+;base64,[\w/+=]+"), "<data>"),
    (re.compile(r'"transformers_version": "[^"]+"'), '"transformers_version": "<hidden>"'),
]
"""(what varies, what stands for it) in every text."""
MACHINE = [
    *provenance.versions().values(),
    *(str(vars(provenance.hardware())[x]) for x in ("device", "machine")),
]
"""Words of this machine; they are whole words in a text."""
CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")
NUMBER = re.compile(r"(-?\d+\.\d+)")
RELATIVE, DIGITS = 5e-3, 4


class WorkClock:
    """Seconds that pass when a linear layer computes, by the rows that it reads, and hardly when somebody looks."""

    def __init__(self) -> None:
        self.now, self.thread = 0.0, threading.get_ident()

    def __call__(self) -> float:
        if (
            threading.get_ident() == self.thread
        ):  # lines of progress have a thread that looks when it likes
            self.now += 1e-9
        return self.now

    def work(self, module: nn.Module, inputs: Any, output: Any) -> None:
        if isinstance(module, nn.Linear):
            rows = inputs[0].numel() // inputs[0].shape[-1]
            self.now += 1e-4 * (1 + rows / 8)


@contextmanager
def counted_time() -> Iterator[None]:
    """`time.perf_counter` and `time.monotonic` are a WorkClock, and nobody else works on the machine."""
    clock = WorkClock()
    quiet = TurnEvidence(1.0, 1.0, 0.0, 0.0, 1, [1.0, 1.0])
    hook = nn.modules.module.register_module_forward_hook(clock.work)
    try:
        with (
            mock.patch("time.perf_counter", clock),
            mock.patch("time.monotonic", clock),
            mock.patch.object(MachineWatch, "end", return_value=quiet),
        ):
            yield
    finally:
        hook.remove()


def masked(value: Any, folder: Path | None = None) -> Any:
    """`value` (JSON or text) without what may differ from run to run; paths below `folder` are relative to it."""
    if isinstance(value, Mapping):
        return {key: "<hidden>" if key in HIDDEN else masked(x, folder) for key, x in value.items()}
    if isinstance(value, list | tuple):
        return [masked(x, folder) for x in value]
    if isinstance(value, float):
        return 0.0 if abs(value) < 1e-9 else float(f"{value:.{DIGITS}g}")
    if isinstance(value, str):
        for path, name in ((str(folder), "$TMP"), (str(ROOT), "$ROOT")):
            value = value.replace(path, name)
        for word in MACHINE:
            value = re.sub(rf"(?<![\w.]){re.escape(word)}(?![\w.])", "<hidden>", value)
        for pattern, name in MASKS:
            value = pattern.sub(name, value)
        # a random model writes bytes that would make git take a golden file for a binary one
        return CONTROL.sub(lambda found: f"\\x{ord(found[0]):02x}", value)
    return value


def to_text(value: Any, indent: str = "") -> str:
    """JSON with a key a line; a list of numbers or words is one line."""
    inner = indent + " "
    if isinstance(value, Mapping) and value:
        rows = [f"{inner}{json.dumps(key)}: {to_text(x, inner)}" for key, x in value.items()]
        return "{\n" + ",\n".join(rows) + f"\n{indent}}}"
    if isinstance(value, list) and any(isinstance(x, Mapping | list) and x for x in value):
        if all(isinstance(x, list) for x in value) and len(json.dumps(value)) < 110:
            return json.dumps(value)
        return "[\n" + ",\n".join(inner + to_text(x, inner) for x in value) + f"\n{indent}]"
    return json.dumps(value, ensure_ascii=False)


def difference(golden: str, made: str) -> str:
    """The lines that differ by more than a fraction's last digits; empty: none does."""
    before, after = golden.splitlines(), made.splitlines()
    pairs = difflib.SequenceMatcher(None, before, after, autojunk=False).get_opcodes()
    lines = []
    for kind, a, b, c, d in pairs:
        near = b - a == d - c and all(map(is_near, before[a:b], after[c:d]))
        if kind != "equal" and not near:
            lines += [f"- {line}" for line in before[a:b]] + [f"+ {line}" for line in after[c:d]]
    return "\n".join(lines[:60])


def is_near(before: str, after: str) -> bool:
    """Whether two lines are equal but for fractions, which are nearly so."""
    old, new = NUMBER.split(before), NUMBER.split(after)
    if len(old) != len(new) or old[::2] != new[::2]:
        return False
    return all(
        abs(float(x) - float(y)) <= max(RELATIVE * abs(float(x)), 1.01 * unit(x), 1.01 * unit(y))
        for x, y in zip(old[1::2], new[1::2], strict=True)
    )


def unit(number: str) -> float:
    """One in the last place of a fraction."""
    return 10.0 ** -len(number.partition(".")[2])


def check(name: str, value: Any, folder: Path | None = None) -> None:
    """Asserts that `value`, masked, is what the golden file `name` holds; with WRITE_GOLDENS=1 it is written instead.

    Texts are kept as they are, all else as JSON.
    """
    value = masked(value, folder)
    text = value if isinstance(value, str) else to_text(value) + "\n"
    file = FOLDER / name
    if WRITES:
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text, encoding="utf-8")
        return
    assert file.is_file(), f"{name} is missing: write the golden files again"
    found = difference(file.read_text(encoding="utf-8"), text)
    assert found == "", f"{name} changed:\n{found}"


def tensors(state: Mapping[str, torch.Tensor]) -> dict[str, str]:
    """{tensor: its dtype and shape}."""
    kinds = {name: str(x.dtype).removeprefix("torch.") for name, x in state.items()}
    return {name: f"{kinds[name]} {list(state[name].shape)}" for name in sorted(state)}


def made_tensors(kinds: Mapping[str, str], seed: int = 0) -> dict[str, torch.Tensor]:
    """Tensors of these dtypes and shapes: small sines, equal on every machine; whole numbers are 0, 1, 2, …"""
    state = {}
    for name, kind in kinds.items():
        dtype, _, shape = kind.partition(" ")
        size: Sequence[int] = json.loads(shape)
        count = torch.arange(int(torch.tensor(size).prod()), dtype=torch.float64)
        values = (
            count if not dtype.startswith(("float", "bfloat")) else 0.3 * (count * 0.7 + seed).sin()
        )
        state[name] = values.view(size).to(getattr(torch, dtype))
        seed += 1
    return state
