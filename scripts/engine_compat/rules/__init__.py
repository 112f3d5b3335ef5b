"""What serving engines require of a draft's files.

checkpoint.py                       the files as rules read them, Rule, and checks that engines share
causal.py, eagle.py, medusa.py      tensors and checks of a family
blocks.py                           the same for PARD, P-EAGLE, DFlash, DSpark and MTP layers
vllm.py, sglang.py, trtllm.py, hf.py   the table of rules of an engine (hf: transformers)
llamacpp.py                         the same, and how heads are written for it as GGUF

checkpoint <- causal, eagle, medusa, blocks <- engines. It may import decode/.
"""
