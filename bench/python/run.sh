#!/usr/bin/env bash
# Decoding in transformers with kvist beside without: builds the wheel, makes an environment in bench/target/python (torch, 4 GB), and
# measures in turns. WHEEL names a wheel that is built already, BENCH_PYTHON a Python that has torch, transformers and kvist.
set -euo pipefail
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
python=${BENCH_PYTHON:-}
if [[ -z $python ]]; then
    venv=$here/../target/python
    [[ -x $venv/bin/python ]] || python3 -m venv "$venv"
    python=$venv/bin/python
    "$python" -m pip install --quiet 'maturin>=1.16,<2' torch 'transformers>=5.20,<6'
    if [[ -z ${WHEEL:-} ]]; then
        rm -rf "$venv/wheels"
        "$venv/bin/maturin" build --profile dist --manifest-path "$here/../../crates/python/Cargo.toml" --interpreter "$python" --out "$venv/wheels"
        WHEEL=$(echo "$venv"/wheels/*.whl)
    fi
    "$python" -m pip install --quiet --force-reinstall --no-deps "$WHEEL"
fi
exec "$python" "$here/decode.py" "$@"
