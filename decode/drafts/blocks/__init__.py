"""Drafts that propose a block of tokens in one pass.

levels         the distributions of a block as steps of decode.drafts.drafting
pard           a small language model that reads mask tokens in place of the tokens it has not drafted yet
peagle         EAGLE-3's network with a mask in place of its own states
dflash         DFlash and DSpark: layers over a block of masks, with the target's states as context
mask_token     the check of a mask token in heads
dflash_model   their network
"""
