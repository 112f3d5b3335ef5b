"""The text of tokens that arrive in rounds is the tokenizer's text of all of them, in whole characters."""

import random
from collections.abc import Callable
from typing import Any

import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from decode.engine.text_stream import WINDOW, LabelledText, TextStream
from tests.worlds import byte_tokenizer

MARKS = ["<s>", "</s>"]
PIECES = ["▁", "▁▁", "▁▁▁▁", "▁a", "b", "▁é", "é", "字", "🙂", "\ufffd", ".", "'", "\n", "\t", "▁."]
BYTES = [f"<0x{value:02X}>" for value in range(256)]


def wrapped(tokenizer: Tokenizer, **settings: Any) -> PreTrainedTokenizerFast:
    tokenizer.add_special_tokens([AddedToken(mark, special=True) for mark in MARKS])
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token=MARKS[0], eos_token=MARKS[1], **settings
    )


def with_decoder(tokens: list[str], decoder: Any, **settings: Any) -> PreTrainedTokenizerFast:
    """A BPE tokenizer of these tokens."""
    vocab = {token: number for number, token in enumerate([*MARKS, *tokens])}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[], byte_fallback=True))
    tokenizer.decoder = decoder
    return wrapped(tokenizer, **settings)


def byte_level() -> PreTrainedTokenizerFast:
    """GPT-2's kind, with tokens that hold the end of one character and the beginning of the next."""
    table = dict(zip(range(256), byte_alphabet(), strict=True))
    texts = ["é", "字", "🙂", " a", "\ufffd", "  ", "e\u0301"]
    cuts = [
        b"\xe5\xad",
        b"\x97\xf0\x9f",
        b"\x99\x82\xc3",
        b"\xa9A",
        b"\x9f\x99",
        b"\xff\xfe",
        b"A\xe5",
    ]
    tokens = [*map(bytes, ([value] for value in range(256))), *map(str.encode, texts), *cuts]
    spelled = ["".join(table[value] for value in token) for token in tokens]
    return with_decoder(list(dict.fromkeys(spelled)), decoders.ByteLevel())


def byte_alphabet() -> list[str]:
    """The letter of each byte in GPT-2's vocabularies."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.decoder = decoders.ByteLevel()
    letters = pre_tokenizers.ByteLevel.alphabet()
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = iter(sorted(set(letters) - {chr(value) for value in printable}))
    return [chr(value) if value in printable else next(others) for value in range(256)]


def llama(strip: bool) -> PreTrainedTokenizerFast:
    """Llama-2's kind, which strips the text's first space, or Gemma's, which does not."""
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    steps += [decoders.Strip(" ", 1, 0)] * strip
    return with_decoder([*PIECES, *BYTES], decoders.Sequence(steps))


def metaspace() -> PreTrainedTokenizerFast:
    """T5's kind: Unigram without tokens for bytes."""
    tokens = [(token, -1.0) for token in [*MARKS, "<unk>", *PIECES]]
    tokenizer = Tokenizer(models.Unigram(tokens, unk_id=2))
    tokenizer.decoder = decoders.Metaspace(prepend_scheme="always")
    return wrapped(tokenizer)


def metaspace_with_bytes() -> PreTrainedTokenizerFast:
    steps = [decoders.ByteFallback(), decoders.Metaspace(prepend_scheme="first")]
    return with_decoder([*PIECES, *BYTES], decoders.Sequence(steps))


def word_pieces(clean: bool) -> PreTrainedTokenizerFast:
    """BERT's kind; with `clean`, transformers removes spaces before punctuation as well."""
    texts = ["a", "##b", "字", "🙂", ".", ",", "?", "!", "'", "n", "t", "n't", "##.", "s", "'ve"]
    vocab = {t: n for n, t in enumerate(dict.fromkeys([*MARKS, "[UNK]", *texts]))}
    tokenizer = Tokenizer(models.WordPiece(vocab, unk_token="[UNK]"))
    tokenizer.decoder = decoders.WordPiece(cleanup=not clean)
    return wrapped(tokenizer, clean_up_tokenization_spaces=clean)


def suffixes() -> PreTrainedTokenizerFast:
    """GPT-1's kind: the end of a word is marked."""
    return with_decoder(["a", "b</w>", "字</w>", "🙂", "</w>"], decoders.BPEDecoder("</w>"))


KINDS: dict[str, Callable[[], PreTrainedTokenizerFast]] = {
    "bytes": byte_tokenizer,
    "byte-level": byte_level,
    "llama": lambda: llama(True),
    "gemma": lambda: llama(False),
    "metaspace": metaspace,
    "metaspace with bytes": metaspace_with_bytes,
    "word pieces": lambda: word_pieces(False),
    "word pieces, cleaned": lambda: word_pieces(True),
    "suffixes": suffixes,
}


def rounds_of(ids: list[int], rng: random.Random) -> list[list[int]]:
    """`ids` split at random."""
    rounds, at = [], 0
    while at < len(ids):
        end = at + rng.randint(0, rng.choice([1, 3, 30]))
        rounds.append(ids[at:end])
        at = end
    return rounds


def random_ids(tokenizer: PreTrainedTokenizerFast, rng: random.Random) -> list[int]:
    """Tokens of few kinds or many, so that bad bytes, repetitions and special tokens come in long runs too."""
    some = rng.sample(range(len(tokenizer)), rng.choice([1, 2, 4, min(len(tokenizer), 30)]))
    return rng.choices(some, k=rng.randint(0, 80))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("skip", [True, False])
def test_the_joined_text_is_that_of_all_tokens(kind: str, skip: bool) -> None:
    """Catches spaces and characters lost between rounds, and text that a later token changes after it was shown."""
    tokenizer = KINDS[kind]()
    rng = random.Random(0)
    for _ in range(120):
        ids = random_ids(tokenizer, rng)
        stream = TextStream(tokenizer, skip_special_tokens=skip)
        shown = ""
        for n, tokens in enumerate(rounds := rounds_of(ids, rng)):
            shown += stream.add(tokens)
            so_far = [token for part in rounds[: n + 1] for token in part]
            whole = tokenizer.decode(so_far, skip_special_tokens=skip)
            assert shown + stream.rest() == whole, (ids, rounds)
        assert shown + stream.rest() == tokenizer.decode(ids, skip_special_tokens=skip)


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "word pieces, cleaned"])
def test_text_goes_on_behind_the_prompt(kind: str) -> None:
    """Catches the first space of an answer lost, and a prompt's own text printed again."""
    tokenizer = KINDS[kind]()
    rng = random.Random(1)
    tried = 0
    while tried < 80:
        prompt, ids = random_ids(tokenizer, rng), random_ids(tokenizer, rng)
        before = tokenizer.decode(prompt, skip_special_tokens=True)
        last = tokenizer.decode(prompt[-1:], skip_special_tokens=True)
        if last.strip("\ufffd ") == "" or tokenizer.convert_ids_to_tokens(prompt[-1]) in BYTES:
            continue  # bytes of the answer may change the prompt's last character
        tried += 1
        stream = TextStream(tokenizer, prompt)
        shown = "".join(map(stream.add, rounds_of(ids, rng))) + stream.rest()
        assert before + shown == tokenizer.decode(prompt + ids, skip_special_tokens=True)


def test_complete_characters_are_shown_at_once_and_others_never() -> None:
    """Catches a broken character, and one that waits although it is complete."""
    for tokenizer in (byte_tokenizer(), byte_level()):
        table = dict(zip(range(256), byte_alphabet(), strict=True))
        stream, shown = TextStream(tokenizer), []
        for value in "a🙂é字".encode():
            shown.append(stream.add([tokenizer.convert_tokens_to_ids(table[value])]))
        assert shown == ["a", "", "", "", "🙂", "", "é", "", "", "字"]


def test_a_run_of_byte_tokens_is_shown_when_it_ends() -> None:
    """Catches characters that a bad byte behind them would have to take back: such a run is decoded as a whole."""
    tokenizer = llama(True)
    of = tokenizer.convert_tokens_to_ids
    emoji = [of(f"<0x{value:02X}>") for value in "🙂é".encode()]
    stream = TextStream(tokenizer)
    assert stream.add([of("▁a"), *emoji]) == "a"
    assert stream.rest() == "🙂é"
    assert stream.add([of("▁a")]) == "🙂é a"
    assert stream.add(emoji) == ""
    assert stream.add([of("<0xFF>"), of("b")]) == "\ufffd" * 7 + "b"


@pytest.mark.parametrize("kind", [kind for kind in KINDS if "cleaned" not in kind])
def test_a_token_costs_the_same_however_long_the_text_is(kind: str) -> None:
    """Catches a text that is decoded from its beginning for each token, also one of bad bytes or of one token."""
    tokenizer = KINDS[kind]()
    rng = random.Random(2)
    for _ in range(3):
        stream, decoded = TextStream(tokenizer), 0
        original = tokenizer.decode

        def counting(ids: list[int], original: Any = original, **settings: Any) -> str:
            nonlocal decoded
            decoded += len(ids)
            return str(original(ids, **settings))

        tokenizer.decode = counting
        for token in rng.choices(rng.sample(range(len(tokenizer)), rng.choice([1, 2])), k=600):
            stream.add([token])
        tokenizer.decode = original
        assert decoded < 600 * 8 * WINDOW


def test_a_character_has_the_label_of_its_last_token() -> None:
    """Catches a character with the label of its first token, and text that takes that of a later one because it had to
    wait for it."""
    tokenizer = byte_tokenizer()
    ids = tokenizer("a🙂b", add_special_tokens=False)["input_ids"]
    text = LabelledText(TextStream(tokenizer))
    assert text.add(ids[:3], "green") == [("a", "green")]
    assert text.add(ids[3:4], "red") == []
    assert text.add(ids[4:], "blue") == [("🙂b", "blue")]
    tokenizer = llama(False)
    of = tokenizer.convert_tokens_to_ids
    emoji, letter = ([of(f"<0x{value:02X}>") for value in char.encode()] for char in "🙂é")
    text = LabelledText(TextStream(tokenizer))
    assert text.add([*emoji, letter[0]], "green") == []
    assert text.add([letter[1]], "blue") == []
    assert text.add([of("b")], "black") == [("🙂", "green"), ("é", "blue"), ("b", "black")]
    assert text.end() == []
