"""Tiny random T5s, references made by transformers' own code, and a folder with a T5, drafts and prompts."""

import copy
import random
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors
from transformers import (
    AutoConfig,
    AutoModelForSeq2SeqLM,
    GenerationConfig,
    PreTrainedTokenizerFast,
)

from decode.model.loading import Target, build_runner
from decode.model.seq2seq import prepare_generate
from decode.verification.sampling import SamplingParams, warp
from tests.tiny import VOCAB, noisy
from tests.worlds import write_prompts

START = 0
SIZES: dict[str, Any] = {
    "vocab_size": VOCAB,
    "d_model": 32,
    "d_kv": 8,
    "d_ff": 48,
    "num_layers": 2,
    "num_decoder_layers": 3,  # more than the encoder has
    "num_heads": 4,
    "relative_attention_num_buckets": 8,
    "relative_attention_max_distance": 12,
    "decoder_start_token_id": START,
    "pad_token_id": 0,
    "eos_token_id": None,
}
GATED = {"feed_forward_proj": "gated-gelu", "tie_word_embeddings": False}
VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    "t5": ("t5", {}), "t5-v1.1": ("t5", GATED), "flan-t5": ("t5", GATED | {"d_kv": 12}),
    "mt5": ("mt5", {}),
}  # fmt: skip


def tiny_t5(variant: str = "t5", seed: int = 0, std: float = 0.3, **changes: Any) -> Any:
    """A random encoder-decoder in eval mode, with a position bias that matters."""
    kind, settings = VARIANTS[variant]
    dtype = changes.pop("dtype", torch.float32)
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        config = AutoConfig.for_model(kind, **(SIZES | settings | changes))
        model = AutoModelForSeq2SeqLM.from_config(config, dtype=dtype)
        with torch.no_grad():
            for name, value in model.named_parameters():
                if value.ndim == 2:
                    wide = 2.0 if "relative_attention_bias" in name else std
                    torch.nn.init.normal_(value, std=wide)
    return model.to(dtype).eval()


def t5_target(model: Any, eos: tuple[int, ...] = ()) -> Target:
    """A target over a copy of the model."""
    return Target(build_runner(copy.deepcopy(model)), None, "tiny", None, "f", frozenset(eos))


def generated(
    model: Any, prompt: list[int], tokens: int, eos: list[int] | None = None
) -> list[int]:
    """The greedy answer of transformers' `generate`."""
    settings = GenerationConfig(
        do_sample=False, max_new_tokens=tokens, eos_token_id=eos, pad_token_id=0, decoder_start_token_id=START
    )  # fmt: skip
    ids = torch.tensor([prompt])
    plain = copy.deepcopy(model)
    prepare_generate(plain)
    out = plain.generate(ids, attention_mask=torch.ones_like(ids), generation_config=settings)
    return out[0, 1:].tolist()


@torch.no_grad()
def own_law(model: Any, prompt: list[int], length: int, sampling: SamplingParams) -> torch.Tensor:
    """[V ** length] from plain passes of the model over the prompt and every prefix of the answer."""
    mass, answers = torch.ones(1, dtype=torch.float64), [[START]]
    for _ in range(length):
        read = torch.tensor([prompt]).expand(len(answers), -1)
        logits = model(input_ids=read, decoder_input_ids=torch.tensor(answers)).logits[:, -1]
        probs = warp(logits, sampling)
        mass = (mass[:, None] * probs.double()).flatten()
        answers = [[*text, token] for text in answers for token in range(probs.shape[1])]
    return mass


@dataclass(frozen=True)
class Seq2SeqWorld:
    target: Path
    draft: Path  # close to the target
    prompts: Path  # jsonl
    texts: list[str]


def letter_tokenizer() -> PreTrainedTokenizerFast:
    """A token for each byte behind <pad> and </s>; texts end with </s>, as those of T5 do."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {token: i for i, token in enumerate(["<pad>", "</s>", *letters])}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.post_processor = processors.TemplateProcessing(
        single="$A </s>", special_tokens=[("</s>", 1)]
    )
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="<pad>", eos_token="</s>")


def build(folder: Path, prompts: int = 24) -> Seq2SeqWorld:
    """A T5, a draft near it and prompts, in `folder`. About every tenth token of a greedy answer is an EOS."""
    tokenizer = letter_tokenizer()
    target = tiny_t5("t5-v1.1", seed=3, vocab_size=len(tokenizer), eos_token_id=1)
    with torch.no_grad():
        target.lm_head.weight[1] *= 2.0
    rng = random.Random(0)
    texts = [
        f"zq{i} " + "".join(rng.choices("abcdef ghij", k=rng.randint(1, 20)))
        for i in range(prompts)
    ]
    for name, model in (("target", target), ("draft", noisy(target, 0.05))):
        model.generation_config = GenerationConfig(
            eos_token_id=1, pad_token_id=0, decoder_start_token_id=START
        )
        model.save_pretrained(folder / name)
        tokenizer.save_pretrained(folder / name)
    return Seq2SeqWorld(
        folder / "target", folder / "draft", write_prompts(folder / "prompts.jsonl", texts), texts
    )
