#!/usr/bin/env bash
# The ladder of docs/ladder.md: table and plot, measured here and now. KVIST_RUNS and KVIST_WARMUPS override.
set -euo pipefail
cd "$(dirname "$0")/.."
cargo build --release --quiet
target/release/kvist bench ladder --shared bench/models/tiny-rust-7m-shared-kv.gguf --t 32,64,128,256,512,1024 \
    --warmups "${KVIST_WARMUPS:-1}" --runs "${KVIST_RUNS:-5}" --svg docs/ladder.svg
