#!/usr/bin/env bash
# Everything `just rivals` does: the rivals, kvist, the models, the comparison. Arguments go to compare.py.
set -euo pipefail
cd "$(dirname "$0")/../.."
bench/rivals/install.sh
cargo build --release --quiet -p kvist
cargo build --release --quiet --manifest-path tools/random-model/Cargo.toml --target-dir "${CARGO_TARGET_DIR:-target}"
built=${CARGO_TARGET_DIR:-target}/release
models=bench/target/models
mkdir -p $models
[ -e $models/b-q8_0.gguf ] || "$built/random-model" --preset b --dtype q8_0 $models/b-q8_0.gguf
[ -e $models/b-q4_0.gguf ] || "$built/random-model" --preset b --dtype q4_0 $models/b-q4_0.gguf
[ -e $models/b-bf16 ] || "$built/random-model" --preset b --format safetensors --dtype bf16 $models/b-bf16
bench/rivals/compare.py --kvist "$built/kvist" "$@"
