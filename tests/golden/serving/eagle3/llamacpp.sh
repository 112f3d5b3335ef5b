# once, in a checkout of draftsmith
python scripts/export.py me/draft --format gguf --target org/target --out gguf/draft
python scripts/export.py org/target --format gguf --dtype bfloat16 --out gguf/target
llama-server -m gguf/target/model.gguf -md gguf/draft/model.gguf \
  --spec-type draft-eagle3 \
  --spec-draft-n-max 5 \
  --no-spec-draft-backend-sampling
