"""Training of drafts that propose a block of tokens in one pass.

slots.py        which positions are anchors, how deep each is trained, and what each slot may attend to
block_loss.py   the loss of a batch's slots against the target
mask_token.py   which token stands for one that is not drafted yet
pard.py         a small language model with mask tokens
peagle.py       EAGLE-3's network with masks
dflash.py       DFlash and DSpark
"""
