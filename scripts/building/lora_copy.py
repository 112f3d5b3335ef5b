"""Tunes a copy of a target with LoRA on someone's answers: a changed target for eval/transfer.py.

    python scripts/building/lora_copy.py --target T --data train.jsonl --prompt question --answer answer --out DIR
    python eval/transfer.py DRAFT --targets '[T, DIR/model]'

The adapters (peft) are merged, so DIR/model is a whole model that any engine loads. transformers' Trainer trains it on
the answers alone, each behind its prompt in the target's chat template. The last line is JSON: the loss on held-out
answers in nats a token before and after, and the steps.
"""

import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

if not __package__:
    sys.path[0] = str(Path(__file__).resolve().parents[2])

from peft import LoraConfig, get_peft_model
from torch.utils.data import Dataset
from transformers import DataCollatorForSeq2Seq, Trainer, TrainingArguments, logging

from decode.common.command import run_command
from decode.common.errors import UserError
from decode.common.files import parse_json_lines, read_lines, write_atomically
from decode.common.ranges import Count, LearningRate, Seed
from decode.common.run_dir import open_run, replace_folder
from decode.engine.chat_template import encode_prompt
from decode.model.loading import load_model, load_tokenizer
from train.families.heads.lora_target import linear_layer_names

COMMAND = "scripts/building/lora_copy.py"
IGNORED_LABEL = -100
Example = dict[str, list[int]]


@dataclass
class LoraCopyConfig:
    target: str = "assets/target"
    data: str = ""
    """File of JSON lines with prompts and answers."""
    prompt: str = "prompt"
    """Name of the field with the prompt."""
    answer: str = "answer"
    """Name of the field with the answer."""
    held_out: Count = 64
    """Last rows of the file, on which the loss is measured and nothing is trained."""
    steps: Count = 200
    batch_size: Count = 8
    """AnswerDataset a step."""
    lr: LearningRate = 1e-3
    """Peak learning rate; it falls linearly to zero."""
    rank: Count = 16
    """Rank of the adapters of all linear layers but the LM head."""
    max_tokens: Count = 384
    """Longer rows are cut."""
    device: str = "auto"
    dtype: str = "float32"
    seed: Seed = 0
    out: str = "outputs/lora_copy"
    """Folder of the run; `model` in it is the copy."""
    overwrite: bool = False
    """Delete what an earlier run left in `out` and train again."""


class AnswerDataset(Dataset[Example]):
    """Rows of token ids; labels are the answer's ids with the token that ends it."""

    def __init__(self, rows: Sequence[dict[str, Any]], tokenizer: Any, s: LoraCopyConfig):
        self.examples = [encode_row(row, tokenizer, s) for row in rows]

    def __len__(self) -> int:
        return len(self.examples)

    def __getitem__(self, index: int) -> Example:
        return self.examples[index]


def encode_row(row: dict[str, Any], tokenizer: Any, s: LoraCopyConfig) -> Example:
    """{input_ids, labels} of one row. UserError if it lacks one of the two texts."""
    missing = [name for name in (s.prompt, s.answer) if not isinstance(row.get(name), str)]
    if missing:
        raise UserError(
            f"{s.data}: a row has no text {missing[0]!r}: name its fields, it has {', '.join(row)}"
        )
    prompt = encode_prompt(tokenizer, row[s.prompt])
    answer = tokenizer(row[s.answer], add_special_tokens=False)["input_ids"]
    answer = [*answer, tokenizer.eos_token_id]
    ids = (prompt + answer)[: s.max_tokens]
    labels = ([IGNORED_LABEL] * len(prompt) + answer)[: s.max_tokens]
    return {"input_ids": ids, "labels": labels}


def tune(s: LoraCopyConfig, folder: Path) -> dict[str, Any]:
    """Trains the adapters and writes the merged model and its tokenizer into `folder`; {before, after, steps}."""
    rows = [row for _, row in parse_json_lines(read_lines(s.data), s.data)]
    if len(rows) <= s.held_out:
        raise UserError(f"{s.data} has {len(rows)} rows: give more than held_out, {s.held_out}")
    tokenizer = load_tokenizer(s.target)
    if tokenizer.pad_token_id is None:
        tokenizer.pad_token = tokenizer.eos_token
    base = load_model(s.target, "target", s.device, s.dtype)
    adapters = LoraConfig(r=s.rank, lora_alpha=2 * s.rank, target_modules=linear_layer_names(base))
    model = get_peft_model(base, adapters)
    arguments = TrainingArguments(
        output_dir=str(folder),
        max_steps=s.steps,
        per_device_train_batch_size=s.batch_size,
        per_device_eval_batch_size=s.batch_size,
        learning_rate=s.lr,
        lr_scheduler_type="linear",
        warmup_steps=min(10, s.steps),
        logging_steps=20,
        save_strategy="no",
        report_to=[],
        seed=s.seed,
        use_cpu=base.device.type == "cpu",
        dataloader_pin_memory=False,
    )
    trainer = Trainer(
        model=model,
        args=arguments,
        train_dataset=AnswerDataset(rows[: -s.held_out], tokenizer, s),
        eval_dataset=AnswerDataset(rows[-s.held_out :], tokenizer, s),
        data_collator=DataCollatorForSeq2Seq(tokenizer, label_pad_token_id=IGNORED_LABEL),
    )
    before = trainer.evaluate()["eval_loss"]
    trainer.train()
    after = trainer.evaluate()["eval_loss"]
    merged: Any = model.merge_and_unload()  # type: ignore[operator]
    merged.save_pretrained(folder, safe_serialization=True)
    load_tokenizer(s.target).save_pretrained(folder)
    return {"before": round(before, 4), "after": round(after, 4), "steps": s.steps}


def main(s: LoraCopyConfig) -> None:
    """Writes the copy and lora_copy.json; the last line is JSON."""
    out = Path(s.out)
    if not s.data:
        raise UserError("data is empty: name a file of JSON lines with prompts and answers")
    logging.disable_progress_bar()
    with open_run(s.out, s, COMMAND, ["model/**", "lora_copy.json"]):
        if not (out / "lora_copy.json").is_file():
            with replace_folder(out / "model") as folder:
                facts = tune(s, folder)
            write_atomically(out / "lora_copy.json", json.dumps(facts) + "\n")
        print((out / "lora_copy.json").read_text().strip())


if __name__ == "__main__":
    run_command(main, LoraCopyConfig, __doc__)
