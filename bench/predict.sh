#!/usr/bin/env bash
# How far off is the simulator? Measures the step costs of this machine with the embedded model (--model M for another),
# then serves a load that was not part of that, and simulates it: three times, with three loads. What a machine gives moves
# with its neighbours, so each load has a table of its own, measured just before. Prints Markdown for bench/RESULTS.md.
# KVIST_SECONDS (90) is the time of each; KVIST_SEEDS ("1 2 3") are the loads; KVIST names another program than the one that cargo builds.
set -euo pipefail
cd "$(dirname "$0")/.."
source bench/kvist.sh
find_kvist
seconds=${KVIST_SECONDS:-90}
folder=$(mktemp -d)
trap 'rm -r "$folder"' EXIT
echo "By \`just predict\` on $(date -u +%Y-%m-%d)."
for seed in ${KVIST_SEEDS:-1 2 3}; do
    echo
    echo '```'
    "$KVIST" bench calibrate "$@" --seconds "$seconds" -o "$folder/costs.json"
    echo '```'
    echo
    "$KVIST" bench predict "$@" --costs "$folder/costs.json" --seconds "$seconds" --seed "$seed" \
        --trace "$folder/load.jsonl" --record "$folder/run.jsonl" >"$folder/prediction"
    sed -e 's/^What was served, replayed:$/\n```/' "$folder/prediction"
    echo '```'
done
