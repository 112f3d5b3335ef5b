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
    the target's logits; probabilities are in fp32 and their running sums in fp64. It holds for drafts that draw their
    tokens from q; activations of the layers are not counted, and neither is what kernels allocate for themselves.
    """
    wide, row = rows * tokens * vocab, rows * vocab
    logits = itemsize * wide
    if sampling.greedy and rule != "typical":
        return logits
    q = 0 if tree or sampling.greedy else 4 * (wide - row)
    p, sums = 4, 8 + 1  # the sums in fp64, and which of them are passed
    cut = 0 if sampling.greedy or sampling.top_k == 0 else 4 + 4 + 1  # scores before, after, mask
    if not sampling.greedy and sampling.top_p < 1:
        cut = p + 4 + 8 + 4 + 1  # sorted, their order, the sums before each, mask
    if rule == "typical":
        # the terms of the entropy; then p at the end of the path, and its sums
        drawn = max((p + 4) * wide, p * wide + (p + sums) * row)
    elif tree or tokens == 1:
        drawn = (p + sums) * wide  # a token is drawn at each node
    else:
        residuals = 4 if rule == "block" else 3  # p, q and what is left of them
        drawn = p * wide + (4 * residuals + sums) * row
    return logits + q + max(cut * wide, drawn)
