#!/usr/bin/env bash
# Measures the README's table: the quickstart's pipeline with more samples, more steps and every evaluation prompt.
# Two CPU cores: under 60 minutes. Run again, it continues where it stopped.
set -euo pipefail
cd "$(dirname "$0")/.."
. scripts/env.sh
begun=$SECONDS
$launch train/sample.py --config configs/reproduce/sample.yaml
$launch train/distill.py --config configs/reproduce/causal.yaml
python eval/run.py --config configs/reproduce/eval.yaml
python scripts/track_report.py --run outputs/reproduce/drafts/causal --report outputs/reproduce/report
printf '\ndone in %d s: outputs/reproduce/report/report.md\n' $((SECONDS - begun))
