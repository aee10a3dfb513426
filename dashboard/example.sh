#!/usr/bin/env bash
# Writes the recording that the page shows without a server: agents that start others, in a cache that is a little too small.
# An earlier random number generator made the committed file, so running this replaces it with other requests.
set -euo pipefail
cd "$(dirname "$0")/.."
file=$(mktemp)
trap 'rm -f "$file"' EXIT
cargo run --release -p kvist -- simulate --seed 9 --requests 80 --arrivals on_off:per_s=3,on_s=5,off_s=4 \
    --contents agents:fan_out=3,depth=2,system_tokens=160,tokens_per_id=16 \
    --prompt-tokens lognormal:mean=110,variation=0.8 --output-tokens lognormal:mean=70,variation=0.7 \
    --capacity-blocks 240 --prefill-rate 2.5 --decode-rate 0.4 --max-batch 16 --batch-tokens 192 --max-new 200 \
    --record "$file" >/dev/null
gzip -9nc "$file" >dashboard/public/example.jsonl.gz
