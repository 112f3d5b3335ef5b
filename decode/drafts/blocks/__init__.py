"""Drafts that propose a block of tokens in one pass.

- pard: a small language model that reads mask tokens in place of the tokens it has not drafted yet

A pass gives one distribution for each position of the block, all from the committed text alone. `level_step` hands them
to decode.drafts.drafting, which makes chains and trees of them as of any draft's distributions.
"""
