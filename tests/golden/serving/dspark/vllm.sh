vllm serve org/target \
  --revision 4e0f3a1 \
  --speculative-config '{"model": "me/draft", "method": "dspark", "num_speculative_tokens": 8}'
