#!/usr/bin/env bash
# The rivals of bench/rivals/compare.py in an environment of their own, bench/target/rivals, which may be deleted at
# any time: llama.cpp as the sdist of llama-cpp-python vendors it, built for this machine, and torch.
#
# No compiler is best at all of llama.cpp's kernels, so it is built by each of $RIVAL_COMPILERS (of clang, clang-N,
# gcc, gcc-N; without it clang and gcc, as far as they are there) and the fastest counts. gcc before 13 is left out
# on machines with AMX, whose q8_0 path it is said to miscompile.
# $TORCH_PIP_ARGS may name an index of CPU builds of torch, which are much smaller.
# Needs a C++ compiler, cmake, ninja and python3 with venv. What is there is not made again.
set -euo pipefail
cd "$(dirname "$0")"
here=$PWD
mkdir -p ../target/rivals
cd ../target/rivals
jobs=${JOBS:-$(nproc)}

for tool in cmake ninja python3; do
    command -v $tool >/dev/null || { echo "install.sh: $tool is not there" >&2; exit 1; }
done

[ -x venv/bin/python ] || python3 -m venv venv
venv/bin/python -c 'import torch' 2>/dev/null || venv/bin/pip install --quiet ${TORCH_PIP_ARGS:-} torch numpy

if [ ! -e src/vendor/llama.cpp/CMakeLists.txt ]; then
    rm -rf sdist src
    venv/bin/pip download --quiet --no-deps --no-binary llama-cpp-python -d sdist \
        "llama-cpp-python${LLAMA_CPP_PYTHON:+==$LLAMA_CPP_PYTHON}"
    mkdir src.partial
    tar xf sdist/*.tar.gz -C src.partial --strip-components=1
    mv src.partial src
fi
llama=src/vendor/llama.cpp
version=$(ls sdist | sed 's/.*-\(.*\)\.tar\.gz/\1/')

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
    out=llama-$cc
    mkdir -p "$out"
    echo "llama-cpp-python $version by $($cc --version | head -1)"
    if [ ! -e "$out/done" ]; then
        CC=$cc CXX=$cxx cmake -G Ninja -S $llama -B "$out/build" -DCMAKE_BUILD_TYPE=Release -DGGML_NATIVE=ON \
            -DBUILD_SHARED_LIBS=ON -DLLAMA_CURL=OFF -DLLAMA_OPENSSL=OFF -DLLAMA_BUILD_TESTS=OFF \
            -DLLAMA_BUILD_EXAMPLES=OFF -DLLAMA_BUILD_SERVER=OFF -DLLAMA_BUILD_TOOLS=ON >"$out/cmake.log"
        cmake --build "$out/build" -j"$jobs" --target ggml llama llama-bench >"$out/build.log"
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
