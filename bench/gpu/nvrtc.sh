# To be sourced: fetches NVRTC from PyPI into a virtual environment in target/, and sets KVIST_NVRTC to its file. On a machine with
# a driver it takes the newest that the driver supports.
nvrtc_package=nvidia-cuda-nvrtc
if command -v nvidia-smi >/dev/null 2>&1 && nvidia-smi 2>/dev/null | grep -q 'CUDA Version: 12'; then
    nvrtc_package=nvidia-cuda-nvrtc-cu12
fi
nvrtc_folder=$(realpath -m "${CARGO_TARGET_DIR:-target}")/$nvrtc_package
if [[ ! -x $nvrtc_folder/bin/pip ]]; then python3 -m venv "$nvrtc_folder"; fi
"$nvrtc_folder/bin/pip" install --quiet "$nvrtc_package"
KVIST_NVRTC=$(find "$nvrtc_folder" -name 'libnvrtc.so.1[0-9]' | sort | tail -n 1)
[[ -n $KVIST_NVRTC ]] || { echo "$nvrtc_package has no libnvrtc.so" >&2; exit 1; }
export KVIST_NVRTC
