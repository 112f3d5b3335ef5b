"""Top-p (nucleus) sampling: which tokens stay (Holtzman et al. 2020)."""

import torch

FIRST_FLOOR, LAST_FLOOR = 2.0**-8, 2.0**-40
"""The probabilities from which, and down to which, `_likely` looks for the most probable tokens."""
RARE = 2.0**-17
"""All tokens below this probability seldom matter, so that those above are looked at alone."""


def keep_top_p(probs: torch.Tensor, top_p: float) -> torch.Tensor:
    """Probabilities [..., V], renormalised, of the smallest set of most probable tokens whose total in probs is
    at least `top_p`; those of other tokens are 0. Of equally probable tokens the ones with lower ids come first.

    `probs` may be overwritten.
    """
    if reads_are_free(probs):
        return top_p_on_cpu(probs, top_p)
    ordered, index = probs.sort(dim=-1, descending=True, stable=True)
    kept = probs.scatter_(-1, index, _cut(ordered, top_p))
    return kept.div_(kept.sum(-1, keepdim=True))


def reads_are_free(tensor: torch.Tensor) -> bool:
    """Whether the host may read `tensor` without waiting: on a CPU."""
    return tensor.device.type == "cpu"


@torch.library.custom_op("draftsmith::top_p", mutates_args=())
def top_p_on_cpu(probs: torch.Tensor, top_p: float) -> torch.Tensor:
    """`keep_top_p` without sorting the vocabulary, which would take longer than a pass of a small model.

    It reads tensors on the host, and is an operation that compiled code calls.
    """
    rows = probs.reshape(-1, probs.shape[-1])
    few, token = _gather(rows, rows >= RARE)
    if bool((few.sum(-1) >= top_p + 1e-5).all()):
        few, place = _gather(few, _likely(few, top_p))
        token = token.gather(-1, place)
    else:
        few, token = _gather(rows, _likely(rows, top_p))
    ordered, order = few.sort(dim=-1, descending=True, stable=True)
    kept = _cut(ordered, top_p)
    kept /= kept.cumsum(-1)[:, -1:]  # a running sum does not depend on how many zeros follow
    # It adds because fillers name token 0 again, with probability 0.
    found = torch.zeros_like(rows).scatter_add_(-1, token.gather(-1, order), kept)
    return found.reshape(probs.shape)


@top_p_on_cpu.register_fake
def _(probs: torch.Tensor, top_p: float) -> torch.Tensor:
    return torch.empty_like(probs)


def _cut(ordered: torch.Tensor, top_p: float) -> torch.Tensor:
    """Probabilities [..., n] in falling order, those from the first total of at least top_p on set to 0, in place."""
    before = ordered.cumsum(-1).sub_(ordered)  # of all better tokens: the best one is always kept
    return ordered.masked_fill_(before >= top_p, 0.0)


def _gather(probs: torch.Tensor, mask: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The entries of probs [R, V] where `mask` is set, in order, and their places, [R, n]; 0 where a row has fewer."""
    row, at = mask.nonzero(as_tuple=True)
    count = torch.bincount(row, minlength=len(probs))
    place = torch.arange(len(row)) - (count.cumsum(0) - count)[row]
    width = max(1, int(count.max())) if len(count) else 1
    found, index = probs.new_zeros(len(probs), width), count.new_zeros(len(probs), width)
    found[row, place], index[row, place] = probs[row, at], at
    return found, index


def _likely(probs: torch.Tensor, top_p: float) -> torch.Tensor:
    """Bool [R, V]: all tokens of at least some probability, in each row enough to have top_p with room for rounding.

    Every other token comes after a total of top_p, and so is outside the nucleus.
    """
    floor = torch.full_like(probs[:, :1], FIRST_FLOOR)
    while True:
        likely = probs >= floor
        short = (probs * likely).sum(-1, keepdim=True) < top_p + 1e-5
        short &= floor > 0
        if not short.any():
            return likely
        lower = torch.where(floor > LAST_FLOOR, floor / 8, 0)
        floor = torch.where(short, lower, floor)
