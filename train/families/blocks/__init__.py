"""Training of drafts that propose a block of tokens in one pass.

- slots: which positions are anchors of a block, how deep each is trained, and what each slot may attend to
- block_loss: the loss of a batch's slots against the target
- pard: a small language model with mask tokens
"""
