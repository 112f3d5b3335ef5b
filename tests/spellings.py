"""Tiny tokenizers that spell the same texts in different tokens: byte-level BPE, and SentencePiece's kind."""

import json
from functools import cache
from typing import Any

from tokenizers import (
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    processors,
    trainers,
)
from transformers import PreTrainedTokenizerFast

from decode.drafts.other_tokenizer import OtherTokenizerDraft
from decode.model.loading import Target
from decode.model.runner import ModelRunner
from decode.model.vocabularies import Spelling
from tests.decode.verification.test_exact_distribution import small
from tests.tiny import noisy

TEXTS = {
    "prose": "the other thing that they thought there was then the theory of the weather, and the end of it. ",
    "code": "def theta(self, other):\n    return self.other + other\n\ndef there(x):\n    return x ** 2\n",
    "letters": "Grüße, naïve 字 words → the 🙂 other one; über alles ",
}
"""What merges are learnt from, and what is decoded."""


@cache
def byte_level(learnt: str, merges: int = 60, end: str = "<eos>") -> PreTrainedTokenizerFast:
    """GPT-2's kind; no BOS."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    special = [end, "<|user|>"]
    trainer = trainers.BpeTrainer(
        vocab_size=len(special) + 256 + merges, special_tokens=special, show_progress=False,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
    )  # fmt: skip
    tokenizer.train_from_iterator([TEXTS[learnt] * 3], trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token=end, additional_special_tokens=special[1:]
    )


@cache
def sentence_piece(learnt: str, merges: int = 60) -> PreTrainedTokenizerFast:
    """Llama-2's kind: a space in front of each text, byte tokens for what has no piece, and BOS."""
    tokenizer = Tokenizer(models.BPE(byte_fallback=True, unk_token="<unk>", fuse_unk=True))
    tokenizer.normalizer = normalizers.Sequence(
        [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
    )
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )  # fmt: skip
    special = ["<unk>", "<s>", "</s>"]
    known = [*special, *(f"<0x{value:02X}>" for value in range(256))]
    trainer = trainers.BpeTrainer(
        vocab_size=len(known) + 40 + merges, special_tokens=known, show_progress=False
    )
    tokenizer.train_from_iterator(TEXTS[learnt].split() * 3, trainer)
    # Byte tokens are ordinary ones of SentencePiece's vocabularies.
    backend = Tokenizer(models.BPE(tokenizer.get_vocab(), merges_of(tokenizer), byte_fallback=True,
                                   unk_token="<unk>", fuse_unk=True))  # fmt: skip
    backend.normalizer, backend.decoder = tokenizer.normalizer, tokenizer.decoder
    backend.add_special_tokens(special)
    backend.post_processor = processors.TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", backend.token_to_id("<s>"))]
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=backend, bos_token="<s>", eos_token="</s>", unk_token="<unk>"
    )


def merges_of(tokenizer: Tokenizer) -> list[tuple[str, str]]:
    found = json.loads(tokenizer.to_str())["model"]["merges"]
    return [tuple(one) if isinstance(one, list) else tuple(one.split(" ")) for one in found]


KINDS = {
    "bytes of prose": lambda: byte_level("prose"),
    "bytes of code": lambda: byte_level("code", 40, "</s>"),
    "pieces of prose": lambda: sentence_piece("prose"),
    "pieces of letters": lambda: sentence_piece("letters", 50),
}


def of_letters(*tokens: str) -> Spelling:
    """A vocabulary of these tokens, from id 0 on; a pair of letters is merged."""
    pairs = [(one[0], one[1]) for one in tokens if len(one) == 2]
    model = models.BPE({token: number for number, token in enumerate(tokens)}, pairs)
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=Tokenizer(model))
    return Spelling(tokenizer, len(tokens))


def two_of_three(target: Target, **changes: Any) -> OtherTokenizerDraft:
    """A draft of four tokens for a target of three, of which two are the draft's too, with other ids."""
    model = small(vocab_size=4, num_hidden_layers=1, **changes)
    own, wanted = of_letters("b", "a", "ba", "aa"), of_letters("a", "b", "ab")
    return OtherTokenizerDraft(ModelRunner(noisy(model, 0.3)), own, wanted, 3)
