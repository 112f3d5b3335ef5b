"""What people type, by habit or from other tools: it works, or one line names the setting that they look for."""

from pathlib import Path
from typing import Any

import pytest
import yaml

from tests import worlds


def answer(*words: object) -> tuple[dict[str, Any], str]:
    """(the settings that a command line gives, the line with which it is refused)."""
    done = worlds.call(*words, "--print_config")
    if done.code == 0:
        return yaml.safe_load(done.out), ""
    assert done.code == 2
    return {}, done.err.strip().splitlines()[-1]


REFUSED: list[tuple[str, str]] = [
    ("train/distill.py --draft.family eagle-3", "choose one of causal"),
    ("train/distill.py --lr 1e-4", "'loop.lr'"),
    ("train/distill.py --learning_rate 1e-4", "'loop.lr'"),
    ("train/distill.py --max_grad_norm 0.5", "'loop.clip'"),
    ("train/distill.py --model Qwen/Qwen3-8B", "'target'"),
    ("train/distill.py --target_model_path Qwen/Qwen3-8B", "'target'"),
    ("train/distill.py --draft.family eagle3 --draft.ttt_length 7", "'draft.steps'"),
    ("train/distill.py --draft.family dflash --draft.block_size 16", "'draft.block'"),
    ("train/distill.py --num_train_epochs 2", "'loop.epochs'"),
    ("train/distill.py --per_device_train_batch_size 2", "'loop.micro_batch'"),
    ("train/distill.py --output_dir out", "'out'"),
    ("train/sample.py --dataset a.jsonl", "'sources'"),
    ("train/sample.py --max_tokens 5", "'max_new_tokens'"),
    ("eval/run.py --num_speculative_tokens 3", "'k'"),
    ("decode/generate.py --num_speculative_tokens 3", "'k'"),
    ("decode/generate.py --model m", "'target'"),
    ("eval/run.py --draft D", "--methods '[{name: ngram}, {name: mine, draft: DIR}]'"),
    ("eval/run.py --tasks [humanevl]", "humaneval"),
    ("eval/run.py --tasks humanevl", "humaneval"),
    ("eval/run.py --methods ngrm", "ngram"),
    ("eval/run.py --mode compile", "compiled"),
    ("eval/run.py --dtype bfloat32", "bfloat16"),
    ("decode/generate.py Hello", "write --NAME VALUE"),
    ("train/distill.py --loop.steps", "write --loop.steps VALUE"),
    ("scripts/check_draft.py assets/draft", "vllm"),
]
"""(a command line, what the one line with which it is refused must name)."""


@pytest.mark.parametrize(("line", "names"), REFUSED)
def test_what_is_refused_names_the_setting(line: str, names: str) -> None:
    settings, said = answer(*line.split())
    if not settings:
        assert said.startswith("error: ")
        assert names in said
        assert "typing." not in said
        return
    command, *words = line.split()  # some are refused only by the command itself
    done = worlds.call(command, *words)
    assert done.code == 2
    assert names in done.err.strip().splitlines()[-1]


TAKEN: list[tuple[str, str, Any]] = [
    ("train/distill.py --dry_run", "dry_run", True),
    ("train/distill.py --dry_run --overwrite false", "overwrite", False),
    ("train/distill.py --target_dtype bf16", "target_dtype", "bfloat16"),
    ("eval/run.py --dtype fp16", "dtype", "float16"),
    ("eval/run.py --tasks humaneval,gsm8k", "tasks", ["humaneval", "gsm8k"]),
    ("eval/run.py --tasks [humaneval]", "tasks", ["humaneval"]),
    ("eval/run.py --methods ngram,suffix", "methods", ["ngram", "suffix"]),
]
"""(a command line, a setting, its value; of a list the names)."""


@pytest.mark.parametrize(("line", "setting", "value"), TAKEN)
def test_what_is_taken_has_its_value(line: str, setting: str, value: Any) -> None:
    settings, said = answer(*line.split())
    assert said == ""
    found = settings[setting]
    assert ([one["name"] for one in found] if isinstance(value, list) else found) == value


def test_a_file_of_another_command_is_named() -> None:
    _, said = answer("train/distill.py", "--config", worlds.ROOT / "configs/bundled/eval.yaml")
    assert "settings of eval/run.py" in said


def test_a_file_of_specforge_is_known(tmp_path: Path) -> None:
    file = tmp_path / "theirs.yaml"
    model = {
        "target_model_path": "Qwen/Qwen3-8B",
        "draft_model_config": "configs/qwen3-8b-eagle3.json",
    }
    file.write_text(yaml.safe_dump({"model": model, "training": {"strategy": "eagle3"}}))
    _, said = answer("train/distill.py", "--config", file)
    assert "SpecForge" in said
    assert "configs/README.md" in said


HELP = ["train/distill.py", "train/sample.py", "eval/run.py", "eval/tune.py"]
HELP += ["decode/generate.py", "train/write_prompts.py", "scripts/publish.py"]


@pytest.mark.parametrize("command", HELP)
def test_help_fits_a_screen_and_all_of_it_is_there_on_request(command: str) -> None:
    short, whole = worlds.call(command, "--help").out, worlds.call(command, "--help_all").out
    assert len(short.splitlines()) <= 45
    for text in (short, whole):
        assert f"    python {command}" in text or f"    accelerate launch {command}" in text
        assert "typing." not in text
    assert "--help_all explains all" in short
    assert whole.count("\n--") > short.count("\n--")
