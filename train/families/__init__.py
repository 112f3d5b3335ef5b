"""Draft families in training: a family is a class of settings, and what makes a TrainableDraft of it.

    registry.py       the settings of trained families by name;  builders.py  what makes a draft in training of them
    settings/         their settings, which are read without torch
    base.py           TrainableDraft, FamilyContext: what a family brings to training and what it is built from
    causal.py         a small language model
    eagle.py          EAGLE-1 and EAGLE-3;  ttt_attention.py  attention of EAGLE-3's training-time test
    medusa.py         Medusa heads, also together with the target
    mtp.py            multi-token prediction layers, the target's own or new ones
    layerskip.py      exits of the target after its first layers;  layerskip2.py  the target trained for early exit
    blocks.py         drafts of a block in one pass: PARD, P-EAGLE;  dflash.py  DFlash, DSpark
    slots.py          which positions of such drafts are trained, and their loss: block_loss.py
    lora_target.py    the target in training itself
    head_loss.py      the loss of heads at supervised target rows, and weights of their steps
    alignment.py      which input, label, teacher row and position belong together

May import decode, train.settings, train.data, train.losses and train.teacher.
"""
