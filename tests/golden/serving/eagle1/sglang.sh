python -m sglang.launch_server \
  --model org/target \
  --speculative-algorithm EAGLE \
  --speculative-draft-model-path me/draft \
  --speculative-num-steps 4 \
  --speculative-eagle-topk 1 \
  --speculative-num-draft-tokens 5
