"""scripts/lab/tune_target.py: answers are learned, questions are not, and a tuning that was killed goes on."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from decode.model.loading import load_tokenizer
from scripts.lab import tune_target
from scripts.lab.tune_target import TuneTargetConfig
from tests.rows import save_byte_target, write_rows

TEMPLATE = "{% for m in messages %}<{{ m.content }}>{% endfor %}"


@pytest.fixture
def home(tmp_path: Path) -> Path:
    save_byte_target(tmp_path / "target", TEMPLATE)
    rows = [{"question": f"{i}+{i}?", "answer": f"= {2 * i}"} for i in range(4)] * 12
    later = [{"question": f"later {i}?", "answer": "= 0"} for i in range(3)]
    write_rows(tmp_path / "rows.jsonl", rows + later)
    return tmp_path


def tune(home: Path, out: Path) -> dict[str, Tensor]:
    files = str(home / "target"), str(home / "rows.jsonl"), str(out)
    tune_target.main(TuneTargetConfig(*files, 48, 2, rank=4, lr=0.02, batch_size=4))
    return load_file(out / "model" / "model.safetensors")


def test_labels_are_the_answer_and_its_end(home: Path) -> None:
    """Catches the question's tokens among the labels, and an answer without its end."""
    tokenizer = load_tokenizer(str(home / "target"))
    ids, prompt = tune_target.encode(tokenizer, "1+1?", "= 2")
    assert tokenizer.decode(ids[:prompt]) == "<1+1?>"
    assert tokenizer.decode(ids[prompt:-1]) == "= 2"
    assert ids[-1] == tokenizer.eos_token_id


def test_what_was_saved_goes_on_to_the_same_weights(
    home: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Catches a resumed run without the optimiser's states, updates that are not saved, and questions asked that were
    learned."""
    straight = tune(home, home / "straight")
    said = capsys.readouterr().out
    assert "step 12/12" in said
    losses = [float(part.split(",")[0]) for part in said.split("loss ")[1:]]
    assert losses[-1] < losses[0] - 0.3
    asked = (home / "straight" / "prompts.jsonl").read_text().splitlines()
    assert [json.loads(line)["prompt"] for line in asked] == ["later 0?", "later 1?"]
    stopped = home / "stopped"
    stopped.mkdir()
    for name in ("progress.json", "updates.safetensors", "optimizer.pt"):
        shutil.copy(home / "straight" / name, stopped)
    resumed = tune(home, stopped)
    again = capsys.readouterr().out
    assert "step 11/12" in again
    assert "step 10/12" not in again
    before = load_file(home / "target" / "model.safetensors")
    changed = {
        name
        for name in before
        if not torch.equal(straight[name].float(), before[name].bfloat16().float())
    }
    assert changed == {name for name in before if "self_attn" in name and "norm" not in name}
    for name, value in straight.items():
        assert torch.equal(value, resumed[name]), name
