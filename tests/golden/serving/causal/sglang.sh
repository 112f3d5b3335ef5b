python -m sglang.launch_server \
  --model org/target \
  --speculative-algorithm STANDALONE \
  --speculative-draft-model-path me/draft \
  --speculative-num-steps 3 \
  --speculative-eagle-topk 1 \
  --speculative-num-draft-tokens 4
