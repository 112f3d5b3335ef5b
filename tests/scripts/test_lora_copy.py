"""scripts/building/lora_copy.py: the copy has learnt the answers, is a plain model, and differs from its target."""

import json
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM

from scripts.building import lora_copy
from scripts.building.lora_copy import LoraCopyConfig
from tests import worlds


def run(target: Path, folder: Path, **settings: object) -> dict[str, float]:
    data = folder / "answers.jsonl"
    rows = [{"q": f"add {i} and 1", "a": "zebra zebra zebra"} for i in range(24)]
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    config = LoraCopyConfig(
        target=str(target), data=str(data), prompt="q", answer="a", held_out=4, steps=12, batch_size=4,
        device="cpu", out=str(folder / "copy"), **settings,  # type: ignore[arg-type]
    )  # fmt: skip
    lora_copy.main(config)
    facts: dict[str, float] = json.loads((folder / "copy/lora_copy.json").read_text())
    return facts


def test_the_copy_has_learnt_and_is_a_plain_model(tmp_path: Path) -> None:
    """Catches adapters that are not merged, and a copy that has learnt nothing."""
    world = worlds.build(tmp_path, prompts=1)
    facts = run(world.target, tmp_path)
    assert facts["after"] < facts["before"] - 0.05
    copied = AutoModelForCausalLM.from_pretrained(tmp_path / "copy/model")
    original = AutoModelForCausalLM.from_pretrained(world.target)
    assert copied.state_dict().keys() == original.state_dict().keys()
    ids = torch.arange(8)[None]
    assert (copied(ids).logits - original(ids).logits).abs().max() > 1e-3


def test_labels_are_those_of_the_answer() -> None:
    """Catches loss on the prompt, and an answer without its end."""
    tokenizer = worlds.byte_tokenizer()
    config = LoraCopyConfig(prompt="q", answer="a")
    example = lora_copy.encode_row({"q": "one", "a": "two"}, tokenizer, config)
    answer = [*tokenizer("two", add_special_tokens=False)["input_ids"], tokenizer.eos_token_id]
    prompt = len(example["input_ids"]) - len(answer)
    assert example["input_ids"][prompt:] == answer
    assert example["labels"] == [lora_copy.IGNORED_LABEL] * prompt + answer
