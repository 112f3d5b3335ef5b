"""What serving engines require of a draft's files.

checkpoint.py                       the files as rules read them, Rule, and checks that engines share
causal.py, eagle.py, medusa.py      tensors and checks of a family
vllm.py, sglang.py, trtllm.py, hf.py   the table of rules of an engine (hf: transformers)

checkpoint <- causal, eagle, medusa <- engines. It may import decode/.
"""
