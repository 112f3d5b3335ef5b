"""What `accelerate launch` is told reaches training, or is refused in one line; checkpoints know their launch."""

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import yaml
from accelerate import Accelerator
from accelerate.commands.launch import _validate_launch_command, launch_command_parser
from accelerate.utils import DistributedType
from accelerate.utils.launch import (
    prepare_deepspeed_cmd_env,
    prepare_multi_gpu_env,
    prepare_simple_launcher_cmd_env,
)
from torch.distributed.fsdp.wrap import size_based_auto_wrap_policy, transformer_auto_wrap_policy

from decode.common.errors import UserError
from tests import worlds
from tests.tiny import tiny_model, tiny_target
from tests.worlds import Done, World
from train.families.base import FamilyContext
from train.families.builders import build_trainable
from train.families.settings.base import FamilySettings
from train.families.settings.causal import CausalSettings
from train.families.settings.eagle import Eagle1Settings
from train.settings.training import LoopConfig, Precision
from train.trainer import launch, sharding
from train.trainer.checkpoint import LaunchKind
from train.trainer.launch import Claims
from train.trainer.settings import DistillConfig

COMMAND, WEIGHTS = "train/distill.py", "model.safetensors"
HEAD: list[object] = ["--draft.init", "", "--draft.family", "eagle1"]


def arguments(world: World, data: Path, out: Path) -> list[object]:
    """Four steps of 8 samples, each logged, every second one saved."""
    return [
        "--target", world.target, "--data", data, "--draft.init", world.draft, "--out", out,
        "--loop.steps", 4, "--loop.batch_size", 8, "--loop.warmup", 1, "--loop.lr", 3e-3,
        "--loop.log_every", 1, "--loop.save_every", 2, "--loop.eval_every", 0,
    ]  # fmt: skip


@pytest.fixture
def train(world: World, data: Path, tmp_path: Path) -> Callable[..., Done]:
    """Trains into tmp_path / name."""
    return lambda name, *more: worlds.call(COMMAND, *arguments(world, data, tmp_path / name), *more)


def settings_of(out: Path) -> Any:
    return yaml.safe_load((out / "run.yaml").read_text())


def losses_of(out: Path) -> list[float]:
    lines = map(json.loads, (out / "metrics.jsonl").read_text().splitlines())
    return [line["train/loss"] for line in lines if "train/loss" in line]


# ---- what the launcher says ----


def passed_on(*words: str, file: dict[str, Any] | None = None, folder: Path) -> dict[str, str]:
    """The variables that accelerate's own launcher sets for these words and this file of `accelerate config`."""
    if file is not None:
        (folder / "accelerate.yaml").write_text(yaml.safe_dump(file))
        words = ("--config_file", str(folder / "accelerate.yaml"), *words)
    else:
        words = ("--num_processes", "1", *words)
    args = launch_command_parser().parse_args([*words, "train/distill.py"])
    args.nondefault = []
    args = _validate_launch_command(args)[0]
    if args.use_deepspeed:
        args.deepspeed_fields_from_accelerate_config = ""
        return prepare_deepspeed_cmd_env(args)[1]
    if args.use_fsdp:
        return prepare_multi_gpu_env(args)
    return prepare_simple_launcher_cmd_env(args)[1]


PLAIN = {"compute_environment": "LOCAL_MACHINE", "num_machines": 1, "num_processes": 2}
PLAIN |= {"distributed_type": "NO", "use_cpu": True}
ZERO = {**PLAIN, "distributed_type": "DEEPSPEED", "use_cpu": False, "main_process_port": 0}
BY_LAUNCHER = "the launcher's "


@pytest.mark.parametrize(
    ("words", "file", "wanted"),
    [
        ([], None, Claims()),
        (["--mixed_precision", "no"], None, Claims()),  # the variable is as above
        (["--mixed_precision=bf16"], None, Claims({BY_LAUNCHER + "mixed_precision": "bf16"})),
        ([], {**PLAIN, "mixed_precision": "no"}, Claims()),
        ([], {**PLAIN, "mixed_precision": "fp16"},
         Claims({BY_LAUNCHER + "mixed_precision": "fp16"})),
        (["--mixed_precision", "bf16"], {**PLAIN, "mixed_precision": "fp16"},
         Claims({BY_LAUNCHER + "mixed_precision": "bf16"})),
        ([], {**ZERO, "deepspeed_config": {"zero_stage": 2, "gradient_accumulation_steps": 1}}, Claims()),
        ([], {**ZERO, "deepspeed_config": {"zero_stage": 2, "gradient_accumulation_steps": 4,
                                           "gradient_clipping": 0.5}},
         Claims(accumulation={BY_LAUNCHER + "gradient_accumulation_steps": 4},
                clip={BY_LAUNCHER + "gradient_clipping": 0.5})),
        ([], {**ZERO, "deepspeed_config": {"gradient_accumulation_steps": "auto", "gradient_clipping": "auto"}},
         Claims()),
        (["--use_deepspeed", "--gradient_accumulation_steps", "8", "--main_process_port", "0"], None,
         Claims(accumulation={BY_LAUNCHER + "gradient_accumulation_steps": 8})),
    ],
)  # fmt: skip
def test_the_variables_of_the_launcher_are_understood(
    words: list[str], file: dict[str, Any] | None, wanted: Claims, tmp_path: Path
) -> None:
    """Bug: none of them was read, and accumulation divided the loss once more."""
    assert launch.read_claims(passed_on(*words, file=file, folder=tmp_path), {}) == wanted


ARGUMENTS = ["--out", "x", "--mixed_precision", "bf16"]


@pytest.mark.parametrize(
    ("line", "wanted"),
    [
        ("python /venv/bin/accelerate launch --mixed_precision no train/distill.py", {"mixed_precision": "no"}),
        ("python -m accelerate.commands.launch --gradient_accumulation_steps=4 --cpu train/distill.py",
         {"gradient_accumulation_steps": "4"}),
        ("/venv/bin/accelerate-launch --gradient-accumulation-steps 4 --mixed-precision=fp16 -m train.distill",
         {"gradient_accumulation_steps": "4", "mixed_precision": "fp16"}),
        ("python /venv/bin/accelerate launch --num_processes 1 train/distill.py", {}),
        ("python -m torch.distributed.run --mixed_precision no train/distill.py", {}),
        ("bash run.sh --gradient_clipping 2", {}),
        ("", {}),
    ],
)  # fmt: skip
def test_the_launchers_own_line_is_read(line: str, wanted: dict[str, str]) -> None:
    """Catches the command's own arguments, which follow, and other programs that have an option of that name."""
    assert launch.launcher_options([*line.split(), *ARGUMENTS], ARGUMENTS) == wanted


def test_what_is_said_on_its_line_counts_even_if_it_is_the_default() -> None:
    said = {"mixed_precision": "no", "gradient_accumulation_steps": "1", "gradient_clipping": "2"}
    claims = launch.read_claims({"ACCELERATE_MIXED_PRECISION": "no"}, said)
    assert list(claims.precision.values()) == ["no"]
    assert list(claims.accumulation.values()) == [1]
    assert list(claims.clip.values()) == [2.0]


def deepspeed_claims(folder: Path, content: dict[str, Any], **more: str) -> Claims:
    (folder / "ds.json").write_text(json.dumps(content))
    file = {**ZERO, "deepspeed_config": {"deepspeed_config_file": str(folder / "ds.json"), **more}}
    return launch.read_claims(passed_on(file=file, folder=folder), {})


def test_deepspeeds_file_is_read(tmp_path: Path) -> None:
    path = tmp_path / "ds.json"
    asked = {
        "zero_optimization": {"stage": 2}, "gradient_accumulation_steps": 2, "gradient_clipping": 0.3,
        "train_micro_batch_size_per_gpu": 4, "train_batch_size": 16,
        "bf16": {"enabled": True}, "fp16": {"enabled": False},
    }  # fmt: skip
    assert deepspeed_claims(tmp_path, asked) == Claims(
        precision={f"bf16 in {path}": "bf16"},
        switched_off={"fp16": f"fp16 in {path}"},
        accumulation={f"gradient_accumulation_steps in {path}": 2},
        micro_batch={f"train_micro_batch_size_per_gpu in {path}": 4},
        batch_size={f"train_batch_size in {path}": 16},
        clip={f"gradient_clipping in {path}": 0.3},
    )
    auto = dict.fromkeys(asked, "auto") | {"fp16": {"enabled": "auto"}, "bf16": {}}
    assert deepspeed_claims(tmp_path, auto) == Claims()
    assert deepspeed_claims(tmp_path, dict.fromkeys(asked)) == Claims()


@pytest.mark.parametrize("section", ["optimizer", "scheduler"])
def test_sections_that_are_the_commands_are_refused(tmp_path: Path, section: str) -> None:
    """Bug: a traceback after the models were loaded."""
    with pytest.raises(UserError, match=f"ds.json has a section '{section}'"):
        deepspeed_claims(tmp_path, {section: {"type": "Adam"}, "zero_optimization": {"stage": 1}})


@pytest.mark.parametrize(
    ("variables", "named"),
    [
        ({"ACCELERATE_USE_MEGATRON_LM": "true"}, "Megatron-LM"),
        ({"ACCELERATE_USE_PARALLELISM_CONFIG": "true"}, "parallelism_config"),
        ({"ACCELERATE_USE_DEEPSPEED": "true", "ACCELERATE_DEEPSPEED_CONFIG_FILE": "/no/ds.json"},
         "/no/ds.json does not exist"),
    ],
)  # fmt: skip
def test_what_nothing_follows_is_refused(variables: dict[str, str], named: str) -> None:
    with pytest.raises(UserError, match=named):
        launch.read_claims(variables, {})


# ---- what is in force ----


@pytest.mark.parametrize(
    ("ours", "said", "device", "wanted"),
    [
        ("auto", {}, "cpu", "no"),
        ("auto", {}, "cuda", "bf16"),
        ("auto", {"the launcher": "no"}, "cuda", "no"),
        ("auto", {"the launcher": "bf16"}, "cpu", "bf16"),
        ("auto", {"the launcher": "fp16"}, "cuda", "fp16"),
        ("bf16", {}, "cpu", "bf16"),
        ("no", {}, "cuda", "no"),
        ("bf16", {"the launcher": "bf16", "ds.json": "bf16"}, "cuda", "bf16"),
    ],
)
def test_the_precision_in_force(
    ours: Precision, said: dict[str, str], device: str, wanted: str
) -> None:
    assert launch.settle_precision(ours, Claims(said), device, bf16_supported=True) == wanted


def test_a_default_gives_way_to_what_a_file_switches_off() -> None:
    off = Claims(switched_off={"bf16": "bf16 in ds.json"})
    assert launch.settle_precision("auto", off, "cuda", bf16_supported=True) == "no"
    with pytest.raises(UserError, match=r"bf16, and bf16 in ds\.json switches it off"):
        launch.settle_precision("bf16", off, "cuda", bf16_supported=True)


@pytest.mark.parametrize(
    ("ours", "said", "device", "bf16", "words"),
    [
        ("no", {"the launcher's": "bf16"}, "cpu", True,
         ["mixed_precision of this command is no", "the launcher's is bf16"]),
        ("bf16", {"the launcher's": "fp16"}, "cuda", True, ["is bf16", "the launcher's is fp16"]),
        ("auto", {"the launcher's": "bf16", "fp16 in ds.json": "fp16"}, "cuda", True,
         ["the launcher's is bf16", "fp16 in ds.json is fp16"]),
        ("auto", {"the launcher's": "fp8"}, "cuda", True, ["fp8 is not supported"]),
        ("fp16", {}, "cpu", True, ["fp16", "gradient scaler", "GPUs only"]),
        ("auto", {"the launcher's": "bf16"}, "cuda", False, ["this GPU does not have it"]),
    ],
)  # fmt: skip
def test_two_values_are_refused_and_named(
    ours: Precision, said: dict[str, str], device: str, bf16: bool, words: list[str]
) -> None:
    with pytest.raises(UserError) as error:
        launch.settle_precision(ours, Claims(said), device, bf16)
    assert "\n" not in str(error.value)
    for word in words:
        assert word in str(error.value)


@pytest.mark.parametrize(
    ("ours", "said", "processes", "wanted"),
    [
        (LoopConfig(), Claims(), 1, (16, 16, 1.0)),
        (LoopConfig(), Claims(accumulation={"a": 4}), 1, (16, 4, 1.0)),
        (LoopConfig(), Claims(accumulation={"a": 4}), 2, (16, 2, 1.0)),
        (LoopConfig(batch_size=12), Claims(accumulation={"a": 1}), 3, (12, 4, 1.0)),
        (LoopConfig(batch_size=16, micro_batch=3), Claims(accumulation={"a": 6}), 1, (16, 3, 1.0)),
        (LoopConfig(), Claims(micro_batch={"b": 2}, batch_size={"c": 32}), 2, (32, 2, 1.0)),
        (LoopConfig(), Claims(accumulation={"a": 8}, micro_batch={"b": 2}), 1, (16, 2, 1.0)),
        (LoopConfig(clip=0.5), Claims(clip={"d": 0.5}), 1, (16, 16, 0.5)),
        (LoopConfig(), Claims(clip={"d": 0.25}), 1, (16, 16, 0.25)),
    ],
)
def test_the_loop_in_force(
    ours: LoopConfig, said: Claims, processes: int, wanted: tuple[int, int, float]
) -> None:
    found = launch.settle_loop(ours, said, processes, LoopConfig())
    assert (found.batch_size, found.micro_batch, found.clip) == wanted
    assert launch.settle_loop(found, said, processes, LoopConfig()) == found  # --config run.yaml


@pytest.mark.parametrize(
    ("ours", "said", "processes", "words"),
    [
        (LoopConfig(batch_size=4, micro_batch=2), Claims(accumulation={"the launcher's x": 16}), 1,
         ["the launcher's x is 16", "4 samples a step in 2 micro-batches", "loop.micro_batch 2"]),
        (LoopConfig(), Claims(accumulation={"x": 5}), 1, ["x is 5", "16 samples"]),
        (LoopConfig(), Claims(accumulation={"x": 4, "y": 8}), 1, ["x is 4", "y is 8"]),
        (LoopConfig(batch_size=8), Claims(batch_size={"y": 32}), 1, ["loop.batch_size of this command is 8", "y"]),
        (LoopConfig(clip=2.0), Claims(clip={"z": 0.5}), 1, ["loop.clip of this command is 2.0", "z is 0.5"]),
        (LoopConfig(micro_batch=4), Claims(micro_batch={"y": 2}), 1, ["loop.micro_batch of this command is 4", "y"]),
        (LoopConfig(batch_size=9), Claims(), 2, ["multiple of 2"]),
    ],
)  # fmt: skip
def test_two_loops_are_refused(
    ours: LoopConfig, said: Claims, processes: int, words: list[str]
) -> None:
    with pytest.raises(UserError) as error:
        launch.settle_loop(ours, said, processes, LoopConfig())
    for word in words:
        assert word in str(error.value)


# ---- trained so ----


def test_accumulation_of_the_launcher_is_the_commands(
    train: Callable[..., Done], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Bug: the gradient was divided by 4 once more. 2 samples, 4 times, by either side."""
    assert train("ours", "--loop.micro_batch", 2).code == 0
    monkeypatch.setenv("ACCELERATE_GRADIENT_ACCUMULATION_STEPS", "4")
    done = train("launcher").ok()
    assert "8 samples a step (4 micro-batch(es) of 2 in a process)" in done.err
    ours, launched = tmp_path / "ours", tmp_path / "launcher"
    assert (launched / WEIGHTS).read_bytes() == (ours / WEIGHTS).read_bytes()
    assert settings_of(launched)["loop"] == settings_of(ours)["loop"]
    monkeypatch.setenv("ACCELERATE_GRADIENT_ACCUMULATION_STEPS", "16")
    assert "gradient_accumulation_steps is 16" in train("refused").error()
    assert not (tmp_path / "refused").exists()


def test_precision_of_the_launcher_is_the_commands(
    train: Callable[..., Done], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Bug: the launcher's precision was ignored without a word."""
    for name, more in {"bf16": ["--mixed_precision", "bf16"], "fp32": []}.items():
        assert train(name, *more).code == 0
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", "bf16")
    train("launcher").ok()
    weights = {
        name: (tmp_path / name / WEIGHTS).read_bytes() for name in ("bf16", "fp32", "launcher")
    }
    assert weights["launcher"] == weights["bf16"] != weights["fp32"]
    assert settings_of(tmp_path / "launcher")["mixed_precision"] == "bf16"
    facts = json.loads((tmp_path / "launcher" / "draftsmith.json").read_text())
    assert facts["training"]["mixed_precision"] == "bf16"
    assert "the launcher's mixed_precision is bf16" in train("x", "--mixed_precision", "no").error()
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", "fp16")
    assert "gradient scaler" in train("x").error()
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", "no")
    done = train("launcher")
    assert done.code == 2
    assert "different: mixed_precision" in done.err
    assert not (tmp_path / "x").exists()


def test_sharding_that_accelerate_does_not_start_is_refused(
    train: Callable[..., Done], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Bug: on a CPU a launch for FSDP trains in plain data parallelism without a word."""
    monkeypatch.setenv("ACCELERATE_USE_FSDP", "true")
    assert "the launcher asks for FSDP" in train("out").error()
    assert not (tmp_path / "out").exists()


def test_sampling_says_which_precision_it_computes_in(
    world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    sources = json.dumps([{"kind": "file", "path": str(world.prompts), "limit": 2}])
    for precision, lines in {"bf16": 1, "fp16": 1, "no": 0}.items():
        monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", precision)
        done = worlds.call(
            "train/sample.py", "--target", world.target, "--sources", sources, "--max_new_tokens", 4,
            "--out", tmp_path / precision,
        ).ok()  # fmt: skip
        assert done.err.count(f"launcher's mixed_precision {precision}") == lines
        assert done.err.count("warning: the target computes in float32") == lines


def scaled(monkeypatch: pytest.MonkeyPatch, scale: float) -> None:
    """Trains in fp16 on the CPU, with the scaler that accelerate makes on CUDA."""
    made = Accelerator.__init__

    def with_scaler(self: Accelerator, *args: Any, **kwargs: Any) -> None:
        made(self, *args, **kwargs)
        self.native_amp, self.scaler = True, torch.amp.GradScaler("cpu", init_scale=scale)

    monkeypatch.setattr(Accelerator, "__init__", with_scaler)
    monkeypatch.setattr(launch, "settle_precision", lambda *_: "fp16")


def scale_of(out: Path, step: int) -> float:
    return torch.load(out / f"checkpoints/step-{step:06d}/scaler.pt", weights_only=True)["scale"]


def test_steps_that_overflow_in_fp16_are_repeated(
    train: Callable[..., Done], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Catches a run that ends where the scale is still too large, and steps that are left out."""
    assert train("fp32").code == 0
    with monkeypatch.context() as patch:
        scaled(patch, 2.0**8)
        train("low").ok()
    with monkeypatch.context() as patch:
        scaled(patch, 2.0**40)
        train("high").ok()
        low, high = tmp_path / "low", tmp_path / "high"
        assert scale_of(low, 4) == 2.0**8
        assert scale_of(high, 4) == scale_of(high, 2) < 2.0**30
        assert losses_of(high) == pytest.approx(losses_of(low), rel=1e-3)
        assert losses_of(high) == pytest.approx(losses_of(tmp_path / "fp32"), rel=0.02)
        assert losses_of(high) != losses_of(tmp_path / "fp32")
        whole = (high / WEIGHTS).read_bytes()
        (high / "checkpoints" / "latest").write_text("step-000002\n")  # as if killed there
        done = train("high")
        assert "from step 2" in done.err
        assert (high / WEIGHTS).read_bytes() == whole
    refused = train("high", "--resume", "true", "--mixed_precision", "no").error()
    assert (
        "precision fp16) than this one (data parallelism, 1 process(es), precision no)" in refused
    )


# ---- checkpoints know their launch ----


ONE, TWO = LaunchKind("plain", 1, "no"), LaunchKind("plain", 2, "no")
SHARDED = LaunchKind("FSDP2", 2, "bf16")
SECOND = LaunchKind("ZeRO-2", 2, "bf16")


@pytest.mark.parametrize(
    ("earlier", "now", "goes_on"),
    [
        (ONE, ONE, True), (TWO, ONE, True), (ONE, TWO, True), (ONE, LaunchKind("plain", 1, "bf16"), True),
        (SHARDED, SHARDED, True), (SHARDED, LaunchKind("FSDP2", 4, "no"), True), (SHARDED, ONE, False),
        (ONE, SHARDED, False), (SECOND, SECOND, True), (SECOND, LaunchKind("ZeRO-2", 1, "bf16"), False),
        (SECOND, LaunchKind("ZeRO-2", 2, "no"), False), (SECOND, LaunchKind("ZeRO-1", 2, "bf16"), False),
        (SECOND, ONE, False), (SECOND, SHARDED, False), (ONE, LaunchKind("plain", 1, "fp16"), False),
        (LaunchKind("plain", 1, "fp16"), LaunchKind("plain", 4, "fp16"), True),
    ],
)  # fmt: skip
def test_which_launch_continues_which(earlier: LaunchKind, now: LaunchKind, goes_on: bool) -> None:
    assert now.continues(earlier) is goes_on


@pytest.mark.parametrize(
    ("earlier", "advice"),
    [
        (SHARDED, "continue it with FSDP2 over any number of processes,"),
        (SECOND, "continue it with ZeRO-2 over 2 process(es) with mixed_precision bf16,"),
        (LaunchKind("ZeRO-1", 8, "no"), "ZeRO-1 over 8 process(es) with mixed_precision no,"),
        (
            LaunchKind("plain", 2, "fp16"),
            "one process, or data parallelism over any number in fp16,",
        ),
    ],
)
def test_another_launch_is_refused_before_anything_is_written(
    train: Callable[..., Done], tmp_path: Path, earlier: LaunchKind, advice: str
) -> None:
    """Bug: "no such file" or a traceback, and "the same command goes on"."""
    assert train("out").code == 0
    file = tmp_path / "out/checkpoints/step-000004/contents.json"
    contents = json.loads(file.read_text())
    del contents["sha256"]
    assert contents["launch"] == vars(ONE)
    file.write_text(json.dumps({**contents, "launch": vars(earlier)}))
    before = worlds.contents(tmp_path / "out")
    error = train("out", "--resume", "true").error()
    assert advice in error
    assert str(earlier) in error
    assert "goes on" not in error
    assert worlds.contents(tmp_path / "out") == before
    assert train("out", "--overwrite", "true").code == 0


# ---- through the real launchers ----


def launched(words: list[str], world: World, data: Path, out: Path, *more: object) -> Done:
    """The command under `accelerate launch` with these options."""
    line = [sys.executable, "-m", "accelerate.commands.launch", *words, COMMAND]
    line += map(str, [*arguments(world, data, out), *more])
    done = subprocess.run(
        line, cwd=worlds.ROOT, env={**os.environ, **worlds.ENV},
        capture_output=True, text=True, timeout=worlds.PATIENCE, check=False,
    )  # fmt: skip
    return Done(done.returncode, done.stdout, done.stderr)


MACHINE = ["--num_machines", "1", "--dynamo_backend", "no"]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("more", "named"),
    [
        (["--loop.lrr", 3], "there is no setting loop.lrr (did you mean 'loop.lr'?)"),  # by each process alone
        (["--data", "no-such-set"], "no-such-set"),  # agreed on by all
    ],
)  # fmt: skip
def test_bad_input_under_the_real_launcher(
    world: World, data: Path, tmp_path: Path, more: list[object], named: str
) -> None:
    """Bug: each process printed the line, and the launcher's report, the last thing to be read, did not have it."""
    out, told = tmp_path / "out", [*MACHINE, "--mixed_precision", "no", "--num_processes", "2"]
    told += ["--multi_gpu", "--main_process_port", "0", str(worlds.ROOT / COMMAND)]
    done = worlds.fork(worlds.launcher(), *told, *arguments(world, data, out), *more)
    (error,) = [line for line in done.err.splitlines() if line.startswith("error: ")]
    assert named in error
    blamed = done.err[done.err.index("Root Cause") :]
    assert "exitcode  : 2 " in blamed
    assert f"traceback : {error}" in blamed
    assert not out.exists()


@pytest.mark.slow
def test_quiet_says_the_line_alone(world: World, data: Path, tmp_path: Path) -> None:
    """Bug: the launcher's traceback stands below the line, as without --quiet (docs/runs.md). The code is its own."""
    words = ["--quiet", "--num_processes", "1", *MACHINE, "--mixed_precision", "no"]
    done = launched(words, world, data, tmp_path / "out", "--loop.lrr", 3)
    said = "error: there is no setting loop.lrr (did you mean 'loop.lr'?)\n"
    assert (done.code, done.out, done.err) == (1, "", said)


@pytest.mark.slow
def test_one_process_under_accelerate_launch(
    train: Callable[..., Done], world: World, data: Path, tmp_path: Path
) -> None:
    """Bug: accelerate drops --gradient_accumulation_steps where there is no DeepSpeed, and says so in --help only."""
    assert train("ours", "--loop.micro_batch", 2, "--mixed_precision", "bf16").code == 0
    words = ["--num_processes", "1", *MACHINE, "--mixed_precision", "bf16"]
    words += ["--gradient_accumulation_steps", "4"]
    launched(words, world, data, tmp_path / "launched").ok()
    ours, own = (tmp_path / name / WEIGHTS for name in ("ours", "launched"))
    assert own.read_bytes() == ours.read_bytes()


FSDP = {
    "fsdp_version": 2, "fsdp_cpu_ram_efficient_loading": True, "fsdp_state_dict_type": "FULL_STATE_DICT",
    "fsdp_reshard_after_forward": True, "fsdp_activation_checkpointing": True,
}  # fmt: skip
BY_LAYER = {"fsdp_auto_wrap_policy": "TRANSFORMER_BASED_WRAP"}
BY_SIZE = {"fsdp_auto_wrap_policy": "SIZE_BASED_WRAP", "fsdp_min_num_params": 1000}
LAYER = "fsdp_transformer_layer_cls_to_wrap"


NO_WRAP = "fsdp_auto_wrap_policy is NO_WRAP"
BY_CLASS, OF_SIZE = transformer_auto_wrap_policy, size_based_auto_wrap_policy
CAUSAL, LAYERS = CausalSettings(layers=[0]), ["LlamaDecoderLayer"]


@pytest.mark.parametrize(
    ("policy", "names", "draft", "said"),
    [
        (BY_CLASS, LAYERS, CAUSAL, []),
        (BY_CLASS, None, CausalSettings(layers=[0], lora_rank=2), []),
        (BY_CLASS, ["Qwen2DecoderLayer"], CAUSAL, [f"{LAYER} is LlamaDecoderLayer, the draft's layers"]),
        (BY_CLASS, LAYERS, Eagle1Settings(), [f"{NO_WRAP}: this draft is gathered as one"]),
        (OF_SIZE, None, CAUSAL, [f"{NO_WRAP}: this draft is gathered as one"]),
        (OF_SIZE, None, Eagle1Settings(), [f"{NO_WRAP}: this draft is gathered as one"]),
        (None, None, Eagle1Settings(), []),
    ],
)  # fmt: skip
def test_what_fsdp_wraps_is_what_it_can(
    policy: Any, names: list[str] | None, draft: FamilySettings, said: list[str]
) -> None:
    """Bug: wrap policies ended in tracebacks, as fully_shard wraps lists of layers and heads have no such class."""
    settings = DistillConfig(draft=draft)  # type: ignore[arg-type]
    trainee = build_trainable(draft, FamilyContext(settings, tiny_target(tiny_model("llama")), []))
    plugin = SimpleNamespace(auto_wrap_policy=policy, transformer_cls_names_to_wrap=names)
    state = SimpleNamespace(fsdp_plugin=plugin)
    accelerator: Any = SimpleNamespace(is_fsdp2=True, state=state)
    assert sharding.choose_wrapping(accelerator, trainee) == said
    wraps = policy is BY_CLASS and draft.family == "causal"
    assert plugin.auto_wrap_policy is (BY_CLASS if wraps else None)
    assert plugin.transformer_cls_names_to_wrap == (LAYERS if wraps else names)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("policy", "draft", "said"),
    [(BY_LAYER, ["--draft.lora_rank", 2], ""), (BY_SIZE, HEAD, NO_WRAP)],
)
def test_fsdp_files_of_accelerate_config_train_as_one_process(
    policy: dict[str, Any], draft: list[object], said: str, world: World, data: Path, tmp_path: Path,
    train: Callable[..., Done],
) -> None:  # fmt: skip
    """Bug: wrap policies ended in tracebacks."""
    assert train("one", *draft).code == 0
    file = {**PLAIN, "distributed_type": "FSDP", "use_cpu": False, "main_process_port": 0}
    env = passed_on(file={**file, "fsdp_config": {**FSDP, **policy}}, folder=tmp_path)
    words = [worlds.ROOT / COMMAND, *arguments(world, data, tmp_path / "two"), *draft]
    done = worlds.fork("tests/fsdp2.py", *words, processes=2, env=env).ok()
    assert losses_of(tmp_path / "two") == pytest.approx(losses_of(tmp_path / "one"), abs=1e-4)
    wrapped = [
        line for line in done.err.splitlines() if "wrap" in line and line.startswith("fsdp_")
    ]
    assert [said in line for line in wrapped] == ([True] if said else [])
    for changed in ("cpu_ram_efficient_loading", "activation_checkpointing", "state_dict_type"):
        assert f"fsdp_{changed} is " in done.err
    assert list((tmp_path / "two").glob("checkpoints/step-*/optimizer_0/__1_0.distcp"))  # in pieces
    before = worlds.contents(tmp_path / "two")
    again = train("two", *draft, "--resume", "true", "--loop.steps", 6).error()
    assert "continue it with FSDP2 over any number of processes" in again
    assert worlds.contents(tmp_path / "two") == before


def launch_of(kind: str, precision: str = "no", stage: int = 2, version: int = 2) -> Any:
    """What `sharding.check` reads of an accelerator."""
    plugin = SimpleNamespace(deepspeed_config={"zero_optimization": {"stage": stage}})
    return SimpleNamespace(
        distributed_type=DistributedType(kind), is_fsdp2=kind == "FSDP" and version == 2,
        mixed_precision=precision, state=SimpleNamespace(deepspeed_plugin=plugin),
    )  # fmt: skip


@pytest.mark.parametrize(
    ("accelerator", "loop", "named"),
    [
        (launch_of("FSDP"), LoopConfig(muon_lr=0.02), "Muon needs whole matrices"),
        (launch_of("FSDP", version=1), LoopConfig(), "set fsdp_config.fsdp_version to 2"),
        (launch_of("FSDP", "fp16"), LoopConfig(), "fp16 is not supported under FSDP"),
        (launch_of("DEEPSPEED", "fp16"), LoopConfig(), "fp16 is not supported under DEEPSPEED"),
        (launch_of("DEEPSPEED", stage=0), LoopConfig(), "stage 0 shards nothing"),
        (launch_of("DEEPSPEED", stage=3), LoopConfig(), "stage 3 would shard the frozen target"),
        (launch_of("MULTI_GPU", "fp16"), LoopConfig(muon_lr=0.02), "fp16 scales for one optimiser"),
    ],
)
def test_what_this_parallelism_cannot_train_is_named(
    accelerator: Any, loop: LoopConfig, named: str
) -> None:
    """Bug: stage 3 ended with "restore the tokenizer.json", stage 0 in a traceback."""
    with pytest.raises(UserError, match=named):
        sharding.check(accelerator, "causal", loop)
    with pytest.raises(UserError, match="medusa2 trains adapters inside the target"):
        sharding.check(launch_of("FSDP"), "medusa2", LoopConfig())
    for works in (
        launch_of("FSDP"),
        launch_of("DEEPSPEED", stage=1),
        launch_of("MULTI_GPU", "fp16"),
    ):
        sharding.check(works, "causal", LoopConfig())
