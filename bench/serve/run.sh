#!/usr/bin/env bash
# Everything `just bench-serve` does: llama-server of every build of the rival, kvist, two random models of 134M and 1.1B parameters, the
# comparison. Arguments go to compare.py: --write puts the figures into bench/RESULTS.md, --model measures that file instead of both models.
# KVIST and RANDOM_MODEL name other programs than those that cargo builds.
set -euo pipefail
cd "$(dirname "$0")/../.."
source bench/kvist.sh
bench/rivals/install.sh
shopt -s nullglob
servers=()
for done in bench/target/rivals/llama-*/done; do
    build=${done%/done}/build
    if [[ ! -x $build/bin/llama-server ]]; then
        log=$build/server-build.log
        { cmake "$build" -DLLAMA_BUILD_SERVER=ON -DLLAMA_BUILD_UI=OFF &&
            cmake --build "$build" -j"${JOBS:-$(nproc)}" --target llama-server; } >"$log" 2>&1 ||
            { echo "run.sh: llama-server was not built: see $log" >&2; exit 1; }
    fi
    servers+=(--llama "$build/bin/llama-server")
done
((${#servers[@]})) || { echo "run.sh: bench/rivals/install.sh has built no llama.cpp" >&2; exit 1; }
find_kvist
for argument in "$@"; do
    [[ $argument != --model && $argument != --model=* ]] || exec bench/serve/compare.py --kvist "$KVIST" "${servers[@]}" "$@"
done
models=bench/target/models
mkdir -p $models
for preset in a b; do
    file=$models/$preset-q8_0.gguf
    if [[ ! -e $file ]]; then
        find_random_model
        "$RANDOM_MODEL" --preset $preset --dtype q8_0 $file
    fi
    bench/serve/compare.py --kvist "$KVIST" "${servers[@]}" --model $file "$@"
done
