"""Draft families in training. `train.families.registry.family_trainer(name)` gives the FamilyTrainer of a family.

    base.py           FamilyTrainer, TrainableDraft, FamilyContext: what a family brings to training
    config.py         DraftConfig, the settings of the draft
    registry.py       the trainer of each family in decode/drafts/registry.py
    causal.py         a small language model
    eagle.py          EAGLE-1 and EAGLE-3;  ttt_attention.py  attention of EAGLE-3's training-time test
    medusa.py         Medusa heads, also together with the target
    mtp.py            multi-token prediction layers, the target's own or new ones
    layerskip.py      exits of the target after its first layers;  layerskip2.py  the target trained for early exit
    blocks.py         drafts of a block in one pass: PARD, P-EAGLE;  dflash.py  DFlash, DSpark
    slots.py          which positions of such drafts are trained, and their loss: block_loss.py
    lora_target.py    the target in training itself
    head_init.py      initial weights of heads, and checks of settings and target
    head_loss.py      the loss of heads at supervised target rows, and weights of their steps
    alignment.py      which input, label, teacher row and position belong together

May import decode, train.data, train.losses and train.teacher.
"""
