#!/bin/sh
# Checks the files of this folder without a cluster: the systemd unit by systemd-analyze, the Kubernetes manifests by their schemas
# (kubernetes-validate from PyPI), the dashboard's metrics against a running server. KVIST names the program; without it the
# debug binary is built. Needs Python, PyPI and curl; without
# systemd-analyze the unit is skipped, and said.
set -eu
here=$(cd "$(dirname "$0")" && pwd)
if [ -z "${KVIST:-}" ]; then
    cargo build --manifest-path "$here/../Cargo.toml" -p kvist
    KVIST=$(realpath "${CARGO_TARGET_DIR:-$here/../target}/debug/kvist")
fi
work=$(mktemp -d)
server=
trap '[ -z "$server" ] || kill "$server" 2>/dev/null || true; rm -rf "$work"' EXIT

if command -v systemd-analyze >/dev/null; then
    # It looks whether the program is there.
    sed "s|/usr/local/bin/kvist|$KVIST|" "$here/kvist.service" >"$work/kvist.service"
    systemd-analyze verify "$work/kvist.service"
    systemd-analyze security --offline=true --threshold=20 "$work/kvist.service" >"$work/security"
    tail -1 "$work/security"
else
    echo "deploy: the unit is not checked: no systemd-analyze" >&2
fi

python3 -m venv "$work/env"
"$work/env/bin/pip" install --quiet --disable-pip-version-check kubernetes-validate==1.37.0
"$work/env/bin/kubernetes-validate" --strict "$here/kubernetes/kvist.yaml" "$here/kubernetes/autoscaling.yaml" "$here/kubernetes/router.yaml"
"$work/env/bin/python" - "$here" <<'PYTHON'
import pathlib, sys, yaml
for path in sorted(pathlib.Path(sys.argv[1]).rglob("*.yaml")):
    assert list(yaml.safe_load_all(path.read_text())), path
PYTHON

"$KVIST" serve --port 0 -q >"$work/address" 2>&1 &
server=$!
until grep -q '^serving ' "$work/address"; do
    kill -0 "$server" 2>/dev/null || { cat "$work/address" >&2; exit 1; }
    sleep 0.1
done
url=$(sed -n 's/^serving .* on //p' "$work/address")
curl -sSf "$url/v1/completions" -H 'content-type: application/json' -d '{"prompt": "a", "max_tokens": 2}' >/dev/null
curl -sSf "$url/metrics" >"$work/metrics"
for name in $(grep -oE '(vllm:|kvist_)[a-z_]+' "$here/compose/dashboard.json" | sort -u); do
    grep -q "^$name" "$work/metrics" || { echo "deploy: dashboard.json asks for $name, which /metrics does not have" >&2; exit 1; }
done
echo "deploy: fine"
