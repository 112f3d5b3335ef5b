vllm serve HuggingFaceTB/SmolLM2-135M-Instruct \
  --speculative-config '{"model": "draftsmith/eagle3-smollm2", "method": "eagle3", "num_speculative_tokens": 3, "draft_tensor_parallel_size": 1}'
