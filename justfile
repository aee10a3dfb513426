# What CI runs: format, lints, docs, tests, licences.
check: fmt lint doc test deny

fmt:
    cargo fmt --all --check

lint:
    cargo clippy --workspace --all-targets -- -D warnings

doc:
    RUSTDOCFLAGS="-D warnings" cargo doc --workspace --no-deps

# The same command the README gives.
test:
    cargo test --workspace

deny:
    cargo deny --all-features check bans licenses sources

# More random operations than CI runs, per kind of cache; a failure prints its seed.
soak ops="10000000":
    KVIST_OPS={{ops}} cargo test --release -p kvist-cache --test properties -- --nocapture

# The tables of docs/quality.md and bench/RESULTS.md, measured anew.
quality:
    bench/quality.sh
ladder:
    bench/ladder.sh
# kvist beside llama.cpp and torch: builds them in bench/target (some GB), measures in turns. `just rivals --only decode`.
rivals *args:
    bench/rivals/run.sh {{args}}
# How far off the simulator is: step costs of this machine, then a load served for real and simulated. Leave the machine alone meanwhile.
predict *args:
    bench/predict.sh {{args}}
# Queueing theory with many jobs and a narrow bound; takes minutes.
queueing:
    cargo test --release -p kvist-simulator --test queueing -- --ignored --nocapture
# kvist beside dynamo-mocker and kvbm-logical, each in one run; the first build of a rival takes minutes. They only print.
bench-simulator *args:
    cargo run --release --manifest-path bench/simulator/Cargo.toml -- {{args}}
bench-bookkeeping:
    cargo run --release --manifest-path bench/bookkeeping/Cargo.toml
