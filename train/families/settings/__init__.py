"""The settings of each trained family: a class that builds the draft in training, and knows the sizes of a saved one.

    base.py        what all families have, and what those have whose training continues a saved draft
    causal.py      a small language model
    blocks.py      PARD and P-EAGLE
    eagle.py       EAGLE-1 and EAGLE-3
    dflash.py      DFlash and DSpark
    medusa.py      Medusa, also together with the target
    mtp.py         multi-token prediction layers
    layerskip.py   exits of the target, and the target trained for early exit

Nothing here imports torch when it is loaded: `train/distill.py --help` answers at once.
"""
