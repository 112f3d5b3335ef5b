"""Mutations: bugs of one line, each planted in a copy of this tree, where the tests named for it must fail.

    python -m tests.mutations                  # all of tests/mutations.txt, an hour or less on one core
    python -m tests.mutations --only 26..40    # some, by their numbers
    python -m tests.mutations --plain          # plants nothing: the same tests must pass in the copy

Run it before and after tests are cut: what was caught must be caught still. Exit code 1 if a mutation is missed.
"""

import argparse
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[1]
# A test that hangs has noticed: its process ends with 1, as of one that fails.
PYTEST = ("-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", "-o", "faulthandler_timeout=120")
# What git does not ignore, as it is now. Links would lead tests back to this tree.
COPY = "git ls-files -coz --exclude-standard | tar -c --null -T - | tar -x -C"


class Mutation(NamedTuple):
    file: str
    old: str  # stands once in the file
    new: str
    tests: tuple[str, ...]  # files of tests, or single ones: FILE::NAME


def read_mutations() -> list[Mutation]:
    """Those of the list, in its order."""
    blocks = Path(__file__).with_suffix(".txt").read_text().split("\n\n")
    entries = (block.splitlines() for block in blocks if not block.startswith("#"))
    return [Mutation(x[0], x[1][2:], x[2][2:], tuple(test[2:] for test in x[3:])) for x in entries]


def exit_code(copy: Path, one: Mutation) -> int:
    """pytest's for the mutation's tests in `copy`: 0 if they passed, 1 if one failed; others mean that none ran."""
    whole, command = (copy / one.file).read_text(), [sys.executable, *PYTEST, *one.tests]
    (copy / one.file).write_text(whole.replace(one.old, one.new))
    # Code compiled from a text of the same size and second would be taken for that of this one.
    env = {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(copy), "PYTHONDONTWRITEBYTECODE": "1"}
    code = subprocess.run(command, cwd=copy, env=os.environ | env, capture_output=True).returncode
    (copy / one.file).write_text(whole)
    return code


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--only", default="", help="a number, or N..M: the first is 1")
    parser.add_argument("--plain", action="store_true", help="plant nothing")
    args, chosen = parser.parse_args(), list(enumerate(read_mutations(), 1))
    first, _, last = args.only.partition("..")
    chosen = chosen[int(first or 1) - 1 : int(last or first or len(chosen))]
    if args.plain:  # each set of tests once
        chosen = list({x.tests: (n, x._replace(new=x.old)) for n, x in chosen}.values())
    wanted, good, bad = (0, "passed", "FAILED") if args.plain else (1, "caught", "MISSED")
    codes, begin = [], time.monotonic()
    with tempfile.TemporaryDirectory() as copy:
        subprocess.run(f"{COPY} {copy}", shell=True, cwd=ROOT, check=True)
        for number, one in chosen:
            start = time.monotonic()
            codes.append(exit_code(Path(copy), one))
            verdict = good if codes[-1] == wanted else f"{bad} (pytest ended with {codes[-1]})"
            now = time.monotonic()
            left = (now - begin) * (len(chosen) / len(codes) - 1) / 60
            times = f"{now - start:.1f} s, {left:.0f} min left"
            print(f"{number:3} {verdict}, {times}: {one.file}: {one.new}", flush=True)  # noqa: T201
    missed = sum(code != wanted for code in codes)
    print(f"{len(codes) - missed} {good}, {missed} {bad}")  # noqa: T201
    sys.exit(missed > 0)


if __name__ == "__main__":
    main()
