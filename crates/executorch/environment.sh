#!/usr/bin/env bash
# Prints a Python that has executorch 1.5.1, torch 2.15 and transformers: $EXECUTORCH_PYTHON, or one in .venv-executorch, which is
# made if it does not exist. PyPI's torch brings the CUDA libraries along, 6 GB in all; $TORCH_PIP_ARGS may name an index of CPU builds.
set -euo pipefail
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd)
python=${EXECUTORCH_PYTHON:-}
if [[ -z $python ]]; then
    venv=$root/.venv-executorch
    python=$venv/bin/python
    if [[ ! -e $venv/complete ]]; then
        python3 -m venv "$venv"
        "$python" -m pip install --quiet ${TORCH_PIP_ARGS:-} torch==2.15.0 numpy >&2
        # Only what the export and the tests need: executorch asks for scikit-learn, coremltools and more.
        "$python" -m pip install --quiet --no-deps executorch==1.5.1 'torchao>=0.18,<0.19' >&2
        "$python" -m pip install --quiet transformers==5.23.0 ruamel.yaml flatbuffers tabulate expecttest parameterized pytest >&2
        touch "$venv/complete"
    fi
fi
echo "$python"
