# once, in a checkout of draftsmith
python scripts/export.py draftsmith/eagle3-smollm2 --format gguf --target HuggingFaceTB/SmolLM2-135M-Instruct --out gguf/draft
python scripts/export.py HuggingFaceTB/SmolLM2-135M-Instruct --format gguf --dtype bfloat16 --out gguf/target
llama-server -m gguf/target/model.gguf -md gguf/draft/model.gguf \
  --spec-type draft-eagle3 \
  --spec-draft-n-max 3 \
  --no-spec-draft-backend-sampling
