"""configs/sweep/wandb.yaml under a W&B agent: what its command runs, without an account or a network."""

import os
import stat
import subprocess
from pathlib import Path

from decode.common.files import read_yaml
from decode.common.settings import parse_settings
from tests.worlds import ROOT
from train.trainer.settings import DistillConfig

CHOICE = {"loop.lr": 0.0012, "loop.batch_size": 8, "loss": "lk_alpha"}


def agent_command(sweep: dict[str, object], choice: dict[str, object]) -> list[str]:
    """The words that an agent runs for this choice: W&B's own macros put in place as `wandb agent` does it."""
    from wandb.sdk.launch.sweeps.utils import (  # two seconds
        create_sweep_command,
        create_sweep_command_args,
    )

    words = create_sweep_command_args({"args": {name: {"value": v} for name, v in choice.items()}})
    words |= {"program": [sweep["program"]], "env": ["/usr/bin/env"], "interpreter": ["python"]}
    command = create_sweep_command(list(sweep["command"]))  # type: ignore[call-overload]
    return [
        word
        for chunk in command
        for word in (words[chunk[2:-1]] if chunk.startswith("${") else [chunk])
    ]


def test_an_agent_starts_our_command_in_a_folder_of_its_own(tmp_path: Path) -> None:
    """Bug: macros that nobody replaces, settings that the command does not read, or one folder for all runs."""
    launcher = tmp_path / "accelerate"
    launcher.write_text(f'#!/bin/sh\nprintf "%s\\n" "$@" > {tmp_path}/words\n')
    launcher.chmod(launcher.stat().st_mode | stat.S_IXUSR)
    sweep = read_yaml(ROOT / "configs/sweep/wandb.yaml")
    assert sweep["parameters"].keys() == CHOICE.keys()
    path = os.pathsep.join([str(tmp_path), os.environ["PATH"]])
    environment = os.environ | {"PATH": path, "WANDB_RUN_ID": "abc123"}
    subprocess.run(agent_command(sweep, CHOICE), cwd=ROOT, env=environment, check=True, timeout=60)
    launch, program, *words = (tmp_path / "words").read_text().splitlines()
    assert (launch, program) == ("launch", "train/distill.py")
    settings = parse_settings(DistillConfig, "", words)
    assert settings.out == "outputs/wandb-sweep/abc123"
    assert (settings.loop.lr, settings.loop.batch_size, settings.loss) == tuple(CHOICE.values())


def test_a_command_without_a_folder_for_each_run_is_seen() -> None:
    """The test above is blind if this passes: W&B's default command gives every run the folder of the config."""
    sweep = {"program": "train/distill.py", "command": ["${program}", "${args}"]}
    program, *words = agent_command(sweep, CHOICE)
    assert parse_settings(DistillConfig, "", words).out == DistillConfig().out
