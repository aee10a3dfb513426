#!/usr/bin/env bash
# Prints a folder with the Python package kvist, which has kvist.executorch: `wheel.sh PYTHON OUT`. The folder is OUT/python, so that the
# environment stays as it is. WHEEL names a wheel that is built already.
set -euo pipefail
python=$1 out=$2
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd)
if [[ -z ${WHEEL:-} ]]; then
    "$python" -m venv "$out/build"
    "$out/build/bin/pip" install --quiet 'maturin>=1.16,<2' >&2
    rm -rf "$out/wheels"
    "$out/build/bin/maturin" build --manifest-path "$root/crates/python/Cargo.toml" --profile "${KVIST_PROFILE:-dist}" \
        --interpreter "$python" --out "$out/wheels" >&2
    WHEEL=$(echo "$out"/wheels/*.whl)
fi
rm -rf "$out/python"
"$python" -m pip install --quiet --no-deps --target "$out/python" "$WHEEL" >&2
echo "$out/python"
