"""Running engines of others: started, asked and ended.

- completions: requests to a server with OpenAI's API: which model it serves, repeated attempts, the key.
- server_process: a server that is started for one run; server_guard runs beside it and ends it with its children.
- llama_server: llama.cpp's server for one run.
- vllm_client: jobs for vLLM in an environment of its own, where vllm_worker answers them, and vllm_cpu_states writes
  hidden states. These two import nothing of ours.
"""
