trtllm-serve org/target \
  --backend pytorch \
  --extra_llm_api_options serving/trtllm.yml
