"""Servers that speak OpenAI's API.

    client.py            the requests: which model is served, repeated attempts, the key
    server_process.py    how a server is started, awaited and ended
    server_guard.py      runs beside a server and ends it, with its children, when the command is gone
    vllm_cpu_states.py   runs in vLLM's environment: hidden states written to files by its CPU build

May import decode and eval.
"""
