#!/usr/bin/env bash
# What quantised caches cost in quality: rewrites the tables in docs/quality.md. Half an hour on two cores. KVIST=FILE measures that program
# instead of a new build.
set -euo pipefail
cd "$(dirname "$0")/.."
source bench/kvist.sh
find_kvist
text=tools/tiny-model/val.txt
tokens=${TOKENS:-8192}
out=docs/quality.md
begin='<!-- made by bench/quality.sh -->'
end='<!-- /made by bench/quality.sh -->'

rows() {
    echo
    echo "\`kvist eval --weights f32 --text $text --context CONTEXT --kv K --kv-v V --reference f32 --limit $tokens --json\`"
    for context in 256 512 1024; do
        echo
        echo "Context $context:"
        echo
        echo "| K | V | bits per value | bytes per token | perplexity | KL mean | KL p99 | KL max | top-1 agreement |"
        echo "|---|---|--:|--:|--:|--:|--:|--:|--:|"
        while read -r k v; do
            "$KVIST" eval --weights f32 --text $text --context $context --kv "$k" --kv-v "$v" --limit "$tokens" --json -q |
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
trap 'rm -f "$table" "$out.new"' EXIT
rows >"$table"
echo >>"$table"
# Replaces what is between the markers.
sed -e "\\#^$begin#r $table" -e "\\#^$begin#,\\#^$end#{\\#^$begin#b;\\#^$end#b;d}" "$out" >"$out.new"
mv "$out.new" "$out"
