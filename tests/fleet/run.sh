#!/bin/sh
# Routers of the field in front of three `kvist serve`, and Dynamo's indexer beside them, on loopback. Arguments go to pytest:
# tests/fleet/run.sh -k vllm
# KVIST names the program, one with shared stores; without it the release binary is built. Redis or Valkey is used if it is installed: then a
# test that needs it and cannot run fails, unless KVIST_REQUIRE_REDIS=0. Where there is none these tests are skipped, and pytest lists them
# at the end; with KVIST_CI_STRICT=1 they fail. Python 3.11 or newer; the environment, which git ignores, is made at the first run, with the
# routers from PyPI.
set -eu
here=$(cd "$(dirname "$0")" && pwd)
env=$here/.venv wanted=$here/requirements.txt
if ! cmp -s "$wanted" "$env/installed.txt"; then
    [ -x "$env/bin/python" ] || "${PYTHON:-python3}" -m venv "$env"
    "$env/bin/pip" install --quiet --disable-pip-version-check -r "$wanted"
    cp "$wanted" "$env/installed.txt"
fi
if [ -z "${KVIST:-}" ]; then
    cargo build --release --manifest-path "$here/../../Cargo.toml" -p kvist --features tiers
    KVIST=${CARGO_TARGET_DIR:-$here/../../target}/release/kvist
fi
KVIST=$(realpath "$KVIST")
export KVIST
if command -v redis-server >/dev/null || command -v valkey-server >/dev/null; then
    export KVIST_REQUIRE_REDIS="${KVIST_REQUIRE_REDIS:-1}"
fi
cd "$here"
exec .venv/bin/pytest "$@"
