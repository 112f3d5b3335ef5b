#!/usr/bin/env bash
# The whole pipeline on the bundled models: samples, distills three drafts, decodes, reports, makes the Hub folder.
# Two CPU cores, no GPU, no network except the package index: 14 minutes after installation at 50 GFLOP/s per core.
# Run again, it continues where it stopped; `rm -r outputs/quickstart` starts over.
set -euo pipefail
cd "$(dirname "$0")/.."
. scripts/env.sh
begun=$SECONDS

stage() { printf '\n\033[1m[%s] %s\033[0m\n' "$(date +%T)" "$*"; }

stage "1/5 the target answers prompts"
$launch train/sample.py --config configs/quickstart/sample.yaml
stage "2/5 three drafts learn from the answers: a small LM, Medusa heads, an EAGLE-3 head"
for draft in causal medusa eagle3; do
  $launch train/distill.py --config configs/quickstart/$draft.yaml
done
stage "3/5 decoding with the draft: green accepted, red rejected, blue from the target"
python decode/generate.py --draft outputs/quickstart/drafts/causal --max_new_tokens 80 \
  --prompt $'def read_config(path):\n    """Return the settings in the file at path."""\n    with'
stage "4/5 acceptance and speed-up"
python eval/run.py --config configs/quickstart/eval.yaml
python scripts/track_report.py --run outputs/quickstart/drafts/causal --report outputs/quickstart/report
stage "5/5 the folder for the Hugging Face Hub (nothing is sent)"
python scripts/publish.py --draft outputs/quickstart/drafts/causal --report outputs/quickstart/report/report.json \
  --repo you/tiny-draft --out outputs/quickstart/published > outputs/quickstart/published.txt
sed -n 1,20p outputs/quickstart/published.txt

printf '\ndone in %d s: open outputs/quickstart/report/report.html\n' $((SECONDS - begun))
