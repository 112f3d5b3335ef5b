"""Other engines that serve drafts: what each requires of the files, how it is called, and what it counts.

- engine: ServingEngine, the type of the values in vllm_engine, sglang_engine, trtllm_engine, llamacpp_engine, hf_engine
- rules: a draft's files as rules read them, and Rule; checks: of which engines' rules are made
- target_outline: a target without its weights, to load and check a draft's folder
- checker: ENGINES by name, and a draft's files against the rules of one (scripts/check_draft.py)
- export: a draft in the layouts of engines and trainers (scripts/export.py); gguf_export, gguf_heads: as a GGUF file
- prometheus: reads /metrics dumps; log_counts: what they are read into
- running/: engines that run: started, asked and ended

It may import decode/'s common, model, verification, checkpoints, drafts and engine; the rest of decode/ does not import
it.
"""
