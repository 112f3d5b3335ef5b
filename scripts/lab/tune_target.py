"""A target tuned by LoRA on questions and answers of people, as a model of transformers with merged weights.

    python scripts/lab/tune_target.py --target T --rows openai/gsm8k --out outputs/tuned

It makes what a draft meets when somebody has tuned the target, to measure drafts before and after: OUT/model, and
OUT/prompts.jsonl, questions for sampling the tuned target on which it was not tuned.
Each row of --rows has `question` and `answer`; the loss is the cross entropy of the answer's tokens and of the token
that ends a turn, after the question in the target's chat template. One pass. A kill costs at most the last 10 steps.
"""

import json
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

if not __package__:
    sys.path[0] = str(Path(__file__).resolve().parents[2])

from decode.common.command import run_command
from decode.common.files import write_atomically
from decode.common.ranges import Count, CountOrZero, LearningRate, Seed
from scripts.lab.task_prompts import read_columns

PROGRESS = "progress.json"
MICRO_BATCH = 4
"""Answers a pass: activations of 4 x 256 tokens stay below the size that malloc gives back to the system each time."""


@dataclass
class TuneTargetConfig:
    target: str = ""
    """The model to tune: a folder, a GGUF file or a Hub name."""
    rows: str = "openai/gsm8k"
    """A data set of the Hub (its split train), or JSON lines with `question` and `answer`."""
    out: str = ""
    """Folder of the tuned model."""
    count: Count = 400
    """Rows that are learned, the first ones."""
    asked: CountOrZero = 400
    """The rows behind them whose questions are written to prompts.jsonl."""
    dtype: str = "bfloat16"
    """Of the weights, while tuned and saved: float32 is faster on a CPU without AVX512-BF16."""
    rank: Count = 16
    """Rank of the updates of attention's matrices; alpha is the same number."""
    lr: LearningRate = 2e-4
    """Peak learning rate of AdamW; it falls linearly to a tenth after 10 steps of warm-up."""
    batch_size: Count = 8
    """Answers a step."""
    max_length: Count = 256
    """Longer rows are left out."""
    seed: Seed = 0
    """Of the updates' first values."""


def encode(tokenizer: Any, question: str, answer: str) -> tuple[list[int], int]:
    """(token ids of a turn and its answer, how many of them are the question's)."""
    turn = [{"role": "user", "content": question}]
    prompt = tokenizer.apply_chat_template(turn, add_generation_prompt=True, return_dict=False)
    whole = tokenizer(answer, add_special_tokens=False).input_ids
    return [*prompt, *whole, tokenizer.eos_token_id], len(prompt)


def predict(model: Any, rows: list[tuple[list[int], int]]) -> tuple[Any, Any]:
    """(logits [N, V], labels [N]) of the N tokens of these rows' answers."""
    import torch

    length = max(len(ids) for ids, _ in rows)
    ids = torch.tensor([ids + [0] * (length - len(ids)) for ids, _ in rows])
    learned = torch.zeros_like(ids, dtype=torch.bool)  # positions whose next token is the answer's
    for row, (text, prompt) in enumerate(rows):
        learned[row, prompt - 1 : len(text) - 1] = True
    inner = model.base_model.model
    hidden = inner.model(input_ids=ids).last_hidden_state
    return inner.lm_head(hidden[learned]), ids[:, 1:][learned[:, :-1]]


def main(s: TuneTargetConfig) -> None:
    import torch
    from peft import LoraConfig, get_peft_model, get_peft_model_state_dict
    from peft import set_peft_model_state_dict as load_updates
    from safetensors.torch import load_file, save_file
    from torch.nn.functional import cross_entropy

    from decode.model.loading import load_model, load_tokenizer

    torch.manual_seed(s.seed)
    tokenizer = load_tokenizer(s.target)
    lines = read_columns(s.rows, "question", "answer")
    out = Path(s.out)
    out.mkdir(parents=True, exist_ok=True)
    asked = [line[0] for line in lines[s.count : s.count + s.asked]]
    write_atomically(
        out / "prompts.jsonl", "".join(json.dumps({"prompt": x}) + "\n" for x in asked)
    )
    rows = [encode(tokenizer, question, answer) for question, answer in lines[: s.count]]
    rows = [row for row in rows if len(row[0]) <= s.max_length]
    batches = [rows[i : i + s.batch_size] for i in range(0, len(rows), s.batch_size)]
    model = load_model(s.target, "target", "cpu", s.dtype)
    # Attention alone: on a CPU the MLP's wide outputs cost more in the updates' float32 than in the products.
    attention = ["q_proj", "k_proj", "v_proj", "o_proj"]
    config = LoraConfig(r=s.rank, lora_alpha=s.rank, target_modules=attention)
    model = get_peft_model(model, config)
    updates = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(updates, lr=s.lr, weight_decay=0.0)
    first = 0
    if (out / PROGRESS).exists():
        first = json.loads((out / PROGRESS).read_text())["steps"]
        load_updates(model, load_file(out / "updates.safetensors"))
        optimizer.load_state_dict(torch.load(out / "optimizer.pt", weights_only=True))
    start, tokens = time.monotonic(), 0
    for step, batch in enumerate(batches[first:], first):
        rise, fall = (step + 1) / 10, 1 - 0.9 * step / len(batches)
        optimizer.param_groups[0]["lr"] = s.lr * min(rise, fall)
        learned = sum(len(ids) - prompt for ids, prompt in batch)
        loss = 0.0
        for i in range(0, len(batch), MICRO_BATCH):
            logits, labels = predict(model, batch[i : i + MICRO_BATCH])
            part = cross_entropy(logits.float(), labels, reduction="sum") / learned
            part.backward()
            loss += part.item()
        torch.nn.utils.clip_grad_norm_(updates, 1.0)
        optimizer.step()
        optimizer.zero_grad()
        tokens += learned
        seconds = time.monotonic() - start
        left = seconds / (step + 1 - first) * (len(batches) - step - 1)
        done = f"step {step + 1}/{len(batches)}, loss {loss:.3f}, {tokens / seconds:.0f} tok/s"
        print(f"{done}, {left / 60:.0f} min left", flush=True)
        if (step + 1) % 10 == 0:
            save_file(get_peft_model_state_dict(model), out / "updates.safetensors")
            torch.save(optimizer.state_dict(), out / "optimizer.pt")
            (out / PROGRESS).write_text(json.dumps({"steps": step + 1}))
    merged = model.merge_and_unload()
    merged.save_pretrained(out / "model")
    tokenizer.save_pretrained(out / "model")
    print(f"the tuned model is {out / 'model'}")


if __name__ == "__main__":
    run_command(main, TuneTargetConfig, __doc__)
