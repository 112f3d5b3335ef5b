# once, in a checkout of draftsmith
python scripts/export.py me/draft --format gguf --target org/target --out gguf/draft
python scripts/export.py org/target --format gguf --dtype bfloat16 --out gguf/target
# trained for revision 4e0f3a1 of the target
llama-server -m gguf/target/model.gguf -md gguf/draft/model.gguf \
  --spec-type draft-dspark \
  --spec-draft-n-max 8
