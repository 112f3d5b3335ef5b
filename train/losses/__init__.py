"""Losses between the target distribution p and the draft distribution q.

    divergences.py  forward and reverse KL, JSD, TV, LK losses, cross-entropies and acceptance, one value per position
    chunked_sums.py  losses a few rows at a time, with their gradients
    objective.py    the loss of a position: a divergence, its temperature, and weighted further divergences

May import decode, eval, train.settings and train.data.
"""
