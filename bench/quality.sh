#!/usr/bin/env bash
# What quantised caches cost in quality: rewrites the table in docs/quality.md. Some minutes on two cores.
set -euo pipefail
cd "$(dirname "$0")/.."
cargo build --release --quiet
kvist=target/release/kvist
text=tools/tiny-model/val.txt
tokens=${TOKENS:-8192}
out=docs/quality.md
marker='<!-- made by bench/quality.sh; do not edit below -->'

rows() {
    echo "$marker"
    echo
    echo "\`kvist eval --weights f32 --text $text --context CONTEXT --kv K --kv-v V --reference f32 --limit $tokens --json\`"
    for context in 256 512 1024; do
        echo
        echo "Context $context:"
        echo
        echo "| K | V | bits per value | bytes per token | perplexity | KL mean | KL p99 | KL max | top-1 agreement |"
        echo "|---|---|--:|--:|--:|--:|--:|--:|--:|"
        while read -r k v; do
            $kvist eval --weights f32 --text $text --context $context --kv "$k" --kv-v "$v" --limit "$tokens" --json -q |
                python3 -c '
import json, sys
r = json.load(sys.stdin)
bits = r["kv_bytes_per_token"] * 8 / (2 * 8 * 2 * 64)
print("| {} | {} | {:.2f} | {} | {:.4f} | {:.2e} | {:.2e} | {:.2e} | {:.2f} % |".format(
    r["cache"]["k"], r["cache"]["v"], bits, r["kv_bytes_per_token"], r["perplexity"],
    r["kl_mean"], r["kl_p99"], r["kl_max"], 100 * r["top1_agreement"]))'
        done <<'PAIRS'
f32 f32
f16 f16
bf16 bf16
q8 q8
q8-64 q8-64
q8-rot q8-rot
q4 q4
q4-64 q4-64
q4-rot q4-rot
q4-64-rot q4-64-rot
q4 f16
q4-rot f16
f16 q4
f16 q4-rot
q8 q4
t4-o t4
t4 t4
PAIRS
    done
}

table=$(mktemp)
rows >"$table"
{ sed "/^${marker//\//\\/}/,\$d" "$out"; cat "$table"; } >"$out.new"
mv "$out.new" "$out"
rm "$table"
