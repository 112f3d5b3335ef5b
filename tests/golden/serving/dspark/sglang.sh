# trained for revision 4e0f3a1 of the target
python -m sglang.launch_server \
  --model org/target \
  --speculative-algorithm DSPARK \
  --speculative-draft-model-path me/draft \
  --speculative-num-steps 8 \
  --speculative-eagle-topk 1 \
  --speculative-num-draft-tokens 9
