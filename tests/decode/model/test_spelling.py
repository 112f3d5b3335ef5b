"""How tokenizers spell bytes, and which tokens two of them share."""

from itertools import product

import pytest
from tokenizers import pre_tokenizers

from decode.model.vocabularies import Spelling, byte_letters, shared_tokens
from tests.spellings import KINDS, TEXTS

BYTES = TEXTS["letters"].encode()


def spelling(kind: str) -> Spelling:
    tokenizer = KINDS[kind]()
    return Spelling(tokenizer, len(tokenizer))


def test_the_letters_of_bytes_are_those_of_the_library() -> None:
    """Catches a shifted letter: 68 of the 256 have no printed character of their own."""
    letters = byte_letters()
    assert sorted(letters) == sorted(pre_tokenizers.ByteLevel.alphabet())
    cut = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    for character in map(chr, range(1, 2048)):  # two bytes each from 128 on
        ((spelt, _),) = cut.pre_tokenize_str(character)
        assert bytes(letters[letter] for letter in spelt) == character.encode()


@pytest.mark.parametrize("kind", KINDS)
def test_the_bytes_of_the_tokens_are_the_text(kind: str) -> None:
    """Catches bytes of tokens that are none, such as ▁ for a space, or a byte token's name."""
    own = spelling(kind)
    for text in TEXTS.values():
        assert own.join(own.encode(text.encode())).removeprefix(b" ") == text.encode()
    for cut in range(len(BYTES)):  # in the middle of characters as well
        found = own.join(own.encode(BYTES[cut:]))  # behind an odd byte a space too many may stand
        assert found.replace(b" ", b"") == BYTES[cut:].replace(b" ", b"")
        assert own.join(own.encode(BYTES[:cut])).endswith(BYTES[:cut])


@pytest.mark.parametrize("kind", KINDS)
def test_a_text_is_spelt_on_from_a_boundary(kind: str) -> None:
    """Catches ids that do not spell the rest, a start that is not the first possible, and one inside a token."""
    own = spelling(kind)
    text = TEXTS["prose"].encode()
    ids = own.encode(text)
    ends = [len(text) - len(own.join(ids[n:])) for n in range(1, len(ids) + 1)]
    for start in range(1, len(text)):
        found = own.encode_from(text, [start])
        assert (found is not None) == (start in ends)
        if found is not None:
            assert own.join(found[1]) == text[start:]
            assert found[1] == ids[len(ids) - len(found[1]) :]
    assert own.encode_from(text, [ends[1], ends[3]]) == (ends[1], ids[2:])


@pytest.mark.parametrize(("first", "second"), product(KINDS, KINDS))
def test_shared_tokens_have_the_same_bytes(first: str, second: str) -> None:
    """Catches a token that is taken for another, one that is taken twice, and one that is missed. Pieces are compared
    as text here, apart from the code: decoded beside another token, where SentencePiece keeps its spaces."""
    own, other = spelling(first), spelling(second)
    shared = shared_tokens(own, other)
    assert len(set(shared.values())) == len(shared)

    def text(one: Spelling, number: int) -> str:
        before = one.encode(b"a")[-1]
        return one.tokenizer.decode([before, number])[len(one.tokenizer.decode([before])) :]

    for theirs, ours in shared.items():
        if theirs not in other.special:
            assert text(other, theirs) == text(own, ours)
    plain = [{text(x, n) for n in x.pieces if n not in x.special} for x in (own, other)]
    both = {piece for piece in plain[0] & plain[1] if "\ufffd" not in piece}
    found = {text(other, n) for n in shared if n not in other.special}
    assert both <= found
    ends = own.tokenizer.eos_token_id, other.tokenizer.eos_token_id
    assert shared[ends[1]] == ends[0]  # by role where they have two names
    if first == second:
        assert shared == {n: n for n in own.pieces}
