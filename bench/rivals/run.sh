#!/usr/bin/env bash
# Everything `just rivals` does: the rivals, kvist, the models, the comparison. Arguments go to compare.py. KVIST and RANDOM_MODEL name other
# programs than those that cargo builds.
set -euo pipefail
cd "$(dirname "$0")/../.."
source bench/kvist.sh
bench/rivals/install.sh
find_kvist
models=bench/target/models
mkdir -p $models
make() { # FILE OPTIONS…: makes a model unless it is there
    local file=$models/$1
    [[ ! -e $file ]] || return 0
    find_random_model
    "$RANDOM_MODEL" --preset b "${@:2}" "$file"
}
make b-q8_0.gguf --dtype q8_0
make b-q4_0.gguf --dtype q4_0
make b-bf16 --format safetensors --dtype bf16
bench/rivals/compare.py --kvist "$KVIST" "$@"
