# To be sourced by scripts that measure kvist, in the root of the repository.
#
#     source bench/kvist.sh
#     find_kvist [FEATURES]      sets and exports KVIST: the program to measure
#     find_random_model          sets and exports RANDOM_MODEL: the program that makes models of random weights
#
# A program that the environment names is taken as it is. Otherwise cargo builds it, into $CARGO_TARGET_DIR if that is set, so that a script
# never measures what an earlier build has left there.
find_kvist() {
    if [[ -z ${KVIST:-} ]]; then
        cargo build --release --quiet -p kvist ${1:+--features "$1"}
        KVIST=${CARGO_TARGET_DIR:-target}/release/kvist
    fi
    program_of KVIST
}
find_random_model() {
    if [[ -z ${RANDOM_MODEL:-} ]]; then
        cargo build --release --quiet --manifest-path tools/random-model/Cargo.toml --target-dir "${CARGO_TARGET_DIR:-target}"
        RANDOM_MODEL=${CARGO_TARGET_DIR:-target}/release/random-model
    fi
    program_of RANDOM_MODEL
}
program_of() { # NAME of a variable: its path becomes absolute, so that a script may change its folder
    local path
    path=$(realpath -- "${!1}")
    [[ -x $path ]] || { echo "$1=${!1}: there is no such program" >&2; exit 1; }
    export "$1=$path"
}
