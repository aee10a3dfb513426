#!/usr/bin/env bash
# Builds the wheel, installs it into a fresh virtual environment, and tests it there. PYTHON names another interpreter, WHEEL a
# wheel that is built already, PROFILE another profile than `dist` (`dev` builds faster), FEATURES other features than `tiers`. Arguments go to
# pytest. As the first one, `--notebook` runs docs/simulate.ipynb too, and `--transformers` only the tests with torch and transformers.
set -euo pipefail
cd "$(dirname "$0")"
python=${PYTHON:-python3}
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
mode=${1:-}
packages=()
case $mode in
    --notebook) packages=(pandas nbclient ipykernel) && shift ;;
    --transformers)
        packages=('transformers>=5.20,<6' torch) && shift && set -- -k "transformers or torch" "$@"
        ;;
esac
"$python" -m venv "$work/venv"
venv=$work/venv/bin
"$venv/pip" install --quiet --upgrade pip
if [[ -z ${WHEEL:-} ]]; then
    "$python" -m venv "$work/build"
    "$work/build/bin/pip" install --quiet 'maturin>=1.16,<2'
    "$work/build/bin/maturin" build --profile "${PROFILE:-dist}" --features "${FEATURES:-tiers}" --interpreter "$venv/python" --out "$work/wheels"
    WHEEL=$(echo "$work"/wheels/*.whl)
fi
"$venv/pip" install --quiet "$WHEEL" 'pytest>=8' ${packages[@]+"${packages[@]}"}
# In another folder, so that the package is the installed one and not its sources.
tests=$PWD/tests
cd "$work"
"$venv/python" -m pytest --quiet -p no:cacheprovider --rootdir "$tests" "$@" "$tests"
if [[ $mode == --notebook ]]; then
    "$venv/jupyter-execute" "$tests/../../../docs/simulate.ipynb" # fails if a cell does; writes nothing
fi
