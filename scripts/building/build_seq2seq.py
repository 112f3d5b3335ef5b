"""Trains a T5 target and three T5 drafts on tasks made from rules, and writes prompts.

They stand in for T5-XXL and for T5-small, -base and -large where no weights are at hand. Two tasks are learnt at once:
translation into an invented language, and summaries of market reports. Pairs are drawn anew for every step, so nothing
can be memorised, and every model reads the same ones in the same order. OUT receives small/, base/, large/, target/
(each as transformers saves a T5, with the tokenizer and training.json) and prompts/TASK/train.jsonl and eval.jsonl; no
model is trained on the latter. A stopped run continues when the same command is started again.

    python scripts/building/build_seq2seq.py
    python scripts/building/build_seq2seq.py --steps 200 --out outputs/quick    # a try: worse models, in less time
    python eval/run.py --config configs/seq2seq/eval.yaml                       # the table: docs/seq2seq.md
"""

import json
import random
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

if not __package__:
    sys.path[0] = str(Path(__file__).resolve().parents[2])

import torch
import torch.nn.functional as F
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast, T5Config, T5ForConditionalGeneration, logging

from decode.common.command import run_command
from decode.common.files import write_atomically
from decode.common.ranges import Count, CountOrZero, LearningRate, Seed, Share, at_least
from decode.common.run_dir import open_run, replace_folder
from scripts.building import summary_task, translation_task
from scripts.building.scratch_training import ScratchTraining, train_from_scratch

COMMAND = "scripts/building/build_seq2seq.py"
TASKS = {
    "translation": ("translate: ", translation_task.draw_pair),
    "summary": ("summarise: ", summary_task.draw_pair),
}
"""{task: (what its prompts begin with, the function that draws a pair)}."""
SIZES = {
    "small": (48, 1, 1),
    "base": (64, 1, 2),
    "large": (96, 2, 3),
    "target": (128, 2, 8),
}
"""{model: (width, encoder layers, decoder layers)}. A small step costs what its layers cost to start, so that the depth
of the decoders sets the cost ratio c."""
HEAD_SIZE = 16
PAD, EOS, UNKNOWN = "<pad>", "</s>", "<unk>"
"""Ids 0, 1 and 2 as in T5; the decoder starts with PAD."""
TOKENIZER_PAIRS = 1500
IGNORED_LABEL = -100
Pair = tuple[str, str]
"""(the encoder's text with its task's beginning, the answer)."""


@dataclass
class BuildSeq2SeqConfig:
    out: str = "outputs/seq2seq"
    """Folder that receives the models, the prompts and, until a model is finished, its checkpoints."""
    steps: Count = 500
    """Training steps of every model; odd steps read summaries, even ones translations."""
    batch_size: Count = 48
    """Pairs a step."""
    muon_lr: LearningRate = 0.02
    """Peak learning rate of Muon, which trains the matrices of the layers."""
    adam_lr: LearningRate = 0.004
    """Peak learning rate of AdamW, which trains embeddings, norms and the LM head."""
    decay: Share = 0.5
    """Share of the run, at its end, over which the learning rate falls linearly to zero."""
    vocab: Annotated[int, at_least(300, 4000)] = 1024
    """Entries of the tokenizer."""
    train_prompts: Count = 4000
    """Prompts of each task for train/sample.py."""
    eval_prompts: Count = 200
    """Prompts of each task that no model is trained on; loss and accuracy are measured on them."""
    threads: CountOrZero = 0
    """CPU threads; 0: torch's choice. 1 is fastest beside other work."""
    save_every: Count = 50
    """Steps between checkpoints."""
    seed: Seed = 0
    """Of weights and pairs."""
    overwrite: bool = False
    """Delete what an earlier run left in `out` and train again."""


def draw_pairs(
    task: str, key: str, count: int, excluded: frozenset[str] = frozenset()
) -> list[Pair]:
    """`count` pairs, a function of `key`; none of the texts in `excluded`."""
    prefix, draw_pair = TASKS[task]
    rng = random.Random(f"{task}/{key}")
    pairs: list[Pair] = []
    while len(pairs) < count:
        source, answer = draw_pair(rng)
        if prefix + source not in excluded:
            pairs.append((prefix + source, answer))
    return pairs


def build_tokenizer(vocab: int) -> PreTrainedTokenizerFast:
    """BPE over words, punctuation and single digits; as T5's it ends every text with EOS."""
    pairs = [pair for task in TASKS for pair in draw_pairs(task, "tokenizer", TOKENIZER_PAIRS)]
    tokenizer = Tokenizer(models.BPE(unk_token=UNKNOWN))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Metaspace(),
            pre_tokenizers.Punctuation(),
            pre_tokenizers.Digits(individual_digits=True),
        ]
    )
    tokenizer.decoder = decoders.Metaspace()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab, special_tokens=[PAD, EOS, UNKNOWN], show_progress=False
    )
    tokenizer.train_from_iterator((text for pair in pairs for text in pair), trainer)
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"$A {EOS}", special_tokens=[(EOS, tokenizer.token_to_id(EOS))]
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token=PAD,
        eos_token=EOS,
        unk_token=UNKNOWN,
        clean_up_tokenization_spaces=False,
    )


def new_model(size: str, tokenizer: PreTrainedTokenizerFast) -> Any:
    """A randomly initialised T5 of SIZES[size], without dropout: no pair is read twice."""
    width, encoder_layers, decoder_layers = SIZES[size]
    model = T5ForConditionalGeneration(
        T5Config(
            vocab_size=len(tokenizer),
            d_model=width,
            d_kv=HEAD_SIZE,
            num_heads=width // HEAD_SIZE,
            d_ff=2 * width,
            num_layers=encoder_layers,
            num_decoder_layers=decoder_layers,
            dropout_rate=0.0,
            tie_word_embeddings=False,  # transformers ties them all the same, and does not scale outputs
            pad_token_id=tokenizer.pad_token_id,
            eos_token_id=tokenizer.eos_token_id,
            decoder_start_token_id=tokenizer.pad_token_id,
        )
    )
    model.lm_head.weight.data.mul_(
        width**-0.5
    )  # as transformers leaves it, the first loss is above 30 nats
    return model


def encode_batch(
    tokenizer: PreTrainedTokenizerFast, pairs: Sequence[Pair], device: str
) -> dict[str, torch.Tensor]:
    """input_ids and attention_mask [B, S] of the encoder, labels [B, T] with EOS, padding ignored."""
    sources = tokenizer([source for source, _ in pairs], padding=True, return_tensors="pt")
    answers = tokenizer([answer for _, answer in pairs], padding=True, return_tensors="pt")
    labels = answers["input_ids"].masked_fill(answers["attention_mask"] == 0, IGNORED_LABEL)
    return {
        "input_ids": sources["input_ids"].to(device),
        "attention_mask": sources["attention_mask"].to(device),
        "labels": labels.to(device),
    }


@torch.no_grad()
def evaluate(
    model: Any, tokenizer: PreTrainedTokenizerFast, pairs: Sequence[Pair], device: str
) -> dict[str, float | int]:
    """{loss, accuracy, tokens}: nats and share of most probable tokens, with the answer's earlier tokens given."""
    loss, right, count = 0.0, 0, 0
    for at in range(0, len(pairs), 50):
        batch = encode_batch(tokenizer, pairs[at : at + 50], device)
        logits, labels = model(**batch).logits.flatten(0, 1), batch["labels"].flatten()
        loss += F.cross_entropy(logits, labels, ignore_index=IGNORED_LABEL, reduction="sum").item()
        right += int((logits.argmax(-1) == labels).sum())
        count += int((labels != IGNORED_LABEL).sum())
    return {"loss": round(loss / count, 4), "accuracy": round(right / count, 4), "tokens": count}


def write_prompts(folder: Path, pairs: dict[str, list[Pair]], split: str) -> None:
    """FOLDER/TASK/SPLIT.jsonl: id, prompt, and a right answer as `reference`."""
    for task, drawn in pairs.items():
        rows = [
            {"id": f"{task}-{split}-{i}", "prompt": source, "reference": answer}
            for i, (source, answer) in enumerate(drawn)
        ]
        (folder / task).mkdir(parents=True, exist_ok=True)
        text = "".join(json.dumps(row) + "\n" for row in rows)
        write_atomically(folder / task / f"{split}.jsonl", text)


def build_model(
    s: BuildSeq2SeqConfig,
    size: str,
    tokenizer: PreTrainedTokenizerFast,
    held_out: dict[str, list[Pair]],
    device: str,
) -> dict[str, Any]:
    """Trains the model, saves it, and returns the content of its training.json; only that if it is finished already."""
    out = Path(s.out) / size
    if (out / "training.json").is_file():
        facts: dict[str, Any] = json.loads((out / "training.json").read_text())
        return facts
    torch.manual_seed(s.seed)
    model = new_model(size, tokenizer).to(device)
    excluded = frozenset(source for pairs in held_out.values() for source, _ in pairs)
    tasks = list(TASKS)

    def loss_at(step: int) -> torch.Tensor:
        task = tasks[step % len(tasks)]
        pairs = draw_pairs(task, f"{s.seed}/{step}", s.batch_size, excluded)
        loss: torch.Tensor = model(**encode_batch(tokenizer, pairs, device)).loss
        return loss

    matrices = [
        weight
        for name, weight in model.named_parameters()
        if weight.ndim == 2 and ".block." in name and "relative_attention_bias" not in name
    ]
    checkpoint = Path(s.out) / f"{size}.pt"
    settings = ScratchTraining(
        steps=s.steps,
        per_step=s.batch_size,
        unit="pairs",
        muon_lr=s.muon_lr,
        adam_lr=s.adam_lr,
        decay=s.decay,
        save_every=s.save_every,
        checkpoint=checkpoint,
        name=f"{size}: ",
    )
    run = train_from_scratch(settings, model, matrices, loss_at)
    model.eval()
    width, encoder_layers, decoder_layers = SIZES[size]
    facts = {
        "model": size,
        "parameters": sum(p.numel() for p in model.parameters()),
        "width": width,
        "encoder_layers": encoder_layers,
        "decoder_layers": decoder_layers,
        **run,
        "held_out": {
            task: evaluate(model, tokenizer, pairs, device) for task, pairs in held_out.items()
        },
        "torch": torch.__version__,
    }
    with replace_folder(out) as folder:
        model.save_pretrained(folder)
        tokenizer.save_pretrained(folder)
        (folder / "training.json").write_text(json.dumps(facts, indent=1) + "\n")
    checkpoint.unlink(missing_ok=True)
    return facts


def main(s: BuildSeq2SeqConfig) -> None:
    """Trains the four models one after the other and writes the prompts; the last line is JSON."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    owned = ["tokenizer/**", "prompts/**", *(f"{x}/**" for x in SIZES), *(f"{x}.pt" for x in SIZES)]
    logging.disable_progress_bar()
    if s.threads:
        torch.set_num_threads(s.threads)
    with open_run(s.out, s, COMMAND, owned):
        out = Path(s.out)
        held_out = {task: draw_pairs(task, "eval", s.eval_prompts) for task in TASKS}
        if not (out / "tokenizer").is_dir():
            with replace_folder(out / "tokenizer") as folder:
                build_tokenizer(s.vocab).save_pretrained(folder)
        tokenizer = PreTrainedTokenizerFast.from_pretrained(out / "tokenizer")
        seen = {
            task: draw_pairs(
                task, "sampling", s.train_prompts, frozenset(source for source, _ in pairs)
            )
            for task, pairs in held_out.items()
        }
        write_prompts(out / "prompts", held_out, "eval")
        write_prompts(out / "prompts", seen, "train")
        built = [build_model(s, size, tokenizer, held_out, device) for size in SIZES]
    print(json.dumps({"out": s.out, "models": built}))


if __name__ == "__main__":
    run_command(main, BuildSeq2SeqConfig, __doc__)
