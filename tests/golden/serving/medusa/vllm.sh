vllm serve org/target \
  --speculative-config '{"model": "me/draft", "method": "medusa", "num_speculative_tokens": 4}'
