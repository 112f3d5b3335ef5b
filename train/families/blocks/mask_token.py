"""Which token stands for one that is not drafted yet."""

from collections.abc import Iterable

from decode.common.errors import UserError
from train.data import vocab_mapping
from train.data.sample_store import SampleRow


def choose_mask_token(
    given: int | None, saved: int | None, size: int, rows: Iterable[SampleRow]
) -> int:
    """draft.mask_token `given`; that `saved` in the draft of draft.init; else the token that answers have least often.

    Of several the last one, so that a row of the embedding that no token uses comes first. UserError for an id outside
    the embedding of `size` rows, or another than the saved one.
    """
    if given is not None and not 0 <= given < size:
        raise UserError(f"draft.mask_token {given}: name a token of 0 … {size - 1}")
    if saved is not None:
        if given not in (None, saved):
            raise UserError(
                f"draft.mask_token is {given}, and the draft in draft.init has {saved}: leave it out"
            )
        return saved
    if given is not None:
        return given
    counts = vocab_mapping.count_tokens(rows, size)
    return size - 1 - int(counts.flip(0).argmin())
