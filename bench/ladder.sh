#!/usr/bin/env bash
# The ladder of docs/ladder.md, measured here and now: bench/RESULTS.md and docs/ladder.svg. KVIST_RUNS and KVIST_WARMUPS
# override; KVIST names another program than the one that cargo builds. Without a cache the long lengths take most of the time.
set -euo pipefail
cd "$(dirname "$0")/.."
source bench/kvist.sh
find_kvist
table=$(mktemp)
trap 'rm -f "$table"' EXIT
# Other scripts' sections.
others=$(sed -n '/^<!-- rivals -->/,$p' bench/RESULTS.md)
"$KVIST" bench ladder --shared bench/models/tiny-rust-7m-shared-kv.gguf --t 32,64,128,256,512,1024 \
    --warmups "${KVIST_WARMUPS:-10}" --runs "${KVIST_RUNS:-20}" --svg docs/ladder.svg >"$table"
{
    echo "# Results"
    echo
    echo "## The ladder"
    echo
    echo "Measured on $(date -u +%Y-%m-%d) by \`bench/ladder.sh\`; what the steps are: [docs/ladder.md](../docs/ladder.md)."
    echo
    cat "$table"
    [ -z "$others" ] || printf '\n%s\n' "$others"
} >bench/RESULTS.md
