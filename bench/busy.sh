#!/usr/bin/env bash
# Tokens per second with one busy process beside kvist, over those on a quiet machine, in turns.
# bench/busy.sh MODEL [ROUNDS]; without a model the embedded one. KVIST names another program than the one that cargo builds.
set -euo pipefail
cd "$(dirname "$0")/.."
source bench/kvist.sh
find_kvist
model=(${1:+--model "$1"})
rounds=${2:-3}
rate() { "$KVIST" bench decode "${model[@]}" --runs 3 --tokens 24 --json -q | python3 -c 'import json,sys; print(json.load(sys.stdin)["tokens_per_s"])'; }
for _ in $(seq "$rounds"); do
    quiet=$(rate)
    (while :; do :; done) &
    other=$!
    trap 'kill $other 2>/dev/null || true' EXIT
    busy=$(rate)
    kill $other
    wait $other 2>/dev/null || true
    python3 -c "print(f'quiet {$quiet:.1f} tokens/s, beside a busy process {$busy:.1f}: {$busy / $quiet:.2f}')"
done
