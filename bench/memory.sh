#!/usr/bin/env bash
# The largest anonymous memory of a run (resident, less pages of files), beside the bound `kvist plan` prints.
# bench/memory.sh [MODEL [CONTEXT]]; without a model the embedded one. KVIST names another program than the one that cargo builds.
set -euo pipefail
cd "$(dirname "$0")/.."
source bench/kvist.sh
find_kvist
context=${2:-1024}
new_tokens=64
bytes=$((context - new_tokens - 8))
((bytes > 0)) || { echo "memory.sh: a context of $context is too short: give 128 at least" >&2; exit 1; }
bound=$("$KVIST" plan ${1:+"$1"} --context "$context" --json | python3 -c 'import json,sys; print(json.load(sys.stdin)["bound"]["total"])')
work=$(mktemp -d)
run=
trap '[ -z "$run" ] || kill "$run" 2>/dev/null || true; rm -rf "$work"' EXIT
# A token has one byte at least, so that this prompt, a few control tokens and the new tokens fit into the context with any tokenizer.
head -c "$bytes" tools/tiny-model/val.txt >"$work/prompt"
"$KVIST" run ${1:+--model "$1"} --raw -f "$work/prompt" --context "$context" --max-tokens $new_tokens --ignore-eos --greedy -q >/dev/null 2>"$work/errors" &
run=$!
peak=0
while kill -0 $run 2>/dev/null; do
    now=$(awk '/^RssAnon/ { print $2 * 1024 }' /proc/$run/status 2>/dev/null || echo 0)
    if [ "${now:-0}" -gt "$peak" ]; then peak=$now; fi
    sleep 0.005
done
status=0
wait $run || status=$?
run=
if [ $status != 0 ] || [ "$peak" = 0 ]; then
    cat "$work/errors" >&2
    echo "memory.sh: kvist run ended with $status; its largest memory was $peak bytes" >&2
    exit 1
fi
python3 -c "print(f'peak {$peak / 2**20:.2f} MiB, bound {$bound / 2**20:.2f} MiB: {($peak - $bound) / 2**20:+.2f} MiB')"
