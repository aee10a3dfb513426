#!/usr/bin/env bash
# Builds the wheels of a release into target/wheels: Linux x86-64 and aarch64, for every CPython from 3.9 on and glibc 2.28 or
# newer. Both are linked by zig, from PyPI, so that they run on older systems than this one. Arguments: other targets.
# On macOS and Windows, `maturin build --profile dist` makes the wheel of the machine.
set -euo pipefail
cd "$(dirname "$0")"
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work"
"$work/bin/pip" install --quiet 'maturin>=1.16,<2' ziglang
targets=("$@")
((${#targets[@]})) || targets=(x86_64-unknown-linux-gnu aarch64-unknown-linux-gnu)
out=$(cd ../.. && pwd)/target/wheels
export PATH="$work/bin:$PATH" PYTHONPATH=
for target in "${targets[@]}"; do
    rustup target add "$target"
    # The stable ABI needs no interpreter of the target.
    maturin build --profile dist --zig --target "$target" --compatibility manylinux_2_28 --out "$out"
done
ls -l "$out"
