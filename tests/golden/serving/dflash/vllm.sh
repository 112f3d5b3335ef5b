vllm serve org/target \
  --speculative-config '{"model": "me/draft", "method": "dflash", "num_speculative_tokens": 7}'
