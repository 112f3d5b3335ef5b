"""Checkpoints as the formats' own packages write them: what is loaded is what these unpack, number by number."""

import hashlib
import json
import shutil
from pathlib import Path

import pytest
import torch
from huggingface_hub import constants
from safetensors import safe_open
from safetensors.torch import load_file

from decode.common.errors import UserError
from decode.model.formats import packed_weights
from decode.model.formats.quantized import quantized_folder

PACKED = Path(__file__).parents[2] / "golden" / "packed"
"""Written by packers.py there, which says how."""
REFUSED = {
    "nvfp4": "in the form 'nvfp4-pack-quantized'",
    "int3-groups": r"down_proj: it has 3 words for 24 numbers of \[3\] bits",
}
READ = sorted(file.stem for file in PACKED.glob("*.safetensors") if file.stem not in REFUSED)


def unpacked(name: str, folder: Path) -> tuple[dict[str, str], dict[str, str]]:
    """(what we load, what the package unpacks) of each weight, by the start of its SHA-256."""
    with safe_open(PACKED / f"{name}.safetensors", framework="pt") as stored:
        metadata = stored.metadata()
    folder.mkdir()
    (folder / "config.json").write_text(metadata["config"])
    shutil.copyfile(PACKED / f"{name}.safetensors", folder / "model.safetensors")
    made = Path(quantized_folder(str(folder)) or "")
    got = {n: w for file in made.glob("*.safetensors") for n, w in load_file(file).items()}
    wanted, dtype = json.loads(metadata["weights"]), getattr(torch, metadata["dtype"])
    return {n: digest(got[n].to(dtype)) for n in wanted}, wanted


def digest(tensor: torch.Tensor) -> str:
    content = tensor.contiguous().view(torch.uint8).numpy().tobytes()
    return hashlib.sha256(content).hexdigest()[:16]


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(constants, "HF_HOME", str(tmp_path / "cache"))


@pytest.mark.parametrize("name", READ)
def test_weights_are_what_their_packer_unpacks(name: str, tmp_path: Path) -> None:
    """Catches any number that differs from the package's own, rounded to the dtype that it unpacks to: in float32
    products are exact, so that one rounding gives the package's bits."""
    got, wanted = unpacked(name, tmp_path / "model")
    assert len(wanted) >= 7
    assert got == wanted


@pytest.mark.parametrize("name", REFUSED)
def test_what_packers_write_and_is_not_read_is_refused(name: str, tmp_path: Path) -> None:
    """Catches numbers of three bits taken for four, where both fill as many words, and four-bit floats."""
    with pytest.raises(UserError, match=REFUSED[name]):
        unpacked(name, tmp_path / "model")


def test_planted_bugs_are_found_by_the_digests(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Catches digests that hold whatever is loaded: zero points left out."""
    own = packed_weights.scaled_weight

    def without_zeros(
        numbers: torch.Tensor, scale: torch.Tensor, zero: object, *rest: object, **more: object
    ) -> torch.Tensor:
        return own(numbers, scale, None, *rest, **more)  # type: ignore[arg-type]

    monkeypatch.setattr(packed_weights, "scaled_weight", without_zeros)
    for name in ("int4-groups-asymmetric", "w8a8-channels-asymmetric", "awq", "gptq2"):
        got, wanted = unpacked(name, tmp_path / name)
        assert got != wanted, name
