vllm serve org/target \
  --revision 4e0f3a1 \
  --speculative-config '{"model": "me/draft", "method": "eagle3", "num_speculative_tokens": 5, "draft_tensor_parallel_size": 1}'
