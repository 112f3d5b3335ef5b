#!/usr/bin/env bash
# Trains a head by the recipe of assets/eagle3-smollm2 from nothing and measures SmolLM2's tables of docs: SmolLM2-135M-Instruct answers
# 5,000 prompts, an EAGLE-3 head learns from the answers, and is measured on MT-bench, HumanEval, GSM8K and CNN/DailyMail.
# Every family that leaves the target as it is is trained for 300 steps on the same answers and measured too.
# These and GSM8K's training questions come from the Hugging Face Hub. Two CPU cores with AVX512-BF16: hours.
# Run again, it continues where it stopped. GSM8K=FILE reads the questions from a .jsonl file.
# With the argument tuned: SmolLM2 is tuned on GSM8K, and the shipped head measured before, after, and distilled (an hour).
# With the argument qwen2.5-coder: that pair in four bits, its fidelity, and the README's table beside llama.cpp (LLAMA_SERVER: its server).
set -euo pipefail
cd "$(dirname "$0")/.."
. scripts/env.sh
pick_dtype
begun=$SECONDS
if [ "${1:-smollm2}" = qwen2.5-coder ]; then
  out=outputs/qwen2.5-coder
  bash scripts/get_models.sh qwen2.5-coder
  python train/distill.py --config configs/qwen2.5-coder/draft.yaml
  python eval/fidelity.py --target outputs/models/Qwen2.5-Coder-1.5B-Instruct.Q4_K_M.gguf --dtypes '[w4a8, w8a8, bfloat16]' \
    --samples assets/qwen2.5-coder-answers --limit 116 --out $out/fidelity.json
  python eval/run.py --config configs/qwen2.5-coder/eval.yaml
  exit
fi
if [ "${1:-smollm2}" = tuned ]; then
  out=outputs/tuned
  target=$(bash scripts/get_models.sh smollm2)
  python scripts/lab/tune_target.py --target "$target" --rows "${GSM8K:-openai/gsm8k}" --out $out --count 640 --lr 5e-4 --dtype float32
  $launch train/sample.py --config configs/smollm2/tuned_sample.yaml
  $launch train/distill.py --config configs/smollm2/tuned_eagle3.yaml
  python eval/run.py --config configs/smollm2/tuned_eval.yaml --target "$target" --acceptance.pairs '[[shipped, ngram]]' \
    --methods '[{name: ngram}, {name: suffix}, {name: shipped, draft: assets/eagle3-smollm2}]' --out $out/before
  python eval/run.py --config configs/smollm2/tuned_eval.yaml
  exit
fi
out=outputs/smollm2
target=$(bash scripts/get_models.sh smollm2)

python train/write_prompts.py --target "$target" --dtype "$dtype" --batch_size 64 --count 1300 --max_new_tokens 200 \
  --out $out/written
python scripts/lab/task_prompts.py --math "${GSM8K:-openai/gsm8k}" --article_count 240 --out $out/prompts
sample="$launch train/sample.py --config configs/smollm2/sample.yaml --dtype $dtype"
$sample --sources "[{kind: file, path: $out/prompts/articles.jsonl}]" --max_new_tokens 400 --out $out/samples_articles
python scripts/lab/task_prompts.py --articles $out/samples_articles --out $out/summaries
$sample
$sample --sources "[{kind: file, path: $out/prompts/math.jsonl}, {kind: file, path: $out/prompts/code.jsonl}]" \
  --sampling.temperature 0 --out $out/samples_greedy
distill="$launch train/distill.py --target_dtype $dtype --mixed_precision $precision"
for recipe in eagle3 eagle3_longer; do
  $distill --config configs/smollm2/$recipe.yaml
done
family() { $distill --config configs/smollm2/families.yaml --draft "{family: $2}" --out $out/drafts/$1; }
family causal 'causal, layers: [0, 1, 28, 29], vocab: 8192'
python eval/run.py --config configs/smollm2/eval.yaml
python scripts/track_report.py --run $out/drafts/eagle3_longer --report $out/report
family eagle3_300 'eagle3, vocab: 8192, steps: 3'
family eagle1 'eagle1'
family mtp 'mtp, steps: 3'
family medusa 'medusa, heads: 3'
family layerskip 'layerskip, vocab: 8192, exit_layer: 8'
family pard 'pard, layers: [0, 1, 28, 29], vocab: 8192, block: 6'
family peagle 'peagle, vocab: 8192, block: 6, retention: 0.7'
family dflash 'dflash, vocab: 8192, block: 6, depth: 2, taps: [2, 15, 27]'
family dspark 'dspark, vocab: 8192, block: 6, depth: 2, taps: [2, 15, 27], markov_rank: 64'
python eval/run.py --config configs/smollm2/families_eval.yaml
printf '\ndone in %d s: %s/report/report.html\n' $((SECONDS - begun)) $out
