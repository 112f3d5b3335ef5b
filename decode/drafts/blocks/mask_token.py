"""A check of the token that stands for one not drafted yet, in heads that read the target's embedding."""

from decode.common.errors import UserError
from decode.model.loading import Target


def check_mask_token(path: str, token: int, target: Target) -> None:
    """UserError unless the mask token of the draft in `path` is a row of the target's embedding."""
    if not 0 <= token < target.runner.embedding_rows:
        raise UserError(
            f"draft {path!r} has the mask token {token}, which is no row of the target's embedding: get it again"
        )
