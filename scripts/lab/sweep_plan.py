"""The settings of a sweep, and its trials: every combination of values, checked by the swept command's own parser."""

import hashlib
import importlib
import inspect
import itertools
import json
import math
import random
import re
from collections.abc import Iterator
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Annotated, Any, Literal

from decode.common.errors import UserError
from decode.common.ranges import LARGEST, Count, CountOrZero, Seed, at_least
from decode.common.run_dir import CONTROL_SETTINGS
from decode.common.settings import parse_settings, to_dict

ROOT = Path(__file__).resolve().parents[2]
MAX_TRIALS = 10_000
LONGEST_LABEL = 80


@dataclass
class DrawnRange:
    low: Annotated[float, at_least(-LARGEST)]
    high: Annotated[float, at_least(-LARGEST)]
    scale: Literal["linear", "log"] = "linear"
    """log: small and large numbers are equally likely, as learning rates need."""
    whole: bool = False
    """Draw whole numbers."""


@dataclass
class SweepConfig:
    command: str = "train/distill.py"
    """The swept command: any file of this project that has the setting `out`."""
    recipe: str = ""
    """Config file of the command for every trial."""
    words: list[Any] = field(default_factory=list)
    """Further arguments of the command for every trial: [--loop.steps, 200]."""
    grid: dict[str, list[Any]] = field(default_factory=dict)
    """{dotted setting: its values}: every combination is tried. Results are averaged over a setting named `seed`."""
    random: dict[str, DrawnRange | list[Any]] = field(default_factory=dict)
    """{dotted setting: its values, or {low, high, scale: linear | log, whole}}: drawn at random, `draws` times. Each
    draw is tried with every combination of the grid."""
    draws: Count = 10
    """Random draws. With a larger number the same command adds trials to a finished sweep."""
    seed: Seed = 0
    """Of the random draws."""
    metric: str = "accept/tau"
    """A name in the trial's `result`; a dotted path where values lie deeper: best.0.speedup."""
    result: str = "metrics.jsonl"
    """File in the trial's output folder with the metric (.json, or .jsonl with an object in each line), or stdout: the
    JSON that the command prints last. Of a command whose output is one file, it is that file."""
    goal: Literal["max", "min"] = "max"
    """Whether a large or a small metric is good."""
    point: Literal["last", "best"] = "last"
    """Which of several values in a .jsonl file is the trial's."""
    workers: CountOrZero = 0
    """Trials at a time; 0: one for each entry of `launch`."""
    launch: list[str] = field(default_factory=list)
    """How the workers start a trial, one entry for each: NAME=VALUE words set environment variables, the rest stands
    before the command: ["CUDA_VISIBLE_DEVICES=0", "CUDA_VISIBLE_DEVICES=1 accelerate launch --num_processes 1"]."""
    retries: CountOrZero = 1
    """How often a failed trial is tried again; it goes on in its folder."""
    dry_run: bool = False
    """Only check all trials and print their command lines."""
    out: str = "outputs/sweep"
    """Folder of the table and the trials; machines that share it share the work."""


@dataclass(frozen=True)
class Trial:
    """One command line of a sweep. Its name ends in a hash of all its settings: with others it is another trial."""

    name: str
    settings: dict[str, Any]
    """The swept settings."""
    words: list[str]
    """Arguments of the command, its output included."""
    folder: Path
    out: Path
    """Folder or file that the command writes."""


def plan_trials(s: SweepConfig) -> list[Trial]:
    """The trials, each once. UserError for settings that the command refuses, before anything runs."""
    check_swept_settings(s)
    command_settings = settings_of(s.command)
    out_name = output_name(s.command, command_settings)
    trials: dict[str, Trial] = {}
    for settings in combine_settings(s):
        words = ["--config", s.recipe] if s.recipe else []
        words += map(to_text, s.words)
        words += [f"--{name}={to_text(value)}" for name, value in settings.items()]
        parsed = to_dict(parse_settings(command_settings, "", [*words, "--out=x"]))
        if parsed.get("overwrite"):
            raise UserError("overwrite is true, and no trial could go on: leave it out")
        kept = {name: parsed[name] for name in parsed if name not in ("out", *CONTROL_SETTINGS)}
        resolved = json.dumps([s.command, kept], sort_keys=True, default=str)
        values = (f"{x.split('.')[-1]}={to_text(value)}" for x, value in settings.items())
        label = re.sub(r"[^\w.,=+-]+", "_", ",".join(values))[:LONGEST_LABEL]
        name = f"{label}-{hashlib.sha256(resolved.encode()).hexdigest()[:8]}"
        folder = Path(s.out) / "trials" / name
        out = folder / out_name
        trials.setdefault(name[-8:], Trial(name, settings, [*words, f"--out={out}"], folder, out))
    return list(trials.values())


def check_swept_settings(s: SweepConfig) -> None:
    """UserError for a sweep of nothing, of too much, or of what the sweep itself sets."""
    if not s.grid and not s.random:
        raise UserError("nothing is swept: give --grid '{loop.lr: [0.001, 0.0003]}' or --random")
    for name, values in (s.grid | s.random).items():
        if name == "out":
            raise UserError("out cannot be swept: the sweep sets it")
        if name in s.grid and name in s.random:
            raise UserError(f"{name} cannot be swept: it is in grid and in random")
        if isinstance(values, DrawnRange) and not (
            values.low < values.high and (values.scale == "linear" or values.low > 0)
        ):
            raise UserError(f"random.{name}: give low below high, and low above 0 on a log scale")
        if values == []:
            raise UserError(f"{name} has no values: give at least one")
    count = math.prod(map(len, s.grid.values())) * (s.draws if s.random else 1)
    if count > MAX_TRIALS:
        raise UserError(f"grid and draws make {count:,} trials: give at most {MAX_TRIALS:,}")


def settings_of(command: str) -> type:
    """The settings class of a command of this repository. UserError if it is none."""
    file = (ROOT / command).resolve()
    main = None
    if file.suffix == ".py" and file.is_file() and file.is_relative_to(ROOT):
        parts = file.relative_to(ROOT).with_suffix("").parts
        main = vars(importlib.import_module(".".join(parts))).get("main")
    parameters = list(inspect.signature(main).parameters.values()) if main else []
    if len(parameters) != 1:
        raise UserError(f"command {command} is no command of this project: name train/distill.py")
    kind: type = parameters[0].annotation
    return kind


def output_name(command: str, settings: type) -> str:
    """Name of what the command writes: a folder, or a file if the default of its setting `out` is one or is empty."""
    defaults = [one.default for one in fields(settings) if one.name == "out"]
    if len(defaults) == 0:
        raise UserError(f"{command} has no setting out, which a sweep gives each trial")
    return "out" + (Path(str(defaults[0])).suffix if defaults[0] != "" else ".json")


def combine_settings(s: SweepConfig) -> Iterator[dict[str, Any]]:
    """{setting: value} of each trial: every draw with every combination of the grid."""
    for number in range(s.draws if s.random else 1):
        drawn = {
            name: draw(values, random.Random(f"{s.seed} {name} {number}"))
            for name, values in s.random.items()
        }
        for values in itertools.product(*s.grid.values()):
            yield dict(zip(s.grid, values, strict=True)) | drawn


def draw(values: DrawnRange | list[Any], generator: random.Random) -> Any:
    """One of the values, or a number of the range with four digits."""
    if isinstance(values, list):
        return generator.choice(values)
    if values.scale == "log":
        number = math.exp(generator.uniform(math.log(values.low), math.log(values.high)))
    else:
        number = generator.uniform(values.low, values.high)
    return round(number) if values.whole else float(f"{number:.4g}")


def to_text(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value)
