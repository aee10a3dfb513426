#!/bin/sh
# The official clients against the real program. Arguments go to pytest: tests/clients/run.sh -k chat
# KVIST names the program; without it the release binary is built. Python 3.11 or newer; the environments, which
# git ignores, are made at the first run.
set -eu
here=$(cd "$(dirname "$0")" && pwd)
if [ -z "${KVIST:-}" ]; then
    cargo build --release --manifest-path "$here/../../Cargo.toml" -p kvist
    KVIST=${CARGO_TARGET_DIR:-$here/../../target}/release/kvist
fi
KVIST=$(realpath "$KVIST")
export KVIST
# aiperf has an environment of its own: it pins what the others have newer.
for pair in .venv:requirements.txt .venv-load:requirements-load.txt; do
    env=$here/${pair%%:*} wanted=$here/${pair##*:}
    if ! cmp -s "$wanted" "$env/installed.txt"; then
        [ -x "$env/bin/python" ] || "${PYTHON:-python3}" -m venv "$env"
        "$env/bin/pip" install --quiet --disable-pip-version-check -r "$wanted"
        cp "$wanted" "$env/installed.txt"
    fi
done
cd "$here"
exec .venv/bin/pytest "$@"
