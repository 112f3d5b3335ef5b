#!/usr/bin/env bash
# Trains four draft families on the samples of configs/compare/sample.yaml at equal steps and evaluates them side by side.
# About an hour on two CPU cores once the samples exist. Run again, it continues where it stopped.
set -euo pipefail
cd "$(dirname "$0")/../.."
. scripts/env.sh

$launch train/sample.py --config configs/compare/sample.yaml
for family in causal medusa eagle1 eagle3; do
  $launch train/distill.py --config configs/compare/$family.yaml
done
python eval/run.py --config configs/compare/eval.yaml
