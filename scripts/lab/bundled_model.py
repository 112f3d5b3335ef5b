"""What build_target.py does: the bundled target or its base draft is trained, evaluated and saved."""

import contextlib
import hashlib
import io
import json
import math
import platform
import re
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from decode.common import lock
from decode.common.command import DeferredStop, Terminated, stop
from decode.common.errors import UserError
from decode.common.files import parse_jsonl, read_text, write_atomically
from decode.common.run_dir import check_folder, replace_folder
from eval.tasks.row_files import load_hub_dataset
from scripts.lab.settings import BuildTargetConfig
from train.data import python_corpus

COMMAND = "python scripts/lab/build_target.py"
EOS = "<|endoftext|>"
HELD_OUT_QUESTIONS = 400  # the last ones of GSM8K's training set
# The draft has one layer: at this size a step costs what its layers cost to launch, not what they compute.
LAYERS = {"target": 12, "draft": 1}
DOMAIN_WEIGHTS = {"code": 0.63, "prose": 0.05, "arithmetic": 0.32}
"""Shares of the windows of a batch."""


def gsm8k_documents(source: str) -> list[str]:
    """`Question: …\\nAnswer: …\\n` texts without the calculator annotations. UserError for a file without them."""
    if Path(source).exists() or source.endswith(".jsonl"):
        rows = [row for _, row in parse_jsonl(read_text(source), source)]
    else:
        rows = list(load_hub_dataset(source, "main", "train"))
    right = [isinstance(r, dict) and {"question", "answer"} <= r.keys() for r in rows]
    if not all(right) or len(rows) <= HELD_OUT_QUESTIONS:
        raise UserError(
            f"gsm8k {source}: {sum(right)} of {len(rows)} rows have `question` and `answer`: give over "
            f"{HELD_OUT_QUESTIONS}, all with both"
        )
    clean = re.compile(r"<<.*?>>")
    return [
        f"Question: {r['question'].strip()}\nAnswer: {clean.sub('', r['answer']).strip()}\n"
        for r in rows
    ]


def load_corpus(gsm8k: str, held_out: bool) -> dict[str, list[str]]:
    """{domain: documents}, those to train on or those that are held out."""
    questions = gsm8k_documents(gsm8k)
    seen, unseen = questions[:-HELD_OUT_QUESTIONS], questions[-HELD_OUT_QUESTIONS:]
    return {
        "code": list(python_corpus.read_modules(held_out).values()),
        "prose": list(python_corpus.read_help_topics(held_out).values()),
        "arithmetic": unseen if held_out else seen,
    }


def build_tokenizer(documents: dict[str, list[str]]) -> PreTrainedTokenizerFast:
    """Byte-level BPE of 4,096 entries, digits apart, no chat template."""
    tokenizer = Tokenizer(models.BPE())
    digits, level = pre_tokenizers.Digits(True), pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([digits, level])
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=4096,
        special_tokens=[EOS],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator((d for docs in documents.values() for d in docs), trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token=EOS, eos_token=EOS, clean_up_tokenization_spaces=False
    )


def encode(
    tokenizer: PreTrainedTokenizerFast, documents: dict[str, list[str]]
) -> dict[str, np.ndarray]:
    """{domain: the ids [N] of all its documents in one stream, each document followed by EOS}."""
    streams = {}
    for domain, texts in documents.items():
        ids = tokenizer(texts, add_special_tokens=False)["input_ids"]
        ended = [np.array([*row, tokenizer.eos_token_id], dtype=np.int64) for row in ids]
        streams[domain] = np.concatenate(ended)
    return streams


def new_model(name: str, vocab: int, window: int) -> Any:
    """A randomly initialised Llama."""
    config = LlamaConfig(
        vocab_size=vocab,
        hidden_size=256,
        intermediate_size=688,
        num_hidden_layers=LAYERS[name],
        num_attention_heads=4,
        num_key_value_heads=4,
        head_dim=64,  # some engines' CPU builds know few head sizes
        max_position_embeddings=window,
        tie_word_embeddings=True,
        rms_norm_eps=1e-6,
        bos_token_id=0,
        eos_token_id=0,
    )
    model = LlamaForCausalLM(config)
    for name_, weight in model.named_parameters():  # residual branches start small
        if name_.endswith(("o_proj.weight", "down_proj.weight")):
            weight.data.div_(math.sqrt(2 * config.num_hidden_layers))
    return model


def sample_batch(
    streams: dict[str, np.ndarray], s: BuildTargetConfig, step: int, window: int
) -> torch.Tensor:
    """[windows, window + 1] ids. They depend only on (seed, step), so that a resumed run gets the same batches."""
    rng = np.random.default_rng([s.seed, step])
    rows, names, weights = [], list(DOMAIN_WEIGHTS), list(DOMAIN_WEIGHTS.values())
    for domain in rng.choice(names, size=s.batch_tokens // window, p=weights):
        at = rng.integers(0, len(streams[domain]) - window - 1)
        rows.append(streams[domain][at : at + window + 1])
    return torch.from_numpy(np.stack(rows))


def next_token_loss(model: torch.nn.Module, ids: torch.Tensor) -> torch.Tensor:
    """Mean cross-entropy in nats of ids [B, T + 1], in bfloat16."""
    with torch.autocast(ids.device.type, torch.bfloat16):
        logits = model(input_ids=ids[:, :-1], use_cache=False).logits
    return F.cross_entropy(logits.float().flatten(0, 1), ids[:, 1:].flatten())


def train(
    s: BuildTargetConfig, model: Any, streams: dict[str, np.ndarray], device: str
) -> dict[str, float]:
    """Trains in place, from the checkpoint if there is one; {steps, tokens, minutes, train_loss}.

    A signal ends the run after the current step with a checkpoint.
    """
    steps, checkpoint = s.tokens // s.batch_tokens, Path(s.work) / f"{s.model}.pt"
    next_loss = torch.compile(next_token_loss) if s.compile else next_token_loss
    own = {id(p): p for n, p in model.named_parameters() if p.ndim == 2 and "layers" in n}
    rest = [p for p in model.parameters() if id(p) not in own]
    muon = torch.optim.Muon([*own.values()], weight_decay=0.05, momentum=0.95, nesterov=True)
    adam = torch.optim.AdamW(rest, betas=(0.9, 0.95), weight_decay=0.0)
    optimizers: list[torch.optim.Optimizer] = [muon, adam]
    step, spent, smooth = 0, 0.0, 0.0
    if checkpoint.is_file():
        state = torch.load(checkpoint, weights_only=True)
        step, spent, smooth = state["step"], state["seconds"], state["loss"]
        model.load_state_dict(state["model"])
        for optimizer, saved in zip(optimizers, state["optimizers"], strict=True):
            optimizer.load_state_dict(saved)
        print(f"resumed at step {step} of {steps}")
    start = time.perf_counter()
    with DeferredStop() as asked:
        while step < steps:
            # Warm-up over 100 steps, plateau, linear fall to zero.
            scale = min(1.0, (step + 1) / 100, (steps - step) / max(1, steps * s.decay))
            for peak, optimizer in zip((s.muon_lr, s.adam_lr), optimizers, strict=True):
                optimizer.param_groups[0]["lr"] = peak * scale
            window = s.short_window if step < 0.8 * steps else s.window
            if device == "cpu":  # explicit attention is the faster one on a CPU up to 256 tokens
                model.set_attn_implementation("eager" if window <= 256 else "sdpa")
            loss = next_loss(model, sample_batch(streams, s, step, window).to(device))
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad(set_to_none=True)
            step += 1
            smooth = loss.item() if step == 1 else 0.98 * smooth + 0.02 * loss.item()
            if not math.isfinite(smooth):
                raise UserError("the loss is not finite: lower --muon_lr and --adam_lr")
            seconds = spent + time.perf_counter() - start
            if step % 20 == 0:
                speed, left = step * s.batch_tokens / seconds, (steps - step) * seconds / step / 60
                told = f"loss {smooth:.3f} {speed:,.0f} tokens/s, {left:.0f} min left"
                print(f"step {step}/{steps} {told}", flush=True)
            if step % s.save_every == 0 or step == steps or asked.received:
                state = {"step": step, "seconds": seconds, "loss": smooth}
                state |= {"model": model.state_dict()}
                state |= {"optimizers": [o.state_dict() for o in optimizers]}
                content = io.BytesIO()
                torch.save(state, content)
                write_atomically(checkpoint, content.getvalue())
            if asked.received and step < steps:
                stop(asked.received, f"step {step} is saved")
    minutes = round((spent + time.perf_counter() - start) / 60, 1)
    tokens = steps * s.batch_tokens
    return {"steps": steps, "tokens": tokens, "minutes": minutes, "train_loss": round(smooth, 4)}


@torch.no_grad()
def evaluate(
    model: Any, streams: dict[str, np.ndarray], window: int, device: str
) -> dict[str, dict[str, float]]:
    """{domain: {loss, accuracy, tokens}} of next-token prediction in fp32 over non-overlapping windows."""
    out = {}
    for domain, stream in streams.items():
        loss, right, count = 0.0, 0, 0
        for at in range(0, min(len(stream) - 1, 160_000), window):
            ids = torch.from_numpy(stream[at : at + window + 1]).to(device)[None]
            logits = model(input_ids=ids[:, :-1], use_cache=False).logits.float()[0]
            loss += F.cross_entropy(logits, ids[0, 1:], reduction="sum").item()
            right += int((logits.argmax(-1) == ids[0, 1:]).sum())
            count += ids.shape[1] - 1
        scores = {"loss": round(loss / count, 4), "accuracy": round(right / count, 4)}
        out[domain] = scores | {"tokens": count}
    return out


def build_bundled(s: BuildTargetConfig) -> None:
    """Trains, evaluates and saves the model; the last line is JSON. UserError while another run uses the folders."""
    longest = max(s.window, s.short_window)
    if s.batch_tokens < longest:
        raise UserError(
            f"batch_tokens is {s.batch_tokens}: give at least {longest}, the longer window"
        )
    target = Path(s.assets) / "target"
    if s.model == "draft" and not (target / "tokenizer.json").is_file():
        raise UserError(f"{target} has no tokenizer.json: build the target first")
    work, out = Path(s.work), Path(s.assets) / s.model
    check_folder(work)
    check_folder(out)
    seen, unseen = (load_corpus(s.gsm8k, held_out) for held_out in (False, True))
    with contextlib.ExitStack() as stack:
        for folder in (work, out):
            folder.mkdir(parents=True, exist_ok=True)
            stack.enter_context(lock.hold(folder / lock.LOCK_FILE, folder))
        try:
            build(s, work, out, seen, unseen)
        except (KeyboardInterrupt, Terminated) as error:
            error.add_note(f"checkpoints are kept in {work}, and the same command goes on")
            raise


def build(
    s: BuildTargetConfig,
    work: Path,
    out: Path,
    seen: dict[str, list[str]],
    unseen: dict[str, list[str]],
) -> None:
    """Trains on `seen`, evaluates on `unseen` and saves the model, with the tokenizer in `work` if there is one."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    torch.manual_seed(s.seed)
    folder = Path(s.assets) / "target" if s.model == "draft" else work / "tokenizer"
    if not folder.is_dir():
        made = build_tokenizer(seen)
        with replace_folder(folder) as new:
            made.save_pretrained(new)
    tokenizer = PreTrainedTokenizerFast.from_pretrained(folder)
    streams, held_out = encode(tokenizer, seen), encode(tokenizer, unseen)
    print("corpus tokens", {d: f"{len(x):,}" for d, x in streams.items()})
    model = new_model(s.model, len(tokenizer), s.window).to(device)
    parameters = sum(p.numel() for p in model.parameters())
    print(f"{s.model}: {parameters:,} parameters")
    run = train(s, model, streams, device)
    model = model.to(torch.bfloat16).float().eval()  # evaluated with the weights that are stored
    scores = evaluate(model, held_out, s.window, device)
    digest = hashlib.sha256(b"".join(streams[domain].tobytes() for domain in sorted(streams)))
    facts = {
        "model": s.model,
        "parameters": parameters,
        "command": f"{COMMAND} --model {s.model} --gsm8k openai/gsm8k --tokens {s.tokens}",
        "settings": {k: v for k, v in asdict(s).items() if k not in ("gsm8k", "work", "assets")},
        "corpus": {
            "python": platform.python_version(),
            "tokens": {domain: len(stream) for domain, stream in streams.items()},
            "weights": DOMAIN_WEIGHTS,
            "sha256_of_ids": digest.hexdigest(),
        },
        "run": run,
        "held_out": scores,
        "torch": torch.__version__,
    }
    model.to(torch.bfloat16).save_pretrained(out)
    tokenizer.save_pretrained(out)
    (out / "provenance.json").write_text(json.dumps(facts, indent=1) + "\n")
    print(json.dumps({"out": str(out), **run, "held_out": scores}))
