#!/usr/bin/env bash
# Decode steps with kvist's caches and with ExecuTorch's own, in turns: `just bench-executorch`. Arguments go to steps.py.
set -euo pipefail
cd "$(dirname "$0")/../.."
python=$(crates/executorch/environment.sh)
out=$(realpath -m "${CARGO_TARGET_DIR:-target}/executorch")
crates/executorch/build.sh "$python" "$out"
PYTHONPATH=$(crates/executorch/wheel.sh "$python" "$out")
export PYTHONPATH KVIST_EXECUTORCH_LIBRARY=$out/libkvist_executorch.so
"$python" bench/executorch/steps.py "$@"
