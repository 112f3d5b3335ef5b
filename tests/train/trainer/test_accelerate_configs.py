"""configs/accelerate/: accelerate's own launcher reads each file and means by it what its name says."""

from pathlib import Path
from typing import Any

import pytest
import yaml
from accelerate.commands.config.config_args import load_config_from_file
from accelerate.commands.launch import _validate_launch_command, launch_command_parser

from tests.worlds import ROOT

FOLDER = ROOT / "configs" / "accelerate"
MEANING: dict[str, dict[str, Any]] = {
    "one_gpu": {"num_processes": 1, "multi_gpu": False, "use_fsdp": False, "use_deepspeed": False},
    "ddp8": {"num_processes": 8, "num_machines": 1, "multi_gpu": True, "use_fsdp": False},
    "fsdp2_8": {"num_processes": 8, "use_fsdp": True, "fsdp_version": 2}
    | {"fsdp_auto_wrap_policy": "NO_WRAP", "fsdp_state_dict_type": "SHARDED_STATE_DICT"},
    "deepspeed_zero2": {"num_processes": 8, "use_deepspeed": True, "zero_stage": 2}
    | {"gradient_accumulation_steps": 1},
    "two_nodes": {"num_processes": 16, "num_machines": 2, "multi_gpu": True, "machine_rank": 0},
}


def understood(file: Path) -> Any:
    """The launcher's arguments with this file; ValueError for a key that the launcher does not have."""
    args = launch_command_parser().parse_args(["--config_file", str(file), "train/distill.py"])
    known = set(vars(args))
    fields = yaml.safe_load(file.read_text())
    for part in ("fsdp_config", "deepspeed_config"):
        for name in fields.get(part, {}):
            if name not in known:
                raise ValueError(f"{part} has no {name}")
    load_config_from_file(str(file))
    args.nondefault = []  # what the launcher's own entry point adds
    return _validate_launch_command(args)[0]


def test_every_file_is_spoken_of() -> None:
    """Catches a file that no line of the table below knows."""
    assert {file.stem for file in FOLDER.glob("*.yaml")} == MEANING.keys()


@pytest.mark.parametrize("name", MEANING)
def test_the_launcher_means_what_the_name_says(name: str) -> None:
    """Catches keys that accelerate passes over in silence, such as FSDP 1 by default, and wrong counts of processes."""
    args = understood(FOLDER / f"{name}.yaml")
    assert {key: getattr(args, key) for key in MEANING[name]} == MEANING[name]


def test_a_key_that_nobody_reads_is_seen(tmp_path: Path) -> None:
    """The test above is blind if this passes: accelerate itself checks no key inside fsdp_config."""
    file = tmp_path / "a.yaml"
    file.write_text((FOLDER / "fsdp2_8.yaml").read_text() + "  fsdp_wrap_all: true\n")
    with pytest.raises(ValueError, match="fsdp_wrap_all"):
        understood(file)
