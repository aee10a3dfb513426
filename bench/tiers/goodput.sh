#!/usr/bin/env bash
# What a disk is worth: the same chats, which together are five times as long as the cache, without and with a disk, served and
# simulated. Some six minutes on two cores, which nothing else should use.
#     bench/tiers/goodput.sh MODEL.gguf [FOLDER-ON-THE-DISK]
set -euo pipefail
cd "$(dirname "$0")/../.."
model=${1:?give a model: bench/tiers/goodput.sh MODEL.gguf}
folder=$(mktemp -d "${2:-/tmp}/kvist-goodput.XXXXXX")
trap 'rm -rf "$folder"' EXIT
kvist=${KVIST:-target/release/kvist}
[[ -x $kvist ]] || cargo build --release --quiet --features tiers
batch=(--max-batch 8 --max-batch-tokens 256)
"$kvist" bench calibrate --model "$model" "${batch[@]}" --context 1536 --seconds 120 -o "$folder/costs.json"
"$kvist" bench predict --model "$model" --costs "$folder/costs.json" --requests 90 --seed 2 --chats 4s --busy 0.75 --context 3072 \
    --slo-ttft 3s --tier-disk "$folder/blocks" --tier-disk-size 1GiB
