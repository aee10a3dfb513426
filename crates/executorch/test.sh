#!/usr/bin/env bash
# kvist's caches in ExecuTorch's runtimes. $EXECUTORCH_PYTHON names a Python that has executorch 1.5.1, torch 2.15 and transformers; without
# it a virtual environment is made in .venv-executorch.
set -euo pipefail
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
root=$(cd "$here/../.." && pwd)
python=${EXECUTORCH_PYTHON:-}
if [[ -z $python ]]; then
    python=$root/.venv-executorch/bin/python
    if [[ ! -x $python ]]; then
        python3 -m venv "$root/.venv-executorch"
        "$python" -m pip install --quiet torch==2.15.0 --index-url https://download.pytorch.org/whl/cpu
        # Only what the export and the tests need: executorch asks for scikit-learn, coremltools and more.
        "$python" -m pip install --quiet --no-deps executorch==1.5.1 'torchao>=0.18,<0.19'
        "$python" -m pip install --quiet transformers==5.23.0 ruamel.yaml flatbuffers tabulate expecttest parameterized pytest
    fi
fi
export CARGO_TARGET_DIR=${CARGO_TARGET_DIR:-$root/target}
out=$CARGO_TARGET_DIR/executorch
"$here/build.sh" "$python" "$out"
export KVIST_EXECUTORCH_LIBRARY=$out/libkvist_executorch.so
export KVIST_PTE=$out/tiny.pte
rm -f "$KVIST_PTE"
"$python" -m pytest -q "$here/tests" "$@"

