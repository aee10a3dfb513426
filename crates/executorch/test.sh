#!/usr/bin/env bash
# kvist's caches in ExecuTorch's runtimes: builds the library, exports small models and runs them. Arguments go to pytest.
set -euo pipefail
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
root=$(cd "$here/../.." && pwd)
python=$("$here/environment.sh")
export CARGO_TARGET_DIR=${CARGO_TARGET_DIR:-$root/target}
out=$CARGO_TARGET_DIR/executorch
"$here/build.sh" "$python" "$out"
PYTHONPATH=$("$here/wheel.sh" "$python" "$out")
export PYTHONPATH
export KVIST_EXECUTORCH_LIBRARY=$out/libkvist_executorch.so
export KVIST_PTE=$out/tiny.pte
rm -f "$KVIST_PTE"
# The wheel warns of its own deprecations and experiments.
"$python" -m pytest -q -W ignore "$here/tests" "$@"
