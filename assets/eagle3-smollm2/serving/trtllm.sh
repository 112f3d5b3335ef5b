trtllm-serve HuggingFaceTB/SmolLM2-135M-Instruct \
  --backend pytorch \
  --extra_llm_api_options serving/trtllm.yml
