#!/usr/bin/env bash
# Everything `just bench-serve` does: llama-server beside the other rivals, kvist, two random models of 134M and 1.1B
# parameters, the comparison. Arguments go to compare.py; without any, both models go into bench/RESULTS.md.
set -euo pipefail
cd "$(dirname "$0")/../.."
bench/rivals/install.sh
build=$(ls -d bench/target/rivals/llama-clang*/build bench/target/rivals/llama-gcc*/build 2>/dev/null | head -1)
if [ ! -x "$build/bin/llama-server" ]; then
    cmake "$build" -DLLAMA_BUILD_SERVER=ON -DLLAMA_BUILD_UI=OFF >"$build/server-cmake.log"
    cmake --build "$build" -j"${JOBS:-$(nproc)}" --target llama-server >"$build/server-build.log"
fi
cargo build --release --quiet -p kvist
cargo build --release --quiet --manifest-path tools/random-model/Cargo.toml --target-dir "${CARGO_TARGET_DIR:-target}"
built=${CARGO_TARGET_DIR:-target}/release
models=bench/target/models
mkdir -p $models
for preset in a b; do
    [ -e $models/$preset-q8_0.gguf ] || "$built/random-model" --preset $preset --dtype q8_0 $models/$preset-q8_0.gguf
    [ $# -gt 0 ] ||
        bench/serve/compare.py --kvist "$built/kvist" --llama "$build/bin/llama-server" \
            --model $models/$preset-q8_0.gguf --write
done
[ $# -eq 0 ] || bench/serve/compare.py --kvist "$built/kvist" --llama "$build/bin/llama-server" "$@"
