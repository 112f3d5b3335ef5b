python -m sglang.launch_server \
  --model org/target \
  --speculative-algorithm DFLASH \
  --speculative-draft-model-path me/draft \
  --speculative-num-steps 7 \
  --speculative-eagle-topk 1 \
  --speculative-num-draft-tokens 8
