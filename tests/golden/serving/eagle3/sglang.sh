python -m sglang.launch_server \
  --model org/target \
  --speculative-algorithm EAGLE3 \
  --speculative-draft-model-path me/draft \
  --speculative-num-steps 5 \
  --speculative-eagle-topk 1 \
  --speculative-num-draft-tokens 6
