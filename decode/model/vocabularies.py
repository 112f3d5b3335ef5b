"""Whether two tokenizers give their ids to the same tokens, so that a draft of one can serve a target of the other, and
whether a model embeds the tokens of a text."""

from collections.abc import Sequence
from itertools import zip_longest
from typing import Any

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
