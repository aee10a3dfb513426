#!/usr/bin/env bash
# Everything about CUDA that needs a GPU of NVIDIA: the tests on it, attention beside the copy bandwidth, branches of one trunk,
# and decoding with random models. Writes bench/gpu/results-NAME.md. GPU=1 takes another GPU than the first.
set -euo pipefail
cd "$(dirname "$0")/../.."
gpu=${GPU:-0}

command -v nvidia-smi >/dev/null 2>&1 || { echo "no nvidia-smi: this needs a machine with a GPU of NVIDIA and its driver" >&2; exit 1; }
name=$(nvidia-smi --id="$gpu" --query-gpu=name --format=csv,noheader) || { echo "nvidia-smi finds no GPU $gpu" >&2; exit 1; }
command -v cargo >/dev/null 2>&1 || { echo "cargo is needed: install Rust with rustup" >&2; exit 1; }
if [[ -z ${KVIST_NVRTC:-} ]] && ! ldconfig -p | grep -q 'libnvrtc\.so'; then
    source bench/gpu/nvrtc.sh # the newest that the driver supports
fi
target=${CARGO_TARGET_DIR:-target}
out=bench/gpu/results-$(tr -cs 'A-Za-z0-9' '-' <<<"$name" | sed 's/-$//').md
echo "GPU $gpu: $name" >&2

echo "== tests on the GPU" >&2
KVIST_CUDA=$gpu KVIST_REQUIRE_CUDA=1 cargo test --release -p kvist-cuda --test operations --test conformance -- --nocapture
KVIST_CUDA=$gpu KVIST_REQUIRE_CUDA=1 cargo test --release -p kvist-engine --features cuda-experimental --test cuda -- --nocapture

echo "== attention" >&2
cargo build --release -p kvist-cuda --example attention
cargo build --release -p kvist --features cuda-experimental
cargo build --release -p random-model
# Clocks are locked where that is permitted.
locked=no
if nvidia-smi --id="$gpu" --lock-gpu-clocks=tdp,tdp >/dev/null 2>&1; then
    locked=yes
    trap 'nvidia-smi --id="$gpu" --reset-gpu-clocks >/dev/null' EXIT
fi
{
    echo "# $name"
    echo
    nvidia-smi --id="$gpu" --query-gpu=driver_version,compute_cap,memory.total,clocks.max.sm --format=csv,noheader
    echo "Clocks locked: $locked. kvist $(git rev-parse --short HEAD 2>/dev/null || echo 'of no commit')."
    echo
    echo "Attention of one decode step: one layer of a Llama 3 8B, by the GPU's clock."
    echo
    echo "| GPU | tokens | K | V | branches | attention | K and V read | copy (read and written) | share |"
    echo "|---|--:|---|---|--:|--:|--:|--:|--:|"
} >"$out"
for storage in f16 bf16 f32 q8 q4; do
    for branches in 1 8; do
        if ! row=$("$target/release/examples/attention" --gpu "$gpu" --tokens 32768 --k $storage --v $storage --branches $branches 2>&1); then
            row="| $name | 32768 | $storage | $storage | $branches | $(tail -n 1 <<<"$row") | | | |"
        fi
        tee -a "$out" <<<"$row"
    done
done

echo "== decoding" >&2
models=$target/gpu-models
mkdir -p "$models"
{
    echo
    echo "Decoding with random models: \`kvist run --backend cuda:$gpu\`, 256 tokens after a prompt of one."
    echo
    echo "| model | weights | K and V | tokens/s |"
    echo "|---|---|---|--:|"
} >>"$out"
decode() { # label, dtype, file
    for kv in f16 f32; do
        report=$("$target/release/kvist" run --backend "cuda:$gpu" --model "$3" --kv $kv --greedy --ignore-eos --max-tokens 256 --json a 2>/dev/null) || report=
        rate=$(grep -o '"decode_tokens_per_second": *[0-9.]*' <<<"$report" | head -1 | grep -o '[0-9.]*$' || echo failed)
        echo "| $1 | $2 | $kv | $rate |" | tee -a "$out"
    done
}
for dtype in f16 q8_0 q4_0; do
    file=$models/1b-$dtype.gguf
    [[ -f $file ]] || "$target/release/random-model" --preset b --dtype $dtype "$file"
    decode "1.1B" $dtype "$file"
done
file=$models/8b-f16.gguf
[[ -f $file ]] || "$target/release/random-model" --preset b --hidden 4096 --layers 32 --heads 32 --kv-heads 8 --head-dim 128 \
    --ff 14336 --dtype f16 "$file"
decode "8B" f16 "$file"
echo "wrote $out" >&2
