python -m sglang.launch_server \
  --model HuggingFaceTB/SmolLM2-135M-Instruct \
  --speculative-algorithm EAGLE3 \
  --speculative-draft-model-path draftsmith/eagle3-smollm2 \
  --speculative-num-steps 3 \
  --speculative-eagle-topk 1 \
  --speculative-num-draft-tokens 4
