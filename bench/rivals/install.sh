#!/usr/bin/env bash
# The rivals of bench/rivals/compare.py in an environment of their own, bench/target/rivals, which may be deleted at
# any time: llama.cpp as the sdist of llama-cpp-python vendors it, built for this machine, and torch.
#
# No compiler is best at all of llama.cpp's kernels, so it is built by each of $RIVAL_COMPILERS (of clang, clang-N,
# gcc, gcc-N; without it clang and gcc, as far as they are there) and the fastest counts. gcc before 13 is left out
# on machines with AMX, whose q8_0 path it is said to miscompile.
# The versions are those of the published figures; $TORCH and $LLAMA_CPP_PYTHON name others. What another version
# left is removed. $TORCH_PIP_ARGS may name an index of CPU builds of torch, which are much smaller.
# Needs a C++ compiler, cmake, ninja and python3 with venv. What is there is not made again.
set -euo pipefail
cd "$(dirname "$0")"
here=$PWD
mkdir -p ../target/rivals
cd ../target/rivals
jobs=${JOBS:-$(nproc)}
torch="torch==${TORCH:-2.15.0} ${TORCH_PIP_ARGS:-}"
version=${LLAMA_CPP_PYTHON:-0.3.36}

for tool in cmake ninja python3; do
    command -v $tool >/dev/null || { echo "install.sh: $tool is not there" >&2; exit 1; }
done
logged() { # LOG COMMAND…: a part of a build, whose output goes into a log
    local log=$1
    shift
    "$@" >"$log" 2>&1 || { echo "install.sh: llama.cpp was not built: see $PWD/$log" >&2; exit 1; }
}

[ -x venv/bin/python ] || python3 -m venv venv
if [ "$(cat venv/installed.txt 2>/dev/null)" != "$torch" ]; then
    # shellcheck disable=SC2086
    venv/bin/pip install --quiet --disable-pip-version-check $torch numpy
    echo "$torch" >venv/installed.txt
fi

sdist=sdist/llama_cpp_python-$version.tar.gz
if [ ! -e src/vendor/llama.cpp/CMakeLists.txt ] || [ ! -e "$sdist" ]; then
    # Builds of another version go, and so do caches that they have filled.
    rm -rf sdist src src.partial llama-*/ states
    venv/bin/pip download --quiet --disable-pip-version-check --no-deps --no-binary llama-cpp-python -d sdist "llama-cpp-python==$version"
    mkdir src.partial
    tar xf "$sdist" -C src.partial --strip-components=1
    mv src.partial src
fi
llama=src/vendor/llama.cpp

if [ -z "${RIVAL_COMPILERS:-}" ]; then
    RIVAL_COMPILERS=
    for cc in clang gcc; do
        command -v $cc >/dev/null || continue
        if [ $cc = gcc ] && [ "$(gcc -dumpversion | cut -d. -f1)" -lt 13 ] && grep -qw amx_int8 /proc/cpuinfo; then
            echo "gcc $(gcc -dumpversion) left out: this machine has AMX"
            continue
        fi
        RIVAL_COMPILERS="$RIVAL_COMPILERS $cc"
    done
fi
[ -n "$RIVAL_COMPILERS" ] || { echo "install.sh: no compiler is fit; install clang" >&2; exit 1; }

for cc in $RIVAL_COMPILERS; do
    case $cc in
        clang*) cxx=clang++${cc#clang} ;;
        gcc*) cxx=g++${cc#gcc} ;;
        *) echo "install.sh: $cc is neither clang nor gcc" >&2; exit 1 ;;
    esac
    command -v "$cc" >/dev/null && command -v "$cxx" >/dev/null || { echo "install.sh: $cc or $cxx is not there" >&2; exit 1; }
    out=llama-$cc
    mkdir -p "$out"
    echo "llama-cpp-python $version by $($cc --version | head -1)"
    if [ ! -e "$out/done" ]; then
        logged "$out/cmake.log" env CC=$cc CXX=$cxx cmake -G Ninja -S $llama -B "$out/build" -DCMAKE_BUILD_TYPE=Release -DGGML_NATIVE=ON \
            -DBUILD_SHARED_LIBS=ON -DLLAMA_CURL=OFF -DLLAMA_OPENSSL=OFF -DLLAMA_BUILD_TESTS=OFF \
            -DLLAMA_BUILD_EXAMPLES=OFF -DLLAMA_BUILD_SERVER=OFF -DLLAMA_BUILD_TOOLS=ON
        logged "$out/build.log" cmake --build "$out/build" -j"$jobs" --target ggml llama llama-bench
        touch "$out/done"
    fi
    for program in attention steps; do
        [ "$out/$program" -nt "$here/$program.cpp" ] ||
            $cxx -O2 -std=c++17 -Wall -I$llama/include -I$llama/ggml/include "$here/$program.cpp" -o "$out/$program" \
                -L"$out/build/bin" -lllama -lggml -lggml-cpu -lggml-base '-Wl,-rpath,$ORIGIN/build/bin'
    done
    $cc --version | head -1 >"$out/compiler"
done
echo "$version" >llama-version
echo "torch $(venv/bin/python -c 'import torch; print(torch.__version__)')"
