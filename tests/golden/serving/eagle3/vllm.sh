vllm serve org/target \
  --speculative-config '{"model": "me/draft", "method": "eagle3", "num_speculative_tokens": 5, "draft_tensor_parallel_size": 1}'
