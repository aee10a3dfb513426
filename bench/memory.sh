#!/usr/bin/env bash
# The largest anonymous memory of a run (resident, less pages of files), beside the bound `kvist plan` prints.
# bench/memory.sh [MODEL [CONTEXT]]; without a model the embedded one.
set -euo pipefail
cd "$(dirname "$0")/.."
kvist=target/release/kvist
[ -x $kvist ] || cargo build --release --quiet
context=${2:-1024}
bound=$($kvist plan ${1:+"$1"} --context "$context" --json | python3 -c 'import json,sys; print(json.load(sys.stdin)["bound"]["total"])')
prompt=$(mktemp)
trap 'rm -f "$prompt"' EXIT
# Two bytes to a token at least: it fits, whatever the tokenizer.
head -c "$context" tools/tiny-model/val.txt >"$prompt"
$kvist run ${1:+--model "$1"} --raw -f "$prompt" --context "$context" --max-tokens 64 --ignore-eos --greedy -q >/dev/null 2>&1 &
run=$!
peak=0
while kill -0 $run 2>/dev/null; do
    now=$(awk '/^RssAnon/ { print $2 * 1024 }' /proc/$run/status 2>/dev/null || echo 0)
    [ "${now:-0}" -gt "$peak" ] && peak=$now
    sleep 0.005
done
python3 -c "print(f'peak {$peak / 2**20:.2f} MiB, bound {$bound / 2**20:.2f} MiB: {($peak - $bound) / 2**20:+.2f} MiB')"
