vllm serve org/target \
  --speculative-config '{"model": "me/draft", "method": "draft_model", "num_speculative_tokens": 3}'
