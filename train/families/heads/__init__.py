"""Training of heads that draft token by token from the target's hidden states.

eagle.py          EAGLE-1 and EAGLE-3;  eagle_init.py  their first weights
ttt_attention.py  attention of EAGLE-3's training-time test
mtp.py            multi-token prediction layers, the target's own or new ones
layerskip.py      exits of the target after its first layers
medusa.py         Medusa heads
lora_target.py    the target in training itself, for the next two
medusa2.py        Medusa heads trained together with the target
layerskip2.py     the target trained for early exit;  layer_dropout.py  its dropped layers and the weights of its exits
"""
