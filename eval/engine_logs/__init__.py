"""What serving engines log of speculative decoding, read into the counts that our metrics use.

- counts: drafted and accepted tokens of one request, or of a whole server.
- prometheus: the lines of a /metrics dump.
- spec_counters: the dumps of vLLM and llama.cpp as counts.
- printed: counts behind the rounded figures of a server's own log.
- streams: answers that were saved as they were streamed.
- vllm_log, sglang_log, llamacpp_log: one engine's responses and own log as counts, and SGLang's dump.
- own_log: the lines of our outputs.jsonl as counts.
- reading: which engine wrote a log.

May import eval.metrics and decode, nothing else of eval. docs/engine_logs.md says where each format was read.
"""
