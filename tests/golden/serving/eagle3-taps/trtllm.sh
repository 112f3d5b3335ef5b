# trained for revision 4e0f3a1 of the target
trtllm-serve org/target \
  --backend pytorch \
  --extra_llm_api_options serving/trtllm.yml
