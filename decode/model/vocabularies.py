"""Two tokenizers: whether they give their ids to the same tokens, so that a draft of one can serve a target of the
other, which tokens both have, and how each spells a text. And whether a model embeds the tokens of a text."""

import codecs
from collections import defaultdict
from collections.abc import Sequence
from itertools import zip_longest
from typing import Any

from transformers import PreTrainedTokenizerBase

from decode.common.errors import UserError

PROBE = "def f(x):\n    return x ** 2  # 1234567 Ünïcode → ok\n\n\t\tend"
"""A text that tokenizers of equal vocabularies may split in different ways."""


def disagreement(own: Any, other: Any, whose: str = "the draft") -> str | None:
    """The first id that the tokenizer of a draft (or of `whose`) and the target's give to different tokens, with both,
    in words; None if one vocabulary extends the other, or each has tokens of its own at ids that the other lacks."""
    names, wanted = _tokens(own), _tokens(other)
    shared = sorted(names.keys() & wanted.keys())
    for number in shared:
        if names[number] != wanted[number]:
            return f"id {number} is {names[number]!r} for {whose} and {wanted[number]!r} for the target"
    if not shared:
        return "they share no id"
    split = [one(PROBE, add_special_tokens=False)["input_ids"] for one in (own, other)]
    if all(number in names and number in wanted for ids in split for number in ids):
        for ids in zip_longest(*split):
            if ids[0] != ids[1]:
                first, second = (repr(names[n]) if n is not None else "no token" for n in ids)
                return f"the same text is id {ids[0]} ({first}) for {whose} and id {ids[1]} ({second}) for the target"
    return None


def unknown_ids(own: Any, other: Any, columns: int) -> list[int]:
    """The ids below `columns` that only one of two tokenizers has, in rising order: a draft does not draft them."""
    return sorted(n for n in _tokens(own).keys() ^ _tokens(other).keys() if n < columns)


def check_embedded(tokenizer: Any, ids: Sequence[int], rows: int) -> None:
    """UserError that names the first token of a text for which a model with `rows` of embedding has none."""
    if max(ids, default=0) < rows:
        return
    token = next(int(one) for one in ids if one >= rows)
    if token >= len(tokenizer):
        raise UserError(
            f"token id {token} lies outside the target's vocabulary of {rows} tokens: the ids are another tokenizer's"
        )
    raise UserError(
        f"token {tokenizer.convert_ids_to_tokens(token)!r} has id {token}, and the target embeds {rows} tokens, the "
        f"last one with id {rows - 1}: it was added to the tokenizer alone; resize the model's embedding "
        "(resize_token_embeddings) and train its row, or keep the token out of prompts and chat template"
    )


def _tokens(tokenizer: Any) -> dict[int, str]:
    return {number: token for token, number in tokenizer.get_vocab().items()}


# ---- tokens as the bytes that they stand for ----


class Spelling:
    """What the tokens of a tokenizer stand for, and how it spells texts of bytes.

    Tokens are compared by their bytes, whatever their vocabulary calls them: a byte-level BPE, SentencePiece's pieces
    and byte tokens, and added tokens, whose bytes are their names.
    """

    def __init__(self, tokenizer: Any, size: int):
        """Of the tokens those with ids below `size`, which the model has."""
        self.tokenizer = tokenizer
        self.byte_values = byte_tokens(tokenizer)
        vocab, added = tokenizer.get_vocab(), tokenizer.added_tokens_decoder
        letters = byte_letters()
        if "Ġ" not in vocab or tokenizer.decode([vocab["Ġ"]]) != " ":
            letters = {}  # no byte-level vocabulary
        self.pieces: dict[int, bytes] = {}
        """The bytes of each token in the order of ids; those of a special one are its name."""
        for token, number in sorted(vocab.items(), key=lambda item: item[1]):
            if number >= size:
                break
            if number in self.byte_values:
                piece = bytes([self.byte_values[number]])
            elif number in added:
                piece = added[number].content.encode()
            elif letters.keys() >= set(token):
                piece = bytes(map(letters.__getitem__, token))
            else:
                piece = (token if letters else token.replace("▁", " ")).encode()
            self.pieces[number] = piece
        self.special = special_ids(tokenizer) & self.pieces.keys()
        self.byte_ids = {piece[0]: n for n, piece in self.pieces.items() if len(piece) == 1}
        self.byte_ids |= {value: n for n, value in self.byte_values.items() if n < size}

    def encode(self, text: bytes) -> list[int]:
        """The tokenizer's ids of the text. A byte that is part of no character is the token of that byte; bytes for
        which there is no token are left out."""
        ids: list[int] = []
        while text:
            try:
                whole, odd, rest = text.decode(), b"", b""
            except UnicodeDecodeError as error:
                whole = text[: error.start].decode()
                odd, rest = text[error.start : error.end], text[error.end :]
            if whole:
                ids += self.tokenizer(whole, add_special_tokens=False, verbose=False)["input_ids"]
            ids += [self.byte_ids[value] for value in odd if value in self.byte_ids]
            text = rest
        return [number for number in ids if number in self.pieces]

    def encode_from(self, text: bytes, starts: Sequence[int]) -> tuple[int, list[int]] | None:
        """(start, ids): how the tokenizer spells text[start:] behind what stands before it, for the first of `starts`
        at which a token of the text begins. None where at each of them a token goes on, or where the tokens' bytes are
        other ones than the text's, as with a tokenizer that changes letters.

        Counted from the end, so that a space in front that SentencePiece adds matters at 0 alone.
        """
        ids = self.encode(text)
        begin, first = len(text), {len(text): len(ids)}
        for place in range(len(ids) - 1, -1, -1):
            begin -= len(self.pieces[ids[place]])
            first[max(begin, 0)] = place
        for start in starts:
            tail = ids[first.get(start, len(ids)) :]
            if start in first and self.join(tail).endswith(text[start:]):
                return start, tail
        return None

    def join(self, ids: Sequence[int]) -> bytes:
        return b"".join(self.pieces[number] for number in ids)


def whole_characters(text: bytes) -> bytes:
    """The text without the bytes at its end that begin a character which is not complete."""
    decoder = codecs.getincrementaldecoder("utf-8")("replace")
    decoder.decode(text)
    return text[: len(text) - len(decoder.getstate()[0])]


def shared_tokens(own: Spelling, other: Spelling) -> dict[int, int]:
    """{id of `other`: id of `own`} of the tokens that both have: with the same bytes, or special ones of the same role
    (BOS, EOS, …) that have no namesake. Each id stands there once. Of tokens with equal bytes a SentencePiece's piece
    belongs to a piece first, and a byte token to a byte token."""
    places: tuple[defaultdict[bytes, list[int]], ...] = (defaultdict(list), defaultdict(list))
    for place, one in zip(places, (own, other), strict=True):
        for number in sorted(one.pieces, key=lambda n: (n in one.byte_values, n)):
            place[one.pieces[number]].append(number)
    shared = {
        theirs: ours
        for piece, numbers in places[1].items()
        if piece in places[0]
        for theirs, ours in zip(numbers, places[0][piece], strict=False)
    }
    taken = set(shared.values())
    for ours, theirs in zip(*(roles(one.tokenizer) for one in (own, other)), strict=True):
        if (
            ours in own.pieces
            and theirs in other.pieces
            and not (ours in taken or theirs in shared)
        ):
            shared[theirs] = ours
            taken.add(ours)
    return shared


def roles(tokenizer: Any) -> list[int | None]:
    named = (tokenizer.bos_token_id, tokenizer.eos_token_id)
    return [*named, tokenizer.unk_token_id, tokenizer.pad_token_id]


def byte_letters() -> dict[str, int]:
    """{letter: byte}: how byte-level vocabularies write bytes; those that are no printed character are shifted."""
    plain = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [value for value in range(256) if value not in plain]
    return {chr(value): value for value in plain} | {
        chr(256 + n): value for n, value in enumerate(others)
    }


def byte_tokens(tokenizer: Any) -> dict[int, int]:
    """{id: byte} of the tokens <0x00> to <0xFF> with which SentencePiece's vocabularies spell what they lack; {} for
    other tokenizers."""
    if not isinstance(tokenizer, PreTrainedTokenizerBase):
        return {}
    names = [f"<0x{value:02X}>" for value in range(256)]
    found: list[int | None] = tokenizer.convert_tokens_to_ids(names)
    values = {
        token: value
        for value, token in enumerate(found)
        if token is not None and tokenizer.convert_ids_to_tokens(token) == names[value]
    }
    letter = next((token for token, value in values.items() if value == ord("A")), None)
    return values if letter is not None and tokenizer.decode([letter]) == "A" else {}


def special_ids(tokenizer: Any) -> frozenset[int]:
    """The tokens that `skip_special_tokens` leaves out."""
    if not isinstance(tokenizer, PreTrainedTokenizerBase):
        return frozenset()
    return frozenset(
        number for number, token in tokenizer.added_tokens_decoder.items() if token.special
    )
