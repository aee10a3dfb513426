#!/usr/bin/env bash
# Builds libkvist_executorch.so against the wheel of ExecuTorch that $1 (a Python) has, into $2, beside libkvist.so.
set -euo pipefail
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
python=$1 out=$2
wheel=$("$python" -c 'import importlib.util; print(importlib.util.find_spec("executorch").submodule_search_locations[0])')
target=${CARGO_TARGET_DIR:-$here/../../target}
profile=${KVIST_PROFILE:-dist}
cargo build --manifest-path "$here/../capi/Cargo.toml" --profile "$profile"
mkdir -p "$out"
folder=$profile
[[ $profile == dev ]] && folder=debug # where cargo puts the profile dev
cp "$target/$folder/libkvist.so" "$out/"
flags=(-std=c++17 -O2 -fPIC -Wall -Wextra -Wno-unused-parameter -DC10_USING_CUSTOM_GENERATED_MACROS -DET_EVENT_TRACER_ENABLED
    -I "$here/cpp" -I "$here/../capi/include" -isystem "$wheel/include"
    -isystem "$wheel/include/executorch/runtime/core/portable_type/c10")
runtime=(-L "$wheel/lib" -lexecutorch -Wl,-rpath,"$wheel/lib" -Wl,-rpath,'$ORIGIN')
${CXX:-c++} "${flags[@]}" -shared "$here"/cpp/*.cpp -L "$out" -lkvist "${runtime[@]}" -o "$out/libkvist_executorch.so"
for example in "$here"/examples/*.cpp; do
    # --no-as-needed: kernels and delegates register themselves when they are loaded, and nothing names them.
    ${CXX:-c++} "${flags[@]}" "$example" -L "$out" -Wl,--no-as-needed -lkvist_executorch -lkvist "${runtime[@]}" \
        -lexecutorch_kernels_optimized -lexecutorch_backend_xnnpack -lexecutorch_threadpool -o "$out/$(basename "$example" .cpp)"
done
# A host in Rust, linked with the same libraries.
rustc --edition 2024 -O "$here/examples/host.rs" -o "$out/host" -L "$out" -C link-arg=-Wl,--no-as-needed \
    -C link-arg=-lkvist_executorch -C link-arg=-lkvist -C link-arg=-L"$wheel/lib" -C link-arg=-lexecutorch \
    -C link-arg=-lexecutorch_kernels_optimized -C link-arg=-lexecutorch_backend_xnnpack -C link-arg=-lexecutorch_threadpool \
    -C link-arg=-Wl,-rpath,"$wheel/lib" -C link-arg=-Wl,-rpath,'$ORIGIN'
