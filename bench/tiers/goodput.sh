#!/usr/bin/env bash
# What a disk is worth: the same load, whose working set is five times the cache, without and with a disk, served and simulated.
# Six to twelve minutes on two cores, which nothing else should use.
#     bench/tiers/goodput.sh MODEL.gguf [FOLDER-ON-THE-DISK]
# The load is chats, or with TRACE=conversation_trace.jsonl conversations of Mooncake's trace that have three turns or more
# (conversations.py; https://github.com/kvcache-ai/Mooncake), one token for 64 of its own. BUSY is the share of the time that the
# machine is to be busy with the disk.
set -euo pipefail
cd "$(dirname "$0")/../.."
model=${1:?give a model: bench/tiers/goodput.sh MODEL.gguf}
folder=$(mktemp -d "${2:-/tmp}/kvist-goodput.XXXXXX")
trap 'rm -rf "$folder"' EXIT
kvist=${KVIST:-target/release/kvist}
[[ -x $kvist ]] || cargo build --release --quiet --features tiers
calibrate=(--max-batch 8 --max-batch-tokens 256 --context 1536 --seconds 120)
load=(--requests 90 --seed 2 --chats 4s --busy "${BUSY:-0.75}" --context 3072 --slo-ttft 3s --tier-disk-size 1GiB)
if [[ -n ${TRACE:-} ]]; then
    # An id of the trace stands for 512 tokens, of which 8 are left: a block. The working set are 1,614 ids, the cache has 323.
    python3 bench/tiers/conversations.py "$TRACE" --turns 3 --conversations 390 --output "$folder/conversations.jsonl"
    calibrate=(--max-batch 8 --max-batch-tokens 256 --context 2584 --block-tokens 8 --seconds 135)
    load=(--load "$folder/conversations.jsonl" --scale-tokens 1/64 --busy "${BUSY:-0.6}" --context 2584 --slo-ttft 2s --tier-disk-size 6GiB)
fi
"$kvist" bench calibrate --model "$model" "${calibrate[@]}" -o "$folder/costs.json"
"$kvist" bench predict --model "$model" --costs "$folder/costs.json" "${load[@]}" --tier-disk "$folder/blocks"
