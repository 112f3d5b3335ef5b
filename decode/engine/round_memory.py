"""The memory of a round beside weights and KV cache: tensors as wide as the vocabulary, from shapes alone."""

from decode.verification.sampling import SamplingParams


def round_bytes(
    rows: int,
    tokens: int,
    vocab: int,
    sampling: SamplingParams,
    *,
    rule: str = "exact",
    tree: bool = False,
    itemsize: int = 4,
) -> int:
    """Bytes that are alive at once at the worst moment of a round that verifies `tokens` tokens of each row.

    `tokens` are K + 1 of a chain, or the nodes of a `tree` with its root, or 1 of plain decoding. `itemsize` is that of
    the target's logits; probabilities are in fp32. It holds for drafts that draw their
    tokens from q; activations of the layers are not counted, and neither is what kernels allocate for themselves, nor
    the copy that a draw makes of a vocabulary of no multiple of 256 tokens.
    """
    wide, row = rows * tokens * vocab, rows * vocab
    logits = itemsize * wide
    if sampling.greedy and rule != "typical":
        return logits
    q = 0 if tree or sampling.greedy else 4 * (wide - row)
    p = 4
    cut = 0 if sampling.greedy else 4 + p  # scores and their softmax
    if not sampling.greedy and sampling.top_k > 0:
        cut = 4 + 4 + 1  # scores before, after, mask
    if not sampling.greedy and sampling.top_p < 1:
        cut = p + 4 + 8 + 4 + 1  # sorted, their order, the sums before each, mask
    if rule == "typical":
        drawn = (p + 4) * wide  # the terms of the entropy
    elif tree or tokens == 1:
        drawn = p * wide  # a token is drawn at each node
    else:
        residuals = 4 if rule == "block" else 3  # p, q and what is left of them
        drawn = p * wide + 4 * residuals * row
    return logits + q + max(cut * wide, drawn)
