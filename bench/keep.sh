#!/usr/bin/env bash
# What it costs to keep only some tokens: the table in docs/quality.md, for a model of the caller's. Some minutes on two cores.
#     bench/keep.sh MODEL.gguf [TOKENS]          KVIST names another program than the one that cargo builds
set -euo pipefail
cd "$(dirname "$0")/.."
model=${1:?give a model: bench/keep.sh MODEL.gguf}
limit=${2:-4096}
source bench/kvist.sh
find_kvist
context=1024
echo "| budget | kept | perplexity | KL mean | KL p99 | top-1 agreement |"
echo "|--:|---|--:|--:|--:|--:|"
row() {
    "$KVIST" eval --model "$model" --weights f32 --text tools/tiny-model/val.txt --context $context --chunk 16 --limit "$limit" --json -q "${@:3}" |
        python3 -c '
import json, sys
r = json.load(sys.stdin)
print("| {} | {} | {:.2f} | {:.2e} | {:.2e} | {:.1f} % |".format(
    sys.argv[1], sys.argv[2], r["perplexity"], r["kl_mean"], r["kl_p99"], 100 * r["top1_agreement"]))' "$1" "$2"
}
row "all" "everything"
for percent in 75 50 25; do
    budget=$((context * percent / 100))
    recent=$((budget / 2))
    top=$((budget - recent - 4))
    row "$percent %" "\`sinks=4,recent=$((budget - 4))\`" --keep "sinks=4,recent=$((budget - 4))"
    for by in last attention; do
        keep="sinks=4,recent=$recent,top=$top,by=$by"
        row "$percent %" "\`$keep\`" --keep "$keep"
    done
done
