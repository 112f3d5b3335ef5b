"""Draft families in training. `train.families.registry.family_trainer(name)` gives the FamilyTrainer of a family.

    base.py           FamilyTrainer, TrainableDraft, FamilyContext: what a family brings to training
    config.py         DraftConfig, the settings of the draft
    registry.py       the trainer of each family in decode/drafts/registry.py
    causal.py         a small language model
    heads/            heads on the target's hidden states: Medusa, EAGLE, native MTP layers
    blocks/           drafts that propose a block in one pass: PARD, P-EAGLE, DFlash, DSpark
    head_init.py      initial weights of heads, and checks of settings and target
    head_loss.py      the loss of heads at supervised target rows, and weights of their steps
    alignment.py      which input, label, teacher row and position belong together

May import decode, train.data, train.losses and train.teacher.
"""
