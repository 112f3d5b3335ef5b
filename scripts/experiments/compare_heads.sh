#!/usr/bin/env bash
# All families on the samples of scripts/reproduce.sh, equal steps: which accepts most, which is fastest here?
# About an hour on two CPU cores once the samples are there. Run again, it goes on where it stopped.
set -euo pipefail
cd "$(dirname "$0")/.."
. scripts/env.sh

$launch train/sample.py --config configs/reproduce/sample.yaml
for family in causal medusa eagle1 eagle3; do
  $launch train/distill.py --config configs/compare/$family.yaml
done
python eval/run.py --config configs/compare/eval.yaml
