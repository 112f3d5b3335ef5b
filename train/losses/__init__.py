"""Losses between the target distribution p and the draft distribution q.

    divergences.py  forward and reverse KL, JSD, TV, LK losses, cross-entropies and acceptance, one value per position
    objective.py    the loss of a position: a divergence, its temperature, and weighted further divergences

May import decode, eval and train.data.
"""
