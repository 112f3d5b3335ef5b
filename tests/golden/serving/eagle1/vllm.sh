vllm serve org/target \
  --speculative-config '{"model": "me/draft", "method": "eagle", "num_speculative_tokens": 4, "draft_tensor_parallel_size": 1}'
