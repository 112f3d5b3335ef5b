text-generation-launcher \
  --model-id me/draft \
  --speculate 4
